"""GOOSE (2604.02047): a spine from n-gram matches with branches from adjacency, by its own hand-made rules."""

from __future__ import annotations

from math import ceil

import numpy as np
import numpy.typing as npt

from retrodraft.strategy import TopLogits
from retrodraft.tree import DraftTree, Int32

NGRAM_SIZES = (5, 4, 3)
BRANCH_DEPTH = 6
WIDTH = 10  # tokens of an adjacency row
MIN_SCORE = 0.01
SPINE_BRANCH_SHARE = 0.5  # of the branch budget that hangs off spine nodes
MAX_CHAIN, MAX_GROWN_CHAIN = 20, 100
LONG_MATCH = 8
ACCEPTANCE_DECAY = 0.3
EXTRA_NODES = 40  # asked for at full confidence, where the budget allows it

Adjacency = list[tuple[int, float]]


class Goose:
    """Adjacency rows of tokens and of pairs, shared by all sequences."""

    proposers = {1: "ngram_spine", 2: "adjacency"}
    top_k = WIDTH

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.reset()

    def reset(self) -> None:
        """Empty the rows."""
        self.rows: dict[int, Adjacency] = {}
        self.pair_rows: dict[tuple[int, int], Adjacency] = {}

    def row(self) -> GooseRow:
        """State for a new sequence."""
        return GooseRow(self)

    def harvest(self, before: int, token: int, ids: Int32, probs: npt.NDArray[np.float32]) -> None:
        """Overwrite both rows with a softmax over the kept top-10 (not the true probabilities)."""
        total = float(probs.sum()) or 1.0
        row = list(zip(ids.tolist(), (probs / total).tolist(), strict=True))
        self.rows[token] = row
        self.pair_rows[before, token] = row

    def children(self, before: int, token: int) -> Adjacency:
        """The pair's row, else the token's."""
        return self.pair_rows.get((before, token)) or self.rows.get(token, [])


class GooseRow:
    """One sequence: its text, its n-grams and how well its spines did."""

    def __init__(self, shared: Goose) -> None:
        self._shared = shared
        self._tokens: list[int] = []
        # n-gram -> [index after its oldest occurrence, occurrences, whether all went on with the same token]
        self._ngrams: dict[tuple[int, ...], list[int]] = {}
        self._acceptance = 0.5
        self._spine = 0  # nodes of the last tree's spine

    def begin(self, token_ids: Int32, top: TopLogits | None) -> None:
        """Take the prompt and harvest its logits."""
        self._append(token_ids.tolist())
        if top is not None:
            first = len(self._tokens) - len(top)
            for i in range(len(top)):
                before = self._tokens[first + i - 1] if first + i else -1
                self._shared.harvest(before, self._tokens[first + i], top.token_ids[i], top.probs[i])

    def draft(self, prices: npt.NDArray[np.float64], max_depth: int, chain: bool) -> DraftTree:
        """Spine and branches within `len(prices) - 1` nodes."""
        budget = len(prices) - 1
        found, confidence = self._match()
        tier = 0.15 if self._acceptance < 0.2 else 0.30 if self._acceptance < 0.4 else 0.50
        ratio = tier + confidence * (1.0 - tier)
        wanted = min(budget, 60 + int(confidence * EXTRA_NODES))
        has_row = bool(self._shared.children(*self._ends([])))
        spine = found[: min(int(wanted * ratio) if has_row and not chain else budget, max_depth)]
        self._spine = len(spine)
        tokens, parents = list(spine), list(range(len(spine)))
        if has_row and not chain:
            self._branch(spine, wanted - len(spine), max_depth, tokens, parents)
        elif not spine and has_row:
            self._branch([], 1, 1, tokens, parents)
        tree = DraftTree.from_nodes(self._tokens[-1], tokens, parents)
        _mark_sources(tree, spine)
        return tree

    def _branch(
        self, spine: list[int], budget: int, max_depth: int, tokens: list[int], parents: list[int]
    ) -> None:
        """Alternatives at the root and along the spine, then breadth-first below them."""
        if budget <= 0:
            return
        on_spine = max(1, int(SPINE_BRANCH_SHARE * budget)) if spine else 0
        frontier: list[tuple[int, list[int], float]] = []  # node, its path of tokens, its score

        def add(parent: int, path: list[int], token: int, score: float) -> None:
            tokens.append(token)
            parents.append(parent)
            frontier.append((len(tokens), [*path, token], score))

        end = len(tokens) + budget
        for token, score in self._shared.children(*self._ends([]))[: budget - on_spine]:
            if score >= MIN_SCORE and (not spine or token != spine[0]) and len(tokens) < end:
                add(0, [], token, score)
        harmonic = sum(1.0 / i for i in range(1, len(spine) + 1))
        for i in range(1, len(spine) + 1):
            path = spine[:i]
            taken = 0
            for token, score in self._shared.children(*self._ends(path)):
                if taken >= max(1, int(on_spine / i / harmonic)) or len(tokens) >= end or i >= max_depth:
                    break
                if score >= MIN_SCORE and (i >= len(spine) or token != spine[i]):
                    add(i, path, token, score)
                    taken += 1
        while frontier and len(tokens) < end:
            node, path, score = frontier.pop(0)
            depth = len(path)
            if depth >= min(BRANCH_DEPTH, max_depth):
                continue
            width = min(ceil((end - len(tokens)) * score), max(1, WIDTH // depth))
            for token, below in self._shared.children(*self._ends(path))[:width]:
                if below >= MIN_SCORE and len(tokens) < end:
                    add(node, path, token, score * below)

    def _match(self) -> tuple[list[int], float]:
        """Continuation of the oldest occurrence of the longest n-gram, and the confidence in it."""
        entry = self._lookup(self._tokens)
        if entry is None:
            return [], 0.0
        start, count, agreed = entry
        found = self._tokens[start : start + MAX_CHAIN]
        if count >= 2 and agreed:
            confidence = 1.0
        elif len(found) >= LONG_MATCH:
            confidence = min(0.9, 0.7 + 0.2 * (len(found) - LONG_MATCH) / 12)
        else:
            confidence = 0.6 * len(found) / LONG_MATCH
        while confidence > 0.6 and len(found) < MAX_GROWN_CHAIN:
            entry = self._lookup((self._tokens[-max(NGRAM_SIZES) :] + found)[-max(NGRAM_SIZES) :])
            if entry is None:
                break
            found = found + self._tokens[entry[0] : entry[0] + MAX_CHAIN]
        return found[:MAX_GROWN_CHAIN], confidence

    def _lookup(self, text: list[int]) -> list[int] | None:
        for size in NGRAM_SIZES:
            if len(text) >= size and (entry := self._ngrams.get(tuple(text[-size:]))) is not None:
                return entry
        return None

    def _ends(self, path: list[int]) -> tuple[int, int]:
        """The two newest tokens after `path`."""
        last = [-1, *self._tokens[-2:], *path][-2:]
        return last[0], last[1]

    def commit(self, tree: DraftTree, path: list[int], token_ids: Int32, top: TopLogits | None) -> None:
        """Learn how the spine did, harvest every verified node (the last one wins), append what was emitted."""
        if self._spine:
            accepted = sum(1 for node in path[1:] if tree.sources[node] == 1)
            self._acceptance += ACCEPTANCE_DECAY * (accepted / self._spine - self._acceptance)
        if top is not None:
            for node in range(len(tree)):
                before = self._ends([])[0] if node == 0 else int(tree.token_ids[tree.parents[node]])
                self._shared.harvest(before, int(tree.token_ids[node]), top.token_ids[node], top.probs[node])
        self._spine = 0
        self._append(token_ids.tolist())

    def _append(self, token_ids: list[int]) -> None:
        for token in token_ids:
            position = len(self._tokens)
            for size in NGRAM_SIZES:
                if position >= size:
                    entry = self._ngrams.setdefault(tuple(self._tokens[-size:]), [position, 0, 1])
                    entry[1] += 1
                    if entry[0] < position and token != self._tokens[entry[0]]:
                        entry[2] = 0
            self._tokens.append(token)


def _mark_sources(tree: DraftTree, spine: list[int]) -> None:
    """Source bits: 1 along the spine, 2 elsewhere."""
    tree.sources[:] = 2
    node = 0
    for token in spine:
        node = tree.child(node, token)
        tree.sources[node] = 1
