"""How often a prompt's greedy output is the same whatever was drafted: in low precision, with and without the mode.

    python benchmarks/reproducibility.py WORKLOAD [--dtype bfloat16] [--limit 20] [--max-new-tokens 64]

Each prompt is answered with nothing learned (cold), after all prompts were answered once (warm), and with drafting off:
by plain generate, and in the reproducible mode by forwards of the same constant shape whose drafts are never right.
Prints the share of prompts whose three outputs are equal, and the time against plain generate's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from retrodraft.decoder import REPRODUCIBLE_NODES, RetroDraft
from retrodraft.models import load_model
from retrodraft.workloads import read_workload, render_prompt


class NothingDrafted(RetroDraft):
    """Drafts no node; a reproducible one still verifies forwards of its constant shape."""

    def _new_rows(self, batch_size: int) -> list[Any]:
        rows = super()._new_rows(batch_size)
        for row in rows:
            row.draft = lambda prices, max_depth, chain, row=row: type(row).draft(row, prices[:1], max_depth, chain)
        return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workload", type=Path)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, default=20, help="prompts, evenly spread")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-prompt-tokens", type=int, default=1000)
    options = parser.parse_args()
    model, tokenizer = load_model(options.model, dtype=options.dtype)
    prompts = [render_prompt(tokenizer, item.messages) for item in read_workload(options.workload)]
    prompts = [prompt for prompt in prompts if len(prompt) <= options.max_prompt_tokens]
    prompts = prompts[:: max(len(prompts) // options.limit, 1)][: options.limit]

    def answers(rd: RetroDraft | None, forget: bool) -> tuple[list[list[int]], list[float]]:
        outputs, seconds = [], []
        for prompt in prompts:
            if rd is not None and forget:
                rd.reset()
            start = time.perf_counter()
            ids = (rd or model).generate(
                torch.tensor([prompt]), max_new_tokens=options.max_new_tokens, do_sample=False
            )  # fmt: skip
            seconds.append(time.perf_counter() - start)
            outputs.append(ids[0].tolist())
        return outputs, seconds

    answers(None, True)  # warms up
    plain, plain_seconds = answers(None, True)
    for reproducible in (False, True):
        rd = RetroDraft(model, tokenizer, reproducible=reproducible)
        cold, seconds = answers(rd, True)
        answers(rd, False)
        warm, _ = answers(rd, False)
        off = answers(NothingDrafted(model, tokenizer, reproducible=True), True)[0] if reproducible else plain
        same = [a == b == c for a, b, c in zip(cold, warm, off, strict=True)]
        like_plain = [a == b for a, b in zip(cold, plain, strict=True)]
        ratio = statistics.median(b / a for a, b in zip(seconds, plain_seconds, strict=True))
        name = f"reproducible ({REPRODUCIBLE_NODES} nodes)" if reproducible else "as usual"
        print(
            f"{name}: cold, warm and off equal {sum(same)} of {len(same)}; cold and warm equal "
            f"{sum(a == b for a, b in zip(cold, warm, strict=True))}; cold equal to plain generate's "
            f"{sum(like_plain)}; {ratio:.2f} times plain generate's speed"
        )


if __name__ == "__main__":
    main()
