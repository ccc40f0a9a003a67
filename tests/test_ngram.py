"""The n-gram table against plain counting, and what happens when it is full."""

from __future__ import annotations

import json
import tempfile
import threading
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrodraft.index import IndexFormatError, NgramStore
from retrodraft.index.corpus import CorpusIndex

texts = st.lists(st.integers(-1, 3), max_size=60)


def counted(text: list[int], max_order: int) -> dict[tuple[int, ...], Counter[int]]:
    table: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for i in range(1, len(text)):
        for n in range(1, min(max_order, i) + 1):
            context = tuple(text[i - n : i])
            if min(context) >= 0 and text[i] >= 0:
                table[context][text[i]] += 1
    return table


def assert_counts(store: NgramStore, expected: dict[tuple[int, ...], Counter[int]]) -> None:
    assert len(store) == len(expected)
    for context, tokens in expected.items():
        order, found = store.candidates(list(context), k=8)
        assert order == len(context)
        assert dict(found) == tokens
        assert [count for _, count in found] == sorted(tokens.values(), reverse=True)


@given(texts, st.integers(1, 8), st.integers(0, 60))
@settings(max_examples=150, deadline=None)
def test_counts(text: list[int], max_order: int, cut: int) -> None:
    """Learned at once or as it grows, the counts are those of the text."""
    expected = counted(text, max_order)
    store = NgramStore(max_order=max_order, slots=4096, width=8)
    store.add(text)
    assert_counts(store, expected)
    grown = NgramStore(max_order=max_order, slots=4096, width=8)
    grown.add(text[:cut])
    overlap = text[:cut][-max_order:]
    grown.add(overlap + text[cut:], start=len(overlap))
    assert_counts(grown, expected)


@given(texts, texts)
@settings(max_examples=50, deadline=None)
def test_merge_and_persistence(first: list[int], second: list[int]) -> None:
    one, two = (NgramStore(max_order=3, slots=1024, width=8) for _ in range(2))
    one.add(first)
    two.add(second)
    two.merge(one)
    expected = counted(first, 3)
    for context, tokens in counted(second, 3).items():
        expected[context] += tokens
    assert_counts(two, expected)
    with tempfile.TemporaryDirectory() as folder:
        two.save(Path(folder, "s"))
        loaded = NgramStore.open(Path(folder, "s"), check=True)
    assert (loaded.max_order, loaded.slots, loaded.width) == (3, 1024, 8)
    assert_counts(loaded, expected)


def test_longest_known_order_answers() -> None:
    store = NgramStore(max_order=4)
    store.add([1, 2, 3, 4, 9, 3, 5])
    assert store.candidates([7, 8, 3]) == (1, [(4, 1), (5, 1)])
    assert store.candidates([1, 2, 3]) == (3, [(4, 1)])
    assert store.candidates([8]) == store.candidates([]) == store.candidates([-1]) == (0, [])
    assert store.candidates([3, -1]) == (0, []) and store.candidates([-1, 3])[0] == 1
    assert store.candidates([3], k=1) == (1, [(4, 1)]) and store.candidates([3], k=0) == (1, [])
    with pytest.raises(ValueError, match="k must be at least 0, got -1"):
        store.candidates([3], -1)


def test_a_border_is_not_crossed() -> None:
    store = NgramStore(max_order=2)
    store.add([1, -1, 2])
    assert len(store) == 0


def test_memory_is_bounded_and_the_frequent_survives() -> None:
    """O16: a million random tokens pass; the size stays, what is frequent stays, what was seen lately is known."""
    store = NgramStore(max_order=3, slots=1 << 12, width=4)
    size = store.nbytes
    rng = np.random.default_rng(0)
    phrase = [1, 2, 3, 4, 5]
    for _ in range(200):
        store.add(phrase * 40)
        store.add(rng.integers(100, 50_000, 5000))
        assert store.nbytes == size and len(store) <= store.slots * 3 // 4
    assert store.candidates([2, 3, 4])[1][0][0] == 5
    store.add([7, 8, 9, 10])
    assert store.candidates([7, 8, 9]) == (3, [(10, 1)])


def test_a_full_row_keeps_what_is_frequent() -> None:
    store = NgramStore(max_order=1, width=2)
    store.add([1, 2] * 50 + [1, 3] * 20)
    for other in range(10, 40):
        store.add([1, other])
    assert store.candidates([1])[1][0][0] == 2
    assert len(store.candidates([1])[1]) == 2


def test_a_full_row_takes_a_merged_count_off_the_smallest() -> None:
    """Counts are never too large: what a newcomer displaces is taken off it."""
    store, other = NgramStore(max_order=1, width=2), NgramStore(max_order=1, width=2)
    store.add([1, 2] * 30)
    store.add([1, 3] * 4)
    other.add([1, 4] * 10)
    store.merge(other)
    assert store.candidates([1]) == (1, [(2, 30), (4, 6)])


def test_counts_saturate() -> None:
    store = NgramStore(max_order=1, width=2)
    store.add([1] * 200_000 + [2])
    order, found = store.candidates([1])
    assert found[0][0] == 1 and 30_000 < found[0][1] <= 65_535
    twin = NgramStore(max_order=1, width=2)
    twin.merge(store)
    twin.merge(store)
    assert 30_000 < twin.candidates([1])[1][0][1] <= 65_535


def test_halving() -> None:
    store = NgramStore(max_order=1)
    store.add([1, 2, 1, 2, 1, 3])
    store.halve()
    assert store.candidates([1]) == (1, [(2, 1)])
    assert store.candidates([2]) == (1, [(1, 1)]) and len(store) == 2
    store.halve()
    assert len(store) == 0
    store.add([1, 2])
    store.reset()
    assert len(store) == 0


@pytest.mark.parametrize(
    "options", [{"max_order": 0}, {"max_order": 9}, {"slots": 0}, {"slots": 100}, {"slots": -1}, {"slots": 1 << 40},
                {"width": 0}, {"width": 65}], ids=str,
)  # fmt: skip
def test_sizes_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        NgramStore(**options)


def test_files_of_something_else(tmp_path: Path) -> None:
    CorpusIndex.build([[1]], tmp_path / "c")
    with pytest.raises(IndexFormatError, match="corpus"):
        NgramStore.open(tmp_path / "c")
    store = NgramStore(slots=64, width=2)
    store.save(tmp_path / "s")
    manifest = tmp_path / "s" / "manifest.json"
    text = manifest.read_text()
    matrix = json.loads(text)
    matrix["files"]["hashes"]["shape"] = [0, 2]
    manifest.write_text(json.dumps(matrix))
    with pytest.raises(IndexFormatError, match="not those of an n-gram table"):
        NgramStore.open(tmp_path / "s")
    for old, new in (('"width": 2', '"width": 3'), ('"slots": 64', '"slots": 63'), 
                     ('"max_order": 4', '"max_order": "4"'),
                     ('"hashes":', '"hash":')):  # fmt: skip
        manifest.write_text(text.replace(old, new))
        with pytest.raises(IndexFormatError):
            NgramStore.open(tmp_path / "s")


def test_saving_while_others_learn(tmp_path: Path) -> None:
    """O24: threads share a store; what is saved meanwhile is whole."""
    store = NgramStore(max_order=2, slots=1 << 14)
    rng = np.random.default_rng(0)
    blocks = [rng.integers(0, 500, 2000) for _ in range(40)]
    threads = [
        threading.Thread(target=lambda part=part: [store.add(b) for b in part]) for part in (blocks[::2], blocks[1::2])
    ]
    for thread in threads:
        thread.start()
    for _ in range(5):
        store.save(tmp_path / "s")
        NgramStore.open(tmp_path / "s", check=True)
    for thread in threads:
        thread.join()
    serial = NgramStore(max_order=1, slots=1 << 14)
    for block in blocks:
        serial.add(block)
    assert store.candidates([int(blocks[0][0])])[0] == serial.candidates([int(blocks[0][0])])[0] == 1
