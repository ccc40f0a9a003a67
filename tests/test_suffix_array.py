"""Sorting and searching against brute force, over random and worst-case texts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrodraft.index.shards import sorted_positions
from retrodraft.kernels import suffix_array as kernel
from retrodraft.kernels.suffix_sorting import suffix_array

Int32 = npt.NDArray[np.int32]
texts = st.integers(0, 5).flatmap(lambda k: st.lists(st.integers(-1, k), max_size=80))


def sorted_suffixes(text: list[int]) -> list[int]:
    return sorted(range(len(text)), key=lambda start: text[start:])


def index_of(text: list[int] | Int32) -> tuple[Int32, Int32, npt.NDArray[np.int64]]:
    """The three arrays of a shard."""
    tokens = np.array(text, np.int32)
    return tokens, *sorted_positions(tokens)


def ends(text: list[int], pattern: list[int]) -> list[int]:
    """Positions of the last token of each occurrence."""
    n = len(pattern)
    return [i + n - 1 for i in range(len(text) - n + 1) if text[i : i + n] == pattern]


def fibonacci(n: int) -> list[int]:
    a, b = [0], [0, 1]
    while len(b) < n:
        a, b = b, b + a
    return b[:n]


@given(texts)
@settings(max_examples=400, deadline=None)
def test_order_is_that_of_sorting(text: list[int]) -> None:
    out = np.empty(len(text), np.int32)
    suffix_array(np.array(text, np.int32), out)
    assert out.tolist() == sorted_suffixes(text)


@pytest.mark.parametrize("text", [[3] * 500, [1, 2] * 300, [5, 4, 3] * 99 + [5], fibonacci(987), list(range(300)),
                                  list(range(300, 0, -1)), [7, -1] * 200], ids=str)  # fmt: skip
def test_order_of_regular_texts(text: list[int]) -> None:
    out = np.empty(len(text), np.int32)
    suffix_array(np.array(text, np.int32), out)
    assert out.tolist() == sorted_suffixes(text)


def test_nothing_behind_the_text_is_read() -> None:
    """Without compilation NumPy checks every index: all texts of up to seven tokens, of three kinds."""
    code = """
import itertools, numpy as np
from retrodraft.kernels.suffix_sorting import suffix_array
for size in range(8):
    for text in itertools.product(range(3 if size < 7 else 2), repeat=size):
        out = np.empty(size, np.int32)
        suffix_array(np.array(text, np.int32), out)
        assert out.tolist() == sorted(range(size), key=lambda start: text[start:]), text
"""
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_order_of_a_larger_text_is_checked_in_linear_time() -> None:
    """A permutation in which neighbours are ordered by first token, then by the rank of what follows, is the order."""
    rng = np.random.default_rng(0)
    text = np.concatenate([rng.zipf(1.4, 4000).clip(max=60_000) for _ in range(5)] * 8).astype(np.int32)
    out = np.empty(len(text), np.int32)
    suffix_array(text, out)
    rank = np.full(len(text) + 1, -1)
    rank[out] = np.arange(len(text))
    assert sorted(out.tolist()) == list(range(len(text)))
    first, second = text[out[:-1]], text[out[1:]]
    assert np.all((first < second) | ((first == second) & (rank[out[:-1] + 1] < rank[out[1:] + 1])))


@given(texts, st.lists(st.integers(0, 5), max_size=20))
@settings(max_examples=300, deadline=None)
def test_longest_match_and_all_shorter_ones(text: list[int], context: list[int]) -> None:
    tokens, order, keys = index_of(text)
    query = np.array(context, np.int32)
    length, left, right = kernel.longest_match(tokens, order, keys, query, len(query))
    expected = next((n for n in range(len(context), 0, -1) if ends(text, context[-n:])), 0)
    assert length == expected
    lengths = [n for n in range(1, length + 1) if len(ends(text, context[-n:])) > len(ends(text, context[-n - 1 :]))
               or n == length]  # fmt: skip
    while length:
        assert length == lengths.pop()
        places = ends(text, context[-length:])
        assert sorted(order[left:right].tolist()) == places
        assert kernel.find(tokens, order, keys, query, len(query), length) == (left, right)
        length, left, right = kernel.widen(tokens, order, keys, query, len(query), left, right)
    assert not lengths and (left, right) == (0, len(text))


@given(texts, st.lists(st.integers(0, 5), max_size=8))
@settings(max_examples=200, deadline=None)
def test_finding_what_may_not_occur(text: list[int], pattern: list[int]) -> None:
    tokens, order, keys = index_of(text)
    left, right = kernel.find(tokens, order, keys, np.array(pattern, np.int32), len(pattern), len(pattern))
    places = ends(text, pattern) if pattern else list(range(len(text)))
    assert sorted(order[left:right].tolist()) == places


@given(texts, st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_candidates_have_exact_counts(text: list[int], context: list[int], k: int) -> None:
    tokens, counts = np.empty(k, np.int32), np.empty(k, np.int32)
    query = np.array(context, np.int32)
    length, total, found = kernel.corpus_candidates(*index_of(text), query, len(query), tokens, counts)
    followers: dict[int, Counter[int]] = {
        n: Counter(t for p in ends(text, context[-n:]) if p + 1 < len(text) and (t := text[p + 1]) >= 0)
        for n in range(1, len(context) + 1)
    }
    expected = max((n for n in followers if followers[n]), default=0)
    assert length == expected
    if length:
        assert total == len(ends(text, context[-length:]))
        assert found == min(k, len(followers[length]))
        got = dict(zip(tokens[:found].tolist(), counts[:found].tolist(), strict=True))
        assert all(followers[length][token] == count for token, count in got.items())
        assert sorted(got.values()) == sorted(followers[length].values())[-found:]


def test_counts_of_many_occurrences_are_fair() -> None:
    """What follows early in the order does not win: a sample over the whole interval is counted."""
    rng = np.random.default_rng(0)
    text: list[int] = []
    for _ in range(20_000):
        before = int(rng.integers(10, 500))
        text += [before, 1, 2 if before >= 157 else 3]  # all 3 lie first in the order
    tokens, counts = np.empty(8, np.int32), np.empty(8, np.int32)
    length, total, found = kernel.corpus_candidates(*index_of(text), np.array([9, 1], np.int32), 2, tokens, counts)
    assert (length, total, found) == (1, 20_000, 2)
    assert tokens[:2].tolist() == [2, 3] and abs(counts[0] / total - 0.7) < 0.15


def test_matches_are_bounded() -> None:
    """However much agrees, MAX_MATCH tokens are looked at; two places that agree in so many are one match."""
    text = list(range(100, 300))
    arrays = index_of([1, *text, 2, *text, 3])
    query = np.array(text, np.int32)
    assert kernel.longest_match(*arrays, query, len(query))[0] == kernel.MAX_MATCH
    length, left, right = kernel.longest_match(*arrays, query, len(query))
    assert right - left == 2 and kernel.widen(*arrays, query, len(query), left, right)[0] == 0
    assert kernel.longest_match(*arrays, query[: kernel.MAX_MATCH - 1], kernel.MAX_MATCH - 1)[0] == length - 1


def test_contexts_outside_the_vocabulary_match_nothing() -> None:
    arrays = index_of([1, 2, -1, 1, 2, 3])
    for context, expected in (([-1], 0), ([1, 2], 2), ([-1, 1, 2], 2), ([2, -1], 0), ([1 << 22], 0), ([1 << 22, 2], 1)):
        query = np.array(context, np.int32)
        assert kernel.longest_match(*arrays, query, len(query))[0] == expected, context


def test_damaged_order_reads_nothing_outside() -> None:
    tokens, order, keys = index_of(list(range(100)) * 3)
    order[::3] = 2**31 - 1
    order[1::3] = -5
    out = np.empty(8, np.int32)
    for token in range(100):
        kernel.corpus_candidates(tokens, order, keys, np.array([token - 1, token], np.int32), 2, out, out.copy())


WORST = {
    "one token": lambda n: np.zeros(n, np.int32),
    "two tokens": lambda n: np.tile(np.array([1, 2], np.int32), n // 2),
    "fibonacci": lambda n: np.array(fibonacci(n), np.int32),
    "equal files": lambda n: np.tile(np.random.default_rng(0).integers(0, 999, 2000).astype(np.int32), n // 2000),
    "tiny documents": lambda n: np.where(np.arange(n) % 4 == 3, -1, np.arange(n) * 7919 % 1009).astype(np.int32),
    "random": lambda n: np.random.default_rng(0).integers(0, 49_000, n).astype(np.int32),
}


@pytest.mark.parametrize("name", WORST)
def test_worst_cases_are_linear(name: str) -> None:
    """O17: four times the text takes at most 2.5 times as long a token."""
    suffix_array(np.zeros(10, np.int32), np.empty(10, np.int32))
    seconds = []
    for n in (200_000, 800_000):
        text = WORST[name](n)
        out = np.empty(n, np.int32)
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            suffix_array(text, out)
            best = min(best, time.process_time() - start)
        seconds.append(best)
    assert seconds[1] < 4 * 2.5 * seconds[0] + 0.02


def test_damaged_arrays_end_and_stay_inside() -> None:
    """Whatever `order` and `keys` hold, a look-up returns."""
    rng = np.random.default_rng(0)
    out_tokens, out_counts = np.empty(8, np.int32), np.empty(8, np.int32)
    for case in range(3000):
        size = int(rng.integers(1, 200))
        tokens = rng.integers(-1, 3, size).astype(np.int32)
        order = (rng.integers(-5, size + 5, size) if case % 2 else rng.permutation(size)).astype(np.int32)
        keys = np.zeros(-(-size // kernel.STRIDE), np.int64)
        if case % 3:
            kernel.pack_keys(tokens, np.clip(order, 0, size - 1), keys)
        context = rng.integers(0, 3, 80).astype(np.int32)
        length, total, found = kernel.corpus_candidates(tokens, order, keys, context, 80, out_tokens, out_counts)
        assert 0 <= length <= kernel.MAX_MATCH and 0 <= total <= size and 0 <= found <= 8
