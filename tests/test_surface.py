"""What a caller sees: bad input, streaming, stop strings, tokenizers, statistics, distribution of samples, caches."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tiny import VOCAB, ForwardCount, copy_prompt, looking_on, planted, random_prompt, rigged_llama, tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DynamicCache,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

from retrodraft import RetroDraft, UnsupportedModelError
from retrodraft.cache import DraftCache
from retrodraft.compat import CACHE_ARG
from retrodraft.retro import RetroStrategy
from retrodraft.target import TargetModel, tree_hooks
from retrodraft.tree import DraftTree


def byte_tokenizer(size: int = 256) -> Any:
    """Token n is the n-th byte of the byte-level alphabet: other characters are split over several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:size]
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class Recorder(BaseStreamer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("way", ["generate", "custom_generate", "enabled"])
def test_streamer_gets_every_token_once(way: str) -> None:
    """O10: the same puts as plain decoding, whichever way in, also with an EOS inside a draft."""
    model = tiny_llama(0)
    prompt = copy_prompt(24)
    text = model.generate(prompt, max_new_tokens=40, do_sample=False)[0, 24:].tolist()
    for eos in (None, text[17]):
        options: dict[str, Any] = dict(max_new_tokens=40, do_sample=False, eos_token_id=eos, pad_token_id=0)
        expected, got = Recorder(), Recorder()
        reference = model.generate(prompt, streamer=expected, **options)
        rd = planted(model, [text])
        if way == "generate":
            out = rd.generate(prompt, streamer=got, **options)
        elif way == "custom_generate":
            out = model.generate(prompt, streamer=got, custom_generate=rd, **options)
        else:
            with rd.enabled():
                out = model.generate(prompt, streamer=got, **options)
        assert got.puts == expected.puts and got.ends == 1
        assert out.tolist() == reference.tolist()
        assert rd.stats.num_target_forwards < len(got.puts) - 1


def test_streamed_text_has_no_broken_characters() -> None:
    """O10: characters of four bytes inside accepted runs, read from another thread."""
    tokenizer = byte_tokenizer()
    ids = tokenizer("a🙂b🚀é́ ").input_ids
    successor = list(range(256))
    for a, b in zip(ids, [*ids[1:], ids[0]], strict=True):
        successor[a] = b
    if len(set(ids)) < len(ids):  # a byte that comes twice can't be followed by two things: keep the first round
        ids = tokenizer("a🙂").input_ids
        for a, b in zip(ids, [*ids[1:], ids[0]], strict=True):
            successor[a] = b
    model = rigged_llama(successor)
    rd = RetroDraft(model, tokenizer, budget=16)
    prompt = torch.tensor([ids])
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=300)
    options = dict(max_new_tokens=10 * len(ids), do_sample=False, streamer=streamer)
    thread = threading.Thread(target=rd.generate, args=(prompt,), kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join(300)
    expected = tokenizer.decode(model.generate(prompt, max_new_tokens=10 * len(ids), do_sample=False)[0, len(ids) :])
    assert text == expected and "\ufffd" not in text and "🙂" in text
    assert rd.stats.num_target_forwards < rd.stats.num_new_tokens / 2


@pytest.mark.parametrize("seed", [0, 2])
def test_stop_strings_inside_a_draft(seed: int) -> None:
    """O03: the text of every window of one to three tokens; from the call and from the generation config."""
    model = tiny_llama(seed)
    tokenizer = byte_tokenizer(VOCAB)
    prompt = random_prompt(12, seed)
    text = model.generate(prompt, max_new_tokens=24, do_sample=False)[0, 12:].tolist()
    for start in range(0, 21, 2):
        stop = tokenizer.decode(text[start : start + 1 + start % 3])
        options: dict[str, Any] = dict(max_new_tokens=24, do_sample=False, stop_strings=[stop])
        expected = model.generate(prompt, tokenizer=tokenizer, **options)
        rd = planted(model, [text], depth=8)
        assert rd.generate(prompt, tokenizer=tokenizer, **options).tolist() == expected.tolist()
        rd = planted(model, [text], depth=8)
        rd.tokenizer = tokenizer  # the wrapper's own tokenizer serves as well
        assert rd.generate(prompt, **options).tolist() == expected.tolist()


def test_ids_beyond_the_tokenizer() -> None:
    """O12: a model with padded embedding rows emits an id that its tokenizer does not know."""
    successor = [(i + 1) % 128 if i >= 90 else i + 1 for i in range(128)]
    model = rigged_llama(successor)
    tokenizer = byte_tokenizer(97)
    prompt = torch.tensor([list(range(80, 90))])
    options: dict[str, Any] = dict(
        max_new_tokens=40, do_sample=False, stop_strings=[tokenizer.decode([3])], tokenizer=tokenizer
    )
    expected = model.generate(prompt, **options)
    rd = RetroDraft(model, tokenizer, budget=8)
    assert int(expected.max()) > 97
    for _ in range(2):
        assert rd.generate(prompt, **options).tolist() == expected.tolist()
    assert rd.stats.num_target_forwards < expected.shape[1] - 10
    with pytest.raises(ValueError, match="200 tokens, the model only 128"):
        RetroDraft(model, byte_tokenizer(200))


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(budget=-1), "budget must lie between 0 and 1024, got -1"),
        (dict(budget=10**9), "budget must lie between"),
        (dict(budget="many"), "budget must be a whole number or \"auto\", got 'many'"),
        (dict(budget=1.5), "budget must be a whole number"),
        (dict(budget=True), "budget must be a whole number"),
        (dict(max_depth=0), "max_depth must lie between 1 and 1024"),
        (dict(max_depth="3"), "max_depth must be a whole number"),
        (dict(strategy="magic"), "strategy must be one of retro, goose"),
        (dict(tokenizer=5), "tokenizer must be a tokenizer, as AutoTokenizer loads one, got 5"),
        (dict(tokenizer="gpt2"), "tokenizer must be a tokenizer"),
        (dict(corpora=5), "corpora must be a list of indexes"),
        (dict(corpora=[5]), "corpora must hold indexes, or their folders, got 5"),
        (dict(reproducible="yes"), "reproducible must be True or False, got 'yes'"),
        (dict(hot_start=3), "hot_start must be True or False, got 3"),
        (dict(max_kv_bytes="1G"), "max_kv_bytes must be a number of bytes, got '1G'"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    """O14: refused before any work, with the field's name."""
    with pytest.raises(ValueError, match=message):
        RetroDraft(tiny_llama(0), **options)


@pytest.mark.parametrize(
    "prompt", ["text", [1, 2], [[1, 2]], torch.tensor([1, 2]), torch.ones(1, 1, 2).long(), torch.ones(1, 2)]
)
def test_what_is_no_batch_of_token_ids(prompt: Any) -> None:
    rd = RetroDraft(tiny_llama(0))
    for call in (
        lambda: rd.generate(prompt),
        lambda: rd.generate(input_ids=prompt),
        lambda: rd.generate(inputs=prompt),
    ):
        with pytest.raises(
            ValueError, match=r"generate takes token ids, a tensor \[batch_size, length\], got (a|one of)"
        ):
            call()


@pytest.mark.parametrize(
    "prompt,message",
    [
        (torch.ones(1, 0, dtype=torch.long), "the prompt is empty"),
        (torch.tensor([[1, VOCAB]]), f"token ids must lie between 0 and {VOCAB - 1}, got {VOCAB}"),
        (torch.tensor([[1, -5]]), "token ids must lie between 0 and .*, got -5"),
    ],
)
def test_ids_that_the_model_does_not_have(prompt: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RetroDraft(tiny_llama(0)).generate(prompt, max_new_tokens=2)


def test_options_change_what_is_done() -> None:
    """O14: each option shows in the statistics."""
    model = tiny_llama(0, initializer_range=0.05)
    prompt = copy_prompt(40)
    options: dict[str, Any] = dict(max_new_tokens=40, do_sample=False)

    def run(**changes: Any) -> Any:
        rd = RetroDraft(model, **changes)
        rd.generate(prompt, **options)
        return rd.stats

    assert run(budget=0).num_draft_tokens == 0
    assert run(budget=0).num_target_forwards == 40
    assert 0 < run(budget=1).nodes_per_forward <= 1 < run(budget=30).nodes_per_forward <= 30
    assert max(run(budget=30, max_depth=1).acceptance_histogram) <= 1
    with ForwardCount(model) as forwards:
        rd = RetroDraft(model, budget=7, reproducible=True)
        forwards.tokens = forwards.count = 0
        rd.generate(prompt, **options)
    assert forwards.tokens - 40 == 8 * (forwards.count - 1)  # every verify forward has one shape


def test_what_is_no_causal_language_model() -> None:
    """Refused with advice; an encoder-decoder is left to plain generate."""
    with pytest.raises(UnsupportedModelError, match="AutoModelForCausalLM"):
        RetroDraft(torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedModelError, match="no language-modeling head|a transformers model"):
        RetroDraft(tiny_llama(0).model)
    with pytest.raises(UnsupportedModelError, match="wrap the model inside, ._orig_mod"):
        RetroDraft(torch.compile(tiny_llama(0)))
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    ).eval()
    rd = RetroDraft(model)
    assert rd.capabilities.mode == "plain"
    prompt = random_prompt(5, vocab=50)
    with pytest.warns(UserWarning, match="encoder-decoder"):
        out = rd.generate(prompt, max_new_tokens=8, do_sample=False)
    assert out.tolist() == model.generate(prompt, max_new_tokens=8, do_sample=False).tolist()


def test_another_model_is_refused() -> None:
    """A wrapper can't decode for a model it has not probed."""
    rd = RetroDraft(tiny_llama(0))
    with pytest.raises(ValueError, match="made for another model"):
        tiny_llama(2).generate(random_prompt(5), max_new_tokens=3, custom_generate=rd)


def test_reset_forgets() -> None:
    """Warm rows draft more; after `reset` the first call's figures come back exactly."""
    model = tiny_llama(0, initializer_range=0.1)
    prompt = random_prompt(20)
    rd = RetroDraft(model, budget=16)
    forwards = []
    for _ in range(3):
        rd.generate(prompt, max_new_tokens=40, do_sample=False)
        forwards.append(rd.stats.num_target_forwards)
    assert forwards[2] < forwards[0]
    assert rd.total_stats.num_calls == 3 and rd.total_stats.num_new_tokens == 120
    rd.reset()
    assert rd.total_stats.num_calls == 0
    rd.generate(prompt, max_new_tokens=40, do_sample=False)
    assert rd.stats.num_target_forwards == forwards[0]


def test_samples_follow_the_distribution() -> None:
    """Chi-square of batch sampling against the exact probabilities of the first two tokens."""
    model = tiny_llama(3, vocab_size=6, pad_token_id=None, bos_token_id=None, initializer_range=0.05)
    prompt = torch.tensor([[2, 3, 2, 3, 2]])
    options: dict[str, Any] = dict(max_new_tokens=4, do_sample=True, top_k=0, temperature=1.0)
    rd = RetroDraft(model, budget=12)
    rows, rounds = 64, 40
    counts = torch.zeros(6, 6)
    torch.manual_seed(0)
    saved = 0
    for _ in range(rounds):
        out = rd.generate(prompt, num_return_sequences=rows, **options)
        for first, second in out[:, 5:7].tolist():
            counts[first, second] += 1
        saved += rd.stats.num_new_tokens - rd.stats.num_row_forwards
    assert saved > 0.1 * rows * rounds
    with torch.inference_mode():
        first = model(prompt).logits[0, -1].softmax(-1)
        nexts = torch.stack(
            [model(torch.cat([prompt, torch.tensor([[t]])], 1)).logits[0, -1].softmax(-1) for t in range(6)]
        )
    expected = first[:, None] * nexts * rows * rounds
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 66.6  # the 99.9 % quantile with 35 degrees of freedom


def test_low_memory_of_prefill() -> None:
    """The prompt's logits never exist as one matrix: the head sees at most 128 positions at once."""
    model = tiny_llama(0)
    seen: list[int] = []
    rd = RetroDraft(model, budget=4, strategy="goose")  # which reads the whole prompt
    handle = model.lm_head.register_forward_pre_hook(looking_on(lambda module, args: seen.append(args[0].shape[-2])))
    rd.generate(random_prompt(400), max_new_tokens=4, do_sample=False)
    handle.remove()
    longest = sorted(seen)[-1]
    assert longest <= 128 and sum(seen) > 400


def test_cache_grows_by_doubling_and_commits_in_place() -> None:
    """No step copies the context: the buffers move only when they double."""
    model = tiny_llama(0)
    cache = DraftCache(DynamicCache(config=model.config), 1)
    prompt = random_prompt(100)
    moves, last = 0, 0
    with torch.inference_mode(), tree_hooks():
        model(input_ids=prompt, use_cache=True, **{CACHE_ARG: cache})
        target = TargetModel(model)
        for _ in range(150):
            target.verify([DraftTree.from_nodes(5, [6, 7, 8], [0, 1, 0])], cache)
            cache.commit([[0, 1, 2]])
            pointer = cache.draft_layers[0].keys.data_ptr()
            moves, last = moves + (pointer != last), pointer
    assert cache.lengths == [550] and moves <= 3


def test_unused_slots_never_reach_the_output() -> None:
    """Rows of different lengths share buffers: whatever lies in memory behind a short row must not leak in as NaN."""
    model = tiny_llama(0)
    prompts = torch.cat([copy_prompt(20, 1), random_prompt(20, 2), random_prompt(20, 3)])
    expected = model.generate(prompts, max_new_tokens=30, do_sample=False)
    rd = RetroDraft(model, budget=16)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh memory with NaN
    try:
        out = rd.generate(prompts, max_new_tokens=30, do_sample=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.tolist() == expected.tolist() and rd.stats.num_target_forwards < 30


def test_state_survives_threads() -> None:
    """O24: eight threads share one wrapper; each output is its own plain run's."""
    model = tiny_llama(0, initializer_range=0.1)
    prompts = [copy_prompt(20 + seed, seed) for seed in range(8)]
    expected = [model.generate(p, max_new_tokens=24, do_sample=False).tolist() for p in prompts]
    rd = RetroDraft(model, budget=12)
    rd.generate(prompts[0], max_new_tokens=2, do_sample=False)
    results: list[Any] = [None] * 8

    def work(index: int) -> None:
        for _ in range(3):
            results[index] = rd.generate(prompts[index], max_new_tokens=24, do_sample=False).tolist()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == expected
    assert rd.total_stats.num_calls == 25 and rd.total_stats.num_new_tokens == 2 + 8 * 3 * 24


def test_priors_fit_this_version() -> None:
    """The shipped file is numbers, one for each cell, and probabilities."""
    rates = RetroStrategy(10).calibration
    share = rates.hits / rates.trials
    assert share.min() > 0 and share.max() < 1


def test_a_prompt_beyond_the_context_window() -> None:
    """Positions that the model has never seen are no base to generate on; the prompt that just fits is."""
    model = tiny_llama(0, max_position_embeddings=64)
    rd = RetroDraft(model)
    with pytest.raises(ValueError, match="65 tokens.*only 64"):
        rd.generate(torch.ones(1, 65, dtype=torch.long), max_new_tokens=2)
    fitting = torch.ones(1, 60, dtype=torch.long)
    expected = model.generate(fitting, max_new_tokens=8, do_sample=False)
    assert torch.equal(rd.generate(fitting, max_new_tokens=8, do_sample=False), expected)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_context_window_that_rope_scaling_stretches(kind: str) -> None:
    scaling = dict(rope_type=kind, rope_theta=1e4, factor=4.0)
    model = tiny_llama(0, max_position_embeddings=64, rope_parameters=scaling)
    prompt = copy_prompt(100)
    expected = model.generate(prompt, max_new_tokens=30, do_sample=False)
    rd = RetroDraft(model, budget=16)
    assert torch.equal(rd.generate(prompt, max_new_tokens=30, do_sample=False), expected)
    assert rd.stats.num_target_forwards < 30
    with pytest.raises(ValueError, match="257 tokens.*only 256"):
        rd.generate(torch.ones(1, 257, dtype=torch.long), max_new_tokens=2)


def test_unusual_positions_are_left_to_plain_generate() -> None:
    """Positions that do not count the tokens would be lost inside a draft tree."""
    model = tiny_llama(0)
    prompt = copy_prompt(30)
    options = {"position_ids": 2 * torch.arange(30)[None], "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(prompt, **options)
    with pytest.warns(UserWarning, match="positions are not those"):
        assert torch.equal(RetroDraft(model).generate(prompt, **options), expected)


def test_another_threads_forward_is_not_harvested() -> None:
    """Batches in one thread, single rows in another, on one model: each reads the hidden states of its own prefill."""
    model = tiny_llama(0)
    rd = RetroDraft(model, budget=6)
    prompts = [copy_prompt(40, seed) for seed in range(2)]
    batch = torch.cat(prompts)
    expected = [model.generate(prompt, max_new_tokens=8, do_sample=False) for prompt in [*prompts, batch]]
    faults: list[Any] = []

    def run(which: int) -> None:
        try:
            for _ in range(15):
                output = rd.generate([*prompts, batch][which], max_new_tokens=8, do_sample=False)
                assert torch.equal(output, expected[which])
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(which,)) for which in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
