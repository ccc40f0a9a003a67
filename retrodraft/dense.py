"""Dense drafting: what followed in a corpus where the target was in a similar state.

A corpus may carry a dense index (`retrodraft.index.dense`) in its folder `dense`: the target's hidden states at corpus
positions. Where no text matches well, the state whose logits gave the newest token is looked up; what followed the
nearest positions that are continued by that token enters the draft tree as a trie, under hit rates of its own.

The index says which model and which text it belongs to. The text is told by its first tokens, so documents that are
added later, and shards that are joined, leave it valid.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from retrodraft.index.corpus import DENSE, CorpusIndex
from retrodraft.index.storage import MANIFEST, IndexFormatError
from retrodraft.kernels import trie
from retrodraft.kernels.suffix_array import longest_match

if TYPE_CHECKING:
    from retrodraft.index.dense import DenseIndex

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
SHORT_MATCH = 4  # tokens; a text that matches so many is trusted more than similarity
NEIGHBOURS = 16
DRAFT_TOKENS = 12  # of one neighbour
MAX_SHARE = 0.02  # of a step's time that a query may take
RECENT = 15  # queries and steps whose median times are compared
RETRY = 32  # while queries are too slow, one in so many is made to measure again
COSINES = (0.8, 0.93)  # classes of similarity, told apart as matches of 1, 2 and 3 tokens, which are right as often
SAMPLED = 16  # numbers of each weight that tell models apart
PIECES, PIECE_TOKENS = 512, 64  # of a corpus, that tell texts apart


def model_key(model: Any) -> str:
    """Class, shapes and a sample of all weights, as a short hash; nearly the same in float32 and bfloat16."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        if parameter.device.type != "meta":
            numbers = parameter.detach().flatten()
            sample = numbers[:: max(len(numbers) // SAMPLED, 1)][:SAMPLED]
            digest.update(sample.float().to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def tokens_at(corpus: CorpusIndex, positions: Int64) -> Int32:
    """Tokens at positions of the whole corpus, in an array of any shape; -1 at a document's end and beyond the last."""
    found = np.full(positions.shape, -1, np.int32)
    offset = 0
    for tokens, _, _ in corpus.arrays:
        inside = (positions >= offset) & (positions < offset + len(tokens))
        found[inside] = tokens[positions[inside] - offset]
        offset += len(tokens)
    return found


def dense_info(corpus: CorpusIndex, model: Any, num_positions: int) -> dict[str, Any]:
    """What a dense index over the corpus' first `num_positions` says of its origin."""
    return {
        "model": model_key(model), "model_name": str(getattr(model.config, "_name_or_path", "")),
        "num_positions": num_positions, "text": _text_digest(corpus, num_positions),
    }  # fmt: skip


def _text_digest(corpus: CorpusIndex, num_positions: int) -> str:
    """Hash of evenly spread pieces of the corpus' first positions."""
    starts = np.unique(np.linspace(0, max(num_positions - 1, 0), PIECES).astype(np.int64))
    positions = np.minimum(starts[:, None] + np.arange(PIECE_TOKENS), num_positions - 1)
    return hashlib.sha256(tokens_at(corpus, positions).astype("<i4").tobytes()).hexdigest()[:16]


def num_positions(corpus: CorpusIndex) -> int:
    """Positions of the whole corpus, borders included."""
    return sum(len(tokens) for tokens, _, _ in corpus.arrays)


def has_dense(corpus: CorpusIndex) -> bool:
    """Whether a corpus carries a dense index."""
    return (corpus.path / DENSE / MANIFEST).exists()


def open_dense(corpus: CorpusIndex, model: Any) -> DenseIndex:
    """The corpus' dense index.

    Raises:
        ImportError: FAISS is not installed.
        IndexFormatError: there is none, it is damaged, or it is of another model or another text.
    """
    from retrodraft.index.dense import DenseIndex

    path = corpus.path / DENSE
    again = f"run `retrodraft index dense build {corpus.path} --model MODEL`"
    if not has_dense(corpus):
        raise IndexFormatError(f"{corpus.path} has no dense index: {again}, or fill one with RetroDraft.harvest")
    index = DenseIndex.open(path)
    if index.info.get("model") != model_key(model):
        raise IndexFormatError(
            f"{path} holds hidden states of another model ({index.info.get('model_name')!r}), or of other "
            f"weights; they mean nothing to this one: {again} with this model"
        )
    covered, held = index.info.get("num_positions"), num_positions(corpus)
    if type(covered) is not int or not 0 < covered <= held or index.info.get("text") != _text_digest(corpus, covered):
        raise IndexFormatError(f"{path} was made for other documents than {corpus.path} holds now: {again} anew")
    if len(index) and not 0 <= int(index.positions.min()) <= int(index.positions.max()) < covered:
        raise IndexFormatError(f"{path} is damaged: it names positions that the corpus does not have; {again} anew")
    return index


class DenseDrafts:
    """The dense indexes of a model's corpora, and what their queries cost; shared by all sequences."""

    def __init__(self, indexes: Sequence[tuple[CorpusIndex, DenseIndex]]) -> None:
        self._indexes = list(indexes)
        self._query_seconds: deque[float] = deque(maxlen=RECENT)  # of a step that asked, all its rows together
        self._step_seconds: deque[float] = deque(maxlen=RECENT)
        self._pending = 0.0  # seconds of this step's queries
        self._num_pending = 0
        self._num_left_out = 0
        width = len(self._indexes[0][1].projection.mean)
        row = self.row()  # the first query maps pages and compiles, which says nothing of the others
        row.state = np.random.default_rng(0).normal(size=width).astype(np.float32)
        row.fill(-2)

    @classmethod
    def open(cls, corpora: Sequence[CorpusIndex], model: Any) -> DenseDrafts:
        """Those of the corpora that have one; raises as `open_dense` does, and if there is none."""
        having = [corpus for corpus in corpora if has_dense(corpus)]
        return cls([(corpus, open_dense(corpus, model)) for corpus in having or corpora])

    def row(self) -> DenseRow:
        """State for a new sequence."""
        return DenseRow(self)

    @property
    def affordable(self) -> bool:
        """Whether a query takes at most MAX_SHARE of a step, by the medians of the recent ones."""
        if not self._query_seconds or not self._step_seconds:
            return True
        return statistics.median(self._query_seconds) <= MAX_SHARE * statistics.median(self._step_seconds)

    def may_ask(self) -> bool:
        """`affordable`, or it is time to measure again."""
        if self.affordable:
            return True
        self._num_left_out = (self._num_left_out + 1) % RETRY
        return self._num_left_out == 0

    def asked(self, seconds: float) -> None:
        """Count a query."""
        self._pending += seconds
        self._num_pending += 1

    def end_step(self, seconds: float) -> tuple[int, float]:
        """A step has taken `seconds`; returns the number of its queries and their time."""
        self._step_seconds.append(seconds)
        if self._num_pending:
            self._query_seconds.append(self._pending)
        outcome = self._num_pending, self._pending
        self._num_pending, self._pending = 0, 0.0
        return outcome

    def nearest(self, state: Float32) -> tuple[Int32, Float32]:
        """What follows the positions nearest to `state` [hidden]: tokens [n, 1 + DRAFT_TOKENS], and cosines [n]."""
        windows, cosines = [], []
        for corpus, index in self._indexes:
            found, similar = index.search(state[None], NEIGHBOURS)[0]
            windows.append(tokens_at(corpus, found[:, None] + np.arange(1, 2 + DRAFT_TOKENS)))
            cosines.append(similar)
        if len(windows) == 1:
            return windows[0], cosines[0]
        order = np.argsort(-np.concatenate(cosines), kind="stable")[:NEIGHBOURS]
        return np.concatenate(windows)[order], np.concatenate(cosines)[order]


class DenseRow:
    """One sequence's newest hidden state, and the trie of its last query in the arrays of a suffix automaton."""

    def __init__(self, shared: DenseDrafts) -> None:
        self.state: Float32 | None = None  # [hidden], where the newest token was chosen
        self._shared = shared
        room = 2 + NEIGHBOURS * DRAFT_TOKENS
        states = np.zeros((room, 5), np.int32)
        states[0] = (0, -1, -1, 0, -1)
        entries = 1 << (2 * room).bit_length()
        self.arrays = (states, np.zeros((room, 4), np.int32), np.full(entries, -1, np.int32), np.zeros(4, np.int64))

    def recall(
        self, context: Int32, longest: int, shards: Sequence[tuple[npt.NDArray[Any], ...]] = (), spans: Any = ()
    ) -> int:
        """Ask for what follows the newest token, the last of `context`, where no text matches SHORT_MATCH tokens.

        `longest` is the match in other texts; `spans[i]` + 1 bounds the one in a corpus' shard. While queries are too
        slow, most are left out. Returns the match length that stands for the similarity found; 0 leaves the trie, and
        the place in it, as they are.
        """
        if self.state is None or longest >= SHORT_MATCH or not self._shared.may_ask():
            return 0
        started = time.perf_counter()
        for shard, span in zip(shards, spans, strict=True):
            if (
                span + 1 >= SHORT_MATCH
                and len(shard[0])
                and longest_match(*shard, context, len(context))[0] >= SHORT_MATCH
            ):
                return 0
        cosine = self.fill(int(context[-1]))
        self.state = None
        self._shared.asked(time.perf_counter() - started)
        return 0 if cosine is None else 1 + sum(cosine >= limit for limit in COSINES)

    def fill(self, root: int) -> float | None:
        """Make the trie anew; the largest cosine in it, or None where no neighbour is continued by `root`."""
        assert self.state is not None
        windows, cosines = self._shared.nearest(self.state)
        first = trie.fill(*self.arrays, windows, root)
        return None if first < 0 else float(cosines[first])
