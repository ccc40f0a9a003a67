"""Making dense indexes: from a user's own generations as they happen, or by running a corpus through the model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from retrodraft.dense import dense_info, has_dense, num_positions, open_dense, tokens_at
from retrodraft.hidden_states import last_hidden_states
from retrodraft.index.corpus import DENSE, KIND, CorpusIndex, Document
from retrodraft.index.storage import MANIFEST, check_outside, is_store, writing

if TYPE_CHECKING:
    from retrodraft.batch import Batch
    from retrodraft.decoder import RetroDraft
    from retrodraft.index.dense import DenseBuilder, DenseIndex, Projection

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
WINDOW, OVERLAP = 1024, 256  # tokens of a document in one forward, and those of them that are only context
POOL = 64  # windows that are sorted by length, to be run together
BATCH_TOKENS = 4096


class Harvest:
    """Answers and their hidden states, on their way into a corpus and its dense index.

    Several may fill one folder at the same time, a new one too. The first that writes keys decides their projection, so
    states wait unprojected, and the harvest is written for the first time when there are enough to fit one.
    """

    def __init__(self, rd: RetroDraft, index: CorpusIndex | Path | str) -> None:
        from retrodraft.index.dense import DenseBuilder
        from retrodraft.index.fingerprint import tokenizer_facts

        self.path = index.path if isinstance(index, CorpusIndex) else Path(index)
        self._rd = rd
        self._facts: dict[str, Any] = {} if rd.tokenizer is None else tokenizer_facts(rd.tokenizer)
        self._documents: list[Document] = []  # that are not written yet
        self._num_positions = 0  # of these
        self._num_written = 0
        self._problem = ""  # why there will be no keys
        self._builder: DenseBuilder = DenseBuilder(waits=True)
        if self._is_new():
            check_outside(self.path)
            _check_writable(self.path)
        else:
            corpus = CorpusIndex.open(self.path)
            self._check(corpus)
            _check_writable(self.path / DENSE)
            if has_dense(corpus):
                self._builder = DenseBuilder(open_dense(corpus, rd.model).projection)

    @property
    def num_documents(self) -> int:
        """Finished answers so far."""
        return self._num_written + len(self._documents)

    def add(self, batch: Batch) -> None:
        """Take the answers of a finished call."""
        assert batch.states is not None
        for index, row in enumerate(batch.rows):
            token_ids = row.chooser.ids[0, row.chooser.prompt_length :].cpu().numpy().astype(np.int32)
            if not len(token_ids):
                continue
            states = batch.states.visited(index)[1 : len(token_ids) - 1]  # a state that two tokens follow
            if len(states) and not self._problem:
                self._builder.add(states, self._num_positions + np.arange(len(states)))
            self._documents.append(Document(token_ids, f"answer {self.num_documents + 1}"))
            self._num_positions += len(token_ids) + 1
        if self._builder.is_ready:
            with suppress(OSError, ValueError):  # a generation is no place to fail: the block's end tries again
                self.save()

    def save(self) -> None:
        """Add the answers to the corpus as a shard, and their states to its dense index; both are made if need be.

        Raises:
            ValueError: another writer made the folder something that the answers, or their states, do not fit. Answers
                are written wherever they can be.
            OSError: there is no room, or no permission.
        """
        if self._documents:
            self._save()
        if self._problem:
            raise ValueError(self._problem)

    def _save(self) -> None:
        from retrodraft.index.dense import DenseBuilder

        with writing(self.path) as writer:
            if not (self.path / MANIFEST).exists():  # asked under the lock: another harvest may begin it as well
                writer.commit(KIND, {"tokenizer": self._facts, "options": {"harvest": True}, "shards": []})
        corpus = CorpusIndex.open(self.path)
        self._check(corpus)
        start = corpus.extend(self._documents)
        written, self._documents = self._documents, []
        self._num_written += len(written)
        self._num_positions = 0
        if not self._builder.has_rows:
            return
        try:
            self._builder = DenseBuilder(self._save_keys(corpus, written, start))
        except (OSError, ValueError) as error:
            self._builder = DenseBuilder(waits=True)
            self._problem = f"the answers are in {self.path}, but not their keys: {error}"

    def _save_keys(self, corpus: CorpusIndex, written: list[Document], start: int) -> Projection:
        """Add the keys of answers that the corpus holds from `start` on; returns the projection they were made with."""
        from retrodraft.index.dense import DenseIndex

        with writing(self.path / DENSE, part=True) as writer:
            present = open_dense(corpus, self._rd.model) if has_dense(corpus) else None
            rows = self._builder.finish(None if present is None else present.projection)
            index = DenseIndex(rows.projection) if present is None else present
            wanted = np.concatenate([np.append(document.token_ids, -1) for document in written])
            if not np.array_equal(tokens_at(corpus, start + np.arange(len(wanted))), wanted):
                raise ValueError("the index was replaced while the harvest was being written")
            index.take(rows, start)
            index.write(writer, dense_info(corpus, self._rd.model, num_positions(corpus)))
        return index.projection

    def _check(self, corpus: CorpusIndex) -> None:
        corpus.check_tokenizer(self._facts.get("fingerprint", corpus.fingerprint), self._rd.vocab_size)

    def _is_new(self) -> bool:
        """Whether there is nothing, an empty folder, or what a killed first build left."""
        if not self.path.is_dir():
            return not self.path.exists()
        return not (self.path / MANIFEST).exists() and (is_store(self.path) or not any(self.path.iterdir()))


@contextmanager
def harvesting(rd: RetroDraft, index: CorpusIndex | Path | str) -> Iterator[Harvest]:
    """See `RetroDraft.harvest`."""
    if rd.capabilities.mode == "plain":
        raise ValueError(f"a harvest needs a model that can verify drafts; this one can't ({rd.capabilities.reason})")
    if getattr(rd._active, "harvest", None) is not None:
        raise ValueError("a harvest is running in this thread already")
    harvest = Harvest(rd, index)
    rd._active.harvest = harvest
    try:
        yield harvest
    except BaseException:
        rd._active.harvest = None
        try:
            harvest.save()  # what has finished before
        except (OSError, ValueError) as failure:
            warnings.warn(f"the harvest could not be written: {failure}", stacklevel=3)  # not in the error's place
        raise
    rd._active.harvest = None
    harvest.save()


def build_dense(
    corpus: CorpusIndex, model: Any, limit: int = 0, progress: Callable[[int, int], None] | None = None
) -> DenseIndex:
    """Run the corpus' documents through the model and save their states as its dense index.

    Args:
        limit: tokens to run, of documents drawn at random, the last of them cut; 0 takes all.
        progress: called with the number of tokens done and of all.

    Raises ValueError if the corpus is empty, or the model has no output head.
    """
    from retrodraft.index.dense import DenseBuilder

    _check_writable(corpus.path)
    covered = num_positions(corpus)
    documents = _documents(corpus)
    order = np.random.default_rng(0).permutation(len(documents))  # so that the projection is fitted on all kinds
    sizes = np.diff(documents, axis=1)[order, 0]
    total = min(int(sizes.sum()), limit or num_positions(corpus))
    order = order[: int(np.searchsorted(np.cumsum(sizes), total)) + 1]
    builder, done, size = DenseBuilder(), 0, _window_tokens(model)
    pool: list[tuple[int, int, int]] = []
    left = total
    for number in order.tolist():
        start, end = documents[number].tolist()
        end = min(end, start + left)
        left -= end - start
        pool += _windows(start, end, size)
        if len(pool) >= POOL or not left:
            for states, positions in _states(corpus, model, pool):
                builder.add(states, positions)
                done += len(positions)
                if progress is not None:
                    progress(done, total)
            pool = []
    index = builder.finish()
    index.save(corpus.path / DENSE, dense_info(corpus, model, covered))
    return index


def _documents(corpus: CorpusIndex) -> Int64:
    """First position of each document, and the position of its border: [num_documents, 2]."""
    ends, offset = [], 0
    for tokens, _, _ in corpus.arrays:
        ends.append(np.flatnonzero(tokens < 0) + offset)
        offset += len(tokens)
    borders = np.concatenate([np.empty(0, np.int64), *ends])
    starts = np.concatenate([np.zeros(1, np.int64), borders + 1])[: len(borders)]
    return np.stack([starts, borders], 1)


def _window_tokens(model: Any) -> int:
    maximum = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return min(WINDOW, maximum) if isinstance(maximum, int) and maximum > 0 else WINDOW


def _windows(start: int, end: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Windows that cover the document at `start` … `end`: first and last + 1 position, and the first that counts."""
    first, counts = start, start
    while counts < end:
        stop = min(first + size, end)
        yield first, stop, counts
        counts = stop
        first = stop - min(OVERLAP, size // 4)


def _states(corpus: CorpusIndex, model: Any, windows: list[tuple[int, int, int]]) -> Iterator[tuple[Float32, Int64]]:
    """Hidden states at the positions that count in each window, which are run in batches of like lengths."""
    windows = sorted(windows, key=lambda window: window[1] - window[0])
    while windows:
        longest = windows[-1][1] - windows[-1][0]
        taken = max(BATCH_TOKENS // longest, 1)
        batch, windows = windows[-taken:], windows[:-taken]
        # Padding lies behind, where causal attention does not look.
        positions = np.array([first for first, _, _ in batch])[:, None] + np.arange(longest)
        token_ids = np.maximum(tokens_at(corpus, positions), 0)
        hidden = last_hidden_states(model, torch.from_numpy(token_ids).long())
        for row, (first, stop, counts) in enumerate(batch):
            yield hidden[row, counts - first : stop - first].float().cpu().numpy(), np.arange(counts, stop)


def _check_writable(path: Path) -> None:
    """Raise ValueError now if a folder can't be made or written: later, the answers would be lost."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"{path} can't be written: {there} is {'read-only' if there.is_dir() else 'a file'}")
