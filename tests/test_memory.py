"""What a namespace remembers, against plain lists: matches, borders, generations, files, bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import repetitive

from retrodraft.index.memory import BYTES_PER_TOKEN, EXACT_TOKENS, Memory, joined
from retrodraft.kernels.candidates import CONTEXT

SMALL = 1 << 16
HALF = SMALL // 2 // BYTES_PER_TOKEN  # tokens, borders included
texts = st.lists(st.integers(0, 3), max_size=150)


def longest(documents: list[list[int]], context: list[int]) -> tuple[int, set[int]]:
    """Length of the longest suffix of the context that occurs in a document, and what follows it; -1 is its end."""
    for length in range(len(context), 0, -1):
        wanted, following = context[-length:], set()
        for document in documents:
            for i in range(len(document) - length + 1):
                if document[i : i + length] == wanted:
                    following.add(document[i + length] if i + length < len(document) else -1)
        if following:
            return length, following
    return 0, set()


def matches(memory: Memory, context: list[int]) -> list[tuple[int, set[int]]]:
    """The same, as the memory says it, for each of its automata."""
    states, lengths = np.full(3, -7, np.int32), np.full(3, -7, np.int32)
    memory.match(np.array(context, np.int32), states, lengths)
    return [
        (int(length), {token for token, _, _ in automaton.continuations(int(state))} if length else set())
        for automaton, state, length in zip(memory.automata, states, lengths, strict=True)
    ]


@given(st.lists(texts, max_size=12), st.lists(texts, max_size=3), st.lists(st.integers(0, 3), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_matches_of_generations_and_files(added: list[list[int]], files: list[list[int]], context: list[int]) -> None:
    memory = Memory(SMALL)
    newer: list[list[int]] = []
    older: list[list[int]] = []
    for text in added:
        if text and sum(len(each) + 1 for each in newer) + len(text) + 1 > HALF:
            newer, older = [], newer
        newer.append(text)
        memory.add_text(text)
    memory.set_files(files)
    expected = [longest(documents, context) for documents in (newer, older, files)]
    assert matches(memory, context) == expected
    assert memory.nbytes == sum(automaton.nbytes for automaton in memory.automata)


@given(st.lists(texts, min_size=1, max_size=5), st.lists(st.lists(st.integers(0, 4), max_size=5), max_size=5))
@settings(max_examples=40, deadline=None)
def test_files_come_and_go(pool: list[list[int]], choices: list[list[int]]) -> None:
    """Whatever set of files follows another, only the latest one is there."""
    memory = Memory(SMALL)
    for chosen in choices:
        version = memory.version
        current = [pool[i % len(pool)] for i in chosen]
        memory.set_files(current)
        assert memory.version > version
        for context in ([0, 1, 2], pool[0][-5:] or [3]):
            assert matches(memory, context)[2] == longest(current, context)


def test_no_match_crosses_a_border() -> None:
    memory = Memory(SMALL)
    memory.add_text([1, 2, 3])
    memory.add_text([4, 5])
    assert matches(memory, [2, 3, 4])[0] == (1, {5})
    assert matches(memory, [1, 2, 3])[0] == (3, {-1})
    memory.add_text([3, 4])
    assert matches(memory, [2, 3])[0] == (2, {-1})
    assert matches(memory, [9, 3])[0] == (1, {-1, 4})
    context = np.array([1, 2, -1], np.int32)  # as in front of a short text
    assert joined([[1, 2, 3]]).follow(context) == (0, 0)
    assert joined([]).follow(context) == (0, 0) and len(joined([[], [5]])) == 3


def test_only_the_newest_tokens_of_a_context_count() -> None:
    memory = Memory(1 << 20)
    text = list(range(200))
    memory.add_text(text)
    assert matches(memory, text)[0] == (CONTEXT, {-1})
    assert matches(memory, text[:150])[0] == (CONTEXT, {150})


def test_ten_thousand_texts_in_little_memory() -> None:
    """O16: bytes stay below the budget, and the newest half of the budget is found to the last token."""
    budget = 1 << 20
    memory = Memory(budget)
    assert memory.max_tokens == 2 * (budget // 2 // BYTES_PER_TOKEN)
    rng = np.random.default_rng(0)
    newest: list[np.ndarray] = []
    peaks = []
    for number in range(10_000):
        text = rng.integers(0, 5000, int(rng.integers(1, 120))).astype(np.int32)
        memory.add_text(text)
        newest.append(text)
        while sum(len(each) + 1 for each in newest) > memory.max_tokens // 2:
            newest.pop(0)
        peaks.append(memory.nbytes)
        if number % 500 == 499:
            for each in newest:
                found = max(automaton.follow(each)[1] for automaton in (memory.newer, memory.older))
                assert found == len(each)
    assert max(peaks) <= budget
    assert max(peaks[-3000:]) <= 1.01 * max(peaks[3000:6000])
    assert min(peaks[3000:]) > budget // 4  # the budget is made use of


@pytest.mark.parametrize("alphabet", [1, 2, 30])
def test_few_different_tokens_take_more_bytes(alphabet: int) -> None:
    """The densest automata stay near the budget too."""
    memory = Memory(1 << 20)
    rng = np.random.default_rng(alphabet)
    for _ in range(40):
        memory.add_text(rng.integers(0, alphabet, 1000).astype(np.int32))
        assert memory.nbytes <= 1.25 * memory.max_bytes


def test_of_a_text_beyond_the_budget_the_end_is_kept() -> None:
    memory = Memory(SMALL)
    memory.add_text([7, 7, 7])
    memory.add_text(list(range(5000)))
    assert memory.newer.follow(np.arange(5000, dtype=np.int32))[1] == HALF - 1
    assert memory.older.follow(np.array([7, 7, 7], np.int32))[1] == 3
    assert memory.nbytes <= SMALL


def test_a_changed_file_among_many_costs_its_own_tokens() -> None:
    """Stale texts of large workspaces stay until they are a quarter; where it is asked for, none does."""
    rng = np.random.default_rng(0)
    large = rng.integers(0, 30_000, EXACT_TOKENS).astype(np.int32)
    versions = [rng.integers(0, 30_000, 10_000).astype(np.int32) for _ in range(9)]
    memory = Memory()
    held = []
    for text in versions:
        memory.set_files([large, text], exact=False)
        assert memory.files.follow(text[:50])[1] == memory.files.follow(large[-50:])[1] == 50
        held.append(len(memory.files))
    grown = [after - before for before, after in zip(held, held[1:], strict=False)]
    assert grown.count(10_001) == 7 and sum(step < 0 for step in grown) == 1
    assert max(held) < 1.4 * len(large)
    memory.set_files([large], exact=True)
    assert len(memory.files) == len(large) + 1
    assert all(memory.files.follow(text[:50])[1] < 5 for text in versions)
    memory.set_files([], exact=False)
    assert len(memory.files) == 0


def test_everything_can_be_forgotten() -> None:
    memory = Memory(SMALL)
    text = repetitive(np.random.default_rng(0), 200, 9)
    for _ in range(3):
        memory.add_text(text)
    files = [text[:50]]
    memory.set_files(files)
    version = memory.version
    memory.clear()
    assert matches(memory, text) == [(0, set())] * 3 and memory.version > version
    memory.set_files(files)
    assert matches(memory, text[:50])[2][0] == 50
    memory.add_text([])
    memory.add_text(np.empty(0, np.int32))
    assert len(memory.newer) == 0


def test_budgets_that_hold_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 65536"):
        Memory(1000)
