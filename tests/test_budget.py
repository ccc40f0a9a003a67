"""Prices of draft nodes: what the cost curve says, at the rate that decoding has shown, and how curves are kept."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_llama

from retrodraft.budget import (
    LESSON,
    MAX_NODES,
    TREE_SIZES,
    Budget,
    CostCurve,
    cached_cost_curve,
    curve_key,
    measure_cost_curve,
    store_cost_curve,
)

LESSONS = LESSON * np.arange(4)  # what nodes teach is taken off their prices
CURVE = CostCurve([256, 1280], [1, 2, 4], [[1.0, 1.5, 2.5], [2.0, 4.0, 8.0]])


def test_costs_between_measured_sizes_and_contexts() -> None:
    """Straight lines between what was measured, in units of the one-token forward at the same context."""
    assert np.allclose(CURVE.relative(256), [1, 1.5, 2, 2.5])
    assert np.allclose(CURVE.relative(1280), [1, 2, 3, 4])
    middle = [1.5, 2.75, 4.0, 5.25]
    assert np.allclose(CURVE.relative(768), np.array(middle) / 1.5)
    assert np.array_equal(CURVE.relative(0), CURVE.relative(256))  # no line goes below what was measured
    assert np.array_equal(CURVE.relative(10**6), CURVE.relative(256 + 4 * 1024))  # nor far beyond it


def test_a_larger_tree_is_never_cheaper_as_its_forward_may_be_padded() -> None:
    noisy = CostCurve([256], [1, 2, 3, 4], [[1.0, 3.0, 2.0, 4.0]])
    assert noisy.relative(256).tolist() == [1, 2, 2, 4]
    assert noisy.padded(256).tolist() == [1, 3, 3, 4]
    crossing = CostCurve([0, 100], [1, 2, 3], [[1.0, 2.0, 9.0], [1.0, 5.0, 5.0]])  # one line falls, further out
    for context in (0, 50, 100, 200, 400):
        assert (np.diff(crossing.relative(context)) >= 0).all()


def test_a_forward_is_padded_where_that_is_clearly_faster() -> None:
    curve = CostCurve([256], [1, 2, 3, 4, 5, 6], [[1.0, 1.02, 1.01, 3.0, 2.9, 2.0]])
    assert curve.padded(256).tolist() == [1, 2, 3, 6, 6, 6]
    budget = Budget(None, curve)
    assert [budget.forward_size(256, tokens) for tokens in (1, 2, 4, 6, 9)] == [1, 2, 6, 6, 9]
    assert Budget(3, curve).forward_size(256, 4) == 4  # a fixed tree is the caller's choice


@pytest.mark.parametrize("fixed,room,nodes", [(5, 100, 5), (5, 3, 3), (0, 100, 0)])
def test_a_fixed_number_of_nodes_is_free(fixed: int, room: int, nodes: int) -> None:
    for curve in (None, CURVE):
        budget = Budget(fixed, curve)
        budget.learn(256, 3, 1)
        assert budget.prices(256, room).tolist() == [0] * (nodes + 1)


def test_prices_before_anything_is_learned() -> None:
    """Plain decoding's rate: a node costs the tokens that plain decoding makes in its time, less what it teaches."""
    budget = Budget(None, CURVE)
    assert np.allclose(budget.prices(256, 3), [0, 0.5, 1, 1.5] - LESSONS)
    assert np.allclose(budget.prices(256, 1), [0, 0.5] - LESSONS[:2])
    assert budget.prices(256, 0).tolist() == [0] and len(budget.prices(256, 10**6)) == 4
    assert np.allclose(budget.prices(1280, 3), [0, 1, 2, 3] - LESSONS)
    assert np.allclose(budget.prices(1280 + 64, 3), budget.prices(1280, 3))  # anew every 128 tokens
    assert not np.allclose(budget.prices(1280 + 128, 3), budget.prices(1280, 3))


@pytest.mark.parametrize("nodes,tokens,rate", [(3, 4, 4 / 2.5), (1, 1, 1 / 1.5), (0, 1, 1.0), (99, 4, 4 / 2.5)])
def test_prices_follow_the_rate(nodes: int, tokens: int, rate: float) -> None:
    """Time is worth what the last steps made of it: more tokens a unit of time, dearer nodes."""
    budget = Budget(None, CURVE)
    for _ in range(300):
        budget.learn(256, nodes, tokens)
    assert np.allclose(budget.prices(256, 3) + LESSONS, rate * np.array([0, 0.5, 1, 1.5]), rtol=1e-3)
    budget.reset()
    assert np.allclose(budget.prices(256, 3) + LESSONS, [0, 0.5, 1, 1.5])


def test_the_rate_forgets() -> None:
    """A good stretch raises prices at once, and thirty steps later it weighs a third."""
    budget = Budget(None, CURVE)
    for _ in range(300):
        budget.learn(256, 0, 1)
    first = budget.prices(256, 3)[1]
    budget.learn(256, 0, 11)
    raised = budget.prices(256, 3)[1] - first
    for _ in range(30):
        budget.learn(256, 0, 1)
    assert raised > 0 and 0.3 < (budget.prices(256, 3)[1] - first) / raised < 0.5


def test_a_curve_is_measured_once(cache_folder: Path) -> None:
    """Later uses read the file; one that is damaged, or of other sizes, is replaced."""
    model = tiny_llama(0)
    curve = cached_cost_curve(model)
    assert curve.tree_sizes == list(TREE_SIZES) and len(curve.relative(100)) == MAX_NODES + 1
    assert curve.context_lengths == [256]  # the model has no room for the longer one
    assert cached_cost_curve(model) == curve
    (path,) = cache_folder.iterdir()
    marked = CostCurve([7], list(TREE_SIZES), [[float(size) for size in TREE_SIZES]])
    store_cost_curve(model, marked)
    assert cached_cost_curve(model) == marked
    store_cost_curve(model, CostCurve([7], [1, 2], [[1.0, 2.0]]))
    assert cached_cost_curve(model).tree_sizes == list(TREE_SIZES)
    sizes = list(TREE_SIZES)
    rows: list[Any] = [
        [],
        [1.0] * len(sizes),
        [[1.0]],
        [["1.0"] * len(sizes)],
        [[0.0] * len(sizes)],
        [[0.1], [0.1, 0.2]],
    ]
    curves = [{"context_lengths": [256], "tree_sizes": sizes, "seconds": seconds} for seconds in rows]
    curves.append({"context_lengths": [], "tree_sizes": sizes, "seconds": []})
    curves.append({"context_lengths": ["a"], "tree_sizes": sizes, "seconds": [[0.1] * len(sizes)]})
    for damage in ("", "[1, 2]", '{"seconds": 3}', "[" * 100_000, *map(json.dumps, curves)):
        path.write_text(damage)
        assert cached_cost_curve(model).context_lengths == [256]
    assert list(cache_folder.iterdir()) == [path]


def test_a_curve_belongs_to_model_dtype_threads_and_attention() -> None:
    model = tiny_llama(0)
    keys = {curve_key(model), curve_key(tiny_llama(0, intermediate_size=80)), curve_key(tiny_llama(0).bfloat16())}
    model.set_attn_implementation("eager")
    keys.add(curve_key(model))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    keys.add(curve_key(model))
    torch.set_num_threads(threads)
    assert len(keys) == 5
    assert curve_key(tiny_llama(5)) == curve_key(tiny_llama(0))  # weights cost no time


def test_a_slow_start_is_not_measured() -> None:
    """The first round pays for compilation and empty caches."""
    model = tiny_llama(0)
    calls: list[int] = []

    def slow_at_first(module: Any, args: Any, kwargs: Any) -> None:
        calls.append(kwargs["input_ids"].shape[1])
        if len(calls) <= 3:  # the context and the first round
            time.sleep(0.4)

    model.register_forward_pre_hook(slow_at_first, with_kwargs=True)
    curve = measure_cost_curve(model, (16,), (1, 2), repeats=1)
    assert calls == [16, 1, 2, 1, 2]
    assert max(curve.seconds[0]) < 0.2


def test_short_windows_are_measured_at_their_end() -> None:
    curve = measure_cost_curve(tiny_llama(0, max_position_embeddings=80), repeats=1)
    assert curve.context_lengths == [15] and len(curve.seconds) == 1
