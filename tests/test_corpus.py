"""The corpus store against brute force: shards, borders, growth, joins, and what it asks of a model."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import retrodraft_here
from hypothesis import given, settings
from hypothesis import strategies as st

from retrodraft.index import CorpusIndex, Document, IndexFormatError, NgramStore
from retrodraft.index.corpus import BYTES_PER_TOKEN, DENSE
from retrodraft.index.evaluation import evaluate
from retrodraft.index.shards import MAX_TOKEN
from retrodraft.index.storage import MANIFEST, writing


@pytest.fixture(autouse=True, scope="module")
def no_sync() -> Iterator[None]:
    """Syncing hundreds of small files takes minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


corpora = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=6)


def followers(documents: list[list[int]], pattern: list[int]) -> tuple[int, Counter[int]]:
    """Occurrences of `pattern` within documents, and the tokens behind them."""
    n, count, tokens = len(pattern), 0, Counter[int]()
    for document in documents:
        for i in range(len(document) - n + 1):
            if document[i : i + n] == pattern:
                count += 1
                tokens.update(document[i + n : i + n + 1])
    return count, tokens


@given(corpora, st.lists(st.integers(0, 3), min_size=1, max_size=8), st.sampled_from([4, 13, 1000]))
@settings(max_examples=100, deadline=None)
def test_matches_and_continuations(documents: list[list[int]], context: list[int], shard_tokens: int) -> None:
    """One logical index over any number of shards; a document that no shard could hold is cut."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = CorpusIndex.build(documents, Path(folder, "c"), shard_tokens=shard_tokens)
        size = shard_tokens - 1
        cut = [document[i : i + size] for document in documents for i in range(0, len(document), size)]
        assert [list(document.token_ids) for document in corpus.documents()] == cut
        assert all(len(tokens) <= shard_tokens for tokens, _, _ in corpus.arrays)
        assert corpus.num_tokens == sum(map(len, cut)) and corpus.num_documents == len(cut)
        interval = corpus.match(context)
        expected = next((n for n in range(len(context), 0, -1) if followers(cut, context[-n:])[0]), 0)
        assert interval.length == expected
        while interval.length:
            count, tokens = followers(cut, context[-interval.length :])
            assert interval.count == count
            assert corpus.continuations(interval, 8) == sorted(tokens.items(), key=lambda item: (-item[1], item[0]))
            shorter = corpus.shorter(context, interval)
            for n in range(interval.length - 1, shorter.length, -1):
                assert followers(cut, context[-n:])[0] == count
            interval = shorter


def test_no_draft_crosses_a_document() -> None:
    """O20: the tail of one document and the head of the next form no match and no continuation."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = CorpusIndex.build([[1, 2, 3], [4, 5, 6]], Path(folder, "c"))
        assert corpus.match([2, 3, 4]).length == 1
        assert corpus.continuations(corpus.match([2, 3])) == []
        assert corpus.find([3, 4]).count == 0 and corpus.find([3, -1]).count == 0 and corpus.find([2, 3]).count == 1


def test_empty_and_tiny(tmp_path: Path) -> None:
    """O20: an empty corpus opens and drafts nothing; one token, and a thousand copies, work."""
    for documents in ([], [[]], [[], []]):
        corpus = CorpusIndex.build(documents, tmp_path / "empty")
        assert (corpus.num_tokens, corpus.num_documents, corpus.max_token) == (0, 0, -1)
        assert corpus.match([1, 2]).length == 0 and corpus.continuations(corpus.match([1, 2])) == []
        assert corpus.occurrences(corpus.match([1])) == [] and list(corpus.documents()) == []
    corpus = CorpusIndex.build([[5]], tmp_path / "one")
    assert corpus.match([5]).count == 1 and corpus.continuations(corpus.match([5])) == []
    corpus = CorpusIndex.build([[1, 2, 3, 4]] * 1000, tmp_path / "copies")
    assert corpus.continuations(corpus.match([2, 3])) == [(4, 1000)]


def test_names_and_places(tmp_path: Path) -> None:
    names = ["a b.py", "emoji \N{SNOWMAN}\n.py", "bad \udcff name", ""]
    documents = [Document([9, i, 1, 2, 3], name) for i, name in enumerate(names)]
    corpus = CorpusIndex.build(documents, tmp_path / "c", shard_tokens=12)
    assert len(corpus.arrays) == 2
    places = corpus.occurrences(corpus.match([1, 2]))
    assert sorted((place.name, place.position) for place in places) == sorted(
        (name.replace("\udcff", "\ufffd"), 4) for name in names
    )
    assert [place.name[:1] for place in corpus.occurrences(corpus.match([1, 2]), limit=3)] == ["a", "e", ""]
    assert corpus.following(0, 9).tolist() == [0, 1, 2, 3] and corpus.following(13, 2).tolist() == [1, 2]
    assert corpus.following(4, 9).tolist() == corpus.following(23, 9).tolist() == []
    for position in (-1, 24):
        with pytest.raises(ValueError, match="from 0 to 23"):
            corpus.following(position, 1)


def test_growing_joining_compacting(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 30, 200).astype(np.int32) for _ in range(12)]
    whole = CorpusIndex.build(documents, tmp_path / "whole", tokenizer={"fingerprint": "f", "name": "n"})
    grown = CorpusIndex.build(documents[:4], tmp_path / "grown", tokenizer={"fingerprint": "f", "name": "n"})
    other = CorpusIndex.open(tmp_path / "grown")
    assert grown.extend(documents[4:8]) == 4 * 201 and grown.extend([]) == 8 * 201
    assert other.extend(documents[8:]) == 8 * 201  # sees what was added behind its back
    assert (len(other.arrays), len(grown.arrays)) == (1, 1) and grown.num_documents == 8
    first = CorpusIndex.build(documents[:6], tmp_path / "first", tokenizer={"fingerprint": "f"})
    second = CorpusIndex.build(documents[6:], tmp_path / "second", tokenizer={"fingerprint": "f"})
    joined = CorpusIndex.merge([first.path, second.path], tmp_path / "joined")
    compacted = CorpusIndex.merge([first.path, second.path], tmp_path / "compacted")
    compacted.compact()
    assert len(joined.arrays) == 2 and len(compacted.arrays) == 1
    for corpus in (other, joined, compacted, CorpusIndex.open(tmp_path / "compacted", check=True)):
        assert corpus.num_tokens == whole.num_tokens and corpus.fingerprint == "f"
        for document in documents:
            for end in (3, 50, 199):
                context = document[:end]
                assert corpus.match(context).count == whole.match(context).count
                assert corpus.continuations(corpus.match(context)) == whole.continuations(whole.match(context))
    alien = CorpusIndex.build([[1]], tmp_path / "alien", tokenizer={"fingerprint": "g"})
    with pytest.raises(ValueError, match="different tokenizers"):
        CorpusIndex.merge([first.path, alien.path], tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()


def test_damage_is_not_taken_over(tmp_path: Path) -> None:
    """Joining, compacting and adding to a small shard write new checksums, so they compare the old ones first."""
    corpus = CorpusIndex.build([[1, 2, 3], [2, 3, 4]], tmp_path / "a")
    (file,) = (tmp_path / "a").glob("tokens-0.*")
    whole = file.read_bytes()
    file.write_bytes(whole[:64] + bytes([whole[64] ^ 1]) + whole[65:])
    with pytest.raises(IndexFormatError, match="checksum"):
        CorpusIndex.merge([tmp_path / "a"], tmp_path / "b")
    with pytest.raises(IndexFormatError, match="checksum"):
        corpus.compact()
    with pytest.raises(IndexFormatError, match="checksum"):
        corpus.extend([[5, 6]])
    file.write_bytes(whole)
    corpus.extend([[5, 6]])
    assert CorpusIndex.open(tmp_path / "a", check=True).num_documents == 3 and not (tmp_path / "b").exists()


def test_shards_stay_few_however_often_a_corpus_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is more than twice as large as the next, and the whole is what one build makes of the documents."""
    monkeypatch.setattr("retrodraft.index.corpus.SMALL_SHARD", 20)
    rng = np.random.default_rng(0)
    documents = [Document(rng.integers(0, 9, int(size)), str(size)) for size in rng.integers(1, 60, 120)]
    whole = CorpusIndex.build(documents, tmp_path / "whole")
    grown, taken, kept = CorpusIndex.build(documents[:1], tmp_path / "grown"), 1, 0
    while taken < len(documents):
        count = int(rng.integers(1, 5))
        before = [len(tokens) for tokens, _, _ in grown.arrays]
        assert grown.extend(documents[taken : taken + count]) == sum(before)
        taken += count
        sizes = [len(tokens) for tokens, _, _ in grown.arrays]
        assert all(size > 2 * after for size, after in pairwise(sizes))
        kept += len(before) > 1 and sizes[0] == before[0]
    assert kept > 10
    assert [(d.name, list(d.token_ids)) for d in grown.documents()] == [
        (d.name, list(d.token_ids)) for d in whole.documents()
    ]
    assert CorpusIndex.open(tmp_path / "grown", check=True).num_tokens == whole.num_tokens
    context = documents[50].token_ids
    assert grown.continuations(grown.match(context)) == whole.continuations(whole.match(context))
    limited = CorpusIndex.build(documents[:1], tmp_path / "limited")
    for document in documents[1:60]:
        limited.extend([document], shard_tokens=100)
    assert max(len(tokens) for tokens, _, _ in limited.arrays) <= 100


def test_growing_what_was_replaced(tmp_path: Path) -> None:
    """O12: tokens of one tokenizer are not added to a corpus of another, which took its place meanwhile."""
    corpus = CorpusIndex.build([[1, 2]], tmp_path / "a", tokenizer={"fingerprint": "f"})
    CorpusIndex.build([[3, 4]], tmp_path / "a", tokenizer={"fingerprint": "g"})
    with pytest.raises(ValueError, match="another tokenizer"):
        corpus.extend([[5]])
    assert CorpusIndex.open(tmp_path / "a").num_documents == 1


def test_keys_of_what_was_replaced_go(tmp_path: Path) -> None:
    """A dense index stands for positions: it stays while a corpus grows, and goes when another takes its place."""
    ways: list[Callable[[], CorpusIndex]] = [
        lambda: CorpusIndex.build([[3, 4]], tmp_path / "a"),
        lambda: CorpusIndex.merge([tmp_path / "b"], tmp_path / "a"),
    ]
    for replace in ways:
        for name in ("a", "b"):
            CorpusIndex.build([[1, 2]], tmp_path / name)
        with writing(tmp_path / "a" / DENSE, part=True) as writer:
            writer.add("positions", np.arange(2, dtype=np.int64))
            writer.commit(DENSE, {})
        CorpusIndex.open(tmp_path / "a").extend([[5]])
        assert (tmp_path / "a" / DENSE / MANIFEST).exists()
        replace()
        assert not (tmp_path / "a" / DENSE).exists()


def test_many_shards_and_few_open_files(tmp_path: Path) -> None:
    """Small shards keep no file open; for large ones a low limit is named."""
    CorpusIndex.build([[1, 2]], tmp_path / "small")
    CorpusIndex.merge([tmp_path / "small"] * 300, tmp_path / "many")
    CorpusIndex.build([np.arange(20_000)], tmp_path / "large")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, hard))
    try:
        assert CorpusIndex.open(tmp_path / "many").find([1, 2]).count == 300
        with pytest.raises(IndexFormatError, match="ulimit"):
            CorpusIndex.open(tmp_path / "large")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert CorpusIndex.open(tmp_path / "large").num_tokens == 20_000


def test_ids_that_no_document_holds(tmp_path: Path) -> None:
    corpus = CorpusIndex.build([[1, 2, 3]], tmp_path / "a")
    for other in (-1, MAX_TOKEN + 1, 2**40):
        assert corpus.find([other]).count == corpus.find([1, other]).count == 0
        assert corpus.match([1, other, 2]) == corpus.find([2]) and corpus.match([other]).length == 0
    with pytest.raises(ValueError, match="k must be at least 0"):
        corpus.continuations(corpus.find([1]), -1)


@pytest.mark.parametrize("ids", [[1.5], [[1, 2]], ["a"], [True]], ids=repr)
def test_what_is_no_list_of_ids(tmp_path: Path, ids: Any) -> None:
    corpus = CorpusIndex.build([[1, 2, 3]], tmp_path / "a")
    for look_up in (corpus.match, corpus.find, lambda ids: corpus.shorter(ids, corpus.find([1]))):
        with pytest.raises(ValueError, match="must be a list of whole numbers"):
            look_up(ids)
    assert corpus.match([]).length == corpus.match(np.array([])).length == 0


def test_compacting_makes_no_more_shards_than_there_were(tmp_path: Path) -> None:
    """A shard that is larger than the limit stays, under its new number; those between are joined."""
    for name, sizes in (("big", [500]), ("small", [5, 5]), ("later", [9, 9, 9])):
        corpus = CorpusIndex.build([np.arange(n) for n in sizes], tmp_path / name, shard_tokens=501)
    names = ["small", "small", "big", "later", "small", "big", "big"]
    corpus = CorpusIndex.merge([tmp_path / name for name in names], tmp_path / "all")
    before = [list(document.token_ids) for document in corpus.documents()]
    files = {path.name for path in (tmp_path / "all").glob("*.bin")}
    corpus.compact(shard_tokens=100)
    assert [len(tokens) for tokens, _, _ in corpus.arrays] == [24, 501, 42, 501, 501]
    assert len(files & {path.name for path in (tmp_path / "all").glob("*.bin")}) == 3 * 6  # the large ones' own files
    reopened = CorpusIndex.open(tmp_path / "all", check=True)
    assert [list(document.token_ids) for document in reopened.documents()] == before
    assert reopened.find([3, 4]).count == 12
    reopened.extend([[3, 4]])
    reopened.compact()
    assert len(reopened.arrays) == 1 and reopened.find([3, 4]).count == 13


def test_nothing_is_written_into_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the dense index of a corpus; a folder beside is free, however it is spelled."""
    CorpusIndex.build([[1, 2, 3]], tmp_path / "a")
    names = sorted(os.listdir(tmp_path / "a"))
    (tmp_path / "link").symlink_to("a")
    monkeypatch.chdir(tmp_path / "a")
    for target in (tmp_path / "a" / DENSE, tmp_path / "link" / "b" / "c", "b", "./../a/b"):
        for write in (lambda path: CorpusIndex.build([[1]], path), NgramStore().save):
            with pytest.raises(ValueError, match="lies in the store .*a; name a folder outside"):
                write(target)
    assert sorted(os.listdir(tmp_path / "a")) == names
    assert CorpusIndex.build([[1]], tmp_path / "a" / ".." / "b").num_documents == 1
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / MANIFEST).write_text('{"name": "a browser extension"}')
    assert CorpusIndex.build([[1]], tmp_path / "page" / "c").num_documents == 1


def test_joining_onto_one_of_the_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        CorpusIndex.build([[1, 2, 3]], tmp_path / name)
    (tmp_path / "link").symlink_to("b")
    monkeypatch.chdir(tmp_path)
    for target in (tmp_path / "b", "./b/", "link", tmp_path / "a" / ".." / "b"):
        with pytest.raises(ValueError, match="is one of the corpora to merge"):
            CorpusIndex.merge([tmp_path / "a", tmp_path / "b"], target)
    assert CorpusIndex.open(tmp_path / "b", check=True).num_documents == 1
    assert CorpusIndex.merge(["a", "b"], "c").num_documents == CorpusIndex.merge(["a", "a"], "c").num_documents == 2


def test_a_corpus_that_does_not_fit_a_model(tmp_path: Path) -> None:
    """O12: another tokenizer, or ids that the model has no rows for, are named at load."""
    corpus = CorpusIndex.build([[1, 128]], tmp_path / "c", tokenizer={"fingerprint": "abc", "name": "big"})
    corpus.check_tokenizer("abc", 129)
    with pytest.raises(IndexFormatError, match=r"128.*only 128"):
        corpus.check_tokenizer("abc", 128)
    with pytest.raises(IndexFormatError, match="'big'"):
        corpus.check_tokenizer("other", 200)


@pytest.mark.parametrize("document", [[-1], [MAX_TOKEN + 1], [0.5], [[1]], ["a"], [2**40]], ids=str)
def test_ids_that_are_none(tmp_path: Path, document: list[object]) -> None:
    with pytest.raises(ValueError, match="document"):
        CorpusIndex.build([[1, 2], document], tmp_path / "c")  # type: ignore[list-item]
    with pytest.raises(IndexFormatError):
        CorpusIndex.open(tmp_path / "c")


def test_bytes_and_memory_per_token(tmp_path: Path) -> None:
    """At most 9 bytes a token on disk, and building takes at most 14 a token of the largest shard."""
    rng = np.random.default_rng(0)
    documents = [rng.zipf(1.3, 2000).clip(max=49_000).astype(np.int32) for _ in range(500)]
    CorpusIndex.build(documents[:2], tmp_path / "c")
    tracemalloc.start()
    corpus = CorpusIndex.build((document.copy() for document in documents), tmp_path / "c")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert corpus.nbytes / corpus.num_tokens <= 9
    assert peak / corpus.num_tokens <= BYTES_PER_TOKEN


def test_damaged_facts(tmp_path: Path) -> None:
    CorpusIndex.build([[1, 2, 3]], tmp_path / "c")
    manifest = tmp_path / "c" / "manifest.json"
    text = manifest.read_text()
    for old, new in (('"num_documents": 1', '"num_documents": 2'), ('"num_positions": 4', '"num_positions": 5'),
                     ('"shards": [', '"shard": ['), ('"max_token": 3', '"max_token": "x"'), ("keys-0", "kees-0"),
                     ('"tokenizer": {}', '"tokenizer": 5')):  # fmt: skip
        assert old in text
        manifest.write_text(text.replace(old, new))
        with pytest.raises(IndexFormatError):
            CorpusIndex.open(tmp_path / "c")
    manifest.write_text(text)
    CorpusIndex.open(tmp_path / "c", check=True)


@pytest.mark.parametrize("value", [0, 2, 4])
def test_a_largest_id_that_is_none(value: int, tmp_path: Path) -> None:
    """Opening takes the manifest's word, in O(1); a check does not, nor does what copies the shard."""
    corpus = CorpusIndex.build([[1, 2, 3]], tmp_path / "c")
    manifest = tmp_path / "c" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"max_token": 3', f'"max_token": {value}'))
    assert CorpusIndex.open(tmp_path / "c").max_token == value
    for check in (
        lambda: CorpusIndex.open(tmp_path / "c", check=True), corpus.compact,
        lambda: CorpusIndex.merge([tmp_path / "c"], tmp_path / "d"),
    ):  # fmt: skip
        with pytest.raises(IndexFormatError, match=f"shard 0 holds ids up to 3, the manifest says {value}"):
            check()
    done = retrodraft_here("index", "verify", tmp_path / "c")
    assert done.returncode == 1 and done.stdout.startswith("damaged: ") and "ids up to 3" in done.stdout


def test_damaged_tables_of_documents(tmp_path: Path) -> None:
    """Without `check` any content opens; a look-up then names the wrong document, but ends."""
    corpus = CorpusIndex.build([Document([i, 5, 6], f"name {i}") for i in range(9)], tmp_path / "c")
    interval = corpus.match([5, 6])
    whole = {path: path.read_bytes() for path in (tmp_path / "c").glob("*.bin")}
    for part, value in (("borders", 0), ("borders", 255), ("name_ends", 255), ("names", 255), ("order", 127)):
        (file,) = (tmp_path / "c").glob(f"{part}-0.*")
        file.write_bytes(whole[file][:64] + bytes([value]) * (len(whole[file]) - 64))
        damaged = CorpusIndex.open(tmp_path / "c")
        assert len(damaged.occurrences(interval)) == 9
        assert all(len(document.token_ids) <= 36 for document in damaged.documents())
        with pytest.raises(IndexFormatError, match="checksum"):
            CorpusIndex.open(tmp_path / "c", check=True)
        file.write_bytes(whole[file])


def test_replay(tmp_path: Path) -> None:
    """A text that is in the corpus is drafted whole, one that shares nothing not at all."""
    text = list(range(50))
    corpus = CorpusIndex.build([text], tmp_path / "c")
    result = evaluate(corpus, [Document(text)], num_draft_tokens=16).as_dict()
    assert result["num_top_1"] == result["num_positions"] == 49
    assert result["num_forwards"] == 3 and result["tokens_per_forward"] == 49 / 3
    result = evaluate(corpus, [Document(list(range(100, 150)))]).as_dict()
    assert result["num_matched"] == 0 and result["tokens_per_forward"] == 1.0
    assert evaluate(corpus, [Document(text)], num_draft_tokens=0).as_dict()["tokens_per_forward"] == 1.0


def test_import_needs_no_torch() -> None:
    modules = "corpus, evaluation, files, fingerprint, ingest, ngram, storage"
    code = f"import sys\nfrom retrodraft.index import {modules}\nassert 'torch' not in sys.modules\n"
    code += "assert 'transformers' not in sys.modules and 'pyarrow' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
