"""What sessions remember, what they share and save, and who may see it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import PRINTABLE, answered, ask, drafting, drafts, letters, turn
from tiny import VOCAB, random_prompt, tiny_llama
from transformers import StoppingCriteria

from retrodraft import RetroDraft
from retrodraft.index import memory
from retrodraft.index.storage import IndexFormatError
from retrodraft.retro import Calibration
from retrodraft.sessions.namespace import Namespace, joined_texts, load_saved
from retrodraft.sessions.saved import save_session


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
    monkeypatch.setattr("retrodraft.sessions.table.MAX_NAMESPACE_BYTES", 5 * one.nbytes // 2)
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


def test_a_removed_file_is_forgotten_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where so much else is opened that a changed file's old text would stay for a while."""
    monkeypatch.setattr(memory, "EXACT_TOKENS", 0)
    model, ids = tiny_llama(), random_prompt(12)
    text = answered(model, ids)
    session = drafting(model).session("a")
    session.add_file("large", "".join(chr(33 + i * i % 90) for i in range(4000)))
    session.add_file("small", text)
    assert ask(session, ids)["workspace"][1] > 10
    session.add_file("small", "~" * 50)
    assert len(session.namespace.memory._files) and ask(session, ids)["workspace"][1] > 10  # not worth a new start
    session.remove_file("small")
    assert ask(session, ids)["workspace"][1] == 0


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


def test_the_newest_sessions_are_loaded_and_the_newest_hit_rates_stay(tmp_path: Path) -> None:
    """As many as the memory has room for; what the store holds beyond that is not read."""
    rd = drafting(tiny_llama())
    origin = rd.session("a")._origin
    info = {"model_id": origin.model_id, "tokenizer_fingerprint": origin.fingerprint}
    space = Namespace("n", rd.session("a").namespace.adjacency)
    space.memory = memory.Memory(1 << 16)
    texts = np.full(space.memory.max_tokens // 2 + 8, 5, np.int32)
    for number in range(5):
        counts = Calibration()
        arrays = {"texts": joined_texts([texts]), "token_ids": texts[:1]}
        arrays |= {"hits": counts.hits, "trials": counts.trials + number}
        record = save_session(tmp_path, "n", f"s{number}", arrays, info)
        os.utime(record.path / "manifest.json", (number, number))
    space.load(tmp_path, "unsaved", origin, threading.Lock())
    assert {name for _, name in space._known} == {"s3", "s4"}
    assert np.array_equal(space.calibration.trials, Calibration().trials + 4)


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
        with rd.session("a", store=tmp_path / "file" / "deep"):
            raise KeyError("mine")
    with pytest.raises(OSError):
        with rd.session("a", store=tmp_path / "file" / "deep"):
            pass
    assert rd.session("a").turns == 0 and not rd.session("a").closed


@pytest.mark.slow
def test_two_processes_save_into_one_store(tmp_path: Path) -> None:
    code = """
import sys
sys.path.insert(0, {tests!r})
from chats import drafting
from tiny import tiny_llama
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
