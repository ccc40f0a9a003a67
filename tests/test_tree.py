"""Candidates, the best-first builder, node order and masks, against plain Python."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from evidence import automaton_offers, bucket, check_order, context_of, match_cell
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import repetitive

from retrodraft.index.adjacency import AdjacencyRows
from retrodraft.index.suffix_automaton import SuffixAutomaton
from retrodraft.kernels import candidates as c
from retrodraft.kernels.adjacency import ONE, WIDTH
from retrodraft.kernels.confidence import NUM_KINDS
from retrodraft.kernels.learning import learn_rows
from retrodraft.kernels.suffix_automaton import step
from retrodraft.kernels.tree import MIN_PROB, NEW_ROW, build
from retrodraft.retro import RetroStrategy
from retrodraft.strategy import TopLogits
from retrodraft.tree import DraftTree

VOCAB = 50
NO_CORPORA = ((np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64)),)


def learned(seed: int) -> tuple[SuffixAutomaton, AdjacencyRows, np.ndarray, np.ndarray]:
    """A text with its automaton, rows with random probabilities, and random hit rates."""
    rng = np.random.default_rng(seed)
    text = np.array(repetitive(rng, int(rng.integers(3, 120)), int(rng.integers(2, VOCAB))), np.int32)
    rows = AdjacencyRows(VOCAB, num_pairs=64)
    for _ in range(int(rng.integers(0, 60))):
        ids = rng.permutation(VOCAB)[:WIDTH].astype(np.int32)[None]
        probs = np.sort(rng.dirichlet(np.ones(WIDTH)))[::-1].astype(np.float32)[None]
        previous, token = (np.array([value], np.int32) for value in rng.integers(0, VOCAB, 2))
        learn_rows(rows.arrays, previous, token, ids, probs, 0.5, 1)
    return SuffixAutomaton(text), rows, text, rng.random(c.NUM_CELLS).astype(np.float32)


def gather_in_python(
    automaton: SuffixAutomaton, rows: AdjacencyRows, state: int, length: int, previous: int, token: int
) -> dict[int, int]:
    """Token -> cell, written from the layout in `kernels/candidates.py`."""
    match: dict[int, int] = {}
    for offer in automaton_offers(c.REQUEST, automaton, state, length):
        match.setdefault(offer[0], match_cell(offer))
    pair_row = dict(rows.row(token, previous)) if previous >= 0 else {}
    token_row = dict(rows.row(token))
    evidence = 0 if pair_row else 1 if token_row else 2
    cells = {}
    for found in [*match, *pair_row, *token_row]:
        strong = pair_row if pair_row else token_row
        pair = 1 + bucket(strong[found], (0.9, 0.6, 0.3, 0.1, 0.03, 0.005)) if found in strong else 0
        single = 2 + bucket(token_row[found], (0.5, 0.15, 0.03)) if found in token_row else int(bool(token_row))
        cells[found] = (match.get(found, 0) * c.NUM_PAIR + evidence * 8 + pair) * c.NUM_TOKEN + single
    return cells


def gather_compiled(
    automaton: SuffixAutomaton, rows: AdjacencyRows, state: int, length: int, previous: int, token: int
) -> dict[int, int]:
    """The kernel's answer in the same form."""
    found = np.empty((c.NUM_COLUMNS, c.MAX_CANDIDATES), np.int32)
    count = c.gather(
        (automaton.arrays,), np.zeros(1, np.int32), NO_CORPORA, rows.arrays, np.array([state], np.int32),
        np.array([length], np.int32), np.zeros(1, np.int32), context_of([previous, token]), found,
        np.empty((2, c.MAX_EDGES), np.int32),
    )  # fmt: skip
    tokens, cells, foreign, sources = found[: c.SOURCES + 1, :count].tolist()
    assert len(set(tokens)) == count
    assert all(sources) and set(foreign) <= {-1}
    return dict(zip(tokens, cells, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_candidates_and_their_cells(seed: int) -> None:
    automaton, rows, text, _ = learned(seed)
    state, length = automaton.match()
    previous, token = int(text[-2]), int(text[-1])
    expected = gather_in_python(automaton, rows, state, length, previous, token)
    assert gather_compiled(automaton, rows, state, length, previous, token) == expected


def best_first(
    automaton: SuffixAutomaton, rows: AdjacencyRows, text: np.ndarray, rates: np.ndarray, nodes: int, depth: int
) -> list[float]:
    """Path probabilities of the best tree in the order in which nodes are taken, by a heap of Python objects."""
    state, length = automaton.match()
    heap: list[tuple[float, tuple[int, ...], float, int, int]] = []

    def expand(prob: float, path: tuple[int, ...], state: int, length: int) -> None:
        ends = [*text[-2:].tolist(), *path][-2:]
        for token, cell in gather_compiled(automaton, rows, state, length, *ends).items():
            value = float(np.float32(np.float32(prob) * rates[cell]))
            if len(path) < depth and value >= MIN_PROB:
                after = step(automaton.states, automaton.edges, automaton.table, state, length, token)
                worth = value if rows.row(token, ends[-1]) else value * NEW_ROW
                heapq.heappush(heap, (-worth, (*path, token), value, *after))

    expand(1.0, (), state, length)
    taken: list[float] = []
    while heap and len(taken) < nodes:
        _, path, prob, state, length = heapq.heappop(heap)
        taken.append(prob)
        expand(prob, path, state, length)
    return taken


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("nodes,depth", [(8, 20), (40, 3)])
def test_builder_takes_the_best_nodes(seed: int, nodes: int, depth: int) -> None:
    automaton, rows, text, rates = learned(seed)
    tree = built(automaton, rows, text, rates, np.zeros(nodes + 1), depth)
    expected = best_first(automaton, rows, text, rates, nodes, depth)
    assert sorted(tree.probs[1:].tolist()) == pytest.approx(sorted(expected), rel=1e-5)
    assert len(paths_of(tree)) == len(tree) - 1
    check_order(tree)


def built(
    automaton: SuffixAutomaton, rows: AdjacencyRows, text: np.ndarray, rates: np.ndarray, prices: np.ndarray,
    depth: int, chain: bool = False, record: np.ndarray | None = None,
) -> DraftTree:  # fmt: skip
    """Run the kernel."""
    record = np.zeros((NUM_KINDS, 2), np.float32) if record is None else record
    state, length = automaton.match()
    n = len(prices)
    arrays = [np.empty(n, kind) for kind in (np.int32, np.int32, np.int32, np.float32, np.uint8)]
    count = build(
        (automaton.arrays,), np.zeros(1, np.int32), NO_CORPORA, rows.arrays,
        (rates, np.ones_like(rates), record),
        np.array([state], np.int32), np.array([length], np.int32), np.zeros(1, np.int32),
        context_of(text[-2:]), prices, depth, chain, *arrays,
    )  # fmt: skip
    return DraftTree(*(array[:count] for array in arrays))


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    """Token paths of all nodes but the root."""
    mask = tree.ancestor_mask()
    return {tuple(tree.token_ids[mask[node].nonzero()[0][1:]].tolist()) for node in range(1, len(tree))}


@pytest.mark.parametrize("seed", range(20))
def test_a_node_is_taken_only_while_it_pays(seed: int) -> None:
    """The chosen size is the best of all prefixes of the best-first order; a free tree is full, a dear one empty."""
    automaton, rows, text, rates = learned(seed)
    mass = np.concatenate([[0.0], np.cumsum(best_first(automaton, rows, text, rates, 32, 20))])
    for slope in (0.05, 0.3, 2.0):
        prices = slope * np.arange(33.0)
        worth = mass - prices[: len(mass)]
        priced = built(automaton, rows, text, rates, prices, 20)
        assert worth[len(priced) - 1] == pytest.approx(worth.max(), abs=1e-5)
    assert len(built(automaton, rows, text, rates, 2.0 * np.arange(33.0), 20)) == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_has_one_child_a_node(seed: int) -> None:
    automaton, rows, text, rates = learned(seed)
    tree = built(automaton, rows, text, rates, np.zeros(12), 20, chain=True)
    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))


@given(st.lists(st.integers(0, 1000), max_size=30))
@settings(max_examples=100, deadline=None)
def test_mask_is_the_ancestor_relation(choices: list[int]) -> None:
    parents = [choice % (i + 1) for i, choice in enumerate(choices)]
    tree = DraftTree.from_nodes(7, list(range(len(parents))), parents)
    mask = tree.ancestor_mask()
    for node in range(len(tree)):
        line, at = set(), node
        while at >= 0:
            line.add(at)
            at = int(tree.parents[at])
        assert set(mask[node].nonzero()[0].tolist()) == line


def test_children_are_found_by_token() -> None:
    tree = DraftTree.from_nodes(1, [5, 6, 5], [0, 0, 1])
    assert tree.token_ids.tolist() == [1, 5, 5, 6]
    assert [tree.child(0, 5), tree.child(0, 6), tree.child(0, 9), tree.child(1, 5)] == [1, 3, -1, 2]


def test_rows_blend_and_stay_bounded() -> None:
    """Accepted logits outweigh rejected ones; the pair table holds the newest pairs."""
    rows = AdjacencyRows(VOCAB, num_pairs=16)
    one, two = np.array([[4, 5]], np.int32), np.array([[5, 6]], np.int32)
    probs = np.array([[0.8, 0.2]], np.float32)
    first, second = np.array([1], np.int32), np.array([2], np.int32)
    learn_rows(rows.arrays, first, second, one, probs, 0.5, 1)
    assert rows.row(2) == rows.row(2, 1) == [(4, pytest.approx(0.8, abs=1 / ONE)), (5, pytest.approx(0.2, abs=1 / ONE))]
    learn_rows(rows.arrays, first, second, two, probs, 0.25, 2)
    assert dict(rows.row(2)) == {t: pytest.approx(p, abs=3 / ONE) for t, p in {4: 0.6, 5: 0.35, 6: 0.05}.items()}
    for stamp in range(40):
        learn_rows(rows.arrays, np.array([stamp], np.int32), second, one, probs, 0.5, 3 + stamp)
    kept = [pair for pair in range(40) if rows.row(2, pair)]
    assert len(kept) == np.count_nonzero(rows.pair_keys) <= 16
    assert max(kept) == 39


def test_memory_for_a_large_vocabulary() -> None:
    """Rows and hit rates for 152k tokens stay below 64 MB."""
    strategy = RetroStrategy(152_000)
    held = strategy.adjacency.nbytes + strategy.calibration.hits.nbytes + strategy.calibration.trials.nbytes
    assert held <= 64 * 2**20


def test_hit_rates_follow_outcomes_in_the_tree_or_not() -> None:
    """Full information: a cell's rate moves although no tree was ever built; reset returns to the priors."""
    strategy = RetroStrategy(VOCAB)
    before = strategy.calibration.hits / strategy.calibration.trials
    row = strategy.row()
    row.begin(np.array([1, 2, 3] * 5, np.int32), None)
    for token in [1, 2, 3] * 10:
        row.commit(DraftTree.root_only(0), [0], np.array([token], np.int32), None)
    after = strategy.calibration.hits / strategy.calibration.trials
    changed = after != before
    assert changed.any() and (after[changed] > before[changed]).mean() > 0.5
    strategy.reset()
    assert np.array_equal(strategy.calibration.hits / strategy.calibration.trials, before)


def test_draft_is_flat_in_the_length_of_the_context() -> None:
    """O15: a step's drafting at 32k tokens takes no longer than at 1k, within noise, and stays far below a forward."""
    import time

    rng = np.random.default_rng(0)
    medians = []
    for length in (1000, 32_000):
        strategy = RetroStrategy(1000)
        row = strategy.row()
        text = np.array(repetitive(rng, length, 1000), np.int32)
        top = TopLogits(rng.integers(0, 1000, (1000, 8)).astype(np.int32), np.full((1000, 8), 0.1, np.float32))
        row.begin(text, top)
        times = []
        for token in text[:200]:
            start = time.perf_counter()
            tree = row.draft(np.zeros(61), 60, False)
            row.commit(tree, [0], np.array([token], np.int32), None)
            times.append(time.perf_counter() - start)
        medians.append(float(np.median(times)))
    assert medians[1] < 3 * medians[0] + 1e-4
    assert medians[1] < 2e-3
