"""Models whose plain generation is more than their forward: methods, hooks, adapters, caches, inputs of their own."""

from __future__ import annotations

import functools
import threading
import warnings
from typing import Any

import peft
import pytest
import torch
from tiny import _SMALL, ForwardCount, copy_prompt, max_difference, tiny, tiny_llama
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from retrodraft import RetroDraft
from retrodraft.compat import CACHE_ARG

GREEDY: dict[str, Any] = dict(max_new_tokens=30, do_sample=False)


def check(model: Any, rd: RetroDraft, mode: str, saves: bool, *prompt: Any, **options: Any) -> None:
    """Output, verdict, and whether forwards were saved (else the call is left to plain `generate`, with a warning)."""
    expected = model.generate(*prompt, **GREEDY, **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = rd.generate(*prompt, **GREEDY, **options)
    assert torch.equal(found, expected)
    assert rd.capabilities.mode == mode
    assert (0 < rd.stats.num_target_forwards < 30) == saves
    warned = any("leaves this call to plain generate" in str(item.message) for item in seen)
    assert not warned if saves else warned or rd._warned  # of each reason once


class DoublePositions(LlamaForCausalLM):
    """Another input than the one that a forward makes for itself."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs["position_ids"] = 2 * inputs["position_ids"]
        return inputs


class Reversed(LlamaForCausalLM):
    """A decoding loop of its own."""

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        return super()._sample(*args, **kwargs).flip(-1)


@pytest.mark.parametrize("kind", [DoublePositions, Reversed])
def test_methods_of_a_subclass(kind: Any) -> None:
    torch.manual_seed(0)
    model = kind(LlamaConfig(**_SMALL)).eval()
    check(model, RetroDraft(model, budget=16), "plain", False, copy_prompt(24))


class Forgetful(LlamaForCausalLM):
    """Hides the beginning of a padded text from its second step on."""

    def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super()._update_model_kwargs_for_generation(*args, **kwargs)
        mask = inputs.get("attention_mask")
        if mask is not None and not mask.all():
            mask[:, :12] = 0
        return inputs


def test_inputs_that_a_model_changes_from_step_to_step() -> None:
    """They are drafted for as far as the probe has seen them: without padding."""
    torch.manual_seed(0)
    model, prompt = Forgetful(LlamaConfig(**_SMALL)).eval(), copy_prompt(24)
    rd = RetroDraft(model, budget=16)
    check(model, rd, "tree", True, prompt)
    mask = torch.ones(1, 24, dtype=torch.long)
    mask[0, :2] = 0
    expected = model.generate(prompt, attention_mask=mask.clone(), **GREEDY)
    with pytest.warns(UserWarning, match="changes its inputs from step to step"):
        assert torch.equal(rd.generate(prompt, attention_mask=mask.clone(), **GREEDY), expected)


def shift_newest(amount: float, module: Any, args: Any, output: Any) -> Any:
    """Steering that is about a forward's last position."""
    states = (output[0] if isinstance(output, tuple) else output).clone()
    states[:, -1] += amount
    return (states, *output[1:]) if isinstance(output, tuple) else states


def shift_all(module: Any, args: Any, output: Any) -> Any:
    return (output[0] + 0.3, *output[1:]) if isinstance(output, tuple) else output + 0.3


def test_hooks_before_and_after_wrapping() -> None:
    """What a hook does to every position alike can be drafted for; what it does to the last one can't."""
    hook = functools.partial(shift_newest, 1.0)
    model, prompt = tiny_llama(0), copy_prompt(24)
    rd = RetroDraft(model, budget=16)
    check(model, rd, "tree", True, prompt)
    handle = model.model.layers[0].register_forward_hook(hook)
    check(model, rd, "plain", False, prompt)
    check(model, RetroDraft(model, budget=16), "plain", False, prompt)
    handle.remove()
    check(model, rd, "tree", True, prompt)
    model.model.layers[0].register_forward_hook(shift_all)
    check(model, rd, "tree", True, prompt)


def test_hooks_that_come_and_go_are_probed_once() -> None:
    model, prompt = tiny_llama(0), copy_prompt(24)
    rd = RetroDraft(model, budget=16)
    hook = functools.partial(shift_newest, 1.0)
    for _ in range(3):
        handle = model.model.layers[0].register_forward_hook(hook)
        check(model, rd, "plain", False, prompt)
        handle.remove()
        check(model, rd, "tree", True, prompt)
    with ForwardCount(model) as forwards:
        handle = model.model.layers[0].register_forward_hook(hook)
        rd.follow_model()
        handle.remove()
        rd.follow_model()
    assert forwards.count == 0


def test_a_hook_that_comes_while_a_call_runs() -> None:
    """The call goes on as it began."""
    model, prompt, calls = tiny_llama(0), copy_prompt(24), []
    rd = RetroDraft(model, budget=16)

    def follow(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 5:
            handle = model.register_forward_hook(lambda *args: None)
            other = threading.Thread(target=rd.follow_model)
            other.start()
            other.join()
            handle.remove()
        return scores

    expected = model.generate(prompt, **GREEDY)
    assert torch.equal(rd.generate(prompt, logits_processor=LogitsProcessorList([follow]), **GREEDY), expected)
    assert len(calls) == 30 > rd.stats.num_target_forwards


def test_changes_that_no_hook_of_the_model_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook on all modules, a method patched on the class, a layer of another kind."""
    model, prompt = tiny_llama(0), copy_prompt(24)
    rd = RetroDraft(model, budget=16)
    check(model, rd, "tree", True, prompt)
    hook = functools.partial(shift_newest, 1.0)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: hook(module, args, output) if module is model.model.layers[0] else None
    )
    check(model, rd, "plain", False, prompt)
    handle.remove()
    check(model, rd, "tree", True, prompt)
    plain = LlamaForCausalLM.prepare_inputs_for_generation

    def doubled(*args: Any, **kwargs: Any) -> Any:
        inputs = plain(*args, **kwargs)
        inputs["position_ids"] = 2 * inputs["position_ids"]
        return inputs

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "prepare_inputs_for_generation", doubled)
        check(model, rd, "plain", False, prompt)

    class Steered(type(model.model.layers[0])):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return shift_newest(1.0, self, args, super().forward(*args, **kwargs))

    model.model.layers[0].__class__ = Steered
    check(model, rd, "plain", False, prompt)


class Strict(LlamaForCausalLM):
    """A `generate` of its own that takes long prompts alone."""

    def generate(self, inputs: Any, **kwargs: Any) -> Any:
        assert inputs.shape[1] >= 24
        return super().generate(inputs, **kwargs)


def test_a_generate_of_its_own_is_not_what_is_probed() -> None:
    torch.manual_seed(0)
    model = Strict(LlamaConfig(**_SMALL)).eval()
    check(model, RetroDraft(model, budget=16), "tree", True, copy_prompt(24))


def test_the_probe_leaves_training_flags_of_parts_as_they_were() -> None:
    model = tiny_llama(0).train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    RetroDraft(model, budget=16, hot_start=True)
    model.register_forward_hook(lambda *args: None)
    RetroDraft(model, budget=16)
    assert [module.training for module in model.modules()] == before


def test_packed_weights() -> None:
    """Linear layers whose weight is no tensor, and which round by the largest number of a whole forward."""
    model = torch.ao.quantization.quantize_dynamic(tiny_llama(0), {torch.nn.Linear})
    check(model, RetroDraft(model, budget=16), "plain", False, copy_prompt(24))


@pytest.mark.parametrize(
    "kind,mode", [("LoraConfig", "tree"), ("PromptTuningConfig", "plain"), ("PrefixTuningConfig", "plain")]
)
def test_adapters(kind: str, mode: str) -> None:
    """An adapter that generates through the enabled model: weights are drafted for, virtual tokens are not."""
    own = dict(r=4, init_lora_weights=False) if mode == "tree" else dict(num_virtual_tokens=5)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(tiny_llama(0), getattr(peft, kind)(task_type="CAUSAL_LM", **own)).eval()
    if mode == "plain":
        for parameter in adapted.prompt_encoder.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    prompt = copy_prompt(24)
    expected = adapted.generate(input_ids=prompt, **GREEDY)
    base = adapted.base_model.model if mode == "tree" else adapted.base_model
    rd = RetroDraft(base, budget=16)
    with rd.enabled(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            assert torch.equal(adapted.generate(input_ids=prompt, **GREEDY), expected)
    assert rd.capabilities.mode == mode and (0 < rd.stats.num_target_forwards < 30) == (mode == "tree")


HYBRID = dict(num_hidden_layers=4, hidden_size=64)
RECURRENT: dict[str, dict[str, Any]] = {
    "zamba2": dict(
        layers_block_type=["mamba", "hybrid"] * 2, attention_head_dim=32, mamba_d_state=16, mamba_headdim=16,
        n_mamba_heads=8, chunk_size=8, num_mem_blocks=1, mamba_ngroups=1, **HYBRID,
    ),
    "nemotron_h": dict(
        layers_block_type=["mamba", "attention"] * 2, head_dim=16, mamba_num_heads=8, mamba_head_dim=16,
        ssm_state_size=16, n_groups=2, chunk_size=8, **HYBRID,
    ),
    "deepseek_v32": dict(
        q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_routed_experts=4,
        n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=48, first_k_dense_replace=1,
        num_key_value_heads=4, index_n_heads=2, index_head_dim=16, index_topk=64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", RECURRENT)
def test_steps_that_are_not_what_a_forward_over_several_tokens_says(family: str) -> None:
    """Their one-token forwards compute something else, or choose other keys (the prompt is longer than index_topk)."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**_SMALL, **RECURRENT[family]})).eval()
    check(model, RetroDraft(model, budget=8), "plain", False, copy_prompt(100))


@pytest.mark.parametrize("length", [20, 50, 60, 80])
def test_long_rope_at_its_switch(length: int) -> None:
    """Phi-3 forgets its cache where the text grows beyond the short frequencies; below, it is drafted for."""
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8, long_factor=[4.0] * 8)
    rope["original_max_position_embeddings"] = 64
    config = AutoConfig.for_model(
        "phi3", **{**_SMALL, "rope_parameters": rope, "original_max_position_embeddings": 64}
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    check(model, RetroDraft(model, budget=16), "tree", length == 20, copy_prompt(length))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_masks_with_gaps(dtype: torch.dtype) -> None:
    """In any type; a mask without gaps is drafted under."""
    model, prompt = tiny_llama(0), copy_prompt(24)
    mask = torch.ones(1, 24, dtype=dtype)
    check(model, RetroDraft(model, budget=16), "tree", True, prompt, attention_mask=mask)
    mask[0, 5:8] = 0
    check(model, RetroDraft(model, budget=16), "tree", False, prompt, attention_mask=mask)


@pytest.mark.parametrize("begin", [[2], [0, 0, 2, 3], [0, 0, -1]])
def test_masks_of_other_numbers(begin: list[int]) -> None:
    """Plain generate adds them up to positions."""
    mask = torch.ones(1, 24, dtype=torch.long)
    mask[0, : len(begin)] = torch.tensor(begin)
    model = tiny_llama(0)
    check(model, RetroDraft(model, budget=16), "tree", False, copy_prompt(24), attention_mask=mask)


class Rounded(DynamicCache):
    """A cache that keeps something else than it is given."""

    def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        return super().update(keys.round(decimals=1), values.round(decimals=1), *args, **kwargs)


def test_a_cache_of_the_callers_own_kind() -> None:
    model, prompt = tiny_llama(0), copy_prompt(24)
    expected = model.generate(prompt, **{CACHE_ARG: Rounded(config=model.config)}, **GREEDY)
    with pytest.warns(UserWarning, match="a Rounded can't be rolled back"):
        found = RetroDraft(model, budget=16).generate(prompt, **{CACHE_ARG: Rounded(config=model.config)}, **GREEDY)
    assert torch.equal(found, expected)


def test_the_shorter_of_two_lengths_counts() -> None:
    model, prompt = tiny_llama(0), copy_prompt(24)
    lengths = StoppingCriteriaList([MaxLengthCriteria(30), MaxLengthCriteria(50)])
    rd = RetroDraft(model, budget=16)
    assert rd.generate(prompt, stopping_criteria=lengths, **GREEDY).shape[1] == 30
    assert model.generate(prompt, stopping_criteria=lengths, **GREEDY).shape[1] == 30


@pytest.mark.parametrize("family", ["gemma3", "cohere2", "mistral_sliding", "llama4"])
def test_a_batchs_second_turn_beyond_the_window(family: str) -> None:
    """Sliding layers hold their window alone then, others all; from a drafted cache and from plain generate's."""
    model = tiny(family)
    prompt = torch.cat([copy_prompt(40, seed) for seed in (1, 2)])
    for first in (model, RetroDraft(model, budget=16)):
        shown = torch.ones_like(prompt)
        begun = first.generate(prompt, attention_mask=shown, return_dict_in_generate=True, **GREEDY)
        longer = torch.cat([begun.sequences, copy_prompt(8).repeat(2, 1)], 1)
        options = dict(attention_mask=torch.ones_like(longer), **GREEDY)
        expected = model.generate(longer, **options)
        rd = RetroDraft(model, budget=16)
        assert torch.equal(rd.generate(longer, **{CACHE_ARG: begun[CACHE_ARG]}, **options), expected)
        assert 0 < rd.stats.num_target_forwards < 30


@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "gemma3", "bloom"])
@pytest.mark.parametrize("way", ["returned", "handed over"])
def test_the_cache_of_rows_that_ended_early(family: str, way: str) -> None:
    """It holds the keys of the last token and of the padding behind it, as plain generate's does: for the next turn."""
    model = tiny(family)
    prompt = torch.cat([copy_prompt(24, seed) for seed in (1, 2, 3)])
    options = dict(attention_mask=torch.ones_like(prompt), pad_token_id=0, max_new_tokens=60, do_sample=False)
    answers = model.generate(prompt, **options)[:, 24:]
    stops = [int(answers[0, 3]), int(answers[1, 11])]  # at least two rows end early, and at two times
    turns = []
    for generate in (model.generate, RetroDraft(model, budget=12).generate):
        cache = DynamicCache(config=model.config)
        extra = {CACHE_ARG: cache} if way == "handed over" else dict(return_dict_in_generate=True)
        out = generate(prompt, eos_token_id=stops, **options, **extra)
        sequences, cache = (out, cache) if way == "handed over" else (out.sequences, out[CACHE_ARG])
        longer = torch.cat([sequences, copy_prompt(8).repeat(3, 1)], 1)
        again = model.generate(
            longer, attention_mask=torch.ones_like(longer), pad_token_id=0, max_new_tokens=8, do_sample=False,
            output_logits=True, return_dict_in_generate=True, **{CACHE_ARG: cache},
        )  # fmt: skip
        turns.append((sequences, again.sequences, again.logits))
    (first, second, logits), (drafted_first, drafted_second, drafted_logits) = turns
    assert torch.equal(first, drafted_first) and torch.equal(second, drafted_second)
    assert max_difference(logits, drafted_logits) < 1e-3


def test_images_are_left_to_plain_generate() -> None:
    """Text alone is drafted for by the same model."""
    vision = dict(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision),
        text_config=LlamaConfig(**_SMALL),
        image_token_id=96,
        image_seq_length=4,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval()
    text = copy_prompt(20) % 96
    prompt = torch.cat([torch.full((1, 4), 96), text], 1)
    options: dict[str, Any] = dict(pad_token_id=0)
    check(model, RetroDraft(model, budget=16), "tree", True, text, **options)
    check(model, RetroDraft(model, budget=16), "tree", False, prompt, pixel_values=torch.randn(1, 3, 28, 28), **options)


def test_a_head_with_more_rows_than_embeddings() -> None:
    model = tiny_llama(3)
    model.lm_head = torch.nn.Linear(64, 140, bias=False)
    check(model, RetroDraft(model, budget=16), "plain", False, copy_prompt(24), suppress_tokens=list(range(97, 140)))
