"""The trie of drafts against a plain Python one, through the kernels that follow and ask automata."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrodraft.kernels import suffix_automaton as sa
from retrodraft.kernels import trie


def arrays(rows: int, size: int) -> tuple[Any, ...]:
    room = 2 + rows * (size - 1)
    entries = 1 << (2 * room).bit_length()
    automaton = np.full((room, 5), 77, np.int32), np.full((room, 4), 77, np.int32)  # what lies there is no matter
    return *automaton, np.full(entries, 5, np.int32), np.full(4, 9, np.int64)


def followers(store: tuple[Any, ...], state: int) -> dict[int, int]:
    states, edges, _, _ = store
    edge, found = states[state, sa.HEAD], {}
    while edge >= 0:
        found[int(edges[edge, sa.TOKEN])] = int(states[edges[edge, sa.TARGET], sa.COUNT])
        edge = edges[edge, sa.NEXT]
    return found


def counted(drafts: list[list[int]], path: list[int]) -> dict[int, int]:
    """What follows a path in the drafts, in the order of the first ones."""
    found: dict[int, int] = {}
    for draft in drafts:
        if draft[: len(path)] == path and len(draft) > len(path):
            found[draft[len(path)]] = found.get(draft[len(path)], 0) + 1
    return found


def cut(window: list[int]) -> list[int]:
    return window[: window.index(-1)] if -1 in window else window


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 3), min_size=5, max_size=5), min_size=1, max_size=12), st.integers(0, 3))
def test_same_as_a_plain_trie(windows: list[list[int]], root: int) -> None:
    """Every path's followers, their counts and order; stepping by the kernels ends where the plain trie ends."""
    store = arrays(len(windows), 5)
    first = trie.fill(*store, np.array(windows, np.int32), root)
    kept = [i for i, window in enumerate(windows) if window[0] == root and window[1] >= 0]
    assert first == (kept[0] if kept else -1)
    if not kept:
        assert (store[0] == 77).all() and (store[2] == 5).all()
        return
    drafts = [cut(windows[i])[1:] for i in kept]
    states, edges, table, meta = store
    assert meta[sa.NUM_STATES] <= len(states) and meta[sa.NUM_EDGES] <= len(edges)
    assert states[trie.START, sa.COUNT] == len(kept)
    for path in {tuple(draft[:n]) for draft in drafts for n in range(len(draft) + 1)}:
        state, length = trie.START, 7
        for token in path:
            state, length = sa.step(states, edges, table, state, length, token)
        assert state > 0 and length == 7 + len(path)
        expected = counted(drafts, list(path))
        assert followers(store, state) == expected and list(followers(store, state)) == list(expected)
        for token in range(4):
            if token not in expected:  # out of the trie, and there is no way back
                assert sa.step(states, edges, table, state, length, token) == (0, 0)
                assert sa.step(states, edges, table, 0, 0, token) == (0, 0)


@pytest.mark.parametrize("rows", [1, 16])
def test_fits_its_room(rows: int) -> None:
    """Drafts that share nothing fill the arrays; a second filling leaves no trace of the first."""
    windows = np.arange(rows * 13, dtype=np.int32).reshape(rows, 13) + 1
    windows[:, 0] = 0
    store = arrays(rows, 13)
    for _ in range(2):
        assert trie.fill(*store, windows, 0) == 0
        assert store[3][sa.NUM_STATES] == len(store[0]) == 2 + rows * 12
        assert len(followers(store, trie.START)) == rows
    assert trie.fill(*store, windows[:1, :2].copy(), 0) == 0 and followers(store, trie.START) == {int(windows[0, 1]): 1}
