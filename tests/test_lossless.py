"""Output equals plain `generate`, token for token in float32, and takes fewer forwards."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tiny import (
    FAMILIES,
    VOCAB,
    ForwardCount,
    copy_prompt,
    max_difference,
    planted,
    random_prompt,
    rigged_llama,
    tiny,
    tiny_llama,
)
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList

from retrodraft import RetroDraft
from retrodraft.compat import CACHE_ARG
from retrodraft.strategy import STRATEGIES

TOKENS = 40
EXPECTED_MODE = dict.fromkeys(FAMILIES, "tree") | {
    "bloom": "chain", "mpt": "chain", "falcon_alibi": "chain",
    "mamba2": "snapshot", "qwen3_next": "snapshot", "lfm2": "snapshot",
}  # fmt: skip
PAIRS = [(seed, prompt) for seed in (0, 2, 4) for prompt in (0, 1, 2, 3)]  # models x prompts


def plain(model: Any, prompt: torch.Tensor, **options: Any) -> Any:
    """Plain `generate` with logits."""
    options = {"max_new_tokens": TOKENS, "do_sample": False, **options}
    return model.generate(prompt, return_dict_in_generate=True, output_logits=True, **options)


def margin(logits: Any) -> float:
    """Smallest gap between the best two entries over all steps."""
    best = [step.topk(2, dim=-1).values for step in logits]
    return min(float((pair[:, 0] - pair[:, 1]).min()) for pair in best)


def clear_prompt(model: Any, length: int, seed: int = 0, make: Any = random_prompt, **options: Any) -> torch.Tensor:
    """A prompt whose plain output hangs on no tie: shapes of matrix products may decide those even in float32."""
    for attempt in range(50):
        prompt = make(length, seed + 100 * attempt)
        if margin(plain(model, prompt, **options).logits) > 1e-3:
            return prompt
    raise AssertionError("every prompt led to a tie")


def text_of(reference: Any, prompt: torch.Tensor) -> list[int]:
    """Generated ids of the first row."""
    return reference.sequences[0, prompt.shape[1] :].tolist()


def check_equal(rd: RetroDraft, prompt: torch.Tensor, reference: Any, tolerance: float = 2e-4, **options: Any) -> Any:
    """Run the same call drafted: ids equal, logits close, fewer forwards than tokens."""
    options = {"max_new_tokens": TOKENS, "do_sample": False, **options}
    with ForwardCount(rd.model) as forwards:
        out = rd.generate(prompt, return_dict_in_generate=True, output_logits=True, **options)
    assert out.sequences.tolist() == reference.sequences.tolist()
    assert max_difference(out.logits, reference.logits) < tolerance
    assert forwards.count < out.sequences.shape[1] - prompt.shape[1]
    return out


@pytest.mark.parametrize("family,attn", [(f, a) for f, (_, _, kinds) in FAMILIES.items() for a in kinds])
def test_every_family(family: str, attn: str) -> None:
    """Trees with gaps in the accepted paths, over window edges, on every family and attention implementation."""
    model = tiny(family, attn)
    prompt = clear_prompt(model, 21)
    reference = plain(model, prompt)
    rd = planted(model, [text_of(reference, prompt)], wrong=(3, 4, 11, 20, 21, 22))
    assert rd.capabilities.mode == EXPECTED_MODE[family]
    out = check_equal(rd, prompt, reference)
    if family != "mamba2":
        assert out[CACHE_ARG].get_seq_length() == prompt.shape[1] + TOKENS - 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", [0, 2, 4])
def test_every_strategy(strategy: str, seed: int) -> None:
    """The real drafters, cold and warm."""
    model = tiny_llama(seed, initializer_range=0.05)
    rd = RetroDraft(model, strategy=strategy, budget=24)
    for length in (24, 60):
        prompt = clear_prompt(model, length, seed, copy_prompt, max_new_tokens=60)
        reference = plain(model, prompt, max_new_tokens=60)
        for _ in range(2):
            check_equal(rd, prompt, reference, max_new_tokens=60)


@pytest.mark.parametrize("seed,prompt_seed", PAIRS)
def test_accepting_none_one_some_and_all(seed: int, prompt_seed: int) -> None:
    """O07: exactly 0, 1, k-1 and k tokens a round, and 0 and k in turn; prompts of 1 and 2 tokens too."""
    model = tiny_llama(seed)
    prompt = clear_prompt(model, (1, 2, 5, 24)[prompt_seed], prompt_seed)
    reference = plain(model, prompt)
    text = text_of(reference, prompt)
    patterns = {
        "one": range(2, TOKENS, 3), "most": range(6, TOKENS, 6), "all": (), "in turn": [*range(5, 9), *range(18, 22)]
    }  # fmt: skip
    for wrong in patterns.values():
        rd = planted(model, [text], wrong=wrong, depth=6)
        out = check_equal(rd, prompt, reference, tolerance=1e-4)
        assert out[CACHE_ARG].get_seq_length() == prompt.shape[1] + TOKENS - 1
    rd = planted(model, [text], wrong=range(TOKENS), width=3)  # nothing is ever accepted
    assert rd.generate(prompt, max_new_tokens=TOKENS, do_sample=False).tolist() == reference.sequences.tolist()
    assert rd.stats.num_accepted_tokens == 0 and rd.stats.num_draft_tokens > 0


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


@pytest.mark.parametrize("new", [1, 2, 3, 15, 16, 17])
def test_near_the_context_window(new: int) -> None:
    """O04: learned positions end at 40; the tree must not reach beyond what is left."""
    model = tiny("gpt2")
    model.config.n_positions = 40
    model.transformer.wpe = torch.nn.Embedding.from_pretrained(model.transformer.wpe.weight[:40].detach().clone())
    prompt = clear_prompt(model, 24, max_new_tokens=17)
    reference = plain(model, prompt, max_new_tokens=17)
    rd = planted(model, [text_of(reference, prompt)], depth=8, width=3)
    out = rd.generate(prompt, max_new_tokens=new, do_sample=False)
    assert out.tolist() == reference.sequences[:, : 24 + new].tolist()
    assert new < 4 or rd.stats.num_target_forwards < new


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


@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "gemma3", "gpt2", "llama4", "opt", "qwen3_moe"])
@pytest.mark.parametrize("pad", [0, 5])
def test_ragged_batch(family: str, pad: int) -> None:
    """O09: left-padded rows accept different numbers of tokens; each equals its own single run."""
    model = tiny(family)
    prompts = [clear_prompt(model, length, seed) for seed, length in enumerate((9, 24, 17, 3))]
    single = [plain(model, p, max_new_tokens=30) for p in prompts]
    texts = [text_of(ref, p) for ref, p in zip(single, prompts, strict=True)]
    width = max(p.shape[1] for p in prompts)
    ids, mask = torch.full((4, width), pad), torch.zeros(4, width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - prompt.shape[1] :] = prompt
        mask[row, width - prompt.shape[1] :] = 1
    eos = texts[1][11]
    options = dict(attention_mask=mask, max_new_tokens=30, do_sample=False, eos_token_id=eos, pad_token_id=0)
    expected = model.generate(ids, **options, return_dict_in_generate=True, output_logits=True)
    rd = planted(model, texts, wrong=(2, 9, 10))
    with ForwardCount(model) as forwards:
        out = rd.generate(ids, **options, return_dict_in_generate=True, output_logits=True)
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert forwards.count < 20 < out.sequences.shape[1] - width
    for row, text in enumerate(texts):
        stop = text.index(eos) + 1 if eos in text else len(text)
        assert out.sequences[row, width:][:stop].tolist() == text[:stop]
        for step in range(stop):
            assert float((out.logits[step][row] - single[row].logits[step][0]).abs().max()) < 1e-3


def test_num_return_sequences_and_greedy_batch() -> None:
    """Equal rows without padding, and rows of one prompt."""
    model = tiny_llama(0)
    prompt = clear_prompt(model, 20, 0, copy_prompt).repeat(3, 1)
    reference = model.generate(prompt, max_new_tokens=30, do_sample=False)
    rd = RetroDraft(model, budget=20)
    assert rd.generate(prompt, max_new_tokens=30, do_sample=False).tolist() == reference.tolist()
    assert rd.stats.num_target_forwards < 30
    out = rd.generate(prompt[:1], max_new_tokens=30, do_sample=True, num_return_sequences=4, temperature=0.5)
    assert out.shape == (4, 50)


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


def test_custom_criteria_of_a_batch_run_plain() -> None:
    """Rows draft at their own pace, so what may look at the whole batch is left to plain generate."""
    model = tiny_llama(0)
    prompt = copy_prompt(24).repeat(2, 1)
    options = dict(max_new_tokens=16, do_sample=False, stopping_criteria=[LengthIsMultipleOf(9)])
    rd = RetroDraft(model, budget=8)
    with pytest.warns(UserWarning, match="LengthIsMultipleOf"):
        assert rd.generate(prompt, **options).tolist() == model.generate(prompt, **options).tolist()


def test_rigged_model_follows_its_cycle() -> None:
    """Model R: the next token is known, so the statistics are too."""
    cycle = list(range(10, 20))
    successor = list(range(VOCAB))
    for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        successor[a] = b
    model = rigged_llama(successor)
    prompt = torch.tensor([cycle + cycle[:3]])
    rd = RetroDraft(model, budget=16)
    out = rd.generate(prompt, max_new_tokens=60, do_sample=False)
    assert out[0, 13:].tolist() == [cycle[(3 + i) % 10] for i in range(60)]
    assert rd.stats.num_target_forwards <= 8
    assert rd.stats.num_new_tokens == 60
    assert rd.stats.tokens_per_forward == 60 / rd.stats.num_row_forwards
    assert sum(rd.stats.acceptance_histogram.values()) == rd.stats.num_drafts


def test_low_precision_differs_only_at_near_ties() -> None:
    """O08: in bfloat16 a first difference must lie at a margin that rounding explains."""
    model = tiny_llama(0, initializer_range=0.05).to(torch.bfloat16)
    rd = RetroDraft(model, budget=16)
    saved = 0
    for seed in range(12):
        prompt = copy_prompt(24, seed)
        reference = plain(model, prompt)
        out = rd.generate(prompt, max_new_tokens=TOKENS, do_sample=False)
        saved += TOKENS - rd.stats.num_target_forwards
        different = (out != reference.sequences)[0].nonzero()
        if len(different):
            top = reference.logits[int(different[0]) - 24][0].topk(2).values
            assert float(top[0] - top[1]) <= 2e-2
    assert saved > 0
