"""Corpora beside own texts: believed as far as they were borne out, and no further, from text to text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_stores import gathered
from tiny import repetitive

from retrodraft.index.corpus import CorpusIndex
from retrodraft.kernels import candidates as c
from retrodraft.kernels.confidence import EXPECTED, FIRST_FOREIGN_KIND, RIGHT, confidence, kind_of
from retrodraft.retro import RetroRow, RetroStrategy
from retrodraft.tree import DraftTree

VOCAB = 50


def strategy_over(folder: Path, documents: list[list[int]]) -> RetroStrategy:
    return RetroStrategy(VOCAB, [CorpusIndex.build(documents, folder)])


def read(row: RetroRow, token: int) -> None:
    """The target emits a token, and nothing is told of what else it thought."""
    row.commit(DraftTree.root_only(0), [0], np.array([token], np.int32), None)


@pytest.mark.parametrize("seed", range(10))
def test_probabilities_move_towards_the_corpus_as_far_as_it_is_trusted(seed: int, tmp_path: Path) -> None:
    """And a token that the corpus alone proposes counts half."""
    rng = np.random.default_rng(seed)
    text = repetitive(rng, 30, 6)
    strategy = strategy_over(tmp_path / "corpus", [*(repetitive(rng, 80, 6) for _ in range(4)), [*text, 40]])
    strategy.calibration.hits[:] = rng.random(c.NUM_CELLS)
    strategy.calibration.trials[:] = 1.0
    rates = strategy.calibration.hits.copy()
    row = strategy.row()
    row.begin(np.array(text, np.int32), None)
    row.record[:] = rng.random(row.record.shape) * 9
    expected = {}
    found = gathered([(c.REQUEST, row.text)], list(strategy.corpora), text, state=(row.states[0], row.lengths[0]))
    for token, (cell, foreign, sources) in found.items():
        prob = confidence(row.record, kind_of(cell)) * rates[cell]
        if foreign >= 0:
            trust = confidence(row.record, kind_of(foreign))
            prob = (1 - trust) * prob + trust * rates[foreign]
        expected[token] = prob / 2 if sources == 1 << c.GLOBAL else prob
    tree = row.draft(np.zeros(c.MAX_CANDIDATES), 1, False)
    assert dict(zip(tree.token_ids[1:].tolist(), tree.probs[1:].tolist(), strict=True)) == pytest.approx(expected)
    assert found[40][1] >= 0


def test_what_is_known_of_a_corpus_goes_on_to_the_next_text(tmp_path: Path) -> None:
    """One that was never right is not tried anew, until everything is forgotten."""
    strategy = strategy_over(tmp_path / "corpus", [[1, 2, 3, 4, 5, 6, 7, 8] * 4])
    prices = 0.02 * np.arange(9.0)

    def begun() -> RetroRow:
        row = strategy.row()
        row.begin(np.array([9, 1, 2], np.int32), None)
        return row

    def drafts_of_corpus() -> int:
        return int((begun().draft(prices, 8, False).sources == 1 << c.GLOBAL).sum())

    assert drafts_of_corpus() > 0
    row = begun()
    for token in (20, 1, 2) * 9:  # the corpus goes on from the last two otherwise each time
        read(row, token)
    record = strategy.calibration.foreign
    assert record[:, EXPECTED].sum() > 0.2 and not record[:, RIGHT].any()
    assert (row.record[FIRST_FOREIGN_KIND:] == record).all() and (begun().record[FIRST_FOREIGN_KIND:] == record).all()
    assert not begun().record[:FIRST_FOREIGN_KIND].any()
    record[:, EXPECTED] = 40.0
    assert drafts_of_corpus() == 0
    strategy.reset()
    assert drafts_of_corpus() > 0


def test_hit_rates_of_foreign_texts_are_soon_their_own() -> None:
    """Which cells they are is read from the kind of evidence."""
    strategy = RetroStrategy(VOCAB)
    kinds = np.array([kind_of(cell) for cell in range(c.NUM_CELLS)])
    trials = strategy.calibration.trials
    assert set(trials[kinds >= FIRST_FOREIGN_KIND]) == {3.0} and set(trials[kinds < FIRST_FOREIGN_KIND]) == {20.0}
