"""Sessions: what they feed, what they give, what they remember, and who may see it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import VOCAB, copy_prompt, random_prompt, tiny, tiny_llama
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, StoppingCriteria

from retrodraft import RetroDraft
from retrodraft.index.storage import IndexFormatError
from retrodraft.sessions.namespace import load_saved
from retrodraft.sessions.saved import save_session
from retrodraft.sessions.session import MAX_SAVED_TOKENS, common_prefix, rotary_switch
from retrodraft.workloads import render_prompt

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}<assistant>"


def letters() -> Any:
    """A tokenizer with an id for each printable character, 2 to 96, which is as many as the tiny models know."""
    vocab = {"?pad": 0, "?bos": 1, **{chr(32 + i): 2 + i for i in range(VOCAB - 2)}}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="?bos"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def drafting(model: Any, **options: Any) -> RetroDraft:
    return RetroDraft(model, letters(), **{"budget": 12, **options})


@contextmanager
def fed(model: Any) -> Iterator[list[int]]:
    """The number of tokens of each forward."""
    lengths: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        lengths.append(kwargs["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield lengths
    finally:
        handle.remove()


def plain(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(7)
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)


def turn(session: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(7)
    return session.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)


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
GREEDY = dict(do_sample=False)
PRINTABLE = dict(do_sample=False, suppress_tokens=[0, 1])  # the output can be read as text, and tokenised again


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
        assert len(found.scores) == 10 and set(found) == {"sequences", "scores"}
        ids = torch.cat([found.sequences, random_prompt(3)], 1)
    assert session.cached_tokens == 49


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


def answered(model: Any, ids: torch.Tensor, count: int = 30) -> str:
    """What the model will say, as text."""
    return letters().decode(plain(model, ids, max_new_tokens=count, **PRINTABLE)[0, ids.shape[1] :])


def drafts(session: Any) -> dict[str, tuple[int, int]]:
    """Drafted and accepted tokens of the last call by proposer."""
    stats = session.stats
    names = ("session", "workspace", "prediction")
    return {
        name: (stats.num_draft_tokens_by_proposer[name], stats.num_accepted_tokens_by_proposer[name]) for name in names
    }


def ask(session: Any, ids: torch.Tensor, count: int = 30) -> dict[str, tuple[int, int]]:
    """A call; its output is right, and these are its drafts."""
    assert torch.equal(
        turn(session, ids, max_new_tokens=count, **PRINTABLE),
        plain(session._rd.model, ids, max_new_tokens=count, **PRINTABLE),
    )
    return drafts(session)


def test_namespaces_share_nothing(tmp_path: Path) -> None:
    model, ids = tiny_llama(), random_prompt(12)
    text = answered(model, ids)
    rd = drafting(model)
    mine, beside, other = rd.session("a", "one"), rd.session("b", "one"), rd.session("a", "two")
    assert rd.session("a", "one") is mine
    mine.observe(text)
    mine.add_file("never-written.txt", text)
    assert ask(other, ids) == dict.fromkeys(("session", "workspace", "prediction"), (0, 0))
    rates, rows = other.namespace.calibration.hits.copy(), other.namespace.adjacency.token_probs.copy()
    start = rd.strategy.adjacency.token_probs.copy()
    found = ask(beside, ids)
    assert found["session"][1] > 10 and found["workspace"][1] > 10
    assert np.array_equal(other.namespace.calibration.hits, rates)
    assert not np.array_equal(mine.namespace.calibration.hits, rates)
    assert np.array_equal(other.namespace.adjacency.token_probs, rows)
    assert not np.array_equal(mine.namespace.adjacency.token_probs, rows)
    assert np.array_equal(rd.strategy.adjacency.token_probs, start)
    ask(rd.session("c", "two"), ids)  # who drafts from the other's earlier answer, in their own namespace
    assert drafts(rd.session("c", "two"))["session"][1] > 10
    # A call outside of sessions sees none of it.
    rd.generate(ids, max_new_tokens=30, **PRINTABLE)
    assert not rd.stats.num_draft_tokens_by_proposer["session"]


def test_idle_namespaces_go_beyond_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with many keys: namespaces without open sessions are forgotten, the least recently used ones first."""
    rd, ids = drafting(tiny_llama()), random_prompt(12)
    for name in ("one", "two", "three"):
        ask(rd.session("a", name), ids)
    one, two = rd.session("a", "one").namespace, rd.session("a", "two").namespace
    rd.session("a", "one").close()
    rd.session("a", "two").close()
    monkeypatch.setattr("retrodraft.sessions.session.MAX_NAMESPACE_BYTES", 5 * one.nbytes // 2)
    ask(rd.session("a", "three"), ids)
    assert rd.session("b", "two").namespace is two
    assert rd.session("b", "one").namespace is not one


def test_files_are_followed(tmp_path: Path) -> None:
    model, ids = tiny_llama(), random_prompt(12)
    text = answered(model, ids)
    path = tmp_path / "a.txt"
    session = drafting(model).session("a")
    with pytest.raises(ValueError, match="can't be read"):
        session.add_file(path)
    path.write_text("nothing of it")
    session.add_file(path)
    assert ask(session, ids)["workspace"][1] == 0
    session.namespace.memory.clear()  # of the answer
    path.write_text(text)
    assert ask(session, ids)["workspace"][1] > 10
    path.write_text("~" * 50)
    assert ask(session, ids)["workspace"][1] == 0
    path.write_text(text)
    assert ask(session, ids)["workspace"][1] > 10
    session.remove_file(path)
    assert ask(session, ids)["workspace"] == (0, 0)
    with pytest.raises(ValueError, match="not in the workspace"):
        session.remove_file(path)
    (tmp_path / "b.txt").write_text(text)
    session.add_folder(tmp_path)
    assert ask(session, ids)["workspace"][1] > 10
    shutil.rmtree(tmp_path)
    assert ask(session, ids)["workspace"] == (0, 0)


def test_a_prediction_serves_once() -> None:
    model, ids = tiny_llama(), random_prompt(12)
    text = answered(model, ids)
    rd = drafting(model)
    session = rd.session("a")
    session.predict(text)
    assert ask(session, ids)["prediction"][1] > 20
    assert ask(session, ids)["prediction"] == (0, 0)
    other = drafting(model).session("a")
    other.predict("~" * 40)
    assert ask(other, ids)["prediction"][1] == 0
    other.predict("")
    ask(other, ids)
    edited = drafting(model).session("a")
    edited.predict(text[:10] + "~~~" + text[13:])  # found again behind the edit
    assert ask(edited, ids)["prediction"][1] > 10


def test_samples_draft_from_each_other() -> None:
    """The rows of a call see what the others have written so far, and so do calls that run at the same time."""
    model, ids = tiny_llama(), random_prompt(12)
    session = drafting(model).session("a")
    torch.manual_seed(0)
    options = dict(do_sample=True, temperature=0.01, max_new_tokens=60)
    output = session.generate(input_ids=ids, attention_mask=torch.ones_like(ids), num_return_sequences=3, **options)
    assert output.shape == (3, 72)
    rd = drafting(model)
    first, second = rd.session("a"), rd.session("b")
    seen: list[int] = []

    class Nested(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
            if not seen and input_ids.shape[1] == 14:
                seen.append(first.namespace.memory.readers)
                ask(second, ids, 60)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    turn(first, ids, max_new_tokens=60, stopping_criteria=[Nested()], **PRINTABLE)
    assert seen == [1] and drafts(first)["session"][1] > 10
    assert first.turns == second.turns == 1 and first.namespace.memory.readers == 0
    assert first.stats.num_new_tokens == 60


def test_running_calls_are_published() -> None:
    """A call that began alone shows its text as soon as another one runs beside it."""
    model = tiny_llama()
    rd = drafting(model)
    memory = rd.session("a").namespace.memory
    row = rd.session("a").new_rows(1)[0]
    row.begin(np.arange(2, 12, dtype=np.int32), None)
    emitted = np.arange(20, 60, dtype=np.int32)

    def emit(tokens: Any) -> None:
        from retrodraft.tree import DraftTree

        for token in tokens:
            row.commit(DraftTree.root_only(0), [0], np.array([token], np.int32), None)

    emit(emitted[:20])
    assert len(memory.newer) == 0
    rd.session("b").new_rows(1)
    emit(emitted[20:])
    assert memory.newer.follow(emitted[21:31])[1] == 10


def test_saved_sessions_teach_later_ones(tmp_path: Path) -> None:
    model, ids = tiny_llama(), random_prompt(12)
    text = answered(model, ids)
    with drafting(model).session("fix/ü 🙂", "team/α", store=tmp_path) as session:
        session.observe(text)
        ask(session, ids)
    assert session.closed
    again = drafting(model).session("fix/ü 🙂", "team/α", store=str(tmp_path))
    assert again.turns == 1 and np.array_equal(again.token_ids, session.token_ids)
    assert np.array_equal(again.namespace.calibration.hits, session.namespace.calibration.hits)
    assert ask(again, ids)["session"][1] > 10
    assert again.save().turns == 2
    sibling = drafting(model).session("next", "team/α", store=tmp_path)
    assert sibling.turns == 0 and ask(sibling, ids)["session"][1] > 10
    stranger = drafting(model).session("next", "team", store=tmp_path)
    assert ask(stranger, ids)["session"] == (0, 0)
    with pytest.raises(ValueError, match="is closed"):
        turn(session, ids, max_new_tokens=5)


def test_what_another_process_saved_is_seen_when_it_is_opened(tmp_path: Path) -> None:
    model, ids = tiny_llama(), random_prompt(12)
    ours = drafting(model)
    ours.session("a", store=tmp_path)
    with drafting(model).session("b", store=tmp_path) as theirs:
        theirs.observe(answered(model, ids))
    held = len(ours.session("a").namespace.memory.newer)
    opened = ours.session("b", store=tmp_path)
    assert ask(opened, ids)["session"][1] > 10
    opened.close()
    grown = len(opened.namespace.memory.newer)
    assert ours.session("b", store=tmp_path).turns == 1
    assert len(opened.namespace.memory.newer) == grown > held  # closed and opened again: nothing twice


def test_a_store_may_be_named_later(tmp_path: Path) -> None:
    rd = drafting(tiny_llama())
    session = rd.session("a")
    with pytest.raises(ValueError, match="no store"):
        session.save()
    assert rd.session("a", store=tmp_path) is session
    assert session.save().turns == 0
    assert rd.session("a", store=tmp_path) is session
    with pytest.raises(ValueError, match="open already"):
        rd.session("a", store=tmp_path / "other")
    assert drafting(tiny_llama()).session("a", store=tmp_path).turns == 0  # nothing said yet, and loads


def test_sessions_of_other_models_are_refused_by_name(tmp_path: Path) -> None:
    model = tiny_llama()
    with drafting(model).session("mine", store=tmp_path) as session:
        session.observe("x" * 50)
    wider = drafting(tiny_llama(intermediate_size=128))
    with pytest.raises(IndexFormatError, match="'mine' was saved with model"):
        wider.session("mine", store=tmp_path)
    assert len(wider.session("new", store=tmp_path).namespace.memory.newer) == 0
    other = letters()
    other.add_tokens(["zz"])
    model.resize_token_embeddings(98)
    model.config.vocab_size = 97
    with pytest.raises(IndexFormatError, match="'mine' was saved with another tokenizer"):
        RetroDraft(model, other, budget=4).session("mine", store=tmp_path)


def test_a_store_with_foreign_ids_is_refused(tmp_path: Path) -> None:
    rd = drafting(tiny_llama())
    origin = rd.session("a")._origin
    info = {"model_id": origin.model_id, "tokenizer_fingerprint": origin.fingerprint}
    ids = np.array([5, 97, -1], np.int32)
    for arrays in ({"texts": ids, "token_ids": ids[:1]}, {"token_ids": ids[:1]}, {"texts": ids[:1].astype(np.int64)}):
        save_session(tmp_path, "default", "bad", arrays, info)
        with pytest.raises(IndexFormatError, match="'bad' holds no token ids"):
            rd.session("bad", store=tmp_path)
        assert load_saved(tmp_path, "default", "none", origin) is None


def test_the_store_may_vanish(tmp_path: Path) -> None:
    session = drafting(tiny_llama()).session("a", store=tmp_path / "s")
    session.observe("text")
    session.save()
    shutil.rmtree(tmp_path / "s")
    session.save()
    assert drafting(tiny_llama()).session("a", store=tmp_path / "s")._texts[0].tolist() == letters()("text").input_ids


def test_an_error_is_not_hidden_by_a_store_that_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rd = drafting(tiny_llama())
    with pytest.raises(KeyError, match="mine"), pytest.warns(UserWarning, match="could not be saved"):
        with rd.session("a", store=tmp_path / "file"):
            raise KeyError("mine")
    with pytest.raises(OSError):
        with rd.session("a", store=tmp_path / "file"):
            pass
    assert rd.session("a").turns == 0 and not rd.session("a").closed


def test_what_is_kept_to_be_saved_is_bounded() -> None:
    session = drafting(tiny_llama()).session("a")
    for _ in range(5):
        session._add_text(np.arange(MAX_SAVED_TOKENS // 3, dtype=np.int32) % 90)
    session._add_text(np.full(2 * MAX_SAVED_TOKENS, 3, np.int32))
    assert sum(map(len, session._texts)) == session._num_saved <= MAX_SAVED_TOKENS
    assert all(text.base is None for text in session._texts)  # no view that holds a whole conversation


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


def test_names_and_arguments_are_checked() -> None:
    model = tiny_llama()
    rd = drafting(model)
    for name in ("", "x" * 201, None, 3):
        with pytest.raises(ValueError, match="name has 1 to 200 characters"):
            rd.session(name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokenizer"):
        RetroDraft(model, budget=4).session("a")
    with pytest.raises(ValueError, match="retro"):
        drafting(model, strategy="suffix").session("a")
    session = rd.session("a")
    ids = random_prompt(5)
    for arguments in ({}, {"messages": [{"role": "user", "content": "x"}], "input_ids": ids}):
        with pytest.raises(ValueError, match="either messages"):
            session.generate(**arguments)
    for wrong in ([[1, 2]], ids[0], ids.numpy()):
        with pytest.raises(ValueError, match="must be a tensor"):
            session.generate(input_ids=wrong)
    with pytest.raises(ValueError, match="keeps the cache itself"):
        session.generate(input_ids=ids, past_key_values=object())
    with pytest.raises(ValueError, match="no messages"):
        session.generate([])
    with pytest.raises(ValueError, match="must be a dict"):
        session.generate("hello")
    with pytest.raises(ValueError, match="no text"):
        session.generate([{"role": "user", "content": "half \ud800"}])
    for text in ("\ud800", 5):
        with pytest.raises(ValueError, match="no text|must be of type"):
            session.observe(text)  # type: ignore[arg-type]
    assert session.turns == 0 and rd.session("a") is session


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


@pytest.mark.slow
def test_two_processes_save_into_one_store(tmp_path: Path) -> None:
    code = """
import sys
sys.path.insert(0, {tests!r})
from test_session import drafting, tiny_llama
session = drafting(tiny_llama()).session(sys.argv[1], store={store!r})
for i in range(20):
    session.observe("turn %d of %s" % (i, sys.argv[1]))
    session.save()
"""
    code = code.format(tests=str(Path(__file__).parent), store=str(tmp_path))
    running = [subprocess.Popen([sys.executable, "-c", code, name], env=os.environ) for name in ("a", "a", "b")]
    assert [process.wait(600) for process in running] == [0, 0, 0]
    rd = drafting(tiny_llama())
    for name in ("a", "b"):
        texts = rd.session(name, store=tmp_path)._texts
        assert letters().decode(texts[-1]) == f"turn 19 of {name}"


@pytest.mark.slow
def test_ten_thousand_turns_stay_flat() -> None:
    """O16: what a session and its namespace hold is bounded, and the newest text is drafted from to the end."""
    rd = drafting(tiny_llama())
    session = rd.session("a")
    session.namespace.memory.__init__(8 << 20)  # type: ignore[misc]
    rng = np.random.default_rng(0)
    held = []
    for number in range(10_000):
        text = rng.integers(2, VOCAB, 2000).astype(np.int32)
        session._add_text(text)
        if number % 1000 == 999:
            held.append(session.namespace.memory.nbytes)
            state, length = session.namespace.memory.newer.follow(text[-40:])
            assert length == 40
    assert max(held) < 8 << 20
    ask(session, random_prompt(12))
