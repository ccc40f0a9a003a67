"""A text's own record: kept as plain Python keeps it, scaling what the builder believes, and only downwards."""

from __future__ import annotations

import numpy as np
import pytest
from test_tree import built, gather_compiled, learned

from retrodraft.kernels import candidates as c
from retrodraft.kernels.confidence import DOUBT, FADING, NUM_KINDS, confidence, kind_of
from retrodraft.retro import RetroStrategy
from retrodraft.tree import DraftTree

VOCAB = 50


def kind_in_python(cell: int) -> int:
    """From the layout in `kernels/candidates.py`: whose text it is, and what share of the occurrences continued so."""
    match = cell // (c.NUM_PAIR * c.NUM_TOKEN)
    if match == 0:
        return 0
    scope, share = (match - 1) // 72, (match - 1) % 6
    return 1 + {c.GLOBAL: 6, c.DENSE: 12}.get(scope, 0) + share


def test_kinds_cover_all_cells() -> None:
    kinds = [kind_of(cell) for cell in range(c.NUM_CELLS)]
    assert kinds == [kind_in_python(cell) for cell in range(c.NUM_CELLS)]
    assert set(kinds) == set(range(NUM_KINDS))


def test_record_is_kept_as_in_python() -> None:
    """Each token: all counts fade, then every candidate adds the rate it had to its kind, and the right one a hit."""
    strategy = RetroStrategy(VOCAB)
    rng = np.random.default_rng(0)
    row = strategy.row()
    row.begin(np.array([1, 2, 3, 4] * 6, np.int32), None)
    expected = np.zeros((NUM_KINDS, 2))
    for step in range(60):
        token = int(rng.integers(0, VOCAB)) if step % 3 == 0 else step % 4 + 1
        hits, trials = strategy.calibration.hits.copy(), strategy.calibration.trials.copy()
        found = gather_compiled(
            row.text, strategy.adjacency, int(row.states[0]), int(row.lengths[0]), *row.context[-2:].tolist()
        )
        expected *= FADING
        for candidate, cell in found.items():
            expected[kind_in_python(cell)] += (candidate == token, hits[cell] / trials[cell])
            hits[cell] += candidate == token  # the next candidate may be of the same cell
            trials[cell] += 1
        row.commit(DraftTree.root_only(0), [0], np.array([token], np.int32), None)
        assert row.record == pytest.approx(expected, rel=1e-4)
    assert expected[:, 0].sum() > 10


def test_confidence_falls_where_less_comes_true_and_never_rises_above_one() -> None:
    record = np.array([[0.0, 9.0], [5.0, 5.0], [9.0, 1.0]] + [[0.0, 0.0]] * (NUM_KINDS - 3), np.float32)
    values = [confidence(record, kind) for kind in range(NUM_KINDS)]
    assert values == pytest.approx([DOUBT / (DOUBT + 9.0)] + [1.0] * (NUM_KINDS - 1))


@pytest.mark.parametrize("seed", range(20))
def test_builder_scales_each_kind(seed: int) -> None:
    """A tree under a record is the tree of the rates scaled by it."""
    automaton, rows, text, rates = learned(seed)
    record = np.random.default_rng(seed).random((NUM_KINDS, 2)).astype(np.float32) * 20
    scaled = rates * np.array([confidence(record, kind_in_python(cell)) for cell in range(c.NUM_CELLS)], np.float32)
    prices = 0.02 * np.arange(25.0)
    under = built(automaton, rows, text, rates, prices, 20, record=record)
    plain = built(automaton, rows, text, scaled, prices, 20)
    assert sorted(under.probs) == pytest.approx(sorted(plain.probs), rel=1e-5)  # nodes of one probability may swap


def test_a_text_that_never_follows_its_drafts_is_soon_left_alone() -> None:
    """At a price that usual text pays, nothing is drafted after 30 misses; another text begins with a clean record."""
    strategy = RetroStrategy(VOCAB)
    prices = 0.1 * np.arange(9.0)
    rng = np.random.default_rng(0)

    def begun() -> object:
        row = strategy.row()
        row.begin(np.array([1, 2, 3, 4] * 6, np.int32), None)
        return row

    row = begun()
    sizes = []
    for _ in range(30):
        tree = row.draft(prices, 8, False)
        sizes.append(len(tree) - 1)
        miss = int(rng.integers(5, VOCAB))
        row.commit(tree, [0], np.array([miss], np.int32), None)
        row.commit(DraftTree.root_only(0), [0], np.array([int(rng.integers(1, 5))], np.int32), None)
    assert sizes[0] > 0
    assert sum(sizes[-5:]) == 0
    assert len(begun().draft(prices, 8, False)) > 1
