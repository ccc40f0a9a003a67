"""The format on disk: damaged, foreign and hostile folders, and writers that fail."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from stored import check, save

from retrodraft.index.corpus import CorpusIndex
from retrodraft.index.fingerprint import tokenizer_fingerprint
from retrodraft.index.ngram import NgramStore
from retrodraft.index.storage import LOCK, MANIFEST, IndexFormatError, open_store, writing


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
     {"shape": [0, *[1] * 70], "bytes": 64}, {"shape": [0, 1 << 47, 1 << 47], "bytes": 64},
     {"shape": [0] * 9, "bytes": 64}, {"bytes": 5}, {"shape": [True]}, {"sha256": 5}, {"build_id": "../x"}],
    ids=str,
)  # fmt: skip
def test_entries_that_make_no_sense(folder: Path, changes: dict[str, object]) -> None:
    edit(folder, **changes)
    with pytest.raises(IndexFormatError, match="entry 'a'"):
        open_store(folder, "test")


@pytest.mark.parametrize("order", ["big", None, 1])
def test_another_byte_order(folder: Path, order: object) -> None:
    (folder / MANIFEST).write_text(json.dumps({**manifest_of(folder), "byte_order": order}))
    with pytest.raises(IndexFormatError, match=f"byte order {order!r}"):
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


@pytest.mark.parametrize("anonymous_files", [True, False])
def test_writers_wait_through_failures_of_others(
    anonymous_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a failed first save vanishes while others wait for its lock; each is still alone in it.

    Where a file system has no anonymous files, filelock tries it out with a named one, which others may see.
    """
    if not anonymous_files:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
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


def test_files_of_the_lock_are_not_foreign(tmp_path: Path) -> None:
    left = tmp_path / "store" / f".filelock-probe-{'0a' * 16}"
    left.parent.mkdir()
    left.touch()
    save(tmp_path / "store", 1)
    assert check(tmp_path / "store") == 1 and not left.exists()


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
