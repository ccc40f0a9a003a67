"""Tokens per forward of several strategies with the same number of draft nodes, on the same texts.

    python benchmarks/equal_nodes.py question.jsonl --limit 16 --max-new-tokens 80 --nodes 8 16 60

Every prompt is first answered by plain greedy `generate`; the strategies are then held to that answer by a logits
processor, so that near ties of a low precision can't lead them to texts of their own. All that was learned is forgotten
before each prompt. Counts, not times: nothing depends on what else the machine does.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from held_texts import held_to
from rich.console import Console
from rich.table import Table

from retrodraft.decoder import RetroDraft
from retrodraft.models import load_model
from retrodraft.workloads import read_workload, render_prompt


def answers(model: Any, tokenizer: Any, options: argparse.Namespace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Prompts, int64 [1, length], and the whole texts, int64 [length], of plain greedy decoding."""
    items = read_workload(options.workload)
    chosen = items[:: max(len(items) // options.limit, 1)][: options.limit]
    prompts = [torch.tensor([render_prompt(tokenizer, item.messages)]) for item in chosen]
    prompts = [prompt for prompt in prompts if prompt.shape[1] <= options.max_prompt_tokens]
    length = options.max_new_tokens
    return [(prompt, model.generate(prompt, max_new_tokens=length, do_sample=False)[0]) for prompt in prompts]


def main() -> None:
    """Answer, hold every strategy to the answers, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workload", type=Path)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 60])
    parser.add_argument("--strategies", nargs="+", default=["prompt_lookup", "token_recycling", "goose", "retro"])
    parser.add_argument("--limit", type=int, default=16, help="prompts, evenly spread")
    parser.add_argument("--max-new-tokens", type=int, default=80)
    parser.add_argument("--max-prompt-tokens", type=int, default=1000)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    model, tokenizer = load_model(options.model, dtype=options.dtype)
    texts = answers(model, tokenizer, options)
    table = Table("strategy", *(f"{nodes} nodes" for nodes in options.nodes), title="tokens per forward (nodes used)")
    for strategy in options.strategies:
        cells = []
        for nodes in options.nodes:
            rd = RetroDraft(model, tokenizer, strategy=strategy, budget=nodes)
            tokens = forwards = drafted = 0
            for prompt, text in texts:
                rd.reset()
                length = len(text) - prompt.shape[1]
                rd.generate(prompt, max_new_tokens=length, do_sample=False, logits_processor=held_to(text))
                tokens += rd.stats.num_new_tokens
                forwards += rd.stats.num_target_forwards
                drafted += rd.stats.num_draft_tokens
            cells.append(f"{tokens / forwards:.3f} ({drafted / forwards:.1f})")
        table.add_row(strategy, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
