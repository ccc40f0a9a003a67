"""Tokens per forward with a corpus of the model's own earlier answers, with unrelated corpora, and without any.

    python benchmarks/corpus_acceptance.py humaneval.jsonl --limit 24 --max-new-tokens 96 --unrelated /usr/include

Every second prompt of a workload is answered greedily and the answers are indexed; the others, of which `--limit`
evenly spread ones are taken, are then answered once for each corpus: none, the answers, the text files of `--unrelated`
folders, and random tokens. A draft has 16 nodes at most, so timing decides nothing, and the counts are the same on
every machine. Each corpus gets a wrapper of its own that keeps what it learns from prompt to prompt; with `--cold`
everything learned is forgotten between prompts. Outputs must not depend on the corpus: in float32 this is checked.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from retrodraft.decoder import RetroDraft
from retrodraft.index.corpus import CorpusIndex
from retrodraft.index.files import find_files
from retrodraft.index.ingest import IngestReport, read_texts, tokenize
from retrodraft.models import load_model
from retrodraft.workloads import read_workload, render_prompt

BUDGET = 16
RESAMPLES = 2000
RANDOM_TOKENS = 1_000_000
Prompts = list[list[int]]


def answer(rd: RetroDraft, prompts: Prompts, max_new_tokens: int, cold: bool = False) -> tuple[Prompts, dict[str, Any]]:
    """Greedy answers; and tokens and forwards of each, and draft tokens by proposer over all."""
    answers, forwards = [], []
    proposed: dict[str, int] = {}
    accepted: dict[str, int] = {}
    rd.reset()
    for prompt in prompts:
        if cold:
            rd.reset()
        output = rd.generate(torch.tensor([prompt]), max_new_tokens=max_new_tokens, do_sample=False)
        answers.append(output[0, len(prompt) :].tolist())
        forwards.append(rd.stats.num_row_forwards)
        for total, counts in (
            (proposed, rd.stats.num_draft_tokens_by_proposer),
            (accepted, rd.stats.num_accepted_tokens_by_proposer),
        ):
            for name, count in counts.items():
                total[name] = total.get(name, 0) + count
    counts_by_name = {name: {"proposed": n, "accepted": accepted[name]} for name, n in proposed.items() if n}
    return answers, {"tokens": [len(ids) for ids in answers], "forwards": forwards, "proposers": counts_by_name}


def compared(run: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Tokens per forward of a run, and its ratio to the base's with a 95 % interval over prompts (paired bootstrap)."""
    rows = np.array([run["tokens"], run["forwards"], base["tokens"], base["forwards"]], np.float64)
    drawn = rows[:, np.random.default_rng(0).integers(0, rows.shape[1], (RESAMPLES, rows.shape[1]))].sum(2)
    tokens, forwards, base_tokens, base_forwards = rows.sum(1)
    low, high = np.quantile(drawn[0] / drawn[1] * drawn[3] / drawn[2], [0.025, 0.975])
    return {
        "tokens_per_forward": tokens / forwards,
        "ratio": tokens / forwards * base_forwards / base_tokens,
        "low": float(low),
        "high": float(high),
        "proposers": run["proposers"],
    }


def corpora(folder: Path, answers: Prompts, unrelated: list[str], tokenizer: Any) -> dict[str, list[CorpusIndex]]:
    """The corpora to draft from, by name."""
    found: dict[str, list[CorpusIndex]] = {"none": []}
    found["earlier answers"] = [CorpusIndex.build(answers, folder / "answers")]
    for number, name in enumerate(unrelated):
        report = IngestReport()
        documents = tokenize(read_texts(find_files([name], report.skipped), report), tokenizer, report)
        found[name] = [CorpusIndex.build(documents, folder / str(number))]
    ids = np.random.default_rng(0).integers(0, len(tokenizer), (RANDOM_TOKENS // 1000, 1000), dtype=np.int32)
    found["random tokens"] = [CorpusIndex.build(list(ids), folder / "random")]
    return found


def spread(items: list[Any], limit: int) -> list[Any]:
    """`limit` of them, evenly spread; all where the limit is 0 or larger."""
    if not limit or limit >= len(items):
        return items
    return [items[i * len(items) // limit] for i in range(limit)]


def main() -> None:
    """Answer, index, answer again, print a table for each workload."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workloads", nargs="+", type=Path)
    parser.add_argument("--limit", type=int, default=24, help="prompts that are measured; 0 takes all")
    parser.add_argument("--answers", type=int, default=0, help="earlier answers in the corpus; 0 takes all")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--unrelated", action="append", default=[], help="folder of unrelated text; repeatable")
    parser.add_argument("--cold", action="store_true", help="forget what was learned between prompts")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("-o", "--output", type=Path, help="JSON file of the results")
    options = parser.parse_args()
    model, tokenizer = load_model(options.model, dtype=options.dtype)
    results: dict[str, Any] = {}
    for path in options.workloads:
        items = [render_prompt(tokenizer, item.messages) for item in read_workload(path)]
        earlier, others = spread(items[::2], options.answers), spread(items[1::2], options.limit)
        answers, _ = answer(RetroDraft(model, tokenizer, budget=BUDGET), earlier, options.max_new_tokens)
        runs: dict[str, dict[str, Any]] = {}
        outputs: dict[str, Prompts] = {}
        with TemporaryDirectory() as folder:
            for name, indexes in corpora(Path(folder), answers, options.unrelated, tokenizer).items():
                rd = RetroDraft(model, tokenizer, budget=BUDGET, corpora=indexes)
                outputs[name], runs[name] = answer(rd, others, options.max_new_tokens, options.cold)
                size = sum(index.num_tokens for index in indexes)
                result = results.setdefault(path.stem, {})[name] = {
                    "corpus_tokens": size, "prompts": len(others), **compared(runs[name], runs["none"]),
                    "equal_outputs": sum(a == b for a, b in zip(outputs[name], outputs["none"], strict=True)),
                }  # fmt: skip
                print(
                    f"{path.stem}, corpus {name} ({size:,} tokens): {result['tokens_per_forward']:.3f} tokens per "
                    f"forward, {result['ratio']:.3f} of none's [{result['low']:.3f}, {result['high']:.3f}], "
                    f"{result['equal_outputs']}/{len(others)} outputs equal"
                )
                for proposer, count in sorted(result["proposers"].items()):
                    print(f"    {proposer}: {count['proposed']:,} proposed, {count['accepted']:,} accepted", flush=True)
                if options.dtype == "float32" and outputs[name] != outputs["none"]:
                    raise SystemExit("an output depends on the corpus")
    if options.output:
        options.output.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
