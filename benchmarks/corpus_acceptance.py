"""Tokens per forward with a corpus of the model's own earlier answers, with unrelated corpora, and without any.

    python benchmarks/corpus_acceptance.py humaneval.jsonl --limit 24 --max-new-tokens 96 --unrelated /usr/include

Every second prompt of a workload is answered greedily and the answers are indexed; the others, of which `--limit`
evenly spread ones are taken, are answered too, and then again once for each corpus: none, the answers, the text files
of `--unrelated` folders, and random tokens. All runs are held to the first answers by a logits processor, so that near
ties of a low precision can't lead them to texts of their own. A draft has 16 nodes at most, so timing decides nothing.
Each corpus gets a wrapper of its own that keeps what it learns from prompt to prompt; with `--cold` everything learned
is forgotten between prompts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from held_texts import held_to

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


def answers(rd: RetroDraft, prompts: Prompts, max_new_tokens: int) -> list[torch.Tensor]:
    """Whole greedy texts, prompts included, int64 [length]."""
    return [rd.generate(torch.tensor([ids]), max_new_tokens=max_new_tokens, do_sample=False)[0] for ids in prompts]


def drafted(rd: RetroDraft, prompts: Prompts, texts: list[torch.Tensor], cold: bool) -> dict[str, Any]:
    """Tokens and forwards of each text, and draft tokens by proposer over all."""
    tokens, forwards = [], []
    proposed: dict[str, int] = {}
    accepted: dict[str, int] = {}
    rd.reset()
    for prompt, text in zip(prompts, texts, strict=True):
        if cold:
            rd.reset()
        length = len(text) - len(prompt)
        ids = torch.tensor([prompt])
        rd.generate(ids, max_new_tokens=length, do_sample=False, logits_processor=held_to(text))
        tokens.append(rd.stats.num_new_tokens)
        forwards.append(rd.stats.num_row_forwards)
        for total, counts in (
            (proposed, rd.stats.num_draft_tokens_by_proposer),
            (accepted, rd.stats.num_accepted_tokens_by_proposer),
        ):
            for name, count in counts.items():
                total[name] = total.get(name, 0) + count
    counts_by_name = {name: {"proposed": n, "accepted": accepted[name]} for name, n in proposed.items() if n}
    return {"tokens": tokens, "forwards": forwards, "proposers": counts_by_name}


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
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("-o", "--output", type=Path, help="JSON file of the results")
    options = parser.parse_args()
    model, tokenizer = load_model(options.model, dtype=options.dtype)
    results: dict[str, Any] = {}
    for path in options.workloads:
        items = [render_prompt(tokenizer, item.messages) for item in read_workload(path)]
        earlier, others = spread(items[::2], options.answers), spread(items[1::2], options.limit)
        rd = RetroDraft(model, tokenizer, budget=BUDGET)
        texts = answers(rd, others, options.max_new_tokens)
        known = answers(rd, earlier, options.max_new_tokens)
        documents = [text[len(prompt) :].tolist() for prompt, text in zip(earlier, known, strict=True)]
        base: dict[str, Any] = {}
        with TemporaryDirectory() as folder:
            for name, indexes in corpora(Path(folder), documents, options.unrelated, tokenizer).items():
                run = drafted(RetroDraft(model, tokenizer, budget=BUDGET, corpora=indexes), others, texts, options.cold)
                base = base or run
                size = sum(index.num_tokens for index in indexes)
                result = {"corpus_tokens": size, "prompts": len(others), **compared(run, base)}
                results.setdefault(path.stem, {})[name] = result
                print(
                    f"{path.stem}, corpus {name} ({size:,} tokens): {result['tokens_per_forward']:.3f} tokens per "
                    f"forward, {result['ratio']:.3f} of none's [{result['low']:.3f}, {result['high']:.3f}]"
                )
                for proposer, count in sorted(result["proposers"].items()):
                    print(f"    {proposer}: {count['proposed']:,} proposed, {count['accepted']:,} accepted", flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
