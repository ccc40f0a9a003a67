"""Stores under writers that are killed, that run out of disk, or that write at the same time."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from stored import check, save

from retrodraft.index.corpus import CorpusIndex
from retrodraft.index.storage import LOCK, MANIFEST, IndexFormatError

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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "store", 1)
    return tmp_path / "store"


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
