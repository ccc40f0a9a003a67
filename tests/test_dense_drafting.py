"""Dense drafting: the same output in fewer forwards, harvested and built keys, and indexes that do not belong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import retrodraft_here
from tiny import VOCAB, copy_prompt, random_prompt, rigged_llama, tiny, tiny_llama

import retrodraft.dense as dense
from retrodraft import RetroDraft, harvest
from retrodraft.dense import DenseDrafts, num_positions, open_dense, tokens_at
from retrodraft.harvest import build_dense
from retrodraft.hidden_states import last_hidden_states
from retrodraft.index import CorpusIndex, IndexFormatError
from retrodraft.retro import RetroStrategy

GREEDY: dict[str, Any] = dict(max_new_tokens=40, do_sample=False, pad_token_id=0)


@pytest.fixture(autouse=True)
def always_affordable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model's step is shorter than fifty queries, and times must not decide a test."""
    monkeypatch.setattr(dense, "MAX_SHARE", float("inf"))


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, list[list[int]]]:
    """A tiny model, the index of a harvest over eight of its calls, and their texts."""
    model, path = tiny_llama(0), tmp_path_factory.mktemp("harvest") / "answers.index"
    rd = RetroDraft(model, budget=16, hot_start=False)
    texts = []
    with rd.harvest(path) as running:
        for seed in range(8):
            prompt = random_prompt(8, seed)
            texts.append(rd.generate(prompt, **GREEDY)[0].tolist())
            assert texts[-1] == model.generate(prompt, **GREEDY)[0].tolist()
    assert running.num_documents == 8
    return model, path, texts


def copied(path: Path, target: Path) -> CorpusIndex:
    """The corpus and its dense index in another folder."""
    shutil.copytree(path, target)
    return CorpusIndex.open(target)


def test_drafts_where_no_text_can(tmp_path: Path) -> None:
    """Each token has one successor; the dense index alone, without its corpus' text, halves the forwards at least."""
    successor = np.random.default_rng(0).permutation(VOCAB).tolist()
    model = rigged_llama(successor)
    rd = RetroDraft(model, budget=16, hot_start=False)
    prompts = [torch.tensor([[token]]) for token in (3, 50)]
    with rd.harvest(tmp_path / "a"):
        for token in range(1, VOCAB, 8):
            rd.generate(torch.tensor([[token]]), **GREEDY)
    drafts = DenseDrafts.open([CorpusIndex.open(tmp_path / "a")], model)
    for prompt in prompts:
        forwards = []
        for used in (None, drafts):
            rd = RetroDraft(model, budget=16, hot_start=False)
            rd._dense, rd.strategy = used, RetroStrategy(VOCAB, (), used)
            assert rd.generate(prompt, **GREEDY).tolist() == model.generate(prompt, **GREEDY).tolist()
            forwards.append(rd.stats.num_target_forwards)
        assert 2 * forwards[1] <= forwards[0]
        stats = rd.stats
        assert stats.num_accepted_tokens_by_proposer["dense"] > 20 and stats.num_dense_queries > 2
        assert 0 < stats.dense_seconds < stats.draft_seconds + stats.commit_seconds
        assert stats.to_dict()["num_dense_queries"] == stats.num_dense_queries


@pytest.mark.parametrize("rows", [1, 3])
def test_output_is_plain_generates(answered: Any, rows: int) -> None:
    """Greedy ids are equal, of one row and of several with padding; sampling draws the same tokens."""
    model, path, _ = answered
    rd = RetroDraft(model, budget=16, corpora=[path], dense=True)
    for seed in (1, 100, 101):
        prompt = torch.cat([random_prompt(2 + row, seed + row).repeat(1, 6)[:, :8] for row in range(rows)])
        mask = torch.ones_like(prompt)
        if rows > 1:
            prompt[1, :3], mask[1, :3] = 0, 0
        options = dict(attention_mask=mask, **GREEDY)
        assert rd.generate(prompt, **options).tolist() == model.generate(prompt, **options).tolist()
        assert rd.stats.num_dense_queries > 0
    assert rd.total_stats.num_draft_tokens_by_proposer["dense"] > 0
    if rows == 1:
        torch.manual_seed(5)
        drawn = rd.generate(random_prompt(8, 4), do_sample=True, max_new_tokens=30, pad_token_id=0)
        torch.manual_seed(5)
        assert torch.equal(
            drawn, model.generate(random_prompt(8, 4), do_sample=True, max_new_tokens=30, pad_token_id=0)
        )


def test_harvested_keys_are_the_models_states(answered: Any) -> None:
    """Every key is that of the state in one plain forward over prompt and answer, at the token's place."""
    model, path, texts = answered
    corpus = CorpusIndex.open(path)
    index = open_dense(corpus, model)
    assert [list(document.token_ids) for document in corpus.documents()] == [text[8:] for text in texts]
    assert len(index) == sum(len(text) - 8 - 2 for text in texts)
    for number, text in enumerate(texts):
        states = last_hidden_states(model, torch.tensor([text]))[0, 8:-2].float().numpy()
        first = number * 41
        places = np.flatnonzero((index.positions >= first) & (index.positions < first + 41))
        assert index.positions[places].tolist() == list(range(first, first + 38))
        keys, _ = index.projection.apply(states)
        assert np.sum(keys * index._keys[places].astype(np.float32), axis=1).min() > 0.999


def test_harvest_in_rows_and_again(answered: Any, tmp_path: Path) -> None:
    """Several padded rows, sampled; a second harvest adds documents and rows; compacted, all stays valid."""
    model, path, _ = answered
    corpus = copied(path, tmp_path / "a")
    before = len(open_dense(corpus, model))
    prompt = torch.cat([copy_prompt(12), copy_prompt(12, 1)])
    mask = torch.ones_like(prompt)
    prompt[0, :4], mask[0, :4] = 0, 0
    rd = RetroDraft(model, budget=16, corpora=[corpus], dense=True)
    with rd.harvest(corpus):
        out = rd.generate(prompt, attention_mask=mask, **GREEDY)
    corpus = CorpusIndex.open(tmp_path / "a")
    assert corpus.num_documents == 10
    for _ in range(2):
        index = open_dense(corpus, model)
        assert len(index) == before + 2 * 38
        for row in range(2):
            text = out[row, 4 * (1 - row) :] if row == 0 else out[row]
            state = last_hidden_states(model, text[None])[0, -20].float().numpy()
            position = int(index.search(state, 1)[0][0][0])
            assert tokens_at(corpus, position + np.arange(3)).tolist() == text[-20:-17].tolist()
        corpus.compact()
        assert len(corpus.arrays) == 1
    RetroDraft(model, corpora=[corpus], dense=True)
    assert len(list(corpus.documents())) == 10


def test_a_long_harvest_is_written_as_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time there are as many states as a projection is fitted on; and its shards stay few."""
    monkeypatch.setattr("retrodraft.index.dense.FIT_ROWS", 64)
    model = tiny_llama()
    rd = RetroDraft(model, budget=8)
    with rd.harvest(tmp_path / "a"):
        for seed in range(9):
            rd.generate(copy_prompt(12, seed), **GREEDY)
        written = CorpusIndex.open(tmp_path / "a").num_documents
    assert 6 <= written < 9
    for seed in range(9, 29):
        with rd.harvest(tmp_path / "a"):
            rd.generate(copy_prompt(12, seed), **GREEDY)
    corpus = CorpusIndex.open(tmp_path / "a")
    assert corpus.num_documents == 29 and len(corpus.arrays) == 1 and len(open_dense(corpus, model)) == 29 * 38


@pytest.mark.parametrize("family", ["bloom", "lfm2"])
def test_harvest_of_chains_and_snapshots(family: str, tmp_path: Path) -> None:
    """Models that can't verify trees: the states are those of the accepted nodes all the same."""
    model = tiny(family)
    rd = RetroDraft(model, budget=8)
    assert rd.capabilities.mode in ("chain", "snapshot")
    with rd.harvest(tmp_path / "a"):
        text = rd.generate(copy_prompt(24), **GREEDY)[0]
    corpus = CorpusIndex.open(tmp_path / "a")
    index = open_dense(corpus, model)
    keys, _ = index.projection.apply(last_hidden_states(model, text[None])[0, 24:-2].float().numpy())
    assert np.sum(keys * index._keys[: len(index)].astype(np.float32), axis=1).min() > 0.99
    drafting = RetroDraft(model, budget=8, corpora=[corpus], dense=True)
    assert torch.equal(drafting.generate(copy_prompt(24), **GREEDY)[0], text)


def test_build_runs_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every position that has two followers or more is in once, windows or not; states are the model's."""
    model = tiny_llama(1)
    lengths = [1, 2, 3, 7, 40, 100, 65]
    documents = [random_prompt(n, seed)[0].tolist() for seed, n in enumerate(lengths)]
    corpus = CorpusIndex.build(documents, tmp_path / "a", shard_tokens=110)
    assert len(corpus.arrays) > 1
    seen: list[tuple[int, int]] = []
    index = build_dense(corpus, model, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (sum(lengths), sum(lengths))
    starts = np.concatenate([[0], np.cumsum(np.array(lengths) + 1)])
    wanted = [int(start) + i for start, n in zip(starts, lengths, strict=False) for i in range(n)]
    assert sorted(index.positions.tolist()) == wanted
    keys, _ = index.projection.apply(last_hidden_states(model, torch.tensor([documents[5]]))[0].float().numpy())
    places = {int(position): i for i, position in enumerate(index.positions)}
    rows = [places[int(starts[5]) + i] for i in range(100)]
    assert np.sum(keys * index._keys[rows].astype(np.float32), axis=1).min() > 0.999
    monkeypatch.setattr(harvest, "WINDOW", 16)
    monkeypatch.setattr(harvest, "BATCH_TOKENS", 50)
    windowed = build_dense(corpus, model)
    assert sorted(windowed.positions.tolist()) == wanted
    for limit in (2, 60, 200, sum(lengths), 10**6):
        limited = build_dense(corpus, model, limit=limit, progress=lambda done, total: seen.append((done, total)))
        size = min(limit, sum(lengths))  # to the token: the last document is cut
        assert len(limited) == size and set(limited.positions.tolist()) <= set(wanted) and seen[-1] == (size, size)
    RetroDraft(model, corpora=[corpus], dense=True)


def test_an_index_that_does_not_belong(answered: Any, tmp_path: Path) -> None:
    """Another model, another text, none at all, damage: early errors that say what to do."""
    model, path, _ = answered
    corpus = copied(path, tmp_path / "a")
    with pytest.raises(IndexFormatError, match="another model.*dense build"):
        RetroDraft(tiny_llama(1), corpora=[corpus], dense=True)
    corpus.extend([[5, 6, 7]])
    RetroDraft(model, corpora=[tmp_path / "a"], dense=True)  # what is added later leaves the old positions valid
    documents = [list(document.token_ids) for document in corpus.documents()]
    for name, others in (("turned", documents[1:] + documents[:1]), ("short", documents[:2])):
        other = CorpusIndex.build(others, tmp_path / name)
        shutil.copytree(tmp_path / "a" / "dense", tmp_path / name / "dense")
        with pytest.raises(IndexFormatError, match="other documents.*dense build"):
            RetroDraft(model, corpora=[other], dense=True)
        RetroDraft(model, corpora=[other])
    with pytest.raises(IndexFormatError, match=r"no dense index.*harvest"):
        RetroDraft(model, corpora=[CorpusIndex.build(documents, tmp_path / "b")], dense=True)
    with pytest.raises(ValueError, match="pass corpora"):
        RetroDraft(model, dense=True)
    with pytest.raises(ValueError, match="takes no corpora"):
        RetroDraft(model, strategy="suffix", corpora=[path], dense=True)
    corpus = copied(path, tmp_path / "c")
    index = open_dense(corpus, model)
    index._positions = index._positions.copy()
    index._positions[0] = num_positions(corpus)
    index.save(tmp_path / "c" / "dense", index.info)
    with pytest.raises(IndexFormatError, match="positions that the corpus does not have"):
        RetroDraft(model, corpora=[corpus], dense=True)


def test_harvest_that_fails(answered: Any, tmp_path: Path) -> None:
    """What had finished is kept, else nothing is written; misuse is told before or at the call."""
    model, path, _ = answered
    rd = RetroDraft(model, budget=8, hot_start=False)
    with pytest.raises(KeyError), rd.harvest(tmp_path / "none"):
        raise KeyError
    assert not (tmp_path / "none").exists()
    with pytest.raises(KeyError), rd.harvest(tmp_path / "one"):
        rd.generate(random_prompt(8), **GREEDY)
        raise KeyError
    assert CorpusIndex.open(tmp_path / "one").num_documents == 1
    with rd.harvest(tmp_path / "two"):
        with pytest.raises(ValueError, match="running"), rd.harvest(tmp_path / "three"):
            pass
        with pytest.raises(ValueError, match="left to plain generate"):
            rd.generate(random_prompt(8), num_beams=2, **GREEDY)
    assert not (tmp_path / "two").exists() and not (tmp_path / "three").exists()
    rd.generate(random_prompt(8), num_beams=2, **GREEDY)  # outside it is allowed again
    (tmp_path / "file").write_text("text")
    for folder, message in (("file", "folder"), ("file/index", "a file"), ("one/index", "lies in the store")):
        with pytest.raises(ValueError, match=message), rd.harvest(tmp_path / folder):
            pass
    with pytest.raises(IndexFormatError, match="another model"):
        with RetroDraft(tiny_llama(1), hot_start=False).harvest(path):
            pass
    CorpusIndex.build([[1, 2]], tmp_path / "other", tokenizer={"name": "x", "fingerprint": "y"})
    with rd.harvest(tmp_path / "other"):  # no tokenizer, so nothing to compare
        rd.generate(random_prompt(8), max_new_tokens=1, do_sample=False)
    assert CorpusIndex.open(tmp_path / "other").num_documents == 2  # a single token has no key
    assert not (tmp_path / "other" / "dense").exists()


@pytest.mark.parametrize("fit_rows", [10**9, 100], ids=["at the end", "on the way"])
def test_harvests_at_once_into_a_new_folder(fit_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both keep texts and keys, under one projection, whoever comes first, and whatever was written on the way."""
    import retrodraft.index.dense as dense_index

    monkeypatch.setattr(dense_index, "FIT_ROWS", fit_rows)
    model = tiny_llama(0)
    first, second = (RetroDraft(model, budget=8, hot_start=False) for _ in range(2))
    texts = []
    with first.harvest(tmp_path / "a") as outer, second.harvest(tmp_path / "a") as inner:
        for seed in range(8):
            prompt = random_prompt(8, seed)
            texts.append((second if seed % 2 else first).generate(prompt, **GREEDY)[0].tolist())
        assert (tmp_path / "a").exists() == (fit_rows == 100)
    assert outer.num_documents == inner.num_documents == 4
    corpus = CorpusIndex.open(tmp_path / "a", check=True)
    index = open_dense(corpus, model)
    kept = {tuple(document.token_ids) for document in corpus.documents()}
    assert kept == {tuple(text[8:]) for text in texts} and len(index) == 8 * 38
    for text in texts:
        state = last_hidden_states(model, torch.tensor([text]))[0, -20].float().numpy()
        position = int(index.search(state, 1)[0][0][0])
        assert tokens_at(corpus, position + np.arange(3)).tolist() == text[-20:-17]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_harvests_of_two_models_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One folder has keys of one model: the second keeps its texts, and is told at its end."""
    models = tiny_llama(0), tiny_llama(1)
    first, second = (RetroDraft(model, budget=8, hot_start=False) for model in models)
    with pytest.raises(ValueError, match=r"answers are in .*but not their keys.*another model"):
        with second.harvest(tmp_path / "a"):
            with first.harvest(tmp_path / "a"):
                first.generate(random_prompt(8), **GREEDY)
            second.generate(random_prompt(8), **GREEDY)
    corpus = CorpusIndex.open(tmp_path / "a")
    assert corpus.num_documents == 2 and len(open_dense(corpus, models[0])) == 38
    RetroDraft(models[0], corpora=[corpus], dense=True)


def test_a_harvest_over_what_another_leaves(tmp_path: Path) -> None:
    """A killed first build's folder is begun anew; an index of another tokenizer takes no answers, and says so."""
    rd = RetroDraft(tiny_llama(0), budget=8, hot_start=False)
    (tmp_path / "killed").mkdir()
    for name in (".lock", "names-0.058a3316bc8d734382d69b3a57b1b52f.bin"):
        (tmp_path / "killed" / name).write_text("text")
    with rd.harvest(tmp_path / "killed"):
        rd.generate(random_prompt(8), **GREEDY)
    assert CorpusIndex.open(tmp_path / "killed", check=True).num_documents == 1
    with pytest.raises(IndexFormatError, match="only 97 ids"), rd.harvest(tmp_path / "replaced"):
        rd.generate(random_prompt(8), **GREEDY)
        CorpusIndex.build([[VOCAB + 5]], tmp_path / "replaced")
    assert CorpusIndex.open(tmp_path / "replaced").num_documents == 1


def test_cost_rule(answered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries beyond 2 % of a step stop, are tried again now and then, and come back when they are quick."""
    model, path, _ = answered
    monkeypatch.setattr(dense, "MAX_SHARE", 0.02)
    drafts = DenseDrafts.open([CorpusIndex.open(path)], model)
    assert drafts.may_ask() and drafts.end_step(1.0) == (0, 0.0)
    drafts.asked(0.015)
    drafts.asked(0.015)  # two rows of a batch: together they are beyond it
    assert drafts.end_step(1.0) == (2, 0.03)
    assert not drafts.affordable
    assert sum(drafts.may_ask() for _ in range(4 * dense.RETRY)) == 4
    for _ in range(dense.RECENT):
        drafts.asked(0.001)
        drafts.end_step(1.0)
    assert drafts.affordable and all(drafts.may_ask() for _ in range(10))
    rd = RetroDraft(model, budget=16, corpora=[path], dense=True)
    for _ in range(dense.RECENT):
        rd._dense.asked(1.0)
        rd._dense.end_step(1.0)
    rd.generate(random_prompt(8, 3), **GREEDY)
    assert rd.stats.num_dense_queries <= 2


def test_texts_that_match_well_are_not_asked_beside(answered: Any) -> None:
    """Where a text matches SHORT_MATCH tokens, no query is made; the hidden state is not read twice."""
    model, path, texts = answered
    drafts = DenseDrafts.open([CorpusIndex.open(path)], model)
    row = drafts.row()
    assert row.recall(np.array([5], np.int32), 0) == 0 and drafts.end_step(1.0)[0] == 0  # nothing to ask with
    state = last_hidden_states(model, torch.tensor([texts[0]]))[0, 20].float().numpy()
    row.state = state
    shard = CorpusIndex.open(path).arrays[0]
    known = np.array(texts[0][:22], np.int32)
    assert row.recall(known, dense.SHORT_MATCH) == 0 and drafts.end_step(1.0)[0] == 0
    assert row.recall(known, 0, [shard], [64]) == 0 and drafts.end_step(1.0)[0] == 0
    changed = np.concatenate([random_prompt(20, 77)[0].numpy(), known[-1:]]).astype(
        np.int32
    )  # the span is only a bound
    assert row.recall(changed, dense.SHORT_MATCH - 1, [shard], [64]) == 3  # a span is but a bound
    assert drafts.end_step(1.0)[0] == 1 and row.recall(changed, 0, [shard], [-1]) == 0


def test_command(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`retrodraft index dense build`: JSON, text, another tokenizer, an interrupted run, no FAISS."""
    (tmp_path / "text.py").write_text("for i in range(10):\n    print(i)\n" * 10)
    index = tmp_path / "my.index"
    done = retrodraft_here("index", "build", tmp_path / "text.py", "-o", index, "--tokenizer", tiny_folder)
    assert done.returncode == 0, done.stderr
    command = ("index", "dense", "build", index, "--model", tiny_folder)
    done = retrodraft_here(*command, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["num_keys"] == facts["num_tokens"] == 330 and facts["bytes"] > 330 * 128
    kept = sorted(path.name for path in (index / "dense").iterdir())
    done = retrodraft_here(*command)
    assert "330 keys" in done.stdout and done.stderr == ""
    assert "dense: 330 keys" in retrodraft_here("index", "info", index).stdout
    assert len(list((index / "dense").iterdir())) == len(kept)

    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(harvest, "last_hidden_states", interrupted)
        assert retrodraft_here(*command).returncode == 130
    assert len(list((index / "dense").iterdir())) == len(kept)
    assert retrodraft_here("index", "verify", index / "dense").returncode == 0
    assert retrodraft_here("index", "verify", index).returncode == 0
    (keys,) = (index / "dense").glob("keys.*")
    whole = keys.read_bytes()
    keys.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    done = retrodraft_here("index", "verify", index)  # it looks at both stores
    assert done.returncode == 1 and "checksum" in done.stdout and "dense" in done.stdout
    keys.write_bytes(whole[:-1])
    done = retrodraft_here("index", "info", index)
    assert done.returncode == 0 and "330 tokens" in done.stdout and "dense: damaged" in done.stdout
    keys.write_bytes(whole)
    help_text = " ".join(retrodraft_here("index", "dense", "build", "--help").stdout.split())
    assert "Example: retrodraft index dense build" in help_text
    assert "dense" in retrodraft_here("index", "--help").stdout
    for arguments, message in (
        (("index", "dense", "build", tmp_path, "--model", tiny_folder), "manifest"),
        (("index", "dense", "build", index, "--model", tmp_path / "gone"), "no such folder"),
        (("index", "dense", "build", index, "--model", tiny_folder, "--dtype", "int3"), "dtype"),
    ):
        done = retrodraft_here(*arguments)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    CorpusIndex.build([[1, 2, 3]], tmp_path / "b", tokenizer={"name": "x", "fingerprint": "y"})
    done = retrodraft_here("index", "dense", "build", tmp_path / "b", "--model", tiny_folder)
    assert done.returncode == 2 and "fingerprint" in done.stderr
    CorpusIndex.build([], tmp_path / "c")
    done = retrodraft_here("index", "dense", "build", tmp_path / "c", "--model", tiny_folder)
    assert done.returncode == 2 and "no states" in done.stderr and not (tmp_path / "c" / "dense").exists()


def test_without_faiss(answered: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way in names the extra; drafting without it needs no FAISS."""
    model, path, _ = answered
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.delitem(sys.modules, "retrodraft.index.dense")
    with pytest.raises(ImportError, match=r"retrodraft\[dense\]"):
        RetroDraft(model, corpora=[path], dense=True)
    rd = RetroDraft(model, budget=8, corpora=[path])
    with pytest.raises(ImportError, match=r"retrodraft\[dense\]"), rd.harvest(tmp_path / "a"):
        pass
    assert torch.equal(rd.generate(random_prompt(8), **GREEDY), model.generate(random_prompt(8), **GREEDY))
    done = retrodraft_here("index", "dense", "build", path, "--model", tiny_folder)
    assert done.returncode == 2 and "retrodraft[dense]" in done.stderr and "Traceback" not in done.stderr


def test_faiss_starts_no_threads() -> None:
    """O24: training lists, adding and searching leave the process with the threads it had."""
    code = """
import os, numpy as np
from retrodraft.index.dense import DenseIndex, Projection
data = np.random.default_rng(0).normal(size=(21_000, 32)).astype(np.float32)
index = DenseIndex(Projection.fit(data, 16))
before = len(os.listdir("/proc/self/task"))
index.add(data, np.arange(len(data)))
index.search(data[:64])
assert index._trained_size and len(os.listdir("/proc/self/task")) == before
"""
    environment = {"OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "1", "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
