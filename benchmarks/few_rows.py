"""Where `kernels/few_rows.py` pays: its time over that of `linear`, for weights of several shapes.

    python benchmarks/few_rows.py --dtype bfloat16 --threads 1

Below 1 it is faster. Each weight is one of many, about 120 MB in all, so that they come from memory as in a model. Both
forms in turn, medians of nine. The environment variable ONEDNN_MAX_CPU_ISA (AVX512_CORE_BF16, AVX512_CORE, AVX2) keeps
oneDNN from using what a lesser processor lacks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import linear

from retrodraft.kernels.few_rows import few_rows_linear

SHAPES = [(576, 576), (1536, 576), (576, 1536), (49_152, 576), (896, 896), (4864, 896), (2048, 2048), (5632, 2048)]
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64)
TOTAL_BYTES = 120_000_000
REPEATS = 9


def ratio(weights: list[torch.Tensor], rows: int) -> float:
    """Median seconds of `few_rows_linear` over those of `linear`, each over all weights."""
    x = torch.randn(1, rows, weights[0].shape[1]).to(weights[0].dtype)
    forms: list[Callable[..., torch.Tensor]] = [linear, few_rows_linear]
    seconds: list[list[float]] = [[], []]
    for attempt in range(REPEATS + 1):
        for form, times in zip(forms, seconds, strict=True):
            start = time.perf_counter()
            for weight in weights:
                form(x, weight)
            if attempt:  # the first round warms up
                times.append(time.perf_counter() - start)
    return statistics.median(seconds[1]) / statistics.median(seconds[0])


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    table = Table("out x in", *(str(rows) for rows in ROWS), box=None, padding=(0, 1, 0, 0))
    with torch.inference_mode():
        for out_features, in_features in SHAPES:
            count = max(TOTAL_BYTES // (out_features * in_features * dtype.itemsize), 1)
            weights = [torch.randn(out_features, in_features).to(dtype) for _ in range(count)]
            cells = [f"{ratio(weights, rows):.2f}" for rows in ROWS]
            table.add_row(f"{out_features} x {in_features}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
