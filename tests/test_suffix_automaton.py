"""The automaton against a brute-force search, over random and worst-case texts."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrodraft.index.suffix_automaton import SuffixAutomaton
from retrodraft.kernels.suffix_automaton import LENGTH, LINK, MAX_CHAIN, step


def occurrences(text: list[int], pattern: list[int]) -> list[int]:
    """Indices just behind each occurrence of `pattern` that something follows."""
    n = len(pattern)
    return [i + n for i in range(len(text) - n) if text[i : i + n] == pattern]


def longest_suffix(text: list[int]) -> int:
    """Length of the longest proper suffix that also ends earlier."""
    return next((n for n in range(len(text) - 1, 0, -1) if occurrences(text, text[-n:])), 0)


texts = st.integers(1, 5).flatmap(lambda k: st.lists(st.integers(0, k), max_size=60))


@given(texts, st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_match_counts_and_positions(text: list[int], cut: int) -> None:
    automaton = SuffixAutomaton(text[:cut])
    automaton.extend(text[cut:])
    assert len(automaton) == len(text)
    state, length = automaton.match()
    assert length == longest_suffix(text)
    while length:  # every order, down the suffix links
        places = occurrences(text, text[-length:])
        expected = {(token, sum(text[p] == token for p in places), max(p for p in places if text[p] == token))
                    for token in {text[p] for p in places}}  # fmt: skip
        assert set(automaton.continuations(state)) == expected
        state = int(automaton.states[state, LINK])
        length = int(automaton.states[state, LENGTH])


@given(texts, st.lists(st.integers(0, 5), max_size=20))
@settings(max_examples=100, deadline=None)
def test_stepping_follows_the_longest_match(text: list[int], query: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    state = length = 0
    for end, token in enumerate(query, 1):
        state, length = step(automaton.states, automaton.edges, automaton.table, state, length, token)
        expected = next(
            (n for n in range(end, 0, -1) if any(text[i : i + n] == query[end - n : end] for i in range(len(text)))), 0
        )
        assert length == expected


def test_a_border_is_not_crossed() -> None:
    automaton = SuffixAutomaton([1, 2, -7, 1, 2])
    assert automaton.match()[1] == 2
    assert [token for token, _, _ in automaton.continuations()] == [-7]


@pytest.mark.parametrize(
    "make", [lambda n: [7] * n, lambda n: [1, 2] * (n // 2), None], ids=["one", "two", "fibonacci"]
)
def test_worst_cases_are_linear(make: object) -> None:
    """O17: periodic and Fibonacci texts neither hang nor slow down per token."""

    def fibonacci(n: int) -> list[int]:
        a, b = [0], [0, 1]
        while len(b) < n:
            a, b = b, b + a
        return b[:n]

    build = make if callable(make) else fibonacci
    SuffixAutomaton(build(100))
    seconds = []
    for n in (100_000, 400_000):
        text = np.array(build(n), np.int32)
        start = time.perf_counter()
        automaton = SuffixAutomaton(text)
        seconds.append(time.perf_counter() - start)
        assert len(automaton) == n
    assert seconds[1] < 4 * 2.5 * seconds[0] + 0.05
    assert len(automaton.continuations()) <= MAX_CHAIN


def test_bulk_append_is_fast_and_small() -> None:
    """At most 3 microseconds and 100 bytes a token, on a text with the repetition of prose."""
    rng = np.random.default_rng(0)
    vocabulary = rng.zipf(1.3, 200_000).clip(max=49_000)
    text = np.concatenate([vocabulary[i : i + 40] for i in rng.integers(0, 199_000, 5000)]).astype(np.int32)
    SuffixAutomaton(text[:100])
    start = time.perf_counter()
    automaton = SuffixAutomaton(text)
    assert (time.perf_counter() - start) / len(text) < 3e-6
    assert automaton.nbytes / len(text) <= 100
