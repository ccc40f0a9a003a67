"""What dense drafting adds to a corpus of the model's own earlier answers, what a look-up costs, and what is left out.

    python benchmarks/dense_acceptance.py spider_sql.jsonl mbpp.jsonl --limit 24 --max-new-tokens 96

Every second prompt of a workload is answered greedily inside `rd.harvest`, which makes a corpus with a dense index;
the others, of which `--limit` evenly spread ones are taken, are answered too, and then again without a corpus, with
it, with it and its dense index asked at every step where no text matches well, and with the same under the rule that
a query may take 2 % of a step at most. All runs are held to the first answers by a logits processor. A draft has 16
nodes at most, so timing decides nothing but the last of these. Each run gets its own wrapper, which keeps what it
learns from prompt to prompt.

`--rows N` adds the time of a look-up among so many random keys; repeatable.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from corpus_acceptance import BUDGET, answers, compared, drafted, spread

import retrodraft.dense
from retrodraft.decoder import RetroDraft
from retrodraft.dense import DRAFT_TOKENS, MAX_SHARE, NEIGHBOURS, DenseDrafts
from retrodraft.index.corpus import CorpusIndex
from retrodraft.index.dense import DenseBuilder
from retrodraft.models import load_model
from retrodraft.workloads import read_workload, render_prompt

LOOKUPS = 300


def lookup_times(drafts: DenseDrafts, width: int) -> tuple[float, float]:
    """Median and 99th percentile of a query with its trie, in microseconds, for random states."""
    row, times = drafts.row(), []
    for state in np.random.default_rng(1).normal(size=(LOOKUPS, width)).astype(np.float32):
        row.state = state
        started = time.perf_counter()
        row.fill(5)
        times.append(1e6 * (time.perf_counter() - started))
    return float(np.median(times)), float(np.quantile(times, 0.99))


def random_drafts(rows: int, width: int, folder: Path) -> DenseDrafts:
    """A corpus of random tokens whose every position has a random state."""
    rng = np.random.default_rng(0)
    corpus = CorpusIndex.build([rng.integers(0, 1000, rows, dtype=np.int32)], folder / str(rows))
    builder = DenseBuilder()
    for start in range(0, rows, 1 << 14):
        positions = np.arange(start, min(start + (1 << 14), rows))
        builder.add(rng.normal(size=(len(positions), width)).astype(np.float32), positions)
    return DenseDrafts([(corpus, builder.finish())])


def main() -> None:
    """Answer, harvest, answer again, print a table for each workload."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workloads", nargs="*", type=Path)
    parser.add_argument("--limit", type=int, default=24, help="prompts that are measured; 0 takes all")
    parser.add_argument("--answers", type=int, default=24, help="earlier answers that are harvested; 0 takes all")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, action="append", default=[])
    parser.add_argument("-o", "--output", type=Path, help="JSON file of the results")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with TemporaryDirectory() as name:
        for rows in options.rows:
            median, tail = lookup_times(random_drafts(rows, 576, Path(name)), 576)
            results[f"{rows} rows"] = {"lookup_us_median": median, "lookup_us_p99": tail}
            print(f"look-up among {rows:,} keys: median {median:.0f} us, p99 {tail:.0f} us", flush=True)
    model, tokenizer = load_model(options.model, dtype=options.dtype) if options.workloads else (None, None)
    for path in options.workloads:
        items = [render_prompt(tokenizer, item.messages) for item in read_workload(path)]
        earlier, others = spread(items[::2], options.answers), spread(items[1::2], options.limit)
        with TemporaryDirectory() as name:
            index = Path(name) / "answers"
            rd = RetroDraft(model, tokenizer, budget=BUDGET)
            with rd.harvest(index):
                for prompt in earlier:
                    rd.generate(torch.tensor([prompt]), max_new_tokens=options.max_new_tokens, do_sample=False)
            corpus = CorpusIndex.open(index)
            print(f"{path.stem}: {len(earlier)} answers harvested, {corpus.num_tokens:,} tokens", flush=True)
            texts = answers(rd, others, options.max_new_tokens)
            base = None
            for run, dense, share in (
                ("no corpus", False, 1.0), ("corpus", False, 1.0), ("corpus + dense", True, float("inf")),
                ("corpus + dense, under the rule", True, MAX_SHARE),
            ):  # fmt: skip
                retrodraft.dense.MAX_SHARE = share
                corpora = [] if run == "no corpus" else [corpus]
                rd = RetroDraft(model, tokenizer, budget=BUDGET, corpora=corpora, dense=dense)
                counts = drafted(rd, others, texts, cold=False)
                if base is None or run == "corpus":
                    base = counts  # dense runs are compared with the corpus alone
                stats = rd.total_stats
                steps = stats.num_row_forwards - len(others)
                result = results.setdefault(path.stem, {})[run] = {
                    **compared(counts, base), "prompts": len(others), "corpus_tokens": corpus.num_tokens * len(corpora),
                    "queried": stats.num_dense_queries / steps,
                    "query_us": 1e6 * stats.dense_seconds / max(stats.num_dense_queries, 1),
                    "share_of_time": stats.dense_seconds
                    / (stats.draft_seconds + stats.verify_seconds + stats.commit_seconds),
                }  # fmt: skip
                print(
                    f"  {run}: {result['tokens_per_forward']:.3f} tokens per forward, ratio {result['ratio']:.3f} "
                    f"[{result['low']:.3f}, {result['high']:.3f}]"
                )
                if dense:
                    print(
                        f"    asked at {result['queried']:.1%} of {steps} steps, {result['query_us']:.0f} us for "
                        f"{NEIGHBOURS} drafts of {DRAFT_TOKENS}, {result['share_of_time']:.2%} of the steps' time"
                    )
                for proposer, count in sorted(result["proposers"].items()):
                    print(f"    {proposer}: {count['proposed']:,} proposed, {count['accepted']:,} accepted", flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
