"""The corpus store: documents of token ids on disk, and what followed any context in them.

Documents lie one after another, each closed by -1, which no context matches and no draft crosses. They are split into
shards of fewer than 2**31 tokens, each with its own suffix array (`retrodraft.kernels.suffix_array`), so a shard's
positions are int32; a position in the whole corpus is the shard's offset plus that, 64-bit. Readers map the arrays and
share their pages; a token costs 8.5 bytes on disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedDict

from retrodraft.index.shards import BORDER, MAX_SHARD_TOKENS, MAX_TOKEN, PARTS, check_shards, write_shards
from retrodraft.index.storage import MANIFEST, IndexFormatError, Store, open_store, writing
from retrodraft.kernels import suffix_array as kernel

Int32 = npt.NDArray[np.int32]
KIND = "corpus"
DENSE = "dense"  # kind, and folder in that of a corpus, of a dense index of its positions
SMALL_SHARD = 1 << 16  # tokens; a last shard of no more is written anew with what is added
BYTES_PER_TOKEN = 14  # of memory that building a shard may take at most
MAX_SHARDS = 16  # of all corpora together that are drafted from: each is searched at every node that continues a match


@dataclass(frozen=True)
class Document:
    """Token ids with the name that a query shows, for instance a path."""

    token_ids: Sequence[int] | Int32
    name: str = ""


@dataclass(frozen=True)
class Interval:
    """The occurrences of one match: its length, and (left, right) in the order of each shard."""

    length: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """Number of occurrences."""
        return sum(right - left for left, right in self.ranges)


@dataclass(frozen=True)
class Occurrence:
    """One occurrence: its document's name, and the index in it of the token that follows the match."""

    name: str
    position: int


class CorpusIndex:
    """A read-only, memory-mapped corpus; `build` makes one, `extend` adds a shard.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     corpus = CorpusIndex.build([[5, 6, 7], [6, 7, 8, 6, 7, 8]], folder + "/my.index")
    >>> corpus.continuations(corpus.match([1, 6, 7]), 2)
    [(8, 2)]
    """

    def __init__(self, store: Store) -> None:
        self._take(store)

    @classmethod
    def build(
        cls,
        documents: Iterable[Document | Sequence[int] | Int32],
        path: Path | str,
        *,
        tokenizer: dict[str, Any] | None = None,
        shard_tokens: int = MAX_SHARD_TOKENS,
        options: dict[str, Any] | None = None,
    ) -> CorpusIndex:
        """Write a corpus to the folder `path`, replacing one that is there; O(tokens). Empty documents are left out.

        Args:
            documents: token ids, plain or as `Document`; consumed as they are indexed.
            tokenizer: facts about the tokenizer, kept in the manifest: `name`, `fingerprint`, `vocab_size`.
            shard_tokens: largest shard; building one takes up to 14 bytes of memory a token.
            options: how the documents were chosen, kept in the manifest.

        Raises:
            ValueError: a token id is out of range, or `path` holds something else or lies in a store.
        """
        with writing(path) as writer:
            shards = write_shards(writer, _named(documents), 0, shard_tokens)
            writer.commit(KIND, {"tokenizer": tokenizer or {}, "options": options or {}, "shards": shards})
        _drop_dense(path)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path | str, check: bool = False) -> CorpusIndex:
        """Map a corpus; `check` compares the checksums of all files too, and `max_token`. Raises IndexFormatError."""
        corpus = cls(open_store(path, KIND, check))
        if check:
            corpus.check_tokens()
        return corpus

    def check_tokens(self) -> None:
        """Raise IndexFormatError unless each shard's largest id is the one that the manifest names; O(tokens)."""
        for number, (shard, (tokens, _, _)) in enumerate(zip(self.info["shards"], self.arrays, strict=True)):
            if (largest := int(tokens.max())) != shard["max_token"]:
                raise IndexFormatError(
                    f"{self.path}: shard {number} holds ids up to {largest}, the manifest says {shard['max_token']}"
                )

    @classmethod
    def merge(
        cls, paths: Sequence[Path | str], path: Path | str, *, options: dict[str, Any] | None = None
    ) -> CorpusIndex:
        """Write the shards of several corpora as one corpus; checksums are compared, so that no damage is taken over.

        `options` are kept in the manifest; the paths, where there are none.

        Raises:
            ValueError: no corpora are given, their tokenizers differ, or `path` is one of them.
            IndexFormatError: one of them is damaged.
        """
        if not paths:
            raise ValueError("merge needs at least one corpus")
        for source in paths:
            if Path(path).exists() and Path(source).exists() and Path(path).samefile(source):
                raise ValueError(f"{path} is one of the corpora to merge; name another folder for the result")
        corpora = [cls.open(source, check=True) for source in paths]
        for corpus in corpora[1:]:
            if corpus.fingerprint != corpora[0].fingerprint:
                raise ValueError(f"{corpus.path} and {corpora[0].path} were built with different tokenizers")
        with writing(path) as writer:
            shards: list[dict[str, int]] = []
            for corpus in corpora:
                for number, shard in enumerate(corpus.info["shards"]):
                    for part in PARTS:
                        writer.add(f"{part}-{len(shards)}", corpus._store.arrays[f"{part}-{number}"])
                    shards.append(shard)
            chosen = {"merged": [str(source) for source in paths]} if options is None else options
            writer.commit(KIND, {"tokenizer": corpora[0].info["tokenizer"], "options": chosen, "shards": shards})
        _drop_dense(path)
        return cls.open(path)

    def extend(
        self,
        documents: Iterable[Document | Sequence[int] | Int32],
        *,
        shard_tokens: int = MAX_SHARD_TOKENS,
        options: dict[str, Any] | None = None,
    ) -> int:
        """Add documents behind those that are there, on disk and here; returns the position of the first one.

        They are a new shard, and so are the last shards where these are small, or not larger than twice what is added:
        however often a corpus is extended, its shards stay few. So the cost is O(their tokens) on average, times the
        logarithm of the number of calls. `options` join those in the manifest, under `added`.

        Raises ValueError if the corpus was replaced by one of another tokenizer, and IndexFormatError if a shard that
        is written anew is damaged.
        """
        with writing(self.path) as writer:
            present = CorpusIndex.open(self.path)  # another process may have added shards since
            if present.fingerprint != self.fingerprint:
                raise ValueError(f"{self.path} was replaced by a corpus of another tokenizer; open it anew")
            first: deque[Document | Sequence[int] | Int32] = deque()
            size, waiting = 0, iter(documents)
            for document in waiting:
                first.append(document)
                size += np.size(document.token_ids if isinstance(document, Document) else document) + 1
                if size > shard_tokens:
                    break
            num_kept = present._num_kept(size, shard_tokens) if size else len(present.arrays)
            names = [f"{part}-{number}" for number in range(num_kept) for part in PARTS]
            for name in names:
                writer.keep(name, present._store.entries[name])
            present._store.check(set(present._store.entries) - set(names))
            old = present.info["shards"][:num_kept]
            wanted = chain(present.documents(num_kept), _drained(first), waiting)
            new = write_shards(writer, _named(wanted), num_kept, shard_tokens)
            if size:
                chosen = present.info.get("options", {})
                if options is not None:
                    chosen = {**chosen, "added": [*chosen.get("added", []), options]}
                writer.commit(KIND, {**present.info, "options": chosen, "shards": old + new})
        self._take(open_store(self.path, KIND))
        return present._num_positions

    def _num_kept(self, added: int, shard_tokens: int) -> int:
        """How many shards stay as they are where `added` positions come behind them."""
        number = len(self.arrays)
        while number and (size := len(self.arrays[number - 1][0])) <= max(2 * added, SMALL_SHARD):
            if size + added > shard_tokens:
                break
            number, added = number - 1, added + size
        return number

    def compact(self, *, shard_tokens: int = MAX_SHARD_TOKENS) -> None:
        """Join shards into as few as `shard_tokens` allows, on disk and here; O(tokens). Checked as in `merge`.

        Shards that are larger than that already stay as they are.
        """
        with writing(self.path) as writer:
            present = CorpusIndex.open(self.path, check=True)
            shards: list[dict[str, int]] = []
            for is_large, group in groupby(
                range(len(present.arrays)), lambda number: len(present.arrays[number][0]) > shard_tokens
            ):
                numbers = list(group)
                if not is_large:
                    documents = present.documents(numbers[0], numbers[-1] + 1)
                    shards += write_shards(writer, _named(documents), len(shards), shard_tokens)
                    continue
                for number in numbers:
                    for part in PARTS:
                        writer.keep(f"{part}-{len(shards)}", present._store.entries[f"{part}-{number}"])
                    shards.append(present.info["shards"][number])
            writer.commit(KIND, {**present.info, "shards": shards})
        self._take(open_store(self.path, KIND))

    def _take(self, store: Store) -> None:
        self._store = store
        self.path = store.folder
        self.info = store.info
        check_shards(store)
        self.arrays: tuple[tuple[npt.NDArray[Any], ...], ...] = tuple(
            (store.arrays[f"tokens-{i}"], store.arrays[f"order-{i}"], store.arrays[f"keys-{i}"])
            for i in range(len(store.info["shards"]))
        )
        self._offsets = SortedDict()  # of the shards, in tokens of the whole corpus
        self._num_positions = 0
        for number, (tokens, _, _) in enumerate(self.arrays):
            self._offsets[self._num_positions] = number
            self._num_positions += len(tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, borders not counted."""
        return self._num_positions - self.num_documents

    @property
    def num_documents(self) -> int:
        """Documents in all shards."""
        return sum(shard["num_documents"] for shard in self.info["shards"])

    @property
    def max_token(self) -> int:
        """Largest token id in the corpus; -1 if it is empty."""
        return max((shard["max_token"] for shard in self.info["shards"]), default=-1)

    @property
    def advice(self) -> str:
        """What to do before drafts can be taken from the corpus; empty if nothing."""
        if len(self.arrays) <= MAX_SHARDS:
            return ""
        return (
            f"{len(self.arrays)} shards are more than the {MAX_SHARDS} that can be drafted from: join them with "
            f"`retrodraft index compact {self.path}`"
        )

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the tokenizer, empty if it was built without one."""
        return str(self.info["tokenizer"].get("fingerprint", ""))

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self._store.nbytes

    def check_tokenizer(self, fingerprint: str, vocab_size: int) -> None:
        """Raise IndexFormatError unless the corpus fits a tokenizer and a model with `vocab_size` rows."""
        if self.fingerprint and self.fingerprint != fingerprint:
            raise IndexFormatError(
                f"{self.path} was built with tokenizer {self.info['tokenizer'].get('name', '')!r}, fingerprint "
                f"{self.fingerprint[:12]}, the model's is {fingerprint[:12]}; build it anew"
            )
        if self.max_token >= vocab_size:
            raise IndexFormatError(f"{self.path} holds token id {self.max_token}, the model has only {vocab_size} ids")

    def find(self, token_ids: Sequence[int] | Int32) -> Interval:
        """Where all of `token_ids` occur, in this order. O(log tokens) a shard."""
        context = _known(token_ids)
        size = len(context)
        if BORDER in context:
            return Interval(size, ((0, 0),) * len(self.arrays))
        return Interval(size, tuple(kernel.find(*shard, context, size, size) for shard in self.arrays))

    def match(self, context: Sequence[int] | Int32) -> Interval:
        """The longest suffix of `context`, of at most 64 tokens, that occurs in some shard. O(log tokens) a shard."""
        tail = _known(context[-kernel.MAX_MATCH :])
        matches = [kernel.longest_match(*shard, tail, len(tail)) for shard in self.arrays]
        longest = max((length for length, _, _ in matches), default=0)
        return self.find(tail[len(tail) - longest :])

    def shorter(self, context: Sequence[int] | Int32, interval: Interval) -> Interval:
        """The longest suffix of `context` that is shorter than a match of it and occurs more often."""
        tail = _known(context[-kernel.MAX_MATCH :])
        shards = zip(self.arrays, interval.ranges, strict=True)
        wider = [kernel.widen(*shard, tail, len(tail), left, right) for shard, (left, right) in shards]
        longest = max((length for length, _, _ in wider), default=0)
        return self.find(tail[len(tail) - longest :])

    def continuations(self, interval: Interval, k: int = 8) -> list[tuple[int, int]]:
        """`(token, count)` of the k tokens that most often follow, most frequent first.

        Counts are exact up to 64 occurrences a shard; of more, 64 evenly spread ones are counted and scaled up. A
        document's end is no token, so counts may sum to less than the interval's. Raises ValueError unless k >= 0.
        """
        if k < 0:
            raise ValueError(f"k must be at least 0, got {k}")
        counts: dict[int, int] = {}
        tokens, numbers = np.empty(kernel.MAX_SAMPLES, np.int32), np.empty(kernel.MAX_SAMPLES, np.int32)
        for (text, order, _), (left, right) in zip(self.arrays, interval.ranges, strict=True):
            found = kernel.continuations(text, order, left, right, tokens, numbers)
            for token, number in zip(tokens[:found].tolist(), numbers[:found].tolist(), strict=True):
                counts[token] = counts.get(token, 0) + number
        return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:k]

    def occurrences(self, interval: Interval, limit: int = 10) -> list[Occurrence]:
        """Up to `limit` occurrences, evenly spread over all."""
        found = []
        ends = np.cumsum([right - left for left, right in interval.ranges], dtype=np.int64)
        for rank in np.unique(np.linspace(0, interval.count - 1, min(limit, interval.count), dtype=np.int64)).tolist():
            number = int(np.searchsorted(ends, rank, side="right"))
            place = interval.ranges[number][1] - int(ends[number]) + rank
            found.append(self._occurrence(number, int(self.arrays[number][1][place])))
        return found

    def documents(self, first_shard: int = 0, end_shard: int | None = None) -> Iterator[Document]:
        """Every document with its name, in the order they were added; only those of some shards, if these are given."""
        for number in range(len(self.arrays))[first_shard:end_shard]:
            tokens, start = self.arrays[number][0], 0
            for index, end in enumerate(self._store.arrays[f"borders-{number}"].tolist()):
                yield Document(tokens[start:end], self._name(number, index))
                start = end + 1

    def following(self, position: int, num_tokens: int) -> Int32:
        """Up to `num_tokens` tokens behind a position of the whole corpus, of the same document."""
        if not 0 <= position < self._num_positions:
            raise ValueError(f"position must be from 0 to {self._num_positions - 1}, got {position}")
        offset, number = self._offsets.peekitem(self._offsets.bisect_right(position) - 1)
        start = position - offset + 1
        tokens: Int32 = self.arrays[number][0][start : start + num_tokens]
        borders = np.flatnonzero(tokens < 0)
        return tokens[: int(borders[0]) if len(borders) else len(tokens)]

    def _occurrence(self, number: int, position: int) -> Occurrence:
        borders = self._store.arrays[f"borders-{number}"]
        index = min(int(np.searchsorted(borders, position)), len(borders) - 1)  # beyond the last one only if damaged
        start = int(borders[index - 1]) + 1 if index else 0
        return Occurrence(self._name(number, index), position + 1 - start)

    def _name(self, number: int, index: int) -> str:
        ends = self._store.arrays[f"name_ends-{number}"]
        start = int(ends[index - 1]) if index else 0
        return self._store.arrays[f"names-{number}"][start : int(ends[index])].tobytes().decode("utf-8", "replace")


def _known(token_ids: Sequence[int] | Int32) -> Int32:
    """The ids as int32; what no document can hold becomes BORDER, which nothing matches."""
    ids = np.asarray(token_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"token ids must be a list of whole numbers, got {ids.dtype} {ids.shape}")
    return np.where((ids < 0) | (ids > MAX_TOKEN), BORDER, ids).astype(np.int32)


def _drop_dense(path: Path | str) -> None:
    """Remove the dense index of a corpus that was replaced: its keys stand for positions that are gone."""
    folder = Path(path) / DENSE
    if (folder / MANIFEST).exists():
        with writing(folder, part=True):  # which takes away what no manifest names
            (folder / MANIFEST).unlink()
        with suppress(OSError):  # something else lies there
            folder.rmdir()


def _named(
    documents: Iterable[Document | Sequence[int] | Int32],
) -> Iterator[tuple[str, Sequence[int] | Int32]]:
    """Name and token ids of each."""
    for document in documents:
        yield (document.name, document.token_ids) if isinstance(document, Document) else ("", document)


def _drained(documents: deque[Document | Sequence[int] | Int32]) -> Iterator[Document | Sequence[int] | Int32]:
    """All of them; each leaves memory as it is taken."""
    while documents:
        yield documents.popleft()
