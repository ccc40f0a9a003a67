"""Learn the shipped hit rates (`retrodraft/data/priors.npy`) from generations of a real model.

    python benchmarks/learn_priors.py WORKLOAD.jsonl [...] --limit 40 -o retrodraft/data/priors.npy

Every prompt is answered greedily while the calibration counts outcomes as it always does (`kernels/learning.py`), every
second prompt with empty adjacency rows. The counts are then shrunk: a cell towards its match and probability buckets
whatever the row order, those towards the two buckets alone, and these towards the overall rate. Keep the workloads that
a claim is measured on out of the list.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from retrodraft.decoder import RetroDraft
from retrodraft.kernels.candidates import NUM_CELLS, NUM_MATCH, NUM_PAIR, NUM_SCOPES, NUM_TOKEN
from retrodraft.models import load_model
from retrodraft.retro import RetroStrategy
from retrodraft.workloads import read_workload, render_prompt

SHRINKAGE = 4.0  # outcomes of the coarser cell that a finer one begins with
START = 0.5  # trials of the flat rate that counting begins with


def shrunk(
    hits: npt.NDArray[np.float64], trials: npt.NDArray[np.float64], coarser: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Hit rates, each begun with `SHRINKAGE` outcomes at the rate of its coarser cell."""
    return (hits + SHRINKAGE * coarser) / (trials + SHRINKAGE)


def priors(hits: npt.NDArray[np.float32], trials: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    """Shrunk rates of all cells; the scopes that were not seen take those of the request."""
    shape = (NUM_MATCH, NUM_PAIR // 8, 8, NUM_TOKEN)
    h, t = (hits.astype(np.float64).reshape(shape), trials.astype(np.float64).reshape(shape))
    overall = np.float64(h.sum() / t.sum())
    match = shrunk(h.sum((1, 2, 3)), t.sum((1, 2, 3)), overall)
    prob = shrunk(h.sum((0, 1, 3)), t.sum((0, 1, 3)), overall)
    both = shrunk(h.sum((1, 3)), t.sum((1, 3)), (match[:, None] + prob[None, :]) / 2)
    ordered = shrunk(h.sum(3), t.sum(3), both[:, None, :])
    rates = shrunk(h, t, ordered[..., None])
    per_scope = (NUM_MATCH - 1) // NUM_SCOPES
    for scope in range(1, NUM_SCOPES):
        rates[1 + scope * per_scope : 1 + (scope + 1) * per_scope] = rates[1 : 1 + per_scope]
    return rates.reshape(NUM_CELLS).astype(np.float16)


def main() -> None:
    """Generate, count, shrink, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workloads", nargs="+", type=Path)
    parser.add_argument("--limit", type=int, default=40, help="prompts of each workload, evenly spread")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--max-prompt-tokens", type=int, default=2500)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    model, tokenizer = load_model(options.model, dtype=options.dtype)
    rd = RetroDraft(model, tokenizer, budget=32)
    strategy = rd.strategy
    assert isinstance(strategy, RetroStrategy)
    strategy.calibration.trials[:] = START
    strategy.calibration.hits[:] = START * 0.02
    for path in options.workloads:
        items = read_workload(path)
        for number, item in enumerate(items[:: max(len(items) // options.limit, 1)][: options.limit]):
            prompt = render_prompt(tokenizer, item.messages)
            if len(prompt) > options.max_prompt_tokens:
                continue
            if number % 2:
                strategy.adjacency.reset()
            rd.generate(torch.tensor([prompt]), max_new_tokens=options.max_new_tokens, do_sample=False)
        print(f"{path.name}: {rd.total_stats}", flush=True)
    np.save(options.output, priors(strategy.calibration.hits, strategy.calibration.trials))


if __name__ == "__main__":
    main()
