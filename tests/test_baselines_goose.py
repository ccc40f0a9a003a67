"""GOOSE: literal cases for each rule, and random runs against a plain reading of its paper and code."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from drafts import VOCAB, begun, drafted, ids, paths, random_top, walk

from retrodraft.baselines.goose import Goose, spine_ratio
from retrodraft.kernels.baselines_goose import match_confidence
from retrodraft.strategy import TopLogits
from retrodraft.tree import DraftTree


def test_goose_confidence() -> None:
    assert match_confidence(0, False, 8) == 0.0
    assert match_confidence(3, True, 8) == 1.0
    assert match_confidence(4, False, 8) == pytest.approx(0.3)
    assert match_confidence(8, False, 8) == pytest.approx(0.7)
    assert match_confidence(14, False, 8) == pytest.approx(0.8)
    assert match_confidence(20, False, 8) == pytest.approx(0.9)
    assert [spine_ratio(a) for a in (0.1, 0.2, 0.39, 0.4, 1.0)] == [0.15, 0.30, 0.30, 0.50, 0.50]


def test_goose_copies_the_oldest_occurrence_of_the_longest_ngram() -> None:
    # no adjacency: a bare chain of at most 20 tokens
    row = begun(Goose(VOCAB), [1, 2, 3, 7, 8, 1, 2, 3, 9, 1, 2, 3])
    assert paths(drafted(row))[-1] == (7, 8, 1, 2, 3, 9, 1, 2, 3)
    row = begun(Goose(VOCAB), [1, 2, 3, 7, 5, 1, 2, 3, 9, 5, 1, 2, 3])  # a 4-gram beats a 3-gram
    assert paths(drafted(row))[-1][0] == 9
    assert len(drafted(begun(Goose(VOCAB), [1, 2, 7, 1, 2]))) == 1  # 2 tokens are too few
    row = begun(Goose(VOCAB), [*range(30), *range(3)])
    assert len(drafted(row)) == 21
    assert set(drafted(row).sources[1:].tolist()) == {1}


def known_row(goose: Goose, token: int, previous: int, *children: int) -> None:
    top = TopLogits(np.full((1, 10), -1, np.int32), np.zeros((1, 10), np.float32))
    top.token_ids[0, : len(children)] = children
    top.probs[0, : len(children)] = 0.5 ** np.arange(1, len(children) + 1)
    goose.harvest(np.arange(1), ids(previous), ids(token), top)


def test_goose_consensus_spends_everything_on_a_grown_chain() -> None:
    goose = Goose(VOCAB)
    period = list(range(10, 17))
    row = begun(goose, period * 4)
    known_row(goose, 16, -1, 30, 31, 32)
    tree = drafted(row, budget=60)
    assert len(tree) == 61 and set(tree.sources[1:].tolist()) == {1}
    assert paths(tree)[-1] == tuple((period * 10)[:60])
    tree = drafted(row, budget=200)
    assert 100 <= (tree.sources == 1).sum() < 120  # the last lookup may pass 100; branches have the rest
    assert (30,) in paths(tree)
    assert len(drafted(row, budget=8)) == 9


def test_goose_splits_between_spine_and_branches() -> None:
    goose = Goose(VOCAB)
    # 4 tokens follow (1 2 3): confidence 0.3 -> ratio 0.5 + 0.3 * 0.5 = 0.65 of the budget
    row = begun(goose, [1, 2, 3, 40, 1, 2, 3])
    known_row(goose, 3, -1, 40, 41, 42, 43)
    known_row(goose, 40, -1, 1, 20, 21, 22)
    known_row(goose, 41, -1, 25, 26)
    tree = drafted(row, budget=9)  # 10 with the root: spine of 4, 5 branches, 2 on the spine and 3 at the root
    assert paths(tree)[:4] == [(40,), (40, 1), (40, 1, 2), (40, 1, 2, 3)]
    assert [p for p in paths(tree) if len(p) == 1] == [(40,), (41,), (42,), (43,)]  # the spine's own token is skipped
    assert [p for p in paths(tree) if len(p) == 2 and p[0] == 40] == [(40, 1), (40, 20)]
    assert (41, 25) in paths(tree)  # what the spine's nodes could not use goes to the branches
    assert Counter(tree.sources[1:].tolist()) == {1: 4, 2: len(tree) - 5}


def test_goose_pair_row_comes_before_token_row() -> None:
    goose = Goose(VOCAB)
    known_row(goose, 5, 1, 20, 21)
    known_row(goose, 5, -1, 30, 31)
    assert [t for t, _ in goose.successors(1, 5)] == [20, 21]
    assert [t for t, _ in goose.successors(2, 5)] == [30, 31]
    assert [s for _, s in goose.successors(2, 5)] == pytest.approx([2 / 3, 1 / 3])  # over the kept tokens alone


def test_goose_harvests_the_prompt_and_every_node_but_the_pair_of_a_trees_root() -> None:
    goose = Goose(VOCAB)
    row = goose.row()
    top = random_top(np.random.default_rng(0), 3, 10)
    row.begin(ids(1, 2, 3, 4), top)  # belongs to 2, 3, 4
    assert [t for t, _ in goose.successors(1, 2)] == top.token_ids[0].tolist()
    assert goose.successors(-1, 1) == []
    tree = drafted(row, budget=12)
    top = random_top(np.random.default_rng(1), len(tree), 10)
    before = goose.successors(3, 4)
    row.commit(tree, [0], ids(6), top)
    child = int(tree.token_ids[1])
    assert [t for t, _ in goose.successors(4, child)] == top.token_ids[1].tolist()
    assert goose.successors(3, 4) == before and goose.successors(-1, 4) != before
    plain = DraftTree.root_only(6)
    top = random_top(np.random.default_rng(2), 1, 10)
    row.commit(plain, [0], ids(7), top)
    assert [t for t, _ in goose.successors(4, 6)] == top.token_ids[0].tolist()


def test_goose_spine_average_moves_only_with_spines() -> None:
    goose = Goose(VOCAB)
    row = begun(goose, [1, 2, 3, 40, 1, 2, 3])
    known_row(goose, 3, -1, 41)
    tree = drafted(row, budget=9)
    assert int((tree.sources == 1).sum()) == 4
    row.commit(tree, [0, 1], ids(40, 9), None)
    assert row._acceptance == pytest.approx(0.7 * 0.5 + 0.3 * 0.25)
    row.commit(drafted(row), [0], ids(8), None)
    assert row._acceptance == pytest.approx(0.7 * 0.5 + 0.3 * 0.25)


class PlainGoose:
    """GOOSE as its paper and code describe it, over dictionaries."""

    def __init__(self) -> None:
        self.rows: dict[int, Any] = {}
        self.pairs: dict[tuple[int, int], Any] = {}
        self.text: list[int] = []
        self.average = 0.5

    def harvest(self, positions: list[tuple[int, int, int]], top: TopLogits) -> None:
        for index, before, token in positions:
            found, probs = top.token_ids[index], top.probs[index]
            if found[0] < 0 or not 0 <= token < VOCAB:
                continue
            row = list(zip(found.tolist(), (probs / probs.sum()).tolist(), strict=True))
            self.rows[token] = row
            if before >= 0:
                self.pairs[before, token] = row

    def next(self, before: int, token: int) -> Any:
        return self.pairs.get((before, token)) or self.rows.get(token, [])

    def propose(self, query: list[int]) -> tuple[list[int], float]:
        for n in (5, 4, 3):
            ends = range(n, len(self.text)) if len(query) >= n else ()
            starts = [end for end in ends if self.text[end - n : end] == query[-n:]]
            if starts:
                chain = self.text[starts[0] : starts[0] + 20]
                agreed = len(starts) > 1 and len({self.text[s] for s in starts}) == 1
                return chain, match_confidence(len(chain), agreed, 8)
        return [], 0.0

    def tree(self, budget: int) -> tuple[list[tuple[int, ...]], int, bool]:
        """Paths in the order of creation, how many of them are the spine, and whether it is a tree at all."""
        before = self.text[-2] if len(self.text) > 1 else -1
        chain, confidence = self.propose(self.text)
        if not self.next(before, self.text[-1]):
            chain = chain[: budget - 1]
            return [tuple(chain[: i + 1]) for i in range(len(chain))], len(chain), False
        if confidence > 0.6:
            while len(chain) < int(100 * confidence):
                more, trust = self.propose(self.text + chain)
                chain = chain + more
                if not more or (confidence == 1.0 and trust < 1.0):
                    break
        ratio = spine_ratio(self.average)
        ratio += confidence * (1 - ratio)
        size = min(len(chain), int(budget * ratio), budget - 1)
        nodes = [tuple(chain[: i + 1]) for i in range(size)]
        spine = list(nodes)
        branches = budget - 1 - size
        on_spine = max(1, int(branches * 0.5)) if spine and branches else 0
        queue: list[tuple[tuple[int, ...], float]] = []

        def children(path: tuple[int, ...]) -> Any:
            tail = [before, self.text[-1], *path]
            return [(t, s) for t, s in self.next(tail[-2], tail[-1]) if s >= 0.01]

        def attach(path: tuple[int, ...], count: int, skip: int) -> None:
            for token, score in [c for c in children(path) if c[0] != skip][:count]:
                nodes.append((*path, token))
                queue.append(((*path, token), score))

        attach((), branches - on_spine, chain[0] if chain else -1)
        left, total = on_spine, sum(1 / (i + 1) for i in range(size))
        for i, path in enumerate(spine):
            share = min(max(1, int(on_spine * (1 / (i + 1)) / total)), left)
            left -= share
            attach(path, share, chain[i + 1] if i + 1 < size else -1)
        while queue and len(nodes) < budget - 1:
            path, score = queue.pop(0)
            if len(path) >= 6:
                continue
            tail = [before, self.text[-1], *path]
            known = len(self.next(tail[-2], tail[-1]))
            width = max(1, min(known, math.ceil((budget - 1 - len(nodes)) * score)))
            attach(path, min(width, max(1, 10 // len(path)), budget - 1 - len(nodes)), -1)
        return nodes, size, True


@pytest.mark.parametrize("seed", range(8))
def test_goose_against_plain_python(seed: int) -> None:
    rng = np.random.default_rng(seed)
    goose, plain = Goose(VOCAB), PlainGoose()
    block = rng.integers(0, 6, 14).tolist()
    prompt = rng.integers(0, 6, 30).tolist() + block + rng.integers(0, 6, 6).tolist() + block[:9]
    row = goose.row()
    top = random_top(rng, 20, 10)
    row.begin(ids(*prompt), top)
    plain.text = list(prompt)
    first = len(prompt) - 20
    plain.harvest([(i, prompt[first + i - 1], prompt[first + i]) for i in range(20)], top)
    for step in range(40):
        budget = int(rng.choice([3, 9, 17, 61, 121]))
        tree = drafted(row, budget - 1)
        nodes, spine, is_tree = plain.tree(budget)
        found = paths(tree)
        assert sorted(found) == sorted(nodes), step
        assert int((tree.sources == 1).sum()) == spine
        top = random_top(rng, len(tree), 10, 0.3)
        # Follow the spine half of the time, else a random path.
        path, emitted = walk(rng, tree)
        if rng.random() < 0.5:
            kept = int(rng.integers(0, spine + 1))
            path = [0, *(found.index(nodes[i]) + 1 for i in range(kept))]
            emitted = [*(int(tree.token_ids[node]) for node in path[1:]), int(rng.integers(0, 6))]
            if tree.child(path[-1], emitted[-1]) >= 0:
                emitted[-1] = VOCAB - 1
        row.commit(tree, path, ids(*emitted), top)
        linear = not is_tree or len(tree) == 1
        if not linear and spine:
            accepted = sum(1 for node in path if tree.sources[node] == 1)
            plain.average = 0.3 * accepted / spine + 0.7 * plain.average
        positions = [(0, (plain.text[-2] if linear else -1), plain.text[-1])]
        for nodes_path in nodes:
            before = nodes_path[-2] if len(nodes_path) > 1 else plain.text[-1]
            positions.append((found.index(nodes_path) + 1, before, nodes_path[-1]))
        plain.harvest(positions, top)
        plain.text += emitted
        assert row._acceptance == pytest.approx(plain.average)


def test_goose_chain_without_a_match_follows_first_successors() -> None:
    goose = Goose(VOCAB)
    row = begun(goose, [1, 2])
    known_row(goose, 2, 1, 20, 21)
    known_row(goose, 20, -1, 22)
    known_row(goose, 22, -1, 20)
    tree = drafted(row, chain=True)
    assert paths(tree)[-1] == (20, 22, 20, 22, 20, 22) and set(tree.sources[1:].tolist()) == {2}
