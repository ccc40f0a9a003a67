"""`retrodraft bench`: systems side by side on one workload, interleaved, checked against plain generate, resumable."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from filelock import FileLock, Timeout
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from retrodraft import __version__
from retrodraft.decoder import RetroDraft
from retrodraft.models import load_model, quiet_loading
from retrodraft.options import parse_budget
from retrodraft.plots import plot_speedups, require_matplotlib
from retrodraft.reports import markdown, print_results
from retrodraft.runs import BenchSettings, Run, RunLog
from retrodraft.strategy import STRATEGIES
from retrodraft.workloads import WorkloadItem, read_workload, render_prompt

HF_LOOKUP_TOKENS = 10  # prompt_lookup_num_tokens, the value of transformers' documentation
RESAMPLES = 2000
NEAR_TIE = 1e-4  # of two float32 logits, which differ in their last bits from one forward shape to another


def run_bench(settings: BenchSettings, folder: Path) -> dict[str, Any]:
    """Run what is missing, then write results.json, results.md and results.png to `folder` and print the tables.

    Raises ValueError for an unreadable workload, or a folder that holds a run with other settings.
    """
    items = read_workload(settings.workload)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    require_matplotlib()
    lock = FileLock(folder / "runs.lock", timeout=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout as error:
        raise ValueError(f"another benchmark is writing to {str(folder)!r}") from error
    except OSError as error:
        raise ValueError(f"output folder {str(folder)!r} can't be written: {error.strerror or error}") from error
    try:
        return _run_bench(settings, folder, items)
    finally:
        lock.release()


def _run_bench(settings: BenchSettings, folder: Path, items: list[WorkloadItem]) -> dict[str, Any]:
    digest = hashlib.sha256(Path(settings.workload).read_bytes()).hexdigest()
    log = RunLog(folder, {**asdict(settings), "workload_sha256": digest, **machine()})
    quiet_loading()
    model, tokenizer = load_model(settings.model, settings.dtype, settings.device, settings.attn)
    prompts = _prompts(items, tokenizer, model, settings)
    names = ["plain", *(name for name in dict.fromkeys(settings.systems) if name != "plain")]
    budget = parse_budget(settings.budget)
    drafters = {
        name: RetroDraft(
            model,
            tokenizer,
            strategy=name,
            budget=budget,
            reproducible=settings.reproducible,
            corpora=settings.corpora if name == "retro" else (),
        )
        for name in names
        if name in STRATEGIES
    }
    columns = (
        TextColumn("{task.description}", markup=False),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("bench", total=len(prompts) * len(names))
        for name in names:
            _timed_run(name, drafters, model, prompts[0][1][:64], settings, new_tokens=8)  # compiles and warms up
        for drafter in drafters.values():
            drafter.reset()
        if settings.warm and log.done and any((item.id, name) not in log.done for item, _ in prompts for name in names):
            log.add_restart()
        for number, (item, prompt) in enumerate(prompts):
            for offset in range(len(names)):
                name = names[(number + offset) % len(names)]  # no system always runs first
                if (item.id, name) not in log.done:
                    if name in drafters and not settings.warm:
                        drafters[name].reset()
                    run = _timed_run(name, drafters, model, prompt, settings, settings.max_new_tokens)
                    log.add({"id": item.id, "category": item.category, "system": name, **run})
                progress.update(task, advance=1, description=f"{item.id} {name}")
    by_id = {item.id: prompt for item, prompt in prompts}
    results = summarise(log.runs(names, set(by_id)), names, settings, model, by_id)
    results["num_left_out"] = min(len(items), settings.limit or len(items)) - len(prompts)
    results["num_restarts"] = log.num_restarts
    results["workload_sha256"] = digest
    _write_results(results, folder)
    print_results(results)
    return results


def _prompts(
    items: list[WorkloadItem], tokenizer: Any, model: Any, settings: BenchSettings
) -> list[tuple[WorkloadItem, list[int]]]:
    """Rendered prompts, evenly spread over the file, without those too long for the settings or the model's window."""
    window = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    longest = min(settings.max_prompt_tokens, window - settings.max_new_tokens)
    if settings.limit and settings.limit < len(items):
        items = [items[round(i * (len(items) - 1) / max(settings.limit - 1, 1))] for i in range(settings.limit)]
    rendered = [(item, render_prompt(tokenizer, item.messages)) for item in items]
    kept = [(item, ids) for item, ids in rendered if len(ids) <= longest]
    if not kept:
        raise ValueError(
            f"every prompt is longer than {longest} tokens, all that max_prompt_tokens and the model allow"
        )
    return kept


def _timed_run(
    name: str, drafters: dict[str, RetroDraft], model: Any, prompt: list[int], settings: BenchSettings, new_tokens: int
) -> Run:
    """One generate call; forwards and the tokens they take are counted at the model, the same way for every system."""
    ids = torch.tensor([prompt], device=model.device)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens, "do_sample": False}
    if settings.temperature > 0:
        options |= {"do_sample": True, "temperature": settings.temperature, "top_k": 0}
    if name == "hf-prompt-lookup":
        options["prompt_lookup_num_tokens"] = HF_LOOKUP_TOKENS
    fed: list[int] = []
    starts: list[float] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        fed.append(kwargs["input_ids"].shape[1])
        starts.append(time.perf_counter())

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    call = drafters[name].generate if name in drafters else model.generate
    torch.manual_seed(settings.seed)
    try:
        _wait(model)
        start = time.perf_counter()
        out = call(ids, **options)
        _wait(model)
        end = time.perf_counter()
    finally:
        handle.remove()
    tokens = out[0, len(prompt) :].tolist()
    draft_us = [round(value) for value in drafters[name].stats.draft_us] if name in drafters else []
    return {
        "seconds": end - start, "decode_seconds": end - starts[1] if len(starts) > 1 else 0.0, "forwards": len(fed),
        # the prompt's forward may hold drafts too (Hugging Face's does); each later one holds a root
        "nodes": sum(fed) - len(prompt) - (len(fed) - 1), "token_ids": tokens, "draft_us": draft_us,
    }  # fmt: skip


def _wait(model: Any) -> None:
    """Until the device has done what was asked of it."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def summarise(
    runs: dict[str, dict[str, Run]],
    names: list[str],
    settings: BenchSettings,
    model: Any,
    prompts: dict[str, list[int]],
) -> dict[str, Any]:
    """The results record: overall and by category, for each system."""
    categories = list(dict.fromkeys(run["category"] for run in runs["plain"].values()))
    systems = {}
    for name in names:
        pairs = [(run, runs["plain"][identifier]) for identifier, run in runs[name].items()]
        systems[name] = {
            "overall": _cell(pairs),
            "categories": {
                category: _cell([pair for pair in pairs if pair[0]["category"] == category]) for category in categories
            },
        }
    differences = _first_differences(runs, settings, model, prompts)
    ours = [item for item in differences if item["system"] in STRATEGIES and model.dtype == torch.float32]
    return {
        "settings": {**asdict(settings), "workload": Path(settings.workload).name},
        "machine": machine(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_prompts": len(runs["plain"]),
        "num_faults": sum(item["margin"] is None or item["margin"] > NEAR_TIE for item in ours),
        "categories": categories,
        "systems": systems,
        "first_differences": differences,
    }


def _cell(pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """Figures of one system over some prompts, each paired with plain's run of the same prompt."""
    tokens = [len(run["token_ids"]) for run, _ in pairs]
    forwards = sum(run["forwards"] for run, _ in pairs)
    seconds = sum(run["seconds"] for run, _ in pairs)
    decode_seconds = sum(run["decode_seconds"] for run, _ in pairs)
    ratios = np.array(
        [(len(run["token_ids"]) / run["seconds"]) / (len(base["token_ids"]) / base["seconds"]) for run, base in pairs]
    )
    draft_us = np.array([value for run, _ in pairs for value in run["draft_us"]] or [0])
    resampled = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(resampled, axis=1), [0.025, 0.975])
    return {
        "num_prompts": len(pairs),
        "num_tokens": sum(tokens),
        "tokens_per_second": sum(tokens) / seconds,
        "decode_tokens_per_second": (sum(tokens) - len(tokens)) / decode_seconds if decode_seconds else None,
        "speedup_over_plain": {"median": float(np.median(ratios)), "low": float(low), "high": float(high)},
        "tokens_per_forward": sum(tokens) / forwards,
        "nodes_per_forward": sum(run["nodes"] for run, _ in pairs) / forwards,
        "draft_us_p50": float(np.quantile(draft_us, 0.5)),
        "draft_us_p99": float(np.quantile(draft_us, 0.99)),
        "equal_outputs": sum(run["token_ids"] == base["token_ids"] for run, base in pairs) / len(pairs),
    }


def _first_differences(
    runs: dict[str, dict[str, Run]], settings: BenchSettings, model: Any, prompts: dict[str, list[int]]
) -> list[dict[str, Any]]:
    """Where outputs leave plain's; greedy ones with plain's own margins there, of the two tokens and of its top two.

    Sampled outputs, and those of which one ends where the other goes on, have no margin.
    """
    found: list[dict[str, Any]] = []
    for name, by_id in runs.items():
        for identifier, run in by_id.items():
            mine, theirs = run["token_ids"], runs["plain"][identifier]["token_ids"]
            if mine == theirs:
                continue
            shorter = min(len(mine), len(theirs))
            place = next((i for i in range(shorter) if mine[i] != theirs[i]), shorter)
            item = {"id": identifier, "system": name, "position": place, "margin": None, "top2_margin": None}
            if place < shorter and not settings.temperature:
                logits = _next_logits(model, prompts[identifier] + theirs[:place])
                first, second = logits.topk(2).values.tolist()
                item["margin"] = float((logits[theirs[place]] - logits[mine[place]]).abs())
                item["top2_margin"] = first - second
            found.append(item)
    return found


def _next_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Plain generate's logits of the token after `token_ids`."""
    ids = torch.tensor([token_ids], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    logits: torch.Tensor = out.logits[0][0].float()
    return logits


def machine() -> dict[str, Any]:
    """What timings depend on besides the settings."""
    processor = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            processor = next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # not Linux: the platform's own word stands
    return {
        "processor": processor, "cores": os.cpu_count(), "cpu_threads": torch.get_num_threads(),
        "retrodraft": __version__, "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }  # fmt: skip


def _write_results(results: dict[str, Any], folder: Path) -> None:
    """Replace the three result files, each at once."""
    for name, text in (("results.json", json.dumps(results, indent=1)), ("results.md", markdown(results))):
        partial = folder / f"{name}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, folder / name)
    if len(results["systems"]) > 1:
        plot_speedups(results, folder / "results.png.partial")
        os.replace(folder / "results.png.partial", folder / "results.png")
