"""Dense retrieval: places of a corpus where a model was in a similar state (DReSD, Findings of ACL 2025).

A key is the target's last hidden state (after the final norm) at a corpus position, standardised, projected to its
principal components and scaled to length one; its value is the position, so no text is copied. States mean something to
their own model only. Small stores are searched exactly, larger ones by inverted lists (FAISS), very large ones over
product-quantised codes. FAISS structures are rebuilt from plain arrays at open: no file is parsed by FAISS.

FAISS runs on one thread here: a query is too small to share, and its thread pool does not survive a fork.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retrodraft.index.storage import IndexFormatError, StoreWriter, open_store, writing

try:
    import faiss
except ImportError as error:
    raise ImportError("dense retrieval needs FAISS: pip install 'retrodraft[dense]'") from error

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
KIND = "dense"
DIM = 64  # of the keys
FLAT_ROWS = 20_000  # up to here exact search takes well under a millisecond
CODED_ROWS = 2_000_000  # from here on keys are searched as codes
CODE_BYTES = 16
TRAIN_ROWS = 200_000
PROBES = 16  # lists that a query looks into
BLOCK_ROWS = 65_536
FIT_ROWS = 16_384  # states that a projection is fitted on


@dataclass(frozen=True)
class Projection:
    """From hidden states to keys."""

    mean: Float32  # [hidden]
    components: Float32  # [hidden, dim], each row divided by its feature's deviation

    @classmethod
    def fit(cls, states: Float32, dim: int = DIM) -> Projection:
        """Principal components of standardised states [n, hidden]; rows that are not finite are left out.

        Raises:
            ValueError: fewer than two usable rows, or `states` is not a matrix.
        """
        states = np.asarray(states, np.float32)
        if states.ndim != 2:
            raise ValueError(f"states must be a matrix [n, hidden], got shape {states.shape}")
        states = states[np.isfinite(states).all(1)]
        if len(states) < 2:
            raise ValueError(f"a projection needs at least 2 finite states, got {len(states)}")
        mean = states.mean(0, dtype=np.float64)
        deviation = np.maximum(states.std(0, dtype=np.float64), 1e-6)
        standard = (states - mean) / deviation
        _, vectors = np.linalg.eigh(standard.T @ standard / len(states))
        components = vectors[:, ::-1][:, : min(dim, states.shape[1])] / deviation[:, None]
        return cls(mean.astype(np.float32), np.ascontiguousarray(components, np.float32))

    def apply(self, states: Float32) -> tuple[Float32, npt.NDArray[np.bool_]]:
        """Keys [n, dim] of length one, and which rows are usable: finite, and not the mean itself."""
        states = np.atleast_2d(np.asarray(states, np.float32))
        if states.ndim != 2 or states.shape[1] != len(self.mean):
            raise ValueError(f"states have {states.shape[-1]} features, the index was built with {len(self.mean)}")
        with np.errstate(invalid="ignore", over="ignore"):
            keys = (states - self.mean) @ self.components
            norms = np.linalg.norm(keys, axis=1, keepdims=True)
        usable = np.isfinite(norms[:, 0]) & (norms[:, 0] > 1e-9)
        return np.divide(keys, norms, out=np.zeros_like(keys), where=usable[:, None]), usable


class DenseIndex:
    """Keys and their corpus positions; grows in memory, is saved as a folder."""

    def __init__(self, projection: Projection) -> None:
        self.projection = projection
        self.info: dict[str, Any] = {}  # of the manifest it was opened from
        self.num_skipped = 0  # rows that had no usable key
        self._size = 0
        self._keys = np.empty((0, projection.components.shape[1]), np.float16)  # rows beyond the size are unused
        self._positions = np.empty(0, np.int64)
        self._lists = np.empty(0, np.int32)  # inverted list of each row, where there are lists
        self._searcher: Any = None
        self._trained_size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, states: Float32, positions: Int64) -> None:
        """Add states [n, hidden] at corpus positions [n]; amortised O(n). `num_skipped` counts unusable rows."""
        keys, usable = self.projection.apply(states)
        positions = np.asarray(positions, np.int64)
        if positions.shape != (len(keys),):
            raise ValueError(f"{len(keys)} states need as many positions, got shape {positions.shape}")
        self.num_skipped += int(len(keys) - usable.sum())
        self._append(keys[usable].astype(np.float16), positions[usable])

    def take(self, other: DenseIndex, shift: int) -> None:
        """Add the rows of an index with the same projection, its positions moved by `shift`."""
        mine, theirs = self.projection, other.projection
        if not (np.array_equal(mine.mean, theirs.mean) and np.array_equal(mine.components, theirs.components)):
            raise ValueError("the two indexes have different projections")
        self.num_skipped += other.num_skipped
        self._append(other._keys[: len(other)], other._positions[: len(other)] + shift)

    @property
    def positions(self) -> Int64:
        """Corpus position of every row."""
        return self._positions[: len(self)]

    def _append(self, keys: npt.NDArray[np.float16], positions: Int64) -> None:
        if not len(keys):
            return
        start, self._size = self._size, self._size + len(keys)
        if self._size > len(self._keys):
            room = max(2 * start, self._size)
            self._keys, self._positions, self._lists = (
                _resized(array, start, room) for array in (self._keys, self._positions, self._lists)
            )
        self._keys[start : self._size] = keys
        self._positions[start : self._size] = positions
        limit = FLAT_ROWS if self._trained_size == 0 else 2 * self._trained_size
        if self._size > limit or _coded(self._size) != _coded(start):
            self._searcher = None  # the next search trains anew
        elif self._searcher is not None:
            self._insert(start, self._size, known=False)

    def search(self, states: Float32, k: int = 16) -> list[tuple[Int64, Float32]]:
        """For each state [n, hidden], positions of up to k similar ones and their cosines, most similar first."""
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        keys, usable = self.projection.apply(states)
        if len(self) == 0:
            return [(np.empty(0, np.int64), np.empty(0, np.float32)) for _ in keys]
        if self._searcher is None:
            self._build()
        with _one_thread():
            cosines, rows = self._searcher.search(keys, min(k, len(self)))
        found = []
        for row, cosine, good in zip(rows, cosines, usable, strict=True):
            kept = (row >= 0) & good  # FAISS fills up with -1
            found.append((self._positions[row[kept]], cosine[kept]))
        return found

    def save(self, path: Path | str, info: dict[str, Any] | None = None) -> None:
        """Write to the folder `path`, replacing a store that is there; `info` (JSON) says which model and corpus."""
        with writing(path, part=True) as writer:
            self.write(writer, info)

    def write(self, writer: StoreWriter, info: dict[str, Any] | None = None) -> None:
        """`save` for whoever is the folder's writer already."""
        if self._searcher is None:
            self._build()
        size = len(self)
        arrays: dict[str, npt.NDArray[Any]] = {
            "mean": self.projection.mean, "components": self.projection.components, "keys": self._keys[:size],
            "positions": self._positions[:size], "lists": self._lists[: size if self._trained_size else 0],
        }  # fmt: skip
        if self._trained_size:
            arrays["centroids"] = self._searcher.quantizer.reconstruct_n(0, self._searcher.nlist)
            if _coded(size):
                arrays["codebook"] = faiss.vector_to_array(self._searcher.pq.centroids)
        for name, array in arrays.items():
            writer.add(name, array)
        writer.commit(KIND, info or {})

    @classmethod
    def open(cls, path: Path | str, check: bool = False) -> DenseIndex:
        """Map a saved index and rebuild its search structure. Raises IndexFormatError."""
        store = open_store(path, KIND, check)
        arrays = store.arrays
        wanted = {"mean": "<f4", "components": "<f4", "keys": "<f2", "positions": "<i8", "lists": "<i4"}
        for name, dtype in wanted.items():
            if name not in arrays or arrays[name].dtype.str != dtype:
                raise IndexFormatError(f"{path}: {name} is missing or of another type")
        mean, components, keys, positions, lists = (arrays[name] for name in wanted)
        rows, dim = len(positions), components.shape[-1]
        shapes = (mean.ndim, components.shape, keys.shape, positions.ndim, lists.ndim)
        if shapes != (1, (len(mean), dim), (rows, dim), 1, 1) or len(lists) not in (0, rows):
            raise IndexFormatError(f"{path}: the shapes of its arrays do not fit together")
        index = cls(Projection(mean, components))
        index.info = store.info
        index._size, index._keys, index._positions, index._lists = rows, keys, positions, lists
        if len(lists) == 0:
            return index
        centroids = arrays.get("centroids", np.empty(0, np.float32))
        codebook = arrays.get("codebook", np.empty(0, np.float32))
        if centroids.dtype.str != "<f4" or codebook.dtype.str != "<f4":
            raise IndexFormatError(f"{path}: centroids or codebook are of another type")
        if centroids.ndim != 2 or centroids.shape[1] != dim or not 0 <= lists.min() <= lists.max() < len(centroids):
            raise IndexFormatError(f"{path}: the inverted lists are damaged")
        if codebook.shape != ((256 * dim,) if _coded(rows) else (0,)):
            raise IndexFormatError(f"{path}: the codebook is damaged")
        index._trained_size = rows
        index._searcher = index._empty(np.array(centroids), np.array(codebook))
        index._insert(0, rows, known=True)
        return index

    def _build(self) -> None:
        """Make the structure for the present size; trains lists, and codes, where it has grown beyond exact search."""
        if len(self) <= FLAT_ROWS:
            self._trained_size = 0
            self._searcher = faiss.IndexFlatIP(self._keys.shape[1])
        else:
            self._trained_size = len(self)
            sample = np.random.default_rng(0).choice(len(self), min(len(self), TRAIN_ROWS), replace=False)
            self._lists = np.empty(len(self._keys), np.int32)
            with _one_thread():
                trained = self._empty(None, None)
                trained.train(self._keys[np.sort(sample)].astype(np.float32))
            self._searcher = trained
        self._insert(0, len(self), known=False)

    def _empty(self, centroids: Float32 | None, codebook: Float32 | None) -> Any:
        """Inverted lists without rows, trained where centroids (and the codebook of codes) are given."""
        dim = self._keys.shape[1]
        num_lists = int(2 * len(self) ** 0.5) if centroids is None else len(centroids)
        quantizer = faiss.IndexFlatIP(dim)
        if _coded(len(self)):
            index: Any = faiss.IndexIVFPQ(
                quantizer, dim, num_lists, min(CODE_BYTES, dim), 8, faiss.METRIC_INNER_PRODUCT
            )
            index.by_residual = False
        else:
            index = faiss.IndexIVFFlat(quantizer, dim, num_lists, faiss.METRIC_INNER_PRODUCT)
        index.nprobe = PROBES
        if centroids is not None:
            quantizer.add(centroids)
            index.is_trained = True
        if codebook is not None and len(codebook):
            faiss.copy_array_to_vector(codebook, index.pq.centroids)
        return index

    def _insert(self, start: int, stop: int, known: bool) -> None:
        """Put rows into the structure; into lists that are `known`, or into those of the nearest centroids."""
        with _one_thread():
            for first in range(start, stop, BLOCK_ROWS):
                keys = self._keys[first : min(first + BLOCK_ROWS, stop)].astype(np.float32)
                if not self._trained_size:
                    self._searcher.add(keys)
                    continue
                last = first + len(keys)
                if not known:
                    self._lists[first:last] = self._searcher.quantizer.search(keys, 1)[1][:, 0]
                lists, rows = self._lists[first:last].astype(np.int64), np.arange(first, last)
                self._searcher.add_core(len(keys), *(faiss.swig_ptr(array) for array in (keys, rows, lists)))


class DenseBuilder:
    """A dense index made from states as they come.

    The first FIT_ROWS of them give the projection, if none is known. With `waits` they stay as they are until `finish`:
    for a caller that may learn of a projection meanwhile, and calls it when `is_ready`.
    """

    def __init__(self, projection: Projection | None = None, waits: bool = False) -> None:
        self._waits = waits
        self._index = DenseIndex(projection) if projection is not None else None
        self._waiting: list[tuple[Float32, Int64]] = []
        self._num_waiting = 0

    def add(self, states: Float32, positions: Int64) -> None:
        """Take states [n, hidden] at corpus positions [n]."""
        if self._index is not None:
            self._index.add(states, positions)
            return
        self._waiting.append((states, positions))
        self._num_waiting += len(states)
        if self.is_ready and not self._waits:
            self.finish()

    @property
    def is_ready(self) -> bool:
        """Whether there are enough states to fit a projection on, or as many keys by a known one."""
        return (self._num_waiting if self._index is None else len(self._index)) >= FIT_ROWS

    @property
    def has_rows(self) -> bool:
        """Whether there is anything to make an index of."""
        return self._num_waiting > 1 or (self._index is not None and len(self._index) > 0)

    def finish(self, projection: Projection | None = None) -> DenseIndex:
        """The index of all that was added.

        Args:
            projection: for the states that wait; None fits one on them. Keys that were made before keep theirs.

        Raises:
            ValueError: there are no states, or fewer than two usable ones to fit a projection on.
        """
        if self._index is None:
            if not self._waiting:
                raise ValueError("there are no states to make a dense index of")
            if projection is None:
                projection = Projection.fit(np.concatenate([states for states, _ in self._waiting])[:FIT_ROWS])
            self._index = DenseIndex(projection)
            for states, positions in self._waiting:
                self._index.add(states, positions)
            self._waiting.clear()
            self._num_waiting = 0
        return self._index


def _resized(array: npt.NDArray[Any], size: int, rows: int) -> npt.NDArray[Any]:
    """A copy with room for `rows`; the first `size` are kept."""
    grown = np.zeros((rows, *array.shape[1:]), array.dtype)
    grown[: min(size, len(array))] = array[:size]
    return grown


def _coded(rows: int) -> bool:
    return rows > CODED_ROWS


@contextmanager
def _one_thread() -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
