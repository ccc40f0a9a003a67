"""Sessions: what they feed, what they give, and that nothing breaks them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import GREEDY, drafting, fed, letters, plain, turn
from tiny import copy_prompt, random_prompt, tiny, tiny_llama
from transformers import GenerationConfig, StoppingCriteria

from retrodraft import RetroDraft
from retrodraft.compat import CACHE_ARG, CACHE_ARGS
from retrodraft.sessions.prefix import common_prefix, rotary_switch
from retrodraft.sessions.session import MAX_SAVED_TOKENS
from retrodraft.workloads import render_prompt


def turns_of_an_agent(last: torch.Tensor) -> Iterator[torch.Tensor]:
    """Prompts as a client makes them; each `send` gives the last output."""
    last = yield copy_prompt(40)
    last = yield torch.cat([last, random_prompt(9, 1)], 1)  # the conversation goes on
    last = yield torch.cat([last, random_prompt(5, 2)], 1)
    edited = last.clone()
    edited[0, 30] = 2 + (edited[0, 30] - 1) % 90
    last = yield edited  # edited in the middle
    last = yield last[:, :25]  # cut short: a prefix of what is cached
    last = yield last[:, :25]  # the same again
    last = yield torch.cat([last[:, :12], last[:, 20:]], 1)  # compacted
    last = yield random_prompt(20, 3)  # something else
    last = yield torch.cat([last, random_prompt(1, 4)], 1)


FAMILIES = [
    "llama", "mistral_sliding", "qwen2_mixed", "gemma3", "gpt_oss", "gpt2", "opt", "deepseek_v3", "llama4", "bloom",
    "mamba2", "qwen3_next", "lfm2",
]  # fmt: skip
SAMPLING = dict(do_sample=True, temperature=1.3, top_k=20, repetition_penalty=1.1)


@pytest.mark.parametrize(
    "family,options", [*((name, GREEDY) for name in FAMILIES), *((name, SAMPLING) for name in FAMILIES[:3])]
)
def test_turns_equal_fresh_runs_and_feed_what_is_new(family: str, options: dict[str, Any]) -> None:
    model = tiny(family)
    rd = drafting(model)
    session = rd.session("agent")
    keeps = rd.capabilities.mode in ("tree", "chain")
    assert keeps == (family not in ("mamba2", "qwen3_next", "lfm2"))
    cached = torch.empty(0, dtype=torch.long)
    prompts = turns_of_an_agent(cached)
    ids = next(prompts)
    while True:
        expected = plain(model, ids, max_new_tokens=14, **options)
        with fed(model) as lengths:
            output = turn(session, ids, max_new_tokens=14, **options)
        assert torch.equal(output, expected)
        kept = min(common_prefix(cached.numpy(), ids[0].numpy()), ids.shape[1] - 1) if keeps else 0
        assert lengths[0] == ids.shape[1] - kept
        assert session.cached_tokens == kept
        cached = output[0, :-1]
        try:
            ids = prompts.send(output)
        except StopIteration:
            break
    assert session.turns == 9


def test_windows_that_have_moved_on() -> None:
    """A few tokens back is still there; far back is not, and the prompt is fed anew."""
    model = tiny("mistral_sliding")
    session = drafting(model).session("agent")
    long = random_prompt(400)
    edited = long.clone()
    edited[0, 200] = 2 + (edited[0, 200] - 1) % 90
    for ids, new in ((long, 400), (long, 1), (long[:, :380], 1), (edited, 400), (edited, 1)):
        with fed(model) as lengths:
            output = turn(session, ids, max_new_tokens=20, **GREEDY)
        assert torch.equal(output, plain(model, ids, max_new_tokens=20, **GREEDY))
        assert lengths[0] == new
    longer = torch.cat([output, random_prompt(3, 5)], 1)
    with fed(model) as lengths:
        output = turn(session, longer, max_new_tokens=20, **GREEDY)
    assert torch.equal(output, plain(model, longer, max_new_tokens=20, **GREEDY))
    assert lengths[0] == 4


ROPES = {
    "dynamic": dict(rope_type="dynamic", factor=2.0, rope_theta=10_000.0),
    "longrope": dict(
        rope_type="longrope", factor=2.0, rope_theta=10_000.0, short_factor=[1.0] * 8, long_factor=[3.0] * 8,
        original_max_position_embeddings=64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_keys_are_not_reused_where_their_frequencies_change(kind: str) -> None:
    changes = dict(max_position_embeddings=64 if kind == "dynamic" else 128, rope_parameters=ROPES[kind])
    model = tiny_llama(**changes)
    assert rotary_switch(model.config) == 64
    session = drafting(model).session("agent")
    ids, reused = random_prompt(30), []
    while ids.shape[1] < (100 if kind == "longrope" else 64):
        output = turn(session, ids, max_new_tokens=8, **GREEDY)
        fresh = tiny_llama(**changes)  # dynamic frequencies are a state of the model
        assert torch.equal(output, plain(fresh, ids, max_new_tokens=8, **GREEDY))
        reused.append(session.cached_tokens)
        ids = torch.cat([output, random_prompt(8, 1)], 1)
    assert reused == [0, 37, 53, 0, 0][: len(reused)] and len(reused) == (5 if kind == "longrope" else 3)
    ids = random_prompt(30)  # what was cached for a long text does not serve a short one
    assert torch.equal(
        turn(session, ids, max_new_tokens=8, **GREEDY), plain(tiny_llama(**changes), ids, max_new_tokens=8, **GREEDY)
    )


def left_padded(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
    return {"input_ids": padded, "attention_mask": (padded > 0).long()}


def two_rows(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = torch.cat([ids, ids.roll(1)])
    rows[1, :4] = 0
    mask = torch.ones_like(rows)
    mask[1, :4] = 0
    return {"input_ids": rows, "attention_mask": mask}


def own_loop(model: Any, input_ids: torch.Tensor, logits_processor: Any, **kwargs: Any) -> torch.Tensor:
    for _ in range(5):
        logits = model(input_ids=input_ids).logits[:, -1]
        input_ids = torch.cat([input_ids, logits.argmax(-1, keepdim=True)], 1)
    return input_ids


CALLS: dict[str, Any] = {
    "beams": dict(num_beams=2),
    "beams, all returned": dict(num_beams=2, num_return_sequences=2),
    "beams of a configuration": dict(generation_config=GenerationConfig(num_beams=3, max_new_tokens=9, pad_token_id=0)),
    "chunked prefill": dict(prefill_chunk_size=8),
    "no cache": dict(use_cache=False),
    "static cache": dict(cache_implementation="static"),
    "prompt lookup": dict(prompt_lookup_num_tokens=3),
    "one token": dict(max_new_tokens=1),
    "positions": lambda ids: {
        "position_ids": torch.cat([torch.arange(9).flip(0), torch.arange(9, ids.shape[1])])[None]
    },
    "left padded": left_padded,
    "two rows": two_rows,
    "32-bit ids": lambda ids: {"input_ids": ids.int()},
    "no mask": dict(attention_mask=None),
    "no mask, padding inside": lambda ids: {"input_ids": ids * (ids != ids[0, 5]), "attention_mask": None},
    "no mask, padding first": lambda ids: left_padded(ids) | {"attention_mask": None},
    "float mask": lambda ids: {"attention_mask": torch.ones(ids.shape)},
    "own loop": dict(custom_generate=own_loop),
    "eos": lambda ids: {"eos_token_id": list(range(2, 60))},
    "no repeats": dict(no_repeat_ngram_size=2),
    "stop string": lambda ids: {"stop_strings": ["e", "s", "t", "a", "i"], "tokenizer": letters()},
    "guidance": dict(guidance_scale=1.5),
    "assistant": lambda ids: {"assistant_model": tiny_llama(1)},
    "a callable's tokens": lambda ids: {"prefix_allowed_tokens_fn": lambda row, text: list(range(3, 40))},
}


@pytest.mark.filterwarnings("ignore:retrodraft leaves this call")
@pytest.mark.parametrize("call", CALLS)
def test_any_call_between_two_turns(call: str) -> None:
    """Whatever is asked for comes as from plain generate, and the next turn is right."""
    model = tiny_llama()
    session = drafting(model).session("agent")
    first = turn(session, copy_prompt(40), max_new_tokens=12, **GREEDY)
    ids = torch.cat([first, random_prompt(4, 1)], 1)
    changes = CALLS[call](ids) if callable(CALLS[call]) else CALLS[call]
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 9}
    arguments |= {"do_sample": False, **changes}
    if "generation_config" in changes:
        del arguments["max_new_tokens"], arguments["do_sample"]
    expected = model.generate(**arguments)
    assert torch.equal(session.generate(**arguments), expected)
    for prompt in (torch.cat([ids, random_prompt(4, 2)], 1), ids, expected[:1].long(), first, first):
        found = turn(session, prompt, max_new_tokens=9, **GREEDY)
        assert torch.equal(found, plain(model, prompt, max_new_tokens=9, **GREEDY))
    assert session.cached_tokens == 51


def test_scores_come_and_the_cache_stays() -> None:
    model = tiny_llama()
    session = drafting(model).session("agent")
    ids = copy_prompt(40)
    options = dict(max_new_tokens=10, return_dict_in_generate=True, output_scores=True, **SAMPLING)
    for _ in range(2):
        expected, found = plain(model, ids, **options), turn(session, ids, **options)
        assert torch.equal(found.sequences, expected.sequences)
        pairs = zip(found.scores, expected.scores, strict=True)
        assert max(float((a - b).nan_to_num().abs().max()) for a, b in pairs) < 1e-4
        assert len(found.scores) == 10 and set(found) == set(expected)
        ids = torch.cat([found.sequences, random_prompt(3)], 1)
    assert session.cached_tokens == 49


def states(cache: Any) -> list[torch.Tensor]:
    return [states.clone() for layer in cache.layers for states in (layer.keys, layer.values)]


def forward(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits of the last token, fed alone into a cache."""
    with torch.no_grad():
        return model(input_ids=ids[:, -1:], **{CACHE_ARG: cache}).logits[0, -1]


@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "gemma3", "gpt2", "deepseek_v3"])
def test_the_returned_cache_is_the_callers(family: str) -> None:
    """It is as plain generate's; what the caller does with it does not reach the session, nor the other way round."""
    model = tiny(family)
    session = drafting(model).session("agent")
    options = dict(max_new_tokens=12, return_dict_in_generate=True, **GREEDY)
    ids = copy_prompt(40)
    expected, found = plain(model, ids, **options), turn(session, ids, **options)
    cache, text = found[CACHE_ARG], found.sequences
    assert torch.equal(text, expected.sequences) and cache.get_seq_length() == 51
    pairs = zip(states(cache), states(expected[CACHE_ARG]), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-5
    held = states(cache)

    edited = text.clone()
    edited[0, 45] = 2 + (edited[0, 45] - 1) % 90
    last = torch.cat([text[:, :50], edited[:, 45:46]], 1)  # differs where the cache ends
    for prompt in (last, torch.cat([text, random_prompt(5)], 1), edited, ids, random_prompt(60, 3)):
        assert torch.equal(turn(session, prompt, max_new_tokens=9, **GREEDY), plain(model, prompt, max_new_tokens=9))
    assert all(torch.equal(a, b) for a, b in zip(states(cache), held, strict=True))
    logits = forward(model, text, cache)
    assert float((logits - forward(model, text, expected[CACHE_ARG])).abs().max()) < 1e-4

    def crop(cache: Any) -> None:
        for layer in cache.layers:
            if not layer.is_sliding:
                layer.crop(-20)

    for spoil in (lambda c: forward(model, text, c), crop, lambda c: c.reset()):
        given = turn(session, ids, **options)[CACHE_ARG]
        spoil(given)
        with fed(model) as lengths:
            again = turn(session, text, **options)
        assert lengths[0] == 1 and torch.equal(again.sequences, plain(model, text, max_new_tokens=12))


def test_a_session_that_goes_on_copies_nothing() -> None:
    """A returned cache is the session's own memory, which only an edit makes it leave."""
    model = tiny_llama()
    session = drafting(model).session("agent")
    ids = copy_prompt(40)

    def memory(cache: Any) -> int:
        return cache.layers[0].keys.data_ptr()

    found = turn(session, ids, max_new_tokens=9, return_dict_in_generate=True, **GREEDY)
    first = memory(session._cache)
    assert memory(found[CACHE_ARG]) == first
    turn(session, torch.cat([found.sequences, random_prompt(5)], 1), max_new_tokens=9, **GREEDY)
    assert memory(session._cache) == first and session.cached_tokens == 48
    turn(session, ids, max_new_tokens=9, **GREEDY)
    second = memory(session._cache)
    assert second != first and session.cached_tokens == 39
    turn(session, ids[:, :30], max_new_tokens=9, **GREEDY)
    assert memory(session._cache) == second  # nobody holds this one


def test_no_call_warns_of_a_cache_that_is_none() -> None:
    session = drafting(tiny_llama()).session("agent")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in CACHE_ARGS:
            for _ in range(2):
                turn(session, copy_prompt(40), max_new_tokens=3, **GREEDY, **{name: None})
    assert session.cached_tokens == 39


class Streamed(list):  # type: ignore[type-arg]
    ended = False

    def put(self, tokens: torch.Tensor) -> None:
        self.extend(tokens.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_streams_are_the_sequence() -> None:
    session = drafting(tiny_llama()).session("agent")
    ids = copy_prompt(40)
    for _ in range(2):
        streamer = Streamed()
        ids = turn(session, ids, max_new_tokens=15, streamer=streamer, **GREEDY)
        assert streamer == ids[0].tolist() and streamer.ended
    assert session.cached_tokens == 54


class Interrupting(StoppingCriteria):
    def __init__(self, error: BaseException, length: int) -> None:
        self.error, self.length = error, length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        if input_ids.shape[1] >= self.length:
            raise self.error
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("enough")], ids=["interrupt", "error"])
def test_after_a_call_that_broke_off(error: BaseException) -> None:
    model = tiny_llama()
    rd = drafting(model)
    session = rd.session("agent")
    ids = turn(session, copy_prompt(40), max_new_tokens=12, **GREEDY)
    for length in (ids.shape[1] + 1, ids.shape[1] + 6):
        with pytest.raises(type(error)):
            turn(session, ids, max_new_tokens=12, stopping_criteria=[Interrupting(error, length)], **GREEDY)
        expected = plain(model, ids, max_new_tokens=12, **GREEDY)
        assert torch.equal(rd.generate(ids, max_new_tokens=12, **GREEDY), expected)
        assert torch.equal(turn(session, ids, max_new_tokens=12, **GREEDY), expected)
        assert session.cached_tokens == 0
    assert session.turns == 3 and session.namespace.memory.readers == 0


def test_least_recently_used_states_go_first() -> None:
    model = tiny_llama()
    ids = random_prompt(40)
    alone = drafting(model).session("x")
    turn(alone, ids, max_new_tokens=5, **GREEDY)
    assert alone.kv_bytes > 0
    rd = drafting(model, max_kv_bytes=2 * alone.kv_bytes)
    a, b, c = (rd.session(name, namespace=name) for name in "abc")
    expected = plain(model, ids, max_new_tokens=5, **GREEDY)
    for session, held, reused in ((a, "a", 0), (b, "ab", 0), (a, "ab", 39), (c, "ac", 0), (b, "bc", 0), (c, "bc", 39)):
        assert torch.equal(turn(session, ids, max_new_tokens=5, **GREEDY), expected)
        assert "".join(each.name for each in (a, b, c) if each.kv_bytes) == held
        assert session.cached_tokens == reused
    c.release()
    assert c.kv_bytes == 0
    none = drafting(model, max_kv_bytes=0).session("a")
    turn(none, ids, max_new_tokens=5, **GREEDY)
    assert none.kv_bytes == 0
    with pytest.raises(ValueError, match="max_kv_bytes"):
        drafting(model, max_kv_bytes=-1)


def test_what_is_kept_to_be_saved_is_bounded() -> None:
    session = drafting(tiny_llama()).session("a")
    for _ in range(5):
        session._add_text(np.arange(MAX_SAVED_TOKENS // 3, dtype=np.int32) % 90)
    session._add_text(np.full(2 * MAX_SAVED_TOKENS, 3, np.int32))
    assert sum(map(len, session._texts)) == session._num_saved <= MAX_SAVED_TOKENS
    assert all(text.base is None for text in session._texts)  # no view that holds a whole conversation
    for number in (1, 2, 3):
        session._add_text(np.full(MAX_SAVED_TOKENS // 2, number, np.int32))
    assert [int(text[0]) for text in session._texts] == [2, 3]  # the oldest go


def run_threads(*functions: Any) -> None:
    errors: list[BaseException] = []

    def guarded(function: Any) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads(tmp_path: Path) -> None:
    """Four sessions of one namespace and two threads on one of them, with files that change and saves in between."""
    model = tiny_llama()
    rd = drafting(model)
    prompts = [copy_prompt(30 + i, i) for i in range(4)]
    expected = []
    for ids in prompts:
        outputs = [plain(model, ids, max_new_tokens=12, **GREEDY)]
        outputs.append(plain(model, torch.cat([outputs[0], ids[:, :5]], 1), max_new_tokens=12, **GREEDY))
        expected.append(outputs)

    def work(number: int, name: str) -> None:
        session = rd.session(name, store=tmp_path / "store")
        for round_ in range(3):
            session.add_file(f"{number}.txt", letters().decode(expected[number][round_ % 2][0]))
            first = turn(session, prompts[number], max_new_tokens=12, **GREEDY)
            assert torch.equal(first, expected[number][0])
            ids = torch.cat([first, prompts[number][:, :5]], 1)
            assert torch.equal(turn(session, ids, max_new_tokens=12, **GREEDY), expected[number][1])
            session.observe("some text")
            session.save()

    run_threads(*(lambda i=i: work(i, f"s{i}") for i in range(4)), lambda: work(1, "s0"))
    assert rd.session("s0").turns == 12 and rd.session("s0").namespace.memory.readers == 0


def test_messages_and_odd_texts() -> None:
    model = tiny_llama()
    session = drafting(model, budget=0).session("a")
    for text in ("", "hi", "x" * 300, "é\u2028🙂"):
        messages = [{"role": "system", "content": ""}, {"role": "user", "content": text}]
        ids = torch.tensor([render_prompt(letters(), messages)])
        found = session.generate(messages, max_new_tokens=6, **GREEDY)
        assert torch.equal(found, plain(model, ids, max_new_tokens=6, **GREEDY))
        session.observe(text)
        session.predict(text)
    assert session.cached_tokens > 10


def test_a_real_chat(embedded: tuple[Any, Any]) -> None:
    """The embedded model over three turns: the same text as plain generate, and only the new suffix is fed."""
    model, tokenizer = embedded
    session = RetroDraft(model, tokenizer, budget=8).session("chat")
    messages = [{"role": "user", "content": "List three rivers."}]
    cached: Any = np.empty(0, np.int32)
    for following in ("Again, in capitals.", "Now backwards.", ""):
        ids = torch.tensor([render_prompt(tokenizer, messages)])
        with fed(model) as lengths:
            output = session.generate(messages, max_new_tokens=12, **GREEDY)
        assert torch.equal(output, plain(model, ids, max_new_tokens=12, **GREEDY))
        assert lengths[0] == ids.shape[1] - min(common_prefix(cached, ids[0].numpy()), ids.shape[1] - 1)
        cached = output[0, :-1].numpy()
        answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": following}]
    assert lengths[0] < 30 < ids.shape[1]
