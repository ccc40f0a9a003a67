"""What tests of candidates and trees share, in plain Python: the evidence for a token, its cell, and a tree's order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retrodraft.index.suffix_automaton import SuffixAutomaton
from retrodraft.kernels import candidates as c
from retrodraft.kernels.suffix_automaton import COUNT, HEAD, LENGTH, LINK, NEXT, TARGET, TOKEN
from retrodraft.tree import DraftTree

Offer = tuple[int, int, int, int, int, int, int]  # token, scope, shorter, length, count, total, number of followers


def context_of(token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """The newest tokens as the kernels take them."""
    return np.array([*[-1] * (c.CONTEXT - len(token_ids)), *token_ids], np.int32)


def bucket(value: float, bounds: tuple[float, ...]) -> int:
    """How many of the falling bounds the value does not exceed."""
    return sum(value <= bound for bound in bounds)


def automaton_offers(scope: int, automaton: SuffixAutomaton, state: int, length: int) -> list[Offer]:
    """What an automaton says at a place: the continuations of the match and of three shorter suffixes."""
    offers: list[Offer] = []
    shorter = orders = 0
    while state > 0 and length > 0 and orders < c.MAX_ORDERS:
        edges = []
        edge = int(automaton.states[state, HEAD])
        while edge >= 0 and len(edges) < c.MAX_EDGES:
            count = int(automaton.states[automaton.edges[edge, TARGET], COUNT])
            edges.append((int(automaton.edges[edge, TOKEN]), count))
            edge = int(automaton.edges[edge, NEXT])
        total = sum(count for _, count in edges)
        offers += [(token, scope, shorter, length, count, total, len(edges)) for token, count in edges if token >= 0]
        shorter = 1 if edges else shorter
        orders += 1
        state = int(automaton.states[state, LINK])
        length = int(automaton.states[state, LENGTH])
    return offers


def match_cell(offer: Offer) -> int:
    """The part of the calibration cell that a match decides, from the layout in `kernels/candidates.py`."""
    _, scope, shorter, length, count, total, followers = offer
    size = bucket(-length, (-2, -3, -5, -9, -17)) if length > 1 else 0
    share = min(total, 3) - 1 if followers == 1 else 3 + bucket(count / total, (0.6, 0.3))
    return 1 + ((scope * 2 + shorter) * 6 + size) * 6 + share


def check_order(tree: DraftTree) -> None:
    """Depth-first, likeliest child first, depths and distinct siblings."""
    assert all(tree.parents[node] < node for node in range(1, len(tree)))
    for node in range(1, len(tree)):
        assert tree.depths[node] == tree.depths[tree.parents[node]] + 1
    for node in range(len(tree)):
        children = [i for i in range(1, len(tree)) if tree.parents[i] == node]
        assert len({int(tree.token_ids[i]) for i in children}) == len(children)
        if children:
            assert children[0] == node + 1
            assert tree.probs[children[0]] == max(tree.probs[i] for i in children)
