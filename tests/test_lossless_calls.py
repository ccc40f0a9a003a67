"""What a call gives back and leaves behind: outputs, caches, other ways in, and what is left to plain `generate`."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from exactness import TOKENS, check_equal, clear_prompt, plain, text_of
from tiny import VOCAB, ForwardCount, copy_prompt, max_difference, planted, random_prompt, tiny, tiny_llama
from transformers import DynamicCache, LogitsProcessor

from retrodraft import RetroDraft
from retrodraft.compat import CACHE_ARG


def test_outputs_of_accepted_positions() -> None:
    """O06: scores, raw logits, hidden states and attentions, an entry a token, in plain decoding's shapes."""
    for family in ("llama", "mistral_sliding", "gemma3"):
        model = tiny(family, "eager")
        prompt = clear_prompt(model, 13)
        wanted = dict(output_scores=True, output_hidden_states=True, output_attentions=True, repetition_penalty=1.3)
        reference = plain(model, prompt, **wanted)
        rd = planted(model, [text_of(reference, prompt)], wrong=(6, 7))
        out = check_equal(rd, prompt, reference, **wanted)
        assert type(out) is type(reference) and out.keys() == reference.keys()
        assert all(score.shape == (1, VOCAB) for score in out.scores)
        assert max_difference(out.scores, reference.scores) < 2e-4
        for field in ("hidden_states", "attentions"):
            for mine, theirs in zip(out[field], reference[field], strict=True):
                assert [x.shape for x in mine] == [x.shape for x in theirs]
                assert max_difference(mine, theirs) < 1e-3


def test_attentions_over_tokens_that_are_fed_again() -> None:
    """O06: a recurrent model's rejected chains are fed anew in part; every entry still shows all keys before it."""
    model = tiny("qwen3_next", "eager")
    prompt = clear_prompt(model, 13)
    reference = plain(model, prompt, output_attentions=True)
    rd = planted(model, [text_of(reference, prompt)], wrong=(4, 9, 17))
    out = check_equal(rd, prompt, reference, output_attentions=True)
    for mine, theirs in zip(out.attentions, reference.attentions, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (one.shape == other.shape and float((one - other).abs().max()) < 1e-3)


@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "gemma3", "qwen3_next"])
def test_continued_cache(family: str) -> None:
    """The second turn feeds only the new suffix, from our cache and from one that plain generate filled."""
    model = tiny(family)
    first = clear_prompt(model, 19, 1, max_new_tokens=15)
    turn = plain(model, first, max_new_tokens=15)
    prompt = clear_prompt(model, 6, 2, lambda n, seed: torch.cat([turn.sequences, random_prompt(n, seed)], dim=1))
    reference = plain(model, prompt)
    for drafted_first in (False, True):
        rd = planted(model, [text_of(turn, first), text_of(reference, prompt)], wrong=(4,))
        wrapped = rd if drafted_first else model
        begun = wrapped.generate(first, max_new_tokens=15, do_sample=False, return_dict_in_generate=True)
        assert begun[CACHE_ARG].get_seq_length() == first.shape[1] + 14
        if not drafted_first:
            rd.strategy._next_row = 1
        with ForwardCount(model) as forwards:
            out = rd.generate(
                prompt, **{CACHE_ARG: begun[CACHE_ARG]}, max_new_tokens=TOKENS, do_sample=False,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        assert out.sequences.tolist() == reference.sequences.tolist()
        assert max_difference(out.logits, reference.logits) < 5e-4
        assert forwards.count < TOKENS
        assert out[CACHE_ARG] is begun[CACHE_ARG] and out[CACHE_ARG].get_seq_length() == prompt.shape[1] + TOKENS - 1
        assert rd.stats.num_cached_tokens == first.shape[1] + 14


def test_second_call_is_the_same_and_leaves_no_trace() -> None:
    """O11: repeated calls, an error in between, two wrappers in turn; nothing of the caller's is changed."""
    model = tiny_llama(4)
    prompts = [clear_prompt(model, 24, seed, copy_prompt) for seed in (1, 2)]
    expected = [model.generate(p, max_new_tokens=TOKENS, do_sample=False).tolist() for p in prompts]
    settings, arguments = (model.generation_config.to_dict(), dict(max_new_tokens=TOKENS, do_sample=False))
    one, two = (RetroDraft(model, budget=24), RetroDraft(model, strategy="goose", budget=24))
    for _ in range(3):
        for rd in (one, two):
            for prompt, ids in zip(prompts, expected, strict=True):
                assert rd.generate(prompt, **arguments).tolist() == ids

        class Fails(LogitsProcessor):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                if input_ids.shape[1] > 40:
                    raise RuntimeError("on purpose")
                return scores

        with pytest.raises(RuntimeError, match="on purpose"):
            one.generate(prompts[0], logits_processor=[Fails()], **arguments)
    assert model.generation_config.to_dict() == settings
    assert arguments == dict(max_new_tokens=TOKENS, do_sample=False)
    assert "generate" not in model.__dict__ and "_sample" not in model.__dict__
    assert model.generate(prompts[0], **arguments).tolist() == expected[0]


def test_other_ways_in() -> None:
    """`custom_generate=rd`, `with rd.enabled()`, and a pipeline-like caller."""
    model = tiny_llama(0)
    prompt = clear_prompt(model, 24, 0, copy_prompt)
    reference = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)
    text = text_of(plain(model, prompt), prompt)
    rd = planted(model, [text])
    out = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False, custom_generate=rd)
    assert out.tolist() == reference.tolist() and rd.stats.num_target_forwards < TOKENS
    with rd.enabled():
        out = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)
        assert rd.total_stats.num_calls == 2
    assert out.tolist() == reference.tolist()
    with ForwardCount(model) as forwards:
        model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)
    assert forwards.count == TOKENS and rd.total_stats.num_calls == 2


DELEGATED: dict[str, dict[str, Any]] = {
    "beam": dict(num_beams=2),
    "static cache": dict(cache_implementation="static", disable_compile=True),
    "no cache": dict(use_cache=False),
    "prompt lookup": dict(prompt_lookup_num_tokens=5),
}


@pytest.mark.parametrize("name", DELEGATED)
def test_what_cannot_be_drafted_runs_plain(name: str) -> None:
    """One warning that names the reason, and plain generate's output."""
    model = tiny_llama(0)
    prompt = copy_prompt(24)
    options = dict(max_new_tokens=16, do_sample=False, **DELEGATED[name])
    expected = model.generate(prompt, **options)
    rd = RetroDraft(model, budget=8)
    with pytest.warns(UserWarning, match="retrodraft leaves this call to plain generate"):
        assert rd.generate(prompt, **options).tolist() == expected.tolist()
    assert rd.stats.num_target_forwards == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        rd.generate(prompt, **options)  # the same reason is told once


@pytest.mark.parametrize("mask", [torch.ones(1, 30), torch.ones(1, 25), torch.tensor([[0.0] * 6 + [1.0] * 24])])
def test_masks_of_another_length_than_the_prompt(mask: torch.Tensor) -> None:
    """Plain generate takes them for a text of that length."""
    model, prompt = tiny_llama(0), copy_prompt(24)
    options = dict(attention_mask=mask.long(), max_new_tokens=TOKENS, do_sample=False)
    expected = model.generate(prompt, **options)
    with pytest.warns(UserWarning, match=r"the attention_mask has (25|30) columns, but there are 24 tokens"):
        assert torch.equal(RetroDraft(model, budget=16).generate(prompt, **options), expected)


def test_a_cache_that_holds_the_whole_prompt() -> None:
    """Plain generate feeds it all again, behind what is there."""
    model, prompt = tiny_llama(0), copy_prompt(24)
    found = []
    for wrapped in (model, RetroDraft(model, budget=16)):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(prompt, **{CACHE_ARG: cache})
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found.append(wrapped.generate(prompt, **{CACHE_ARG: cache}, max_new_tokens=TOKENS, do_sample=False))
    assert torch.equal(*found)
    assert any("holds the whole prompt already" in str(warning.message) for warning in seen)


@pytest.mark.parametrize("length", [20.5, torch.tensor(20), np.int64(20)])
@pytest.mark.parametrize("option", ["max_new_tokens", "max_length"])
def test_lengths_that_are_no_integers(option: str, length: Any) -> None:
    model, prompt = tiny_llama(0), copy_prompt(8)
    rd = RetroDraft(model, budget=16)
    options = {option: length, "do_sample": False}
    assert torch.equal(rd.generate(prompt, **options), model.generate(prompt, **options))
    assert rd.stats.num_target_forwards > 0


def test_prompts_of_short_integers() -> None:
    """Plain generate's first new token turns them into long ones."""
    model, prompt = tiny_llama(0), copy_prompt(24).int()
    expected = model.generate(prompt, max_new_tokens=4, do_sample=False)
    found = RetroDraft(model, budget=16).generate(prompt, max_new_tokens=4, do_sample=False)
    assert torch.equal(found, expected) and found.dtype == expected.dtype


def test_modes_that_transformers_has_given_up() -> None:
    model, prompt = tiny_llama(0), copy_prompt(24)
    with pytest.raises(ValueError, match="has moved contrastive_search to custom_generate code"):
        model.generate(prompt, penalty_alpha=0.6, top_k=4, custom_generate=RetroDraft(model, budget=16))
