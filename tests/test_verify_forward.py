"""What a verify forward computes, and what it leaves behind for the caller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import looking_on, random_prompt, tiny_llama
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils, modeling_utils

from retrodraft import RetroDraft
from retrodraft.budget import TREE_SIZES, CostCurve, store_cost_curve
from retrodraft.cache import DraftLayer, moves_of
from retrodraft.capabilities import probe
from retrodraft.kernels.tree_attention import TreeLayout, grouped_attention
from retrodraft.target import tree_hooks


@pytest.mark.parametrize("batch_size,num_heads,num_kv_heads,num_nodes", [(1, 9, 3, 14), (2, 8, 1, 5), (3, 4, 2, 1)])
def test_grouped_attention_is_attention_over_repeated_keys(
    batch_size: int, num_heads: int, num_kv_heads: int, num_nodes: int
) -> None:
    torch.manual_seed(num_heads)
    keys = 40
    query = torch.randn(batch_size, num_nodes, num_heads, 16).transpose(1, 2)
    key, value = torch.randn(batch_size, num_kv_heads, keys, 16), torch.randn(batch_size, num_kv_heads, keys, 24)
    mask = torch.rand(batch_size, 1, num_nodes, keys) > 0.3
    mask[..., 0] = True
    layout = TreeLayout(torch.zeros(1), torch.zeros(1, num_nodes), torch.ones(1, num_nodes, num_nodes))
    group = num_heads // num_kv_heads
    for scale in (None, 0.3):
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), attn_mask=mask, scale=scale
        )
        output = grouped_attention(layout, query, key, value, mask, scale)
        assert torch.allclose(output, expected.transpose(1, 2), atol=1e-5)
    assert len(layout.group_masks) == 1  # one mask a forward, whatever the number of layers


def test_nothing_returned_is_an_inference_tensor() -> None:
    model, prompt = tiny_llama(0), random_prompt(20)
    rd = RetroDraft(model, budget=8)
    wanted = dict(output_scores=True, output_logits=True, output_hidden_states=True)
    out = rd.generate(
        prompt, max_new_tokens=300, do_sample=False, return_dict_in_generate=True, **wanted
    )  # the cache grows on the way
    assert rd.stats.num_accepted_tokens > 0
    cache: Any = out.past_key_values if "past_key_values" in out else out.cache
    states = [layer.keys for layer in cache.layers] + [layer.values for layer in cache.layers]
    tensors = [out.sequences, *out.scores, *out.logits, *states, *(x for step in out.hidden_states for x in step)]
    assert not any(tensor.is_inference() for tensor in tensors)
    plain = rd.generate(prompt, max_new_tokens=300, do_sample=False, return_dict_in_generate=True)
    for layer in (plain.past_key_values if "past_key_values" in plain else plain.cache).layers:
        layer.keys[:, :, :3] = 0.0  # what an inference tensor does not allow
    model.train()
    try:
        model(plain.sequences, labels=plain.sequences).loss.backward()
    finally:
        model.eval()
        model.zero_grad()


def test_a_callers_own_attention_and_masks_are_back_afterwards() -> None:
    registries = (masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, modeling_utils.ALL_ATTENTION_FUNCTIONS)
    plain = [registry["sdpa"] for registry in registries]
    calls = []

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain[1](*args, **kwargs)

    registries[1]["sdpa"] = own
    try:
        with tree_hooks(), tree_hooks():
            assert registries[1]["sdpa"] is not own
        assert [registry["sdpa"] for registry in registries] == [plain[0], own]
        model, prompt = tiny_llama(0), random_prompt(12)
        RetroDraft(model, budget=4).generate(prompt, max_new_tokens=4, do_sample=False)
        assert calls
    finally:
        registries[1]["sdpa"] = plain[1]


def test_flex_attention_on_the_cpu_is_left_to_plain_generate() -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        attn_implementation="flex_attention",
    )  # fmt: skip
    verdict = probe(LlamaForCausalLM(config))
    assert verdict.mode == "plain"
    assert "flex attention" in verdict.reason


def test_padded_forwards_give_the_same_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where 12 tokens are measured to be faster than 2 to 8, no forward in between is made."""
    monkeypatch.setenv("RETRODRAFT_CACHE", str(tmp_path))
    model, prompt = tiny_llama(0), random_prompt(20)
    seconds = [{1: 1.0, 12: 1.1}.get(size, 9.0) for size in TREE_SIZES]
    store_cost_curve(model, CostCurve([256], list(TREE_SIZES), [seconds]))
    expected = model.generate(prompt, max_new_tokens=40, do_sample=False)
    rd = RetroDraft(model)  # its probe makes forwards of other sizes
    sizes: set[int] = set()
    handle = model.register_forward_pre_hook(
        looking_on(lambda module, args, kwargs: sizes.add(kwargs["input_ids"].shape[1])), with_kwargs=True
    )
    try:
        assert torch.equal(rd.generate(prompt, max_new_tokens=40, do_sample=False), expected)
    finally:
        handle.remove()
    assert rd.stats.num_accepted_tokens > 0
    assert 12 in sizes and not sizes & set(range(2, 12))  # 20 is the prompt


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_commit_keeps_the_path_and_nothing_else(taken: list[bool], committed: int) -> None:
    """Runs of a path are moved in place; the oracle gathers the slots. Runs may overlap where they came from."""
    path = [0, *(node + 1 for node, taken_too in enumerate(taken) if taken_too)]
    layer = DraftLayer()
    states = torch.arange(committed + len(taken) + 1.0)[None, None, :, None].expand(1, 2, -1, 3)
    if committed:
        layer.update(states[:, :, :committed], -states[:, :, :committed])
    layer.staged = True
    layer.update(states[:, :, committed:], -states[:, :, committed:])
    layer.commit([len(path)], [moves_of(path)])
    slots = [*range(committed), *(committed + node for node in path)]
    assert layer.lengths == [len(slots)] and layer.keys is not None and layer.values is not None
    assert torch.equal(layer.keys[:, :, : len(slots)], states[:, :, slots])
    assert torch.equal(layer.values[:, :, : len(slots)], -states[:, :, slots])
