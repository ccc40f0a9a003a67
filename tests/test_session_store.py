"""Saved sessions: names, refusals, damage, pruning, and several processes at once."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from retrodraft.index.storage import LOCK, MANIFEST, IndexFormatError, writing
from retrodraft.sessions.saved import (
    inspect_session,
    list_sessions,
    load_session,
    prune_sessions,
    remove_session,
    save_session,
    sessions_folder,
)

WORKER = """
import random, sys, time
import numpy as np
from retrodraft.sessions.saved import *
root, namespace, name, what, value, size, seconds = *sys.argv[1:6], int(sys.argv[6]), float(sys.argv[7])
value = int(value)
end = time.monotonic() + seconds
print("ready", flush=True)
rounds = 0
while rounds == 0 or time.monotonic() < end:
    if what == "save":
        arrays = {key: np.full(size, value, np.int32) for key in ("a", "b", "c")}
        save_session(root, namespace, name, arrays, {
            "model_id": "m", "tokenizer_fingerprint": "f", "turns": value, "value": value})
        value += 4
    elif what == "remove":
        remove_session(root, namespace, name)
        time.sleep(random.random() * 0.05)
    elif what == "prune":
        prune_sessions(root, max_bytes=0)
        time.sleep(random.random() * 0.05)
    elif what == "list":
        assert not [record for record in list_sessions(root) if record.problem], list_sessions(root)
    elif what == "load":
        found = load_session(root, namespace, name, "f", "m")
        if found is not None:
            arrays, info = found
            assert all(array.min() == array.max() == info["value"] for array in arrays.values())
    rounds += 1
print(rounds, flush=True)
"""


def save(root: Path, name: str = "s", value: int = 1, namespace: str = "n", size: int = 1000, **info: Any) -> Path:
    arrays = {key: np.full(size, value, np.int32) for key in ("a", "b", "c")}
    facts = {"model_id": "m", "tokenizer_fingerprint": "f", "turns": value, "value": value, **info}
    return save_session(root, namespace, name, arrays, facts).path


def value_of(root: Path, name: str = "s", namespace: str = "n") -> int | None:
    """The value that the whole session agrees on; None if there is none."""
    found = load_session(root, namespace, name, "f", "m")
    if found is None:
        return None
    arrays, info = found
    assert sorted(arrays) == ["a", "b", "c"]
    assert all(array.min() == array.max() == info["value"] for array in arrays.values())
    return int(info["value"])


def used(folder: Path, days_ago: float) -> None:
    moment = time.time() - days_ago * 86_400
    os.utime(folder / MANIFEST, (moment, moment))


def worker(root: Path, what: str, seconds: float, value: int = 0, size: int = 5000, name: str = "s") -> Any:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(root), "n", name, what, str(value), str(size), str(seconds)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_round_trip(tmp_path: Path) -> None:
    root = tmp_path / "new" / "sessions"
    assert load_session(root, "n", "s", "f", "m") is None and list_sessions(root) == []
    arrays = {
        "tokens": np.arange(7, dtype=np.int32), "rates": np.ones((2, 3), np.float32), "empty": np.zeros(0, np.uint8)
    }  # fmt: skip
    info = {"model_id": "m", "tokenizer_fingerprint": "f", "turns": 3, "nested": {"é": [1, None, True, "\n"]}}
    save_session(root, "n", "s", arrays, info)
    found = load_session(root, "n", "s", "f", "m")
    assert found is not None and found[1] == info
    for name, array in arrays.items():
        assert np.array_equal(found[0][name], array) and found[0][name].dtype == array.dtype
        assert not found[0][name].flags.writeable
    save(root, value=5)
    assert value_of(root) == 5 and found[0]["tokens"][6] == 6  # what was loaded before stays as it was
    assert root.stat().st_mode & 0o077 == 0  # others' conversations are private
    assert load_session(root, "other", "s", "f", "m") is None
    assert load_session(root, "n", "S", "f", "m") is None


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/", "\0", ".", "a\nb", "Zoë 😀", "e\u0301", "\u00e9", "CON", " ", "x" * 200, "%s{0}"],
    ids=range(12),
)  # fmt: skip
def test_any_text_is_a_name(tmp_path: Path, name: str) -> None:
    root = tmp_path / "sessions"
    save(root, name, 1, namespace="n")
    save(root, "n", 2, namespace=name)
    assert value_of(root, name, "n") == 1 and value_of(root, "n", name) == 2
    assert {(record.namespace, record.name) for record in list_sessions(root)} == {("n", name), (name, "n")}
    assert [record.name for record in list_sessions(root, name)] == ["n"]
    assert [path.name for path in tmp_path.iterdir()] == ["sessions"]
    for path in root.rglob("*"):
        assert path.is_relative_to(root) and path.name.isascii()
    assert remove_session(root, "n", name) and not remove_session(root, "n", name)
    assert value_of(root, name, "n") is None and value_of(root, "n", name) == 2


def test_names_and_info_that_are_refused(tmp_path: Path) -> None:
    for name in ("", "x" * 201, "\ud800", None, 5, b"s"):
        with pytest.raises(ValueError, match="session name"):
            save(tmp_path, name)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="namespace"):
            load_session(tmp_path, name, "s", "f", "m")  # type: ignore[arg-type]
    for info in ({"x": float("nan")}, {"x": object()}, {"x": b""}, {"x": np.float32(1)}):
        with pytest.raises(ValueError, match="is not JSON"):
            save(tmp_path, **info)
    for key in ("model_id", "tokenizer_fingerprint"):
        for value in (None, "", 5):
            with pytest.raises(ValueError, match=key):
                save(tmp_path, **{key: value})
    facts = {"model_id": "m", "tokenizer_fingerprint": "f"}
    for array_name in ("../x", "", "A", "a" * 101, "manifest.json"):
        with pytest.raises(ValueError, match="a name is"):
            save_session(tmp_path, "n", "s", {array_name: np.zeros(1, np.int32)}, facts)
    with pytest.raises(ValueError, match="stores hold"):
        save_session(tmp_path, "n", "s", {"a": np.array([None])}, facts)
    assert list_sessions(tmp_path) == [] and value_of(tmp_path) is None


def test_other_models_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, model_id="big/model-7b")
    with pytest.raises(IndexFormatError, match="'s' was saved with model 'big/model-7b', not 'small'"):
        load_session(tmp_path, "n", "s", "f", "small")
    with pytest.raises(IndexFormatError, match="another tokenizer .of model 'big/model-7b', fingerprint f"):
        load_session(tmp_path, "n", "s", "0123", "big/model-7b")
    with pytest.raises(IndexFormatError, match="remove it first: session 's' was saved with model 'big/model-7b'"):
        save(tmp_path, value=2)
    assert list_sessions(tmp_path)[0].model == "big/model-7b"
    remove_session(tmp_path, "n", "s")
    save(tmp_path, value=2)
    assert value_of(tmp_path) == 2


def test_a_session_is_bound_to_its_name_and_namespace(tmp_path: Path) -> None:
    """A folder that is moved into another namespace is not loaded there."""
    mine = save(tmp_path, "s", 1, namespace="mine")
    other = save(tmp_path, "s", 2, namespace="other")
    shutil.rmtree(mine)
    shutil.copytree(other, mine)
    with pytest.raises(IndexFormatError, match="holds another session"):
        load_session(tmp_path, "mine", "s", "f", "m")
    with pytest.raises(IndexFormatError, match="remove it first"):
        save(tmp_path, "s", 3, namespace="mine")
    assert [record.problem for record in list_sessions(tmp_path, "mine")] == [
        f"{mine} was moved here from another session"
    ]
    assert remove_session(tmp_path, "mine", "s") and value_of(tmp_path, "s", "other") == 2


def test_damage_is_named_and_can_be_removed(tmp_path: Path) -> None:
    """O22, O23: each file cut, changed by a bit, or replaced by a pickle: an error with the file, never less data."""

    class Marker:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "marker",)

    root = tmp_path / "sessions"
    folder = save(root)
    for path in sorted(path for path in folder.iterdir() if path.name != LOCK):
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[-2] ^= 64
        for data in (whole[:0], whole[:1], whole[: len(whole) // 2], whole[:-1], flipped, pickle.dumps(Marker())):
            path.write_bytes(data)
            if path.name == MANIFEST and data is flipped and json.loads(whole) == _parsed(data):
                continue
            with pytest.raises(IndexFormatError, match=folder.name):
                load_session(root, "n", "s", "f", "m")
        path.write_bytes(whole)
    assert value_of(root) == 1 and not (tmp_path / "marker").exists()

    (folder / MANIFEST).write_text("{")
    record = list_sessions(root)[0]
    assert record.name == "" and "not the manifest" in record.problem and record.bytes > 12_000
    with pytest.raises(IndexFormatError, match="remove it first"):
        save(root)
    assert remove_session(root, "n", "s") and save(root).exists()
    for facts in ({}, {"info": 5}, {"info": {}, "name": 5, "namespace": "n"}, {"info": {}, "name": "\ud800"}):
        with writing(folder) as writer:
            writer.commit("session", facts)
        assert list_sessions(root)[0].problem
        with pytest.raises(IndexFormatError):
            load_session(root, "n", "s", "f", "m")
    with writing(folder) as writer:
        writer.commit("corpus", {})
    with pytest.raises(IndexFormatError, match="kind 'corpus'"):
        load_session(root, "n", "s", "f", "m")


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def test_links_lead_nowhere(tmp_path: Path) -> None:
    """O23: a link in place of a folder, a file or a lock; nothing outside is read, written or removed."""
    root, outside = tmp_path / "sessions", tmp_path / "outside"
    folder = save(root)
    shutil.copytree(folder.parent, outside)
    before = sorted((path, path.stat().st_size) for path in outside.rglob("*"))

    array = next(folder.glob("a.*"))
    array.unlink()
    array.symlink_to(outside / folder.name / array.name)
    with pytest.raises(IndexFormatError, match="not a regular file"):
        load_session(root, "n", "s", "f", "m")
    assert remove_session(root, "n", "s")

    for link, target in ((folder, outside / folder.name), (folder.parent, outside)):
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_dir():
            link.rmdir()
        link.symlink_to(target)
        for action in (save, value_of):
            with pytest.raises(IndexFormatError, match="is a link"):
                action(root)
        with pytest.raises(IndexFormatError, match="is a link"):
            remove_session(root, "n", "s")
        assert list_sessions(root) == [] and list_sessions(root, "n") == [] and prune_sessions(root, 0, 0) == []
        link.unlink()
    lock = root / f"{folder.parent.name}.lock"
    lock.unlink()
    lock.symlink_to(tmp_path / "victim")
    with pytest.raises(IndexFormatError, match="is a link"):
        save(root)
    assert not (tmp_path / "victim").exists()
    assert sorted((path, path.stat().st_size) for path in outside.rglob("*")) == before


def test_foreign_files_stay(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("mine")
    assert [record.name for record in list_sessions(tmp_path)] == ["s"]
    assert [record.name for record in prune_sessions(tmp_path, max_bytes=0)] == ["s"]
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert (tmp_path / "thesis" / "text").read_text() == "mine"


def test_listing(tmp_path: Path) -> None:
    folders = {name: save(tmp_path, name, turns, namespace) for name, turns, namespace in
               (("old", 1, "n"), ("new", 2, "n"), ("else", 3, "o"))}  # fmt: skip
    for days, name in enumerate(("new", "else", "old")):
        used(folders[name], days)
    records = list_sessions(tmp_path)
    assert [(r.name, r.namespace, r.model, r.turns, r.problem) for r in records] == [
        ("new", "n", "m", 2, ""), ("else", "o", "m", 3, ""), ("old", "n", "m", 1, ""),
    ]  # fmt: skip
    assert [record.name for record in list_sessions(tmp_path, "n")] == ["new", "old"]
    assert list_sessions(tmp_path, "nobody") == []
    record = records[0]
    assert record.path == folders["new"] and record.bytes == sum(p.stat().st_size for p in record.path.iterdir())
    assert json.loads(json.dumps(record.as_dict()))["bytes"] == record.bytes

    inspect_session(tmp_path, "n", "old")
    load_session(tmp_path, "n", "old", "f", "m", touch=False)
    assert list_sessions(tmp_path)[0].name == "new"
    load_session(tmp_path, "n", "old", "f", "m")  # loading is a use
    assert [record.name for record in list_sessions(tmp_path)] == ["old", "new", "else"]
    save(tmp_path, "else", 4, "o")
    assert list_sessions(tmp_path)[0].name == "else"


def test_pruning(tmp_path: Path) -> None:
    names = ["a", "b", "c", "d", "e"]
    for days, name in enumerate(names):
        used(save(tmp_path, name, namespace=name), days)
    each = list_sessions(tmp_path)[0].bytes
    assert prune_sessions(tmp_path) == [] and prune_sessions(tmp_path, max_bytes=5 * each + 50) == []
    assert [record.name for record in prune_sessions(tmp_path, max_age_days=3.5)] == ["e"]
    assert [record.name for record in prune_sessions(tmp_path, max_bytes=2 * each + 50)] == ["d", "c"]
    broken = list_sessions(tmp_path, "b")[0].path
    (broken / MANIFEST).write_text("{")  # damaged ones are pruned like others
    used(broken, 9)
    assert [record.path for record in prune_sessions(tmp_path, 2 * each, 5)] == [broken]
    assert [record.name for record in list_sessions(tmp_path)] == ["a"]
    assert [record.name for record in prune_sessions(tmp_path, 0)] == ["a"]
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"] * 5
    for limits in ((-1, None), (None, -1.0), (None, float("nan")), (float("inf"), None)):
        with pytest.raises(ValueError, match="must be a number from 0"):
            prune_sessions(tmp_path, *limits)  # type: ignore[arg-type]


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RETRODRAFT_CACHE", str(tmp_path))
    assert sessions_folder() == tmp_path / "sessions"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert save(Path("~/mine")).is_relative_to(tmp_path / "mine")


def test_killed_while_saving(tmp_path: Path) -> None:
    """O22: the old session or the new one, whole; the next save tidies up."""
    rng = random.Random(0)
    started = time.monotonic()
    manifest = save(tmp_path, value=1, size=300_000) / MANIFEST
    seconds = time.monotonic() - started
    first = manifest.stat().st_ino
    for attempt in range(12):
        child = worker(tmp_path, "save", 60, value=2, size=300_000)
        child.stdout.readline()
        time.sleep(rng.random() * 2 * seconds)
        while attempt == 11 and manifest.stat().st_ino == first:  # one is killed in its second save at the earliest
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert value_of(tmp_path) is not None
    assert value_of(tmp_path) != 1
    folder = save(tmp_path, value=3)
    assert value_of(tmp_path) == 3 and len(list(folder.iterdir())) == 5


def test_killed_in_the_first_save(tmp_path: Path) -> None:
    """There is no session then, and pruning clears what is left."""
    folder = save(tmp_path)
    (folder / MANIFEST).unlink()
    assert value_of(tmp_path) is None and list_sessions(tmp_path) == []
    assert not remove_session(tmp_path, "n", "s") and not folder.exists()
    folder = save(tmp_path)
    (folder / MANIFEST).unlink()
    assert prune_sessions(tmp_path) == [] and not folder.exists()
    save(tmp_path, value=2)
    assert value_of(tmp_path) == 2


def test_processes_at_once(tmp_path: Path) -> None:
    """Savers, a reader, removers, a pruner and a lister on one session: nobody fails, nobody sees a mixture."""
    children = [worker(tmp_path, "save", 2.5, value) for value in (1000, 2001)]
    children += [worker(tmp_path, what, 2.5) for what in ("load", "list", "remove", "prune")]
    children += [worker(tmp_path, "save", 2.5, 5000, name="other")]
    rounds = []
    for child in children:
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
        rounds.append(int(out.split()[1]))
    assert sum(rounds) > 4 * len(rounds)
    save(tmp_path, value=7)
    assert value_of(tmp_path) == 7


def test_threads_at_once(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def run(value: int) -> None:
        try:
            for i in range(8):
                save(tmp_path, value=value + i)
                value_of(tmp_path)
                if value == 300:
                    remove_session(tmp_path, "n", "s")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(value,)) for value in (100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


def test_a_session_that_is_used_meanwhile_is_not_pruned(tmp_path: Path) -> None:
    """Pruning has chosen it, waits for the namespace, and looks again."""
    folder = save(tmp_path)
    used(folder, 50)
    removed: list[Any] = []
    with FileLock(str(tmp_path / f"{folder.parent.name}.lock")):
        thread = threading.Thread(target=lambda: removed.extend(prune_sessions(tmp_path, max_age_days=20)))
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        assert value_of(tmp_path) == 1  # loading needs no lock
    thread.join(60)
    assert removed == [] and value_of(tmp_path) == 1
