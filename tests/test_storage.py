"""The format on disk: damaged, foreign and hostile folders, killed and concurrent writers."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from retrodraft.index.corpus import CorpusIndex
from retrodraft.index.fingerprint import tokenizer_fingerprint
from retrodraft.index.ngram import NgramStore
from retrodraft.index.storage import LOCK, MANIFEST, IndexFormatError, open_store, writing

WRITER = """
import sys, numpy as np
from retrodraft.index.storage import writing
folder, value, size, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
import time
end = time.monotonic() + seconds
print("ready", flush=True)
while True:
    with writing(folder) as writer:
        for name in ("a", "b", "c"):
            writer.add(name, np.full(size, value, np.int32))
        writer.commit("test", {"value": value})
    value += 2
    if time.monotonic() > end:
        break
"""


def save(folder: Path, value: int, size: int = 1000) -> None:
    with writing(folder) as writer:
        for name in ("a", "b", "c"):
            writer.add(name, np.full(size, value, np.int32))
        writer.commit("test", {"value": value})


def check(folder: Path, full: bool = False) -> int:
    """The value that the whole store agrees on."""
    store = open_store(folder, "test", check=full)
    assert sorted(store.arrays) == ["a", "b", "c"]
    for array in store.arrays.values():
        assert array.min() == array.max() == store.info["value"]
    return int(store.info["value"])


def manifest_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / MANIFEST).read_text())


def edit(folder: Path, **changes: object) -> None:
    """Change fields of the first file's manifest entry."""
    manifest = manifest_of(folder)
    manifest["files"]["a"].update(changes)  # type: ignore[index]
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "store", 1)
    return tmp_path / "store"


def test_round_trip_and_replacement(folder: Path) -> None:
    held = open_store(folder, "test", check=True)
    assert check(folder) == 1 and not held.arrays["a"].flags.writeable
    save(folder, 2)
    assert check(folder, full=True) == 2
    assert held.arrays["a"][0] == 1  # what a reader has mapped stays as it was
    assert len([path for path in folder.iterdir() if path.suffix == ".bin"]) == 3


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 2)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64, np.uint64, np.float16, np.float32])
def test_types_and_shapes(tmp_path: Path, shape: tuple[int, ...], dtype: type) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    with writing(tmp_path / "store") as writer:
        writer.add("values", array)
        writer.commit("test", {})
    loaded = open_store(tmp_path / "store", "test", check=True).arrays["values"]
    assert loaded.dtype == dtype and np.array_equal(loaded, array)
    with pytest.raises(ValueError, match="stores hold"), writing(tmp_path / "other") as writer:
        writer.add("objects", np.array([{}], object))


def test_without_commit_nothing_changes(folder: Path) -> None:
    with pytest.raises(RuntimeError), writing(folder) as writer:
        writer.add("a", np.zeros(5, np.int32))
        raise RuntimeError
    assert check(folder, full=True) == 1
    assert len(list(folder.glob("*.bin"))) == 3


def test_truncation_of_each_file(folder: Path) -> None:
    """O22: cut at 0, 1, half and n - 1 bytes, or a byte too long: a named error, never an empty store."""
    for path in sorted(path for path in folder.iterdir() if path.name != LOCK):
        whole = path.read_bytes()
        for size in (0, 1, len(whole) // 2, len(whole) - 1, len(whole) + 1):
            path.write_bytes((whole + b"x")[:size])
            with pytest.raises(IndexFormatError):
                open_store(folder, "test")
        path.write_bytes(whole)
    assert check(folder) == 1


def test_changed_content_is_found_by_checksum(folder: Path) -> None:
    path = next(folder.glob("b.*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    open_store(folder, "test")
    with pytest.raises(IndexFormatError, match="checksum"):
        open_store(folder, "test", check=True)


def test_parts_of_two_builds(folder: Path, tmp_path: Path) -> None:
    save(tmp_path / "other", 5)
    shutil.copy(next((tmp_path / "other").glob("b.*")), next(folder.glob("b.*")))
    with pytest.raises(IndexFormatError, match="another build"):
        open_store(folder, "test")


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "a/../../x", "..\\x", "", ".", "x\0y", "C:\\x", 7, None])
def test_names_that_leave_the_folder(folder: Path, name: object) -> None:
    """O23: nothing outside is opened, whatever the manifest says."""
    (folder.parent / "x").write_bytes(next(folder.glob("a.*")).read_bytes())
    edit(folder, file=name)
    opened: list[str] = []
    hook_on = [True]
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" and hook_on[0] else None)
    with pytest.raises(IndexFormatError, match="'a'"):
        open_store(folder, "test")
    hook_on[0] = False
    assert all(Path(path).parent == folder for path in opened if not path.isdigit())


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "|O"}, {"dtype": "O"}, {"dtype": None}, {"shape": [-1]}, {"shape": [10**9]}, {"shape": "x"},
     {"bytes": 5}, {"shape": [True]}, {"sha256": 5}, {"build_id": "../x"}],
    ids=str,
)  # fmt: skip
def test_entries_that_make_no_sense(folder: Path, changes: dict[str, object]) -> None:
    edit(folder, **changes)
    with pytest.raises(IndexFormatError):
        open_store(folder, "test")


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "{}", "{" * 100_000, "\x80", '{"format": "retrodraft-index"}',
     '{"format": "retrodraft-index", "version": 1, "kind": "test", "build_id": "", "info": {}, "files": {"a": 1}}'],
    ids=range(8),
)  # fmt: skip
def test_manifests_that_are_none(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(text)
    with pytest.raises(IndexFormatError):
        open_store(folder, "test")


def test_wrong_version_kind_and_place(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(IndexFormatError, match="kind 'test'"):
        CorpusIndex.open(folder)
    manifest = manifest_of(folder)
    (folder / MANIFEST).write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(IndexFormatError, match="version 99"):
        open_store(folder, "test")
    for path in (tmp_path / "nothing", folder / MANIFEST, tmp_path):
        with pytest.raises(IndexFormatError):
            open_store(path, "test")


def test_links_and_pipes_are_not_opened(folder: Path, tmp_path: Path) -> None:
    """O23: a link inside the store that points out, a pipe in place of a file."""
    path = next(folder.glob("a.*"))
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(IndexFormatError, match="not a regular file"):
        open_store(folder, "test")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(IndexFormatError, match="not a regular file"):
        open_store(folder, "test")
    path.unlink()
    with pytest.raises(IndexFormatError, match="missing"):
        open_store(folder, "test")
    (folder / LOCK).unlink()
    (folder / LOCK).symlink_to(tmp_path / "victim")
    with pytest.raises(IndexFormatError, match="link"):
        save(folder, 3)
    assert not (tmp_path / "victim").exists()


class Marker:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    """O23: no file holds a pickle, and one that is put in its place does not run."""
    corpus, ngram = tmp_path / "corpus", tmp_path / "ngram"
    CorpusIndex.build([[1, 2, 3]], corpus)
    store = NgramStore()
    store.add([1, 2, 3])
    store.save(ngram)
    marker = tmp_path / "marker"
    for folder, opener in ((corpus, CorpusIndex.open), (ngram, NgramStore.open)):
        for path in folder.iterdir():
            whole = path.read_bytes()
            with pytest.raises(Exception):  # noqa: B017 any error will do: it is not a pickle
                pickle.loads(whole)
            path.write_bytes(pickle.dumps(Marker(marker)))
            if path.name != LOCK:
                with pytest.raises(IndexFormatError):
                    opener(folder)
            path.write_bytes(whole)
    assert not marker.exists()


def test_other_peoples_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="thesis.txt"):
        save(tmp_path, 1)
    with pytest.raises(ValueError, match="is a file"):
        save(tmp_path / "thesis.txt", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("text", ['{"name": "a browser extension"}', '{"files": "retrodraft"}', ""])
def test_foreign_manifests_are_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match="not the manifest of a store"):
        save(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST] and (tmp_path / MANIFEST).read_text() == text


@pytest.mark.parametrize("damage", ["version", "cut", "entry"])
def test_what_cannot_be_read_stays_until_it_is_replaced(folder: Path, damage: str) -> None:
    """A newer version's store is not emptied by a build that fails, and "build it anew" can be done in place."""
    manifest = manifest_of(folder)
    text = json.dumps({**manifest, "version": 99})
    if damage == "entry":
        text = json.dumps({**manifest, "files": {"a": 1}})
    (folder / MANIFEST).write_text(text[:150] if damage == "cut" else text)
    names = sorted(os.listdir(folder))
    with pytest.raises(RuntimeError), writing(folder):
        raise RuntimeError
    assert sorted(os.listdir(folder)) == names
    save(folder, 5)
    assert check(folder, full=True) == 5 and len(os.listdir(folder)) == 5


def test_a_first_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("mine", "new", "new"):
        with pytest.raises(RuntimeError), writing(tmp_path / name) as writer:
            writer.add("a", np.zeros(3, np.int32))
            raise RuntimeError
    assert os.listdir(tmp_path) == ["mine"] and os.listdir(tmp_path / "mine") == []
    save(tmp_path / "new", 1)
    assert check(tmp_path / "new") == 1


def test_writers_wait_through_failures_of_others(tmp_path: Path) -> None:
    """The folder of a failed first save vanishes while others wait for its lock; each is still alone in it."""
    busy, crowds = [0], []

    def fail(number: int) -> None:
        with suppress(RuntimeError), writing(tmp_path / "store") as writer:
            busy[0] += 1
            crowds.append(busy[0])
            writer.add("a", np.full(10, number, np.int32))
            time.sleep(0.01)
            busy[0] -= 1
            raise RuntimeError

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fail, range(48)))
    assert crowds == [1] * 48 and list(tmp_path.rglob("*")) in ([], [tmp_path / "store"])


def test_killed_writers(folder: Path) -> None:
    """O22: killed at any time while it saves: the old store or the new one, whole; the next save tidies up."""
    rng = random.Random(0)
    for _ in range(50):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), "2", "300000", "60"], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(rng.random() * 0.03)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert check(folder) >= 1
    save(folder, 3)
    assert check(folder, full=True) == 3
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 5 and names[0] == LOCK and names[4] == MANIFEST


def killed_at_every_point(operation: Callable[[], object], check: Callable[[], object]) -> int:
    """Let forked children die at each of the calls that touch the disk in turn, until one ends; how many died."""
    for number in itertools.count():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking beside other threads
            child = os.fork()
        if child == 0:
            left = [number]

            def dying(function: Callable[..., object], left: list[int] = left) -> Callable[..., object]:
                def call(*arguments: object, **options: object) -> object:
                    left[0] -= 1
                    return os._exit(9) if left[0] < 0 else function(*arguments, **options)

                return call

            try:
                os.fsync = dying(lambda descriptor: None)  # type: ignore[assignment]
                os.replace, os.unlink = dying(os.replace), dying(os.unlink)  # type: ignore[assignment]
                Path.unlink = dying(Path.unlink)  # type: ignore[assignment, method-assign]
                operation()
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9)
        check()
        if code == 0:
            return number
    raise AssertionError


def test_corpora_survive_a_death_at_any_point(tmp_path: Path) -> None:
    """O22: build, add, compact and merge, killed at each file that they write, name or remove: old or new."""
    texts = {number: [[number, 1, 2, 3]] * 2 for number in range(9)}
    CorpusIndex.build(texts[8], tmp_path / "warm").extend(texts[8])  # compiles before the forks

    def held(name: str) -> list[list[int]]:
        corpus = CorpusIndex.open(tmp_path / name, check=True)
        assert corpus.find([1, 2]).count == corpus.num_documents
        return [list(map(int, document.token_ids)) for document in corpus.documents()]

    def one_of(name: str, *contents: list[list[int]]) -> None:
        assert held(name) in contents

    old, more = texts[0] + texts[1], texts[0] + texts[1] + texts[2]

    def fresh() -> None:
        CorpusIndex.build(texts[0], tmp_path / "a").extend(texts[1])

    def nothing_or(content: list[list[int]]) -> None:
        if (tmp_path / "new" / MANIFEST).exists():
            one_of("new", content)
        else:
            with pytest.raises(IndexFormatError):
                CorpusIndex.open(tmp_path / "new")

    fresh()
    corpus = CorpusIndex.open(tmp_path / "a")
    deaths = [
        killed_at_every_point(lambda: corpus.compact(), lambda: one_of("a", old)),
        killed_at_every_point(lambda: CorpusIndex.build(texts[3], tmp_path / "new"), lambda: nothing_or(texts[3])),
        killed_at_every_point(
            lambda: CorpusIndex.merge([tmp_path / "a", tmp_path / "warm"], tmp_path / "new"),
            lambda: one_of("new", texts[3], old + texts[8] * 2),
        ),
        killed_at_every_point(lambda: CorpusIndex.build(texts[3], tmp_path / "a"), lambda: one_of("a", old, texts[3])),
    ]
    fresh()
    added: list[int] = []

    def grown() -> None:
        added.append(len(held("a")) - len(old))
        assert added[-1] in (0, 2) and held("a") == (more if added[-1] else old)
        if added[-1]:
            fresh()

    deaths.append(killed_at_every_point(lambda: CorpusIndex.open(tmp_path / "a").extend(texts[2]), grown))
    assert min(deaths) >= 8 and {0, 2} == set(added)
    CorpusIndex.build(texts[4], tmp_path / "a")
    assert len(list((tmp_path / "a").glob("*.bin"))) == 6 and held("a") == texts[4]


def test_adding_and_compacting_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """O22: of everything that is added while others add and compact, nothing is lost, and nothing is in twice."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    CorpusIndex.build([[9, 9]], tmp_path / "a")

    def work(number: int) -> None:
        corpus = CorpusIndex.open(tmp_path / "a")
        for step in range(6):
            if number == 3:
                corpus.compact()
            else:
                corpus.extend([[100 + 10 * number + step, 7]])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    corpus = CorpusIndex.open(tmp_path / "a", check=True)
    firsts = sorted(int(document.token_ids[0]) for document in corpus.documents())
    assert firsts == [9] + [100 + 10 * number + step for number in range(3) for step in range(6)]


def test_four_writers_and_a_reader(folder: Path) -> None:
    """O22: nobody crashes, and the reader never sees a mixture."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(value), "20000", "2.5"], stderr=subprocess.PIPE
        )
        for value in (10, 1001, 2002, 3003)
    ]
    seen = set()
    while any(child.poll() is None for child in children):
        seen.add(check(folder))
    for child in children:
        assert child.wait() == 0, child.stderr and child.stderr.read()
        assert child.stderr is not None
        child.stderr.close()
    assert len(seen) > 3
    assert len(list(folder.glob("*.bin"))) == 3


def test_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save(folder, 2)
    monkeypatch.undo()
    assert check(folder, full=True) == 1
    assert len(list(folder.iterdir())) == 5


def test_fingerprints() -> None:
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    def make(merges: list[tuple[str, str]], added: str) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, merges))
        tokenizer.add_special_tokens([AddedToken(added)])
        return tokenizer

    base = tokenizer_fingerprint(make([("a", "b")], "<end>"))
    assert tokenizer_fingerprint(Tokenizer.from_str(make([("a", "b")], "<end>").to_str())) == base
    wrapped = PreTrainedTokenizerFast(tokenizer_object=make([("a", "b")], "<end>"), model_max_length=7)
    assert tokenizer_fingerprint(wrapped) == base
    others = {tokenizer_fingerprint(make([], "<end>")), tokenizer_fingerprint(make([("a", "b")], "<stop>"))}
    assert len(others | {base}) == 3
    twin = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    plain = tokenizer_fingerprint(twin)
    twin.add_special_tokens([AddedToken("b")])  # the vocabulary stays, the text "b" is never merged any more
    assert tokenizer_fingerprint(twin) != plain

    class Written:
        """A tokenizer as another version writes it."""

        def __init__(self, merges: list[object]) -> None:
            self.state = json.dumps({"model": {"merges": merges}, "added_tokens": []})

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1, "ab": 2}

        def to_str(self) -> str:
            return self.state

    assert tokenizer_fingerprint(Written(["a b"])) == tokenizer_fingerprint(Written([["a", "b"]])) == plain
    with pytest.raises(ValueError, match="int"):
        tokenizer_fingerprint(5)
