"""Driving a strategy without a model: begin, draft, random walks and logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from retrodraft.strategy import TopLogits
from retrodraft.tree import DraftTree

VOCAB = 50


def ids(*tokens: int) -> Any:
    return np.array(tokens, np.int32)


def begun(strategy: Any, tokens: Any) -> Any:
    row = strategy.row()
    row.begin(np.asarray(tokens, np.int32), None)
    return row


def drafted(row: Any, budget: int = 60, max_depth: int = 1000, chain: bool = False) -> DraftTree:
    return row.draft(np.zeros(budget + 1), max_depth, chain)


def emit(row: Any, *tokens: int) -> None:
    """Plain decoding steps: nothing drafted, nothing looked at."""
    for token in tokens:
        row.commit(DraftTree.root_only(0), [0], ids(token), None)


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """Each node's path of tokens from the root, in node order."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(tree)):
        found.append((*found[tree.parents[node]], int(tree.token_ids[node])))
    return found[1:]


def random_top(rng: np.random.Generator, count: int, width: int, skip: float = 0.0) -> TopLogits:
    """Random top-k logits; a share of the positions was not looked at."""
    tokens = np.stack([rng.permutation(VOCAB)[:width] for _ in range(count)]).astype(np.int32)
    probs = -np.sort(-rng.dirichlet(np.full(width, 0.3), count)).astype(np.float32) * np.float32(0.9)
    unseen = rng.random(count) < skip
    tokens[unseen], probs[unseen] = -1, 0
    return TopLogits(tokens, probs)


def walk(rng: np.random.Generator, tree: DraftTree) -> tuple[list[int], list[int]]:
    """A random accepted path and the tokens emitted along it."""
    path = [0]
    emitted = []
    while True:
        children = np.flatnonzero(tree.parents == path[-1])
        if not len(children) or rng.random() < 0.4:
            known = set(tree.token_ids[children].tolist())
            emitted.append(int(rng.choice([t for t in range(6) if t not in known] or [VOCAB - 1])))
            return path, emitted
        node = int(rng.choice(children))
        path.append(node)
        emitted.append(int(tree.token_ids[node]))
