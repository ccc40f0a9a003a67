"""`strategy="retro"`: every store's candidates in one calibrated best-first tree, sized by what a node costs.

The stores are the context's suffix automaton and the adjacency rows (Token Recycling, 2408.08696, with probabilities
and pair rows); their candidates meet in one heap, ranked by hit rates learned from outcomes (`kernels.candidates`).
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from retrodraft.index.adjacency import AdjacencyRows
from retrodraft.index.suffix_automaton import SuffixAutomaton
from retrodraft.kernels import learning
from retrodraft.kernels.candidates import FROM_ADJACENCY, FROM_CONTEXT, NUM_CELLS
from retrodraft.kernels.tree import build
from retrodraft.strategy import TopLogits
from retrodraft.tree import DraftTree, Int32

ACCEPTED_RATE, REJECTED_RATE = (0.5, 0.25)  # how far a row moves towards logits seen on the text, and beside it
PRIOR_TRIALS = 20.0  # how many outcomes a shipped hit rate is worth
SCOPE_REQUEST = 0


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
        self.hits = self._priors * self.trials


class RetroStrategy:
    """Adjacency rows and calibration, shared by all sequences; both persist from call to call."""

    proposers = {FROM_CONTEXT: "suffix_automaton", FROM_ADJACENCY: "token_recycling"}

    def __init__(self, vocab_size: int) -> None:
        self.adjacency = AdjacencyRows(vocab_size)
        self.calibration = Calibration()
        self.top_k = self.adjacency.width
        self.clock = 0

    def row(self) -> RetroRow:
        """State for a new sequence."""
        return RetroRow(self)

    def reset(self) -> None:
        """Forget the rows and return to the shipped priors."""
        self.adjacency.reset()
        self.calibration.reset()
        self.clock = 0


class RetroRow:
    """The context of one sequence and its place in every automaton."""

    def __init__(self, shared: RetroStrategy) -> None:
        self.shared = shared
        self.automata = [SuffixAutomaton()]
        self.scopes = np.array([SCOPE_REQUEST], np.int32)
        self.states = np.zeros(1, np.int32)
        self.lengths = np.zeros(1, np.int32)
        self.context = np.full(2, -1, np.int32)  # the two newest tokens

    def begin(self, token_ids: Int32, top: TopLogits | None) -> None:
        """Take the prompt; see `StrategyRow.begin`."""
        self.automata[0].extend(token_ids)
        self.states[0], self.lengths[0] = self.automata[0].match()
        newest = token_ids[-2:]
        self.context[2 - len(newest) :] = newest
        if top is not None and len(top):
            tokens = token_ids[len(token_ids) - len(top) :]
            before = np.concatenate([np.full(1, -1, np.int32), token_ids])[len(token_ids) - len(top) : len(token_ids)]
            self._learn_rows(before, tokens, top, ACCEPTED_RATE)

    def draft(self, prices: npt.NDArray[np.float64], max_depth: int, chain: bool) -> DraftTree:
        """The tree worth most over its price; see `StrategyRow.draft`."""
        size = len(prices)
        tree = DraftTree(
            np.empty(size, np.int32),
            np.empty(size, np.int32),
            np.empty(size, np.int32),
            np.empty(size, np.float32),
            np.empty(size, np.uint8),
        )
        count = build(
            self._stores(), self.scopes, self.shared.adjacency.arrays,
            self.shared.calibration.hits, self.shared.calibration.trials,
            self.states, self.lengths, self.context[0], self.context[1], prices, max_depth, chain,
            tree.token_ids, tree.parents, tree.depths, tree.probs, tree.sources,
        )  # fmt: skip
        return DraftTree(
            tree.token_ids[:count], tree.parents[:count], tree.depths[:count], tree.probs[:count], tree.sources[:count]
        )

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
                self._stores(), self.scopes, self.shared.adjacency.arrays,
                self.shared.calibration.hits, self.shared.calibration.trials,
                self.states, self.lengths, self.context, token_ids, done, top_ids, top_probs,
                ACCEPTED_RATE, self.shared.clock,
            )  # fmt: skip
            if done < len(token_ids):
                self.automata[0].reserve(int(token_ids[done]))

    def _learn_rows(self, before: Int32, tokens: Int32, top: TopLogits, rate: float) -> None:
        arrays = self.shared.adjacency.arrays
        learning.learn_rows(arrays, before, tokens, top.token_ids, top.probs, rate, self.shared.clock)

    def _stores(self) -> tuple[tuple[npt.NDArray[Any], ...], ...]:
        return tuple((a.states, a.edges, a.table, a.meta) for a in self.automata)
