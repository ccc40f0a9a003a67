"""`strategy="retro"`: every store's candidates in one calibrated best-first tree, sized by what a node costs.

The stores are suffix automata over the request's own text and over a namespace's memory, corpora on disk, and the
adjacency rows (Token Recycling, 2408.08696, with probabilities and pair rows); their candidates meet in one heap,
ranked by hit rates learned from outcomes (`kernels.candidates`).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from retrodraft.index.adjacency import AdjacencyRows
from retrodraft.index.corpus import MAX_SHARDS, CorpusIndex
from retrodraft.index.memory import SCOPES, Memory, joined
from retrodraft.index.suffix_automaton import SuffixAutomaton
from retrodraft.kernels import learning
from retrodraft.kernels.candidates import (
    CONTEXT,
    DENSE,
    FIRST_FOREIGN_CELL,
    FROM_ADJACENCY,
    GLOBAL,
    NUM_CELLS,
    PREDICTION,
    REQUEST,
    SESSION,
    WORKSPACE,
)
from retrodraft.kernels.confidence import FIRST_FOREIGN_KIND, NUM_KINDS
from retrodraft.kernels.suffix_array import MAX_MATCH
from retrodraft.kernels.tree import build
from retrodraft.kernels.trie import START
from retrodraft.strategy import TopLogits
from retrodraft.tree import DraftTree, Int32

if TYPE_CHECKING:
    from retrodraft.dense import DenseDrafts

ACCEPTED_RATE, REJECTED_RATE = (0.5, 0.25)  # how far a row moves towards logits seen on the text, and beside it
PRIOR_TRIALS = 20.0  # how many outcomes a shipped hit rate is worth
FOREIGN_TRIALS = 3.0  # the same of foreign texts, whose rates are copies of the request's
PUBLISHED_AT_ONCE, PUBLISHED_CONTEXT = 16, 16  # tokens that a running sequence shows to others, and before them


class Calibration:
    """Hit rates of the candidate cells: `hits / trials`, beginning at the shipped priors."""

    def __init__(self) -> None:
        with (files("retrodraft") / "data" / "priors.npy").open("rb") as file:
            self._priors = np.load(file, allow_pickle=False).astype(np.float32)
        if self._priors.shape != (NUM_CELLS,):
            raise ValueError(f"priors.npy holds {self._priors.shape} hit rates, this version needs ({NUM_CELLS},)")
        self.reset()

    def reset(self) -> None:
        """Return to the shipped priors."""
        self.trials = np.full(NUM_CELLS, PRIOR_TRIALS, np.float32)
        self.trials[FIRST_FOREIGN_CELL:] = FOREIGN_TRIALS
        self.hits = self._priors * self.trials
        self.foreign = np.zeros((NUM_KINDS - FIRST_FOREIGN_KIND, 2), np.float32)  # how far foreign texts were borne out

    def restore(self, hits: npt.NDArray[np.float32], trials: npt.NDArray[np.float32]) -> None:
        """Take saved counts, float32 [num_cells]; those of another layout, or damaged ones, are left alone."""
        fits = hits.shape == trials.shape == (NUM_CELLS,)
        if fits and np.all((hits >= 0) & (hits <= trials) & (trials > 0)):
            self.hits, self.trials = hits.astype(np.float32), trials.astype(np.float32)


class RetroStrategy:
    """Adjacency rows, corpora and calibration, shared by all sequences; all persist from call to call.

    `corpora` are searched for every sequence. Raises ValueError if they have more than MAX_SHARDS shards.
    """

    proposers = {
        1 << REQUEST: "suffix_automaton", FROM_ADJACENCY: "token_recycling", 1 << SESSION: "session",
        1 << WORKSPACE: "workspace", 1 << PREDICTION: "prediction", 1 << GLOBAL: "corpus",
    }  # fmt: skip

    def __init__(self, vocab_size: int, corpora: Sequence[CorpusIndex] = (), dense: DenseDrafts | None = None) -> None:
        self.adjacency = AdjacencyRows(vocab_size)
        self.calibration = Calibration()
        self.corpora = _padded([shard for corpus in corpora for shard in corpus.arrays])
        self.top_k = self.adjacency.width
        self.dense = dense
        if dense is not None:
            self.proposers = {**self.proposers, 1 << DENSE: "dense"}
        self.clock = 0

    def row(
        self,
        memory: Memory | None = None,
        calibration: Calibration | None = None,
        prediction: Int32 | None = None,
        adjacency: AdjacencyRows | None = None,
    ) -> RetroRow:
        """State for a new sequence.

        It may draft from a namespace's memory and rows, from a predicted output (token ids), and have hit rates of its
        own.
        While other sequences draft from that memory too (`Memory.readers`), it gets what is emitted at once.
        """
        rows = adjacency or self.adjacency
        return RetroRow(self, memory or Memory(), calibration or self.calibration, prediction, rows)

    def reset(self) -> None:
        """Forget the rows and return to the shipped priors."""
        self.adjacency.reset()
        self.calibration.reset()
        self.clock = 0


def _padded(shards: list[tuple[npt.NDArray[Any], ...]]) -> tuple[tuple[npt.NDArray[Any], ...], ...]:
    """The shards and empty ones up to a power of two: the kernels are compiled once for each number of shards."""
    if len(shards) > MAX_SHARDS:
        raise ValueError(
            f"the corpora have {len(shards)} shards, at most {MAX_SHARDS} can be drafted from: "
            "join corpora with `retrodraft index merge`, and the shards of one with `retrodraft index compact`"
        )
    count = 1
    while count < len(shards):
        count *= 2
    empty = (np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64))
    for array in empty:
        array.flags.writeable = False  # as mapped arrays are
    return (*shards, *[empty] * (count - len(shards)))


class RetroRow:
    """The context of one sequence and its place in every store."""

    def __init__(
        self,
        shared: RetroStrategy,
        memory: Memory,
        calibration: Calibration,
        prediction: Int32 | None,
        adjacency: AdjacencyRows,
    ) -> None:
        self.shared, self.memory, self.calibration, self.adjacency = shared, memory, calibration, adjacency
        self.text = SuffixAutomaton()
        self.prediction = joined([])
        self._predicted = prediction
        self.dense = shared.dense.row() if shared.dense is not None else None  # its trie is the last store
        last = [DENSE] if self.dense is not None else []
        self.scopes = np.array([REQUEST, PREDICTION, *SCOPES, *last], np.int32)
        self.states = np.zeros(len(self.scopes), np.int32)
        self.lengths = np.zeros(len(self.scopes), np.int32)
        self.spans = np.full(len(shared.corpora), MAX_MATCH, np.int32)
        self.context = np.full(CONTEXT, -1, np.int32)  # the newest tokens
        self.record = np.zeros((NUM_KINDS, 2), np.float32)  # how far this text bears out the hit rates
        self.record[FIRST_FOREIGN_KIND:] = calibration.foreign
        self._version = -1  # of the memory, when its matches were taken
        self._unpublished = 0  # tokens emitted since the memory was given some

    def begin(self, token_ids: Int32, top: TopLogits | None) -> None:
        """Take the prompt; see `StrategyRow.begin`."""
        self.text.extend(token_ids)
        self.states[0], self.lengths[0] = self.text.match()
        newest = token_ids[-CONTEXT:]
        self.context[CONTEXT - len(newest) :] = newest
        if self._predicted is not None:  # it is the answer's: what it follows is the end of this prompt
            self.prediction = joined([np.concatenate([self.context, self._predicted])])
            self.states[1], self.lengths[1] = self.prediction.follow(self.context)
        if top is not None and len(top):
            tokens = token_ids[len(token_ids) - len(top) :]
            before = np.concatenate([np.full(1, -1, np.int32), token_ids])[len(token_ids) - len(top) : len(token_ids)]
            self._learn_rows(before, tokens, top, ACCEPTED_RATE)

    def draft(self, prices: npt.NDArray[np.float64], max_depth: int, chain: bool) -> DraftTree:
        """The tree worth most over its price; see `StrategyRow.draft`."""
        if self.dense is not None:
            length = self.dense.recall(self.context, int(self.lengths[:-1].max()), self.shared.corpora, self.spans)
            if length:
                self.states[-1], self.lengths[-1] = START, length
        size = len(prices)
        tokens, parents, depths = np.empty(size, np.int32), np.empty(size, np.int32), np.empty(size, np.int32)
        probs, sources = np.empty(size, np.float32), np.empty(size, np.uint8)
        count = build(
            self._stores(), self.scopes, self.shared.corpora, self.adjacency.arrays, self._rates(),
            self.states, self.lengths, self.spans, self.context, prices, max_depth, chain,
            tokens, parents, depths, probs, sources,
        )  # fmt: skip
        return DraftTree(tokens[:count], parents[:count], depths[:count], probs[:count], sources[:count])

    def commit(self, tree: DraftTree, path: list[int], token_ids: Int32, top: TopLogits | None) -> None:
        """Judge every candidate of the visited nodes, append the emitted tokens, blend the target's logits in."""
        visited = np.array(path, np.int64)
        width = self.shared.top_k
        if top is None:
            top_ids, top_probs = (np.full((len(path), width), -1, np.int32), np.zeros((len(path), width), np.float32))
        else:
            top_ids, top_probs = top.token_ids[visited], top.probs[visited]
            known = top.token_ids[:, 0] >= 0
            known[visited] = False
            rejected = np.flatnonzero(known)
            if len(rejected):
                others = TopLogits(top.token_ids[rejected], top.probs[rejected])
                before = tree.token_ids[tree.parents[rejected]]
                self._learn_rows(before, tree.token_ids[rejected], others, REJECTED_RATE)
        self.shared.clock += 1
        done = 0
        while done < len(token_ids):
            done = learning.observe(
                self._stores(), self.scopes, self.shared.corpora, self.adjacency.arrays, self._rates(),
                self.states, self.lengths, self.spans, self.context,
                token_ids, done, top_ids, top_probs, ACCEPTED_RATE, self.shared.clock,
            )  # fmt: skip
            if done < len(token_ids):
                self.text.reserve(int(token_ids[done]))
        self.calibration.foreign[:] = self.record[FIRST_FOREIGN_KIND:]
        if self.memory.readers > 1:
            self._unpublished += len(token_ids)
            if self._unpublished >= PUBLISHED_AT_ONCE:
                self.memory.add_text(self.context[-(self._unpublished + PUBLISHED_CONTEXT) :])
                self._unpublished = 0

    def _learn_rows(self, before: Int32, tokens: Int32, top: TopLogits, rate: float) -> None:
        arrays = self.adjacency.arrays
        learning.learn_rows(arrays, before, tokens, top.token_ids, top.probs, rate, self.shared.clock)

    def _rates(self) -> tuple[npt.NDArray[np.float32], ...]:
        return self.calibration.hits, self.calibration.trials, self.record

    def _stores(self) -> tuple[tuple[npt.NDArray[Any], ...], ...]:
        """Arrays of every automaton, and the matches in those that have changed taken anew."""
        if self._version != self.memory.version:
            self._version = self.memory.version
            self.memory.match(self.context, self.states[2:], self.lengths[2:])
        memory = (automaton.arrays for automaton in self.memory.automata)
        dense = () if self.dense is None else (self.dense.arrays,)
        return (self.text.arrays, self.prediction.arrays, *memory, *dense)
