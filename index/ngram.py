"""The store that keeps learning: contexts of 1 to 8 tokens and their most frequent followers, in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retrodraft.index.storage import IndexFormatError, open_store, writing
from retrodraft.kernels import ngram as kernel

Int32 = npt.NDArray[np.int32]
KIND = "ngram"
MIN_SLOTS, MAX_SLOTS = 16, 1 << 30


class NgramStore:
    """Followers with counts of every context of up to `max_order` tokens, aged by halving when the table is full.

    Memory: `slots * (8 + 6 * width)` bytes, at most three quarters of them used; a new context costs a slot for each
    order. Threads may share a store.

    >>> store = NgramStore(max_order=3)
    >>> store.add([1, 2, 3, 1, 2, 3, 1, 2])
    >>> store.candidates([3, 1, 2])
    (3, [(3, 1)])
    """

    def __init__(self, max_order: int = 4, slots: int = 1 << 18, width: int = 4) -> None:
        """An empty store.

        Args:
            max_order: longest context, 1 to 8 tokens.
            slots: contexts that the table can hold; a power of two. The default takes 8 MB.
            width: followers kept for each context, 1 to 64.
        """
        if not 1 <= max_order <= kernel.MAX_ORDER:
            raise ValueError(f"max_order must be from 1 to {kernel.MAX_ORDER}, got {max_order}")
        if not MIN_SLOTS <= slots <= MAX_SLOTS or slots & (slots - 1):
            raise ValueError(f"slots must be a power of two from {MIN_SLOTS} to {MAX_SLOTS}, got {slots}")
        if not 1 <= width <= 64:
            raise ValueError(f"width must be from 1 to 64, got {width}")
        self.max_order, self.slots, self.width = max_order, slots, width
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.hashes = np.zeros(self.slots, np.uint64)
        self.followers = np.full((self.slots, self.width), -1, np.int32)
        self.counts = np.zeros((self.slots, self.width), np.uint16)
        self.meta = np.zeros(1, np.int64)

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """The table in the order the kernels take it."""
        return self.hashes, self.followers, self.counts, self.meta

    @property
    def nbytes(self) -> int:
        """Bytes of the table, used or not."""
        return sum(array.nbytes for array in self.arrays)

    def __len__(self) -> int:
        """Contexts known."""
        return int(self.meta[0])

    def add(self, token_ids: Sequence[int] | Int32, start: int = 0) -> None:
        """Learn the tokens from index `start` on, each after the contexts before it; O(1) a token.

        A negative id is a border. A growing text passes its newest `max_order` tokens again, and their number as start.
        """
        tokens = np.asarray(token_ids, np.int32)
        if start < 0:
            raise ValueError(f"start must not be negative, got {start}")
        with self._lock:
            kernel.add(*self.arrays, tokens, start, self.max_order)

    def candidates(self, context: Sequence[int] | Int32, k: int = 4) -> tuple[int, list[tuple[int, int]]]:
        """Order of the longest known suffix of `context`, and its `(token, count)` followers, most frequent first.

        Raises ValueError unless k >= 0.
        """
        if k < 0:
            raise ValueError(f"k must be at least 0, got {k}")
        tail = np.asarray(context, np.int32)[-self.max_order :]
        tokens, counts = np.empty(k, np.int32), np.empty(k, np.int32)
        hashes, followers, numbers, _ = self.arrays
        order, _, found = kernel.ngram_candidates(
            hashes, followers, numbers, tail, len(tail), self.max_order, tokens, counts
        )
        return order, list(zip(tokens[:found].tolist(), counts[:found].tolist(), strict=True))

    def halve(self) -> None:
        """Halve every count, as a full table does by itself; what was seen once is forgotten."""
        with self._lock:
            kernel.halve(*self.arrays)

    def merge(self, other: NgramStore) -> None:
        """Add the counts of another store; O(its slots)."""
        hashes, followers, counts = other._rows()
        with self._lock:
            kernel.merge(*self.arrays, hashes, followers, counts)

    def save(self, path: Path | str, tokenizer: dict[str, Any] | None = None) -> None:
        """Write the known contexts to the folder `path`, replacing a store that is there.

        Args:
            tokenizer: facts about the tokenizer, kept in the manifest: `name`, `fingerprint`, `vocab_size`.
        """
        hashes, followers, counts = self._rows()
        with writing(path) as writer:
            for name, array in (("hashes", hashes), ("followers", followers), ("counts", counts)):
                writer.add(name, array)
            shape = {"max_order": self.max_order, "slots": self.slots, "width": self.width}
            writer.commit(KIND, {"tokenizer": tokenizer or {}, **shape})

    @classmethod
    def open(cls, path: Path | str, check: bool = False) -> NgramStore:
        """Read a saved store into memory; `check` compares the checksums too. Raises IndexFormatError."""
        store = open_store(path, KIND, check)
        sizes: list[Any] = [store.info.get(name) for name in ("max_order", "slots", "width")]
        arrays = [store.arrays.get(name) for name in ("hashes", "followers", "counts")]
        hashes, followers, counts = arrays
        if hashes is None or followers is None or counts is None or any(type(size) is not int for size in sizes):
            raise IndexFormatError(f"{path}: arrays or sizes of the n-gram table are missing")
        try:
            loaded = cls(*sizes)
        except ValueError as error:
            raise IndexFormatError(f"{path}: {error}") from error
        rows = (len(hashes), loaded.width)
        types = tuple(array.dtype.str for array in (hashes, followers, counts))
        if types != ("<u8", "<i4", "<u2") or hashes.ndim != 1 or followers.shape != rows or counts.shape != rows:
            raise IndexFormatError(f"{path}: the arrays are not those of an n-gram table")
        kernel.merge(*loaded.arrays, hashes, followers, counts)
        return loaded

    def _rows(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Copies of the occupied slots."""
        with self._lock:
            used = np.flatnonzero(self.hashes)
            return self.hashes[used], self.followers[used], self.counts[used]
