"""GOOSE (COLM 2026, 2604.02047): a spine copied from the context, with branches from adjacency, by hand-made rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from retrodraft.baselines.lookup import Text, chain_of
from retrodraft.kernels import baselines_goose as kernel
from retrodraft.kernels.tree import spine_first
from retrodraft.strategy import TopLogits
from retrodraft.tree import DraftTree, Int32

# The defaults of the authors' code.
WIDTH = 10  # successors kept in a row
BRANCH_DEPTH = 6
MIN_SCORE = 0.01
SPINE_BRANCH_SHARE = 0.5  # of the branch budget, for branches that hang off the spine
MAX_CHAIN, MAX_GROWN_CHAIN = 20, 100
LONG_MATCH = 8
GROW_ABOVE = 0.6  # confidence
EMA_RATE = 0.3
PAIR_SLOTS = 1 << 18


class Goose:
    """Adjacency rows for tokens and for pairs of tokens, shared by all sequences.

    Every verified position overwrites its rows, accepted or not, and so does the prompt; the last position of a token
    wins. Differences from the authors' code: the node budget is the caller's, at every confidence (theirs grows from 60
    to 100 nodes, root included, with the confidence); rows stay from one sequence to the next, as in Token Recycling,
    until `reset()` (theirs begin empty); the pair table is bounded and forgets the pairs written longest ago.
    """

    proposers = {kernel.FROM_CONTEXT: "context_match", kernel.FROM_ADJACENCY: "adjacency"}
    top_k = WIDTH

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.reset()

    def reset(self) -> None:
        """Empty the rows."""
        self.rows: tuple[npt.NDArray[Any], ...] = (
            np.full((self.vocab_size, WIDTH), -1, np.int32),
            np.zeros((self.vocab_size, WIDTH), np.float32),
            np.zeros(PAIR_SLOTS, np.int64),
            np.zeros(PAIR_SLOTS, np.int32),
            np.zeros((PAIR_SLOTS, WIDTH), np.int32),
            np.zeros((PAIR_SLOTS, WIDTH), np.float32),
        )
        self.clock = 0

    def row(self) -> GooseRow:
        """State for a new sequence."""
        return GooseRow(self)

    def harvest(self, order: npt.NDArray[np.int64], before: Int32, tokens: Int32, top: TopLogits) -> None:
        """Overwrite rows in `order`; `before[i]` is the token before `tokens[i]`, -1 for no pair."""
        self.clock += 1
        kernel.harvest(
            self.rows, order, before, np.ascontiguousarray(tokens), np.ascontiguousarray(top.token_ids),
            np.ascontiguousarray(top.probs), self.clock,
        )  # fmt: skip

    def successors(self, previous: int, token: int) -> list[tuple[int, float]]:
        """`(token, score)` from the pair's row, else the token's."""
        ids, scores = np.empty(WIDTH, np.int32), np.empty(WIDTH, np.float32)
        count = kernel.successors(self.rows, previous, token, ids, scores)
        return list(zip(ids[:count].tolist(), scores[:count].tolist(), strict=True))


class GooseRow:
    """One sequence: its text, its n-grams and how its spines fared."""

    def __init__(self, shared: Goose) -> None:
        self._shared = shared
        self._chain = np.empty(MAX_GROWN_CHAIN + MAX_CHAIN, np.int32)
        self._start(np.empty(0, np.int32))

    def _start(self, token_ids: Int32) -> None:
        self._text = Text()
        self._table = np.zeros((64, 3), np.int32)
        self._acceptance = 0.5  # moving average over the spines
        self._drafted: DraftTree | None = None
        self._order = np.empty(0, np.int64)
        self._linear = True
        self._append(token_ids)

    def begin(self, token_ids: Int32, top: TopLogits | None) -> None:
        """Take the prompt and harvest what the target said along it; see `StrategyRow.begin`."""
        self._start(token_ids)
        if top is not None and len(top):
            first = len(token_ids) - len(top)
            before = np.full(len(top), -1, np.int32)
            before[1 if first == 0 else 0 :] = token_ids[max(first - 1, 0) : len(token_ids) - 1]
            self._shared.harvest(np.arange(len(top)), before, token_ids[first:], top)

    def draft(self, prices: npt.NDArray[np.float64], max_depth: int, chain: bool) -> DraftTree:
        """The spine tree, or a bare chain where adjacency knows nothing of the root; see `StrategyRow.draft`."""
        text, budget = self._text, len(prices)
        branches = bool(self._shared.successors(self._previous(), text.root))
        length, confidence = kernel.context_chain(
            text.buffer, text.length, self._table, MAX_CHAIN, MAX_GROWN_CHAIN, LONG_MATCH,
            GROW_ABOVE if branches else 1.0, self._chain,
        )  # fmt: skip
        copied = self._chain[:length]
        foreign = np.flatnonzero((copied < 0) | (copied >= self._shared.vocab_size))
        copied = copied[: foreign[0]] if len(foreign) else copied
        self._linear = chain or not branches
        if self._linear:
            if not len(copied) and chain:
                copied = self._likeliest(min(BRANCH_DEPTH, budget - 1))
            tree = chain_of(text.root, copied[: min(max_depth, budget - 1)])
            tree.sources[1:] = kernel.FROM_CONTEXT if length else kernel.FROM_ADJACENCY
            self._order = np.arange(len(tree))
        else:
            tree = self._tree(copied, confidence, budget, max_depth)
        self._drafted = tree
        return tree

    def _tree(self, copied: Int32, confidence: float, budget: int, max_depth: int) -> DraftTree:
        """Divide the budget between spine and branches, and build."""
        tier = spine_ratio(self._acceptance)
        ratio = tier + confidence * (1.0 - tier)
        spine = min(len(copied), int(budget * ratio), budget - 1, max_depth)
        tokens, parents, depths, made = np.empty((4, budget), np.int32)
        probs, sources = np.empty(budget, np.float32), np.empty(budget, np.uint8)
        count = kernel.spine_tree(
            self._shared.rows, self._previous(), self._text.root, copied, len(copied), spine, budget, max_depth,
            BRANCH_DEPTH, SPINE_BRANCH_SHARE, MIN_SCORE, tokens, parents, depths, probs, sources,
        )  # fmt: skip
        made[:count] = np.arange(count)
        spine_first(tokens, parents, depths, probs, made, count)
        made = made[:count]
        self._order = np.argsort(made)
        return DraftTree(tokens[:count], parents[:count], depths[:count], probs[:count], sources[made])

    def _likeliest(self, length: int) -> Int32:
        """Chain of each token's first successor."""
        previous, token = self._previous(), self._text.root
        found: list[int] = []
        while len(found) < length:
            ranked = self._shared.successors(previous, token)
            if not ranked or ranked[0][1] < MIN_SCORE:
                break
            previous, token = token, ranked[0][0]
            found.append(token)
        return np.array(found, np.int32)

    def commit(self, tree: DraftTree, path: list[int], token_ids: Int32, top: TopLogits | None) -> None:
        """Note how the spine fared, harvest every verified node, append what was emitted."""
        own = tree is self._drafted
        linear = self._linear or not own or len(tree) == 1
        spine = tree.sources == kernel.FROM_CONTEXT
        if not linear and spine.any():
            rate = float(spine[path].sum() / spine.sum())
            self._acceptance = EMA_RATE * rate + (1.0 - EMA_RATE) * self._acceptance
        if top is not None:
            before = tree.token_ids[tree.parents]
            # As in the authors' code a tree harvests only pairs that it drafted; a chain or a plain step has the
            # root's pair as well.
            before[0] = self._previous() if linear else -1
            order = self._order if own else np.arange(len(tree))
            self._shared.harvest(order, before, tree.token_ids, top)
        self._drafted = None
        self._append(token_ids)

    def _previous(self) -> int:
        return int(self._text.buffer[self._text.length - 2]) if self._text.length > 1 else -1

    def _append(self, token_ids: Int32) -> None:
        start = self._text.length
        self._text.extend(token_ids)
        needed = 2 * (kernel.MAX_NGRAM - kernel.MIN_NGRAM + 1) * self._text.length
        if needed > len(self._table):
            self._table = np.zeros((1 << needed.bit_length(), 3), np.int32)
            start = 0
        kernel.index_text(self._text.buffer, start, self._text.length, self._table)


def spine_ratio(acceptance: float) -> float:
    """Share of the budget for the spine, by how the last spines fared."""
    if acceptance < 0.2:
        return 0.15
    return 0.30 if acceptance < 0.4 else 0.50
