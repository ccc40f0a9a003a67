"""`reproducible=True`: in low precision the output does not depend on what was drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import check_equal, clear_prompt, plain
from tiny import ForwardCount, copy_prompt, random_prompt, tiny, tiny_llama

from retrodraft import RetroDraft
from retrodraft.cache import FIRST_GRAIN, GRAIN, DraftLayer
from retrodraft.target import TargetModel
from retrodraft.tree import DraftTree

STRATEGIES = ("retro", "prompt_lookup", "suffix", "token_recycling")


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("seed", range(6))
def test_bfloat16_output_does_not_depend_on_the_drafts(seed: int, attn: str) -> None:
    """Cold, warm, and with drafts of other methods: the same tokens, and bit for bit the same logits."""
    model = tiny_llama(seed, num_hidden_layers=4, initializer_range=0.12)
    model.set_attn_implementation(attn)
    model = model.to(torch.bfloat16)
    prompt = random_prompt(90, seed)
    options = dict(max_new_tokens=60, do_sample=False, return_dict_in_generate=True, output_logits=True)
    outputs, forwards = [], []
    for strategy in STRATEGIES:
        rd = RetroDraft(model, strategy=strategy, reproducible=True)
        for _ in range(2):
            with ForwardCount(model) as count:
                outputs.append(rd.generate(prompt, **options))
            forwards.append(count.count)
    for output in outputs[1:]:
        assert torch.equal(output.sequences, outputs[0].sequences)
        assert all(torch.equal(a, b) for a, b in zip(output.logits, outputs[0].logits, strict=True))
    assert min(forwards) < 60 and len(set(forwards)) > 2  # the drafts did differ


@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "qwen2_mixed", "gemma3", "llama4", "gpt2"])
def test_still_equal_to_plain_in_float32(family: str) -> None:
    """Whole blocks of slots are shown to attention; masks hide what does not belong to a query."""
    model = tiny(family)
    rd = RetroDraft(model, reproducible=True, budget=7)
    for length in (24, 57):
        prompt = clear_prompt(model, length)
        reference = plain(model, prompt)
        rd.generate(prompt, max_new_tokens=40, do_sample=False)  # learns
        check_equal(rd, prompt, reference)


def test_a_window_far_behind_the_first_block() -> None:
    """The view begins at a multiple of FIRST_GRAIN slots before the window, and slots are dropped by whole blocks."""
    model = tiny("mistral_sliding")
    model.config.max_position_embeddings, model.config.sliding_window = 4096, 40
    torch.manual_seed(1)
    model = type(model)(model.config).eval()
    rd = RetroDraft(model, reproducible=True, budget=7)
    prompt = clear_prompt(model, 700, max_new_tokens=40)
    reference = plain(model, prompt)
    rd.generate(prompt, max_new_tokens=40, do_sample=False)
    check_equal(rd, prompt, reference)


def test_slots_stay_in_their_blocks() -> None:
    """However far a window has moved, a position's slot keeps its place within a block, and views end on GRAIN."""
    layer = DraftLayer(window=100)
    states = torch.zeros(1, 1, 30, 4)
    layer.staged = layer.aligned = True
    firsts = set()
    for _ in range(120):
        keys, _ = layer.update(states, states)
        width, offset = layer.get_mask_sizes(30)
        assert keys.shape[-2] == width and width % GRAIN == offset % FIRST_GRAIN == 0
        assert offset <= max(layer.lengths[0] - 99, 0) and layer.lengths[0] + 30 <= offset + width
        layer.commit([30], [[]])
        firsts.add(layer.first)
    assert len(firsts) > 2 and all(first % FIRST_GRAIN == 0 for first in firsts)
    assert layer.keys is not None and layer.keys.shape[-2] < 4 * FIRST_GRAIN


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_drafts_are_chains(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's slot is then its position, whatever was drafted before it; a branch would lie elsewhere."""
    shapes = []
    verify = TargetModel.verify

    def watched(self: TargetModel, trees: list[DraftTree], *args: Any, **kwargs: Any) -> Any:
        shapes.extend(tree.parents.tolist() for tree in trees)
        return verify(self, trees, *args, **kwargs)

    model = tiny_llama(0, initializer_range=0.05)
    rd = RetroDraft(model, strategy=strategy, reproducible=True)  # the probe's trees have branches
    monkeypatch.setattr(TargetModel, "verify", watched)
    for _ in range(2):
        rd.generate(copy_prompt(40), max_new_tokens=40, do_sample=False)
    assert max(len(parents) for parents in shapes) > 3
    assert all(parents == list(range(-1, len(parents) - 1)) for parents in shapes)
