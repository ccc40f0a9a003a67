"""The forms of `kernels/few_rows.py` beside torch's `linear`: their time over its, for weights of several shapes.

    python benchmarks/few_rows.py --dtype bfloat16 --threads 1

Below 1 a form is faster. Each weight is one of many, about 120 MB in all, so that they come from memory as in a model.
All forms in turn, medians of nine. To see what a lesser processor would do, ONEDNN_MAX_CPU_ISA (AVX512_CORE_BF16,
AVX512_CORE, AVX2) keeps oneDNN from what that one lacks, and NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx,+avx2,+fma
the tiles.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import linear

from retrodraft.kernels.few_rows import Form, forms_for

SHAPES = [(576, 576), (1536, 576), (576, 1536), (49_152, 576), (896, 896), (4864, 896), (2048, 2048), (5632, 2048)]
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64)
TOTAL_BYTES = 120_000_000
REPEATS = 9


def ratios(weights: list[torch.Tensor], rows: int) -> dict[str, float]:
    """Median seconds of each form over those of `linear`, each over all weights."""
    x = torch.randn(1, rows, weights[0].shape[1]).to(weights[0].dtype)
    forms: dict[str, Form] = {"linear": linear, **forms_for(weights[0])}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for attempt in range(REPEATS + 1):
        for name, form in forms.items():
            start = time.perf_counter()
            for weight in weights:
                form(x, weight, None)
            if attempt:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    torchs = statistics.median(seconds.pop("linear"))
    return {name: statistics.median(times) / torchs for name, times in seconds.items()}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    table = Table("out x in", "form", *(str(rows) for rows in ROWS), box=None, padding=(0, 1, 0, 0))
    with torch.inference_mode():
        for out_features, in_features in SHAPES:
            count = max(TOTAL_BYTES // (out_features * in_features * dtype.itemsize), 1)
            weights = [torch.randn(out_features, in_features).to(dtype) for _ in range(count)]
            measured = [ratios(weights, rows) for rows in ROWS]
            for name in measured[0]:
                cells = [f"{at[name]:.2f}" for at in measured]
                table.add_row(f"{out_features} x {in_features}", name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
