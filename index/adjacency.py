"""Adjacency rows on their own memory: what the target said after a token, and after a pair of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from retrodraft.kernels import adjacency as kernel

PAIR_SLOTS = 1 << 18  # 16 MB of pair rows, written as they are used


class AdjacencyRows:
    """Top-8 rows with probabilities for every token and for the recent pairs of tokens (see `kernels.adjacency`).

    Memory: 48 bytes a token of the vocabulary and 60 bytes a pair slot; for 152,000 tokens 23 MB.
    """

    width = kernel.WIDTH

    def __init__(self, vocab_size: int, num_pairs: int = PAIR_SLOTS) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
        self.vocab_size = vocab_size
        self.num_pairs = num_pairs
        self._start: tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None = None
        self.reset()

    def start_from(self, token_ids: npt.NDArray[np.int32], probs: npt.NDArray[np.float32]) -> None:
        """Forget every row; begin, now and after `reset`, with these of the tokens 0, 1 …: [num_tokens, <= WIDTH]."""
        self._start = token_ids, probs
        self.reset()

    def fresh(self) -> AdjacencyRows:
        """Rows of the same hot start that have seen no text."""
        rows = AdjacencyRows(self.vocab_size, self.num_pairs)
        if self._start is not None:
            rows.start_from(*self._start)
        return rows

    def reset(self) -> None:
        """Forget every row but those of the hot start."""
        self.token_ids = np.full((self.vocab_size, kernel.WIDTH), -1, np.int32)
        self.token_probs = np.zeros((self.vocab_size, kernel.WIDTH), np.uint16)
        if self._start is not None:
            ids, probs = self._start
            self.token_ids[: len(ids), : ids.shape[1]] = ids
            self.token_probs[: len(ids), : ids.shape[1]] = np.minimum(probs, 1.0) * kernel.ONE
        self.pair_keys = np.zeros(self.num_pairs, np.int64)
        self.pair_stamps = np.zeros(self.num_pairs, np.int32)
        self.pair_ids = np.zeros((self.num_pairs, kernel.WIDTH), np.int32)
        self.pair_probs = np.zeros((self.num_pairs, kernel.WIDTH), np.uint16)

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """The tables in the order the kernels take them."""
        return (
            self.token_ids, self.token_probs, self.pair_keys, self.pair_stamps, self.pair_ids, self.pair_probs
        )  # fmt: skip

    def row(self, token: int, previous: int | None = None) -> list[tuple[int, float]]:
        """`(token, probability)` entries of the row of `token`, or of the pair (`previous`, `token`)."""
        ids, probs = self.token_ids, self.token_probs
        index = token
        if previous is not None:
            ids, probs = self.pair_ids, self.pair_probs
            index = kernel.find_pair(self.pair_keys, previous, token)
        if index < 0:
            return []
        return [(int(t), float(p) / kernel.ONE) for t, p in zip(ids[index], probs[index], strict=True) if t >= 0]

    @property
    def nbytes(self) -> int:
        """Bytes of the tables, used or not."""
        return sum(array.nbytes for array in self.arrays)
