"""The product of few rows against numpy's, in both dtypes, on any number of threads, for every kind of processor."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrodraft.kernels.openmp import has_threads
from retrodraft.kernels.tile_product import LANES, STEP, TAKES_BFLOAT16, TILE_ROWS, run_product, tile_product

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def arrays(rows: int, in_features: int, out_features: int, dtype: torch.dtype, seed: int = 0) -> tuple[Any, ...]:
    """Weight and x as tensors of `dtype`, and their exact product."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    x = torch.randn(rows, in_features, generator=generator).to(dtype)
    return weight, x, (x.double() @ weight.double().T).numpy()


def as_taken(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel takes for them."""
    if weight.dtype is torch.float32:
        return weight, x
    return weight.view(torch.uint16), x.view(torch.uint16) if TAKES_BFLOAT16 else x.float()


def product(weight: torch.Tensor, x: torch.Tensor, threads: int) -> np.ndarray:
    taken, rows = as_taken(weight, x)
    out = torch.full((len(x) + 1, len(weight)), 7.0)
    run_product(
        taken.data_ptr(), weight.dtype is torch.bfloat16, rows.data_ptr(), out.data_ptr(),
        len(x), x.shape[1], len(weight), threads,
    )  # fmt: skip
    assert (out[-1] == 7).all()  # nothing was written behind the last row
    return out[:-1].numpy()


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(0, 40), steps=st.integers(1, 5), out_features=st.integers(TILE_ROWS, 60), dtype=DTYPES,
    threads=st.integers(1, 5), seed=st.integers(0, 99),
)  # fmt: skip
def test_it_is_the_product(
    rows: int, steps: int, out_features: int, dtype: torch.dtype, threads: int, seed: int
) -> None:
    weight, x, exact = arrays(rows, steps * STEP, out_features, dtype, seed)
    assert np.allclose(product(weight, x, threads), exact, rtol=1e-5, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 14), out_features=st.integers(TILE_ROWS, 40), dtype=DTYPES, data=st.data())
def test_a_range_of_columns(rows: int, out_features: int, dtype: torch.dtype, data: st.DataObject) -> None:
    """What is asked for is written; beside it, no column but those of the tiles at its ends."""
    first = data.draw(st.integers(0, out_features - 1))
    last = data.draw(st.integers(first, out_features))
    weight, x, exact = arrays(rows, STEP, out_features, dtype)
    taken, x_rows = as_taken(weight, x)
    out = np.full((rows, out_features), np.nan, np.float32)
    tile_product(taken.numpy(), x_rows.numpy(), out, first, last)
    assert np.allclose(out[:, first:last], exact[:, first:last], rtol=1e-5, atol=1e-4)
    assert np.isnan(out[:, : max(first - TILE_ROWS + 1, 0)]).all() and np.isnan(out[:, last + TILE_ROWS - 1 :]).all()


def test_what_is_no_number_stays_none() -> None:
    """Infinities and NaN of a row reach that row's products alone."""
    for dtype in (torch.float32, torch.bfloat16):
        weight, x, _ = arrays(5, STEP, 8, dtype)
        x[1, 3], x[3, 0] = torch.inf, torch.nan
        found = product(weight, x, 1)
        assert np.isinf(found[1]).all() and np.isnan(found[3]).all() and np.isfinite(found[[0, 2, 4]]).all()


def test_many_at_once() -> None:
    """Several threads of Python, each with threads of torch's below it."""
    assert has_threads()
    weight, x, exact = arrays(9, 4 * STEP, 400, torch.float32)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: product(weight, x, 2), range(200)):
            assert np.allclose(found, exact, rtol=1e-5, atol=1e-4)


CHECK = """
import torch
from retrodraft.kernels import few_rows, tile_product
assert (tile_product.LANES, tile_product.TAKES_BFLOAT16) == ({lanes}, False), tile_product.LANES
for dtype in (torch.float32, torch.bfloat16):
    weight = torch.randn(37, 64).to(dtype)
    assert ("tiles" in few_rows.forms_for(weight)) == ({lanes} > 0)
    for rows in range(1, 9) if {lanes} else ():
        x = torch.randn(rows, 64).to(dtype)
        exact = x.double() @ weight.double().T
        found = few_rows.by_tiles(x, weight)
        assert torch.allclose(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4), (dtype, rows)
print("same")
"""


@pytest.mark.parametrize(
    "lanes,environment",
    [
        (8, {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma"}),
        (0, {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": "+sse4.2"}),
        (0, {"NUMBA_CPU_NAME": "generic"}),
        (0, {"NUMBA_DISABLE_JIT": "1"}),
    ],
    ids=["avx2", "older", "any", "interpreted"],
)
def test_other_processors(lanes: int, environment: dict[str, str]) -> None:
    """Processors with shorter registers; those without a fused multiply-add leave the layers to torch."""
    assert LANES >= 8  # this one can play the others
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(lanes=lanes)],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout == "same\n", done.stderr
