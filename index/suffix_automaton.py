"""The context store: a suffix automaton over one growing text (prompt and output, or a session's turns)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from retrodraft.kernels import suffix_automaton as kernel

GROWTH = 1.4  # bounds unused room to 29 %, so that a token costs at most 100 bytes


class SuffixAutomaton:
    """Longest-suffix matches, their continuations and counts, in a text that grows at its end.

    Invariant: after every append, `match()` is the longest proper suffix of the text that also ends at an earlier
    place, so the text never matches itself. About 80 bytes a token.

    >>> automaton = SuffixAutomaton([1, 2, 3, 1, 2])
    >>> automaton.match()
    (2, 2)
    >>> automaton.continuations()
    [(3, 1, 2)]
    """

    def __init__(self, token_ids: Sequence[int] | npt.NDArray[np.int32] = ()) -> None:
        self.states = np.zeros((32, 5), np.int32)
        self.edges = np.zeros((48, 4), np.int32)
        self.table = np.full(64, -1, np.int32)
        self.meta = np.zeros(4, np.int64)
        self.states[0] = (0, -1, -1, 0, -1)
        self.meta[kernel.NUM_STATES] = 1
        self.extend(token_ids)

    def __len__(self) -> int:
        return int(self.states[self.meta[kernel.NEWEST], kernel.LENGTH])

    def extend(self, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Append tokens; amortised O(1) each.

        A negative id is a border: continuations never cross it, and it never matches an id of the model.
        """
        tokens = np.asarray(token_ids, np.int32)
        done = 0
        while True:
            before = done
            done = kernel.append_many(self.states, self.edges, self.table, self.meta, tokens, before, len(self))
            if done == len(tokens):
                return
            self.reserve(int(tokens[done]))

    def match(self) -> tuple[int, int]:
        """State and length of the longest suffix of the text that occurred before; length 0 where none did."""
        state = int(self.states[self.meta[kernel.NEWEST], kernel.LINK])
        return (state, int(self.states[state, kernel.LENGTH])) if state > 0 else (0, 0)

    def continuations(self, state: int | None = None) -> list[tuple[int, int, int]]:
        """`(token, count, latest position)` for each token seen after `state` (default: the current match)."""
        edge = int(self.states[self.match()[0] if state is None else state, kernel.HEAD])
        found = []
        while edge >= 0:
            token, target, following, _ = self.edges[edge].tolist()
            found.append((token, int(self.states[target, kernel.COUNT]), int(self.states[target, kernel.LATEST])))
            edge = following
        return found

    def follow(self, token_ids: npt.NDArray[np.int32]) -> tuple[int, int]:
        """State and length of the longest suffix of `token_ids` that occurs in the text. O(their number)."""
        state, length = kernel.follow(self.states, self.edges, self.table, token_ids)
        return int(state), int(length)

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """The arrays in the order the kernels take them."""
        return self.states, self.edges, self.table, self.meta

    @property
    def nbytes(self) -> int:
        """Bytes held by the arrays."""
        return self.states.nbytes + self.edges.nbytes + self.table.nbytes + self.meta.nbytes

    def reserve(self, token: int) -> None:
        """Make room for appending `token`."""
        degree = kernel.clone_degree(self.states, self.edges, self.table, self.meta, token)
        if self.meta[kernel.NUM_STATES] + 2 > len(self.states):
            self.states = _resized(self.states, int(len(self.states) * GROWTH) + 2)
        if self.meta[kernel.NUM_EDGES] + degree > len(self.edges):
            self.edges = _resized(self.edges, int(len(self.edges) * GROWTH) + degree)
        while 10 * (self.meta[kernel.NUM_ENTRIES] + degree) > 7 * len(self.table):
            self.table = np.full(2 * len(self.table), -1, np.int32)
            kernel.rebuild_table(self.edges, self.table, self.states, self.meta)


def _resized(array: npt.NDArray[np.int32], rows: int) -> npt.NDArray[np.int32]:
    grown = np.empty((rows, array.shape[1]), array.dtype)
    grown[: len(array)] = array
    return grown
