"""The caller's own stops, processors and draws decide every token, as they do in plain `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import TOKENS, check_equal, clear_prompt, margin, plain, text_of
from tiny import VOCAB, copy_prompt, planted, tiny_llama
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList

from retrodraft import RetroDraft


@pytest.mark.parametrize("seed", [0, 2, 4])
def test_eos_in_the_middle_of_a_draft(seed: int) -> None:
    """O01: every token of the output as the EOS."""
    model = tiny_llama(seed)
    prompt = clear_prompt(model, 12, seed)
    text = text_of(plain(model, prompt), prompt)
    for eos in sorted(set(text)):
        reference = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False, eos_token_id=eos, pad_token_id=0)
        rd = planted(model, [text], depth=8)
        out = rd.generate(prompt, max_new_tokens=TOKENS, do_sample=False, eos_token_id=eos, pad_token_id=0)
        assert out.tolist() == reference.tolist()
        new = out.shape[1] - prompt.shape[1]
        assert new < 4 or rd.stats.num_target_forwards < new


def test_forms_of_eos() -> None:
    """O02: no EOS, a number, a list, a tensor; by argument, generation config and the model's own config."""
    model = tiny_llama(0)
    prompt = clear_prompt(model, 12)
    text = text_of(plain(model, prompt), prompt)
    unreachable = next(t for t in range(2, VOCAB) if t not in text)
    for eos in (None, text[17], [text[17]], [unreachable, text[17]], torch.tensor([unreachable, text[17]])):
        options = dict(max_new_tokens=TOKENS, do_sample=False, eos_token_id=eos, pad_token_id=0)
        expected = model.generate(prompt, **options)
        assert planted(model, [text]).generate(prompt, **options).tolist() == expected.tolist()
    model.generation_config.eos_token_id = [unreachable, text[17]]
    expected = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)
    rd = planted(model, [text])
    assert rd.generate(prompt, max_new_tokens=TOKENS, do_sample=False).tolist() == expected.tolist()
    assert rd.stats.num_target_forwards < rd.stats.num_new_tokens


class LastTokenIs(StoppingCriteria):
    """Stops behind a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


class LengthIsMultipleOf(StoppingCriteria):
    """Stops at lengths that plain decoding visits one by one."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] % self.number == 0)


def test_stopping_criteria_inside_a_draft() -> None:
    """O03: user-written criteria see every token with its own prefix."""
    model = tiny_llama(2)
    prompt = clear_prompt(model, 12)
    text = text_of(plain(model, prompt), prompt)
    for criterion in [
        *(LastTokenIs(token) for token in sorted(set(text))),
        *(LengthIsMultipleOf(n) for n in range(7, 30)),
    ]:
        options = dict(max_new_tokens=TOKENS, do_sample=False, stopping_criteria=StoppingCriteriaList([criterion]))
        expected = model.generate(prompt, **options)
        assert planted(model, [text], depth=8).generate(prompt, **options).tolist() == expected.tolist()


def test_custom_criteria_of_a_batch_run_plain() -> None:
    """Rows draft at their own pace, so what may look at the whole batch is left to plain generate."""
    model = tiny_llama(0)
    prompt = copy_prompt(24).repeat(2, 1)
    options = dict(max_new_tokens=16, do_sample=False, stopping_criteria=[LengthIsMultipleOf(9)])
    rd = RetroDraft(model, budget=8)
    with pytest.warns(UserWarning, match="LengthIsMultipleOf"):
        assert rd.generate(prompt, **options).tolist() == model.generate(prompt, **options).tolist()


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": dict(repetition_penalty=1.3),
    "mild_penalty": dict(repetition_penalty=1.05),
    "no_repeat_ngram": dict(no_repeat_ngram_size=3),
    "min_new_tokens": dict(min_new_tokens=30, eos_token_id="text10"),
    "min_length": dict(min_length=40, eos_token_id="text10"),
    "bad_words": dict(bad_words_ids=[["text5"], ["text8", "text9"], ["text12", "text13", "text14"]]),
    "suppress": dict(suppress_tokens=["text3", "text7"]),
    "forced_eos": dict(forced_eos_token_id=5),
    "decay": dict(exponential_decay_length_penalty=(5, 1.5), eos_token_id=7),
    "sequence_bias": dict(sequence_bias=[[["text6"], -5.0], [[9], 2.0]]),
    "pair": dict(repetition_penalty=1.2, no_repeat_ngram_size=4, min_new_tokens=20, eos_token_id="text15"),
}


def with_tokens(value: Any, text: list[int]) -> Any:
    """Replace "text7" by the text's token 7, at any depth."""
    if isinstance(value, dict):
        return {key: with_tokens(item, text) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(with_tokens(item, text) for item in value)
    return text[int(value[4:])] if isinstance(value, str) and value.startswith("text") else value


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("seed", [0, 2, 4])
@pytest.mark.parametrize("do_sample", [False, True])
def test_processors(name: str, seed: int, do_sample: bool) -> None:
    """O05: built-in processors, greedy and sampling, on drafts that were planted from the processed output."""
    model = tiny_llama(seed, initializer_range=0.1)
    for attempt in range(20):
        prompt = copy_prompt(20, seed + 100 * attempt)
        options = with_tokens(PROCESSORS[name], text_of(plain(model, prompt), prompt))
        options |= dict(do_sample=do_sample, pad_token_id=0) | (dict(temperature=0.7, top_k=20) if do_sample else {})
        torch.manual_seed(seed)
        reference = plain(model, prompt, output_scores=True, **options)
        if do_sample or margin(reference.scores) > 1e-3:
            break
    torch.manual_seed(seed)
    unset = plain(model, prompt, do_sample=do_sample, **(dict(temperature=0.7, top_k=20) if do_sample else {}))
    changed = reference.sequences.tolist() != unset.sequences.tolist()
    assert changed or do_sample or name in ("mild_penalty", "decay", "forced_eos", "min_new_tokens", "min_length")
    rd = planted(model, [text_of(reference, prompt)], wrong=(5, 13, 14))
    torch.manual_seed(seed)
    out = check_equal(rd, prompt, reference, output_scores=True, **options)
    finite = [(a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)) for a, b in zip(out.scores, reference.scores, strict=True)]
    assert max(float((a - b).abs().max()) for a, b in finite) < 1e-3
    assert float(torch.rand(1)) == _next_random_after(model, prompt, seed, options)


def _next_random_after(model: Any, prompt: torch.Tensor, seed: int, options: dict[str, Any]) -> float:
    """The random stream must be used up exactly as by plain decoding."""
    torch.manual_seed(seed)
    plain(model, prompt, output_scores=True, **options)
    return float(torch.rand(1))


class CountsItsCalls(LogitsProcessor):
    """A stateful, path-dependent processor: shifts the scores by what it has seen so far."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return scores.roll(len(self.lengths) % 5 + int(input_ids[0, -1]) % 3, dims=-1)


def test_stateful_processor_is_called_once_a_token() -> None:
    """A user's processor runs once for each emitted token, in order, with its true prefix."""
    model = tiny_llama(0)
    prompt = clear_prompt(model, 9)
    first, second = CountsItsCalls(), CountsItsCalls()
    reference = plain(model, prompt, logits_processor=[first])
    rd = planted(model, [text_of(reference, prompt)], wrong=(7, 8))
    check_equal(rd, prompt, reference, logits_processor=[second])
    assert second.lengths == first.lengths == list(range(9, 9 + TOKENS))


def test_guidance_scale() -> None:
    """Classifier-free guidance runs the model itself, with a cache of its own."""
    model = tiny_llama(0)
    prompt = clear_prompt(model, 9)
    reference = plain(model, prompt, guidance_scale=1.5)
    rd = planted(model, [text_of(reference, prompt)])
    out = rd.generate(prompt, max_new_tokens=TOKENS, do_sample=False, guidance_scale=1.5)
    assert out.tolist() == reference.sequences.tolist()
    assert rd.stats.num_target_forwards < TOKENS


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("strategy", ["retro", "token_recycling"])
def test_same_seed_gives_the_same_sample(seed: int, strategy: str) -> None:
    """Sampling uses the random stream as plain decoding does."""
    model = tiny_llama(seed, initializer_range=0.1)
    prompt = copy_prompt(30, seed)
    rd = RetroDraft(model, strategy=strategy, budget=30)
    saved = 0
    for temperature in (0.3, 0.8):
        options = dict(max_new_tokens=60, do_sample=True, temperature=temperature, top_p=0.95, top_k=0)
        torch.manual_seed(seed)
        expected = model.generate(prompt, **options)
        for _ in range(2):
            torch.manual_seed(seed)
            assert rd.generate(prompt, **options).tolist() == expected.tolist()
            saved += rd.stats.num_new_tokens - rd.stats.num_target_forwards
    assert saved > 0
