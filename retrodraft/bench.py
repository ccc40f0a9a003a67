"""`retrodraft bench`: systems side by side on one workload, interleaved, checked against plain generate, resumable."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from retrodraft.decoder import RetroDraft
from retrodraft.models import load_model
from retrodraft.plots import plot_speedups
from retrodraft.reports import markdown, print_results
from retrodraft.strategy import STRATEGIES
from retrodraft.workloads import WorkloadItem, read_workload, render_prompt

SYSTEMS = ("plain", "hf-prompt-lookup", *STRATEGIES)
HF_LOOKUP_TOKENS = 10  # prompt_lookup_num_tokens, the value of transformers' documentation
RESAMPLES = 2000
Run = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Everything that a result depends on besides the machine."""

    workload: str
    systems: list[str]
    model: str = "embedded"
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 0
    attn: str | None = None
    budget: str = "auto"
    limit: int = 0
    max_new_tokens: int = 128
    max_prompt_tokens: int = 4096
    temperature: float = 0.0
    seed: int = 0
    warm: bool = False
    reproducible: bool = False

    def __post_init__(self) -> None:
        for name in self.systems:
            if name not in SYSTEMS:
                raise ValueError(f"systems: {name!r} is none of {', '.join(SYSTEMS)}")
        if not self.systems:
            raise ValueError(f"systems: name at least one of {', '.join(SYSTEMS)}")


def run_bench(settings: BenchSettings, folder: Path) -> dict[str, Any]:
    """Run what is missing, then write results.json, results.md and results.png to `folder` and print the tables.

    Raises ValueError for bad settings, an unreadable workload, or a folder that holds a run with other settings.
    """
    from retrodraft.cli import parse_budget

    budget = parse_budget(settings.budget)
    items = read_workload(settings.workload)
    log = RunLog(folder, settings)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    model, tokenizer = load_model(settings.model, settings.dtype, settings.device, settings.attn)
    prompts = _prompts(items, tokenizer, settings)
    names = ["plain", *(name for name in dict.fromkeys(settings.systems) if name != "plain")]
    drafters = {
        name: RetroDraft(model, tokenizer, strategy=name, budget=budget, reproducible=settings.reproducible)
        for name in names
        if name in STRATEGIES
    }
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("bench", total=len(prompts) * len(names))
        for name in names:
            _timed_run(name, drafters, model, prompts[0][1][:64], settings, new_tokens=8)  # compiles and warms up
        for number, (item, prompt) in enumerate(prompts):
            for offset in range(len(names)):
                name = names[(number + offset) % len(names)]  # no system always runs first
                if (item.id, name) not in log.done:
                    if name in drafters and not settings.warm:
                        drafters[name].reset()
                    run = _timed_run(name, drafters, model, prompt, settings, settings.max_new_tokens)
                    log.add({"id": item.id, "category": item.category, "system": name, **run})
                progress.update(task, advance=1, description=f"{item.id} {name}")
    results = summarise(
        log.runs(names, {item.id for item, _ in prompts}), names, settings, model, dict(_by_id(prompts))
    )
    results["num_left_out"] = min(len(items), settings.limit or len(items)) - len(prompts)
    _write_results(results, folder)
    print_results(results)
    return results


def _by_id(prompts: list[tuple[WorkloadItem, list[int]]]) -> list[tuple[str, list[int]]]:
    return [(item.id, prompt) for item, prompt in prompts]


def _prompts(
    items: list[WorkloadItem], tokenizer: Any, settings: BenchSettings
) -> list[tuple[WorkloadItem, list[int]]]:
    """Rendered prompts, evenly spread over the file, without those that are too long."""
    if settings.limit and settings.limit < len(items):
        items = [items[round(i * (len(items) - 1) / max(settings.limit - 1, 1))] for i in range(settings.limit)]
    rendered = [(item, render_prompt(tokenizer, item.messages)) for item in items]
    kept = [(item, ids) for item, ids in rendered if len(ids) <= settings.max_prompt_tokens]
    if not kept:
        raise ValueError(f"every prompt is longer than max_prompt_tokens={settings.max_prompt_tokens}")
    return kept


def _timed_run(
    name: str, drafters: dict[str, RetroDraft], model: Any, prompt: list[int], settings: BenchSettings, new_tokens: int
) -> Run:
    """One generate call; forwards and tokens fed are counted at the model, the same way for every system."""
    ids = torch.tensor([prompt], device=model.device)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens, "do_sample": False}
    if settings.temperature > 0:
        options |= {"do_sample": True, "temperature": settings.temperature, "top_k": 0}
    if name == "hf-prompt-lookup":
        options["prompt_lookup_num_tokens"] = HF_LOOKUP_TOKENS
    fed: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        fed.append(kwargs["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    call = drafters[name].generate if name in drafters else model.generate
    torch.manual_seed(settings.seed)
    try:
        start = time.perf_counter()
        out = call(ids, **options)
        seconds = time.perf_counter() - start
    finally:
        handle.remove()
    tokens = out[0, len(prompt) :].tolist()
    draft_us = [round(value) for value in drafters[name].stats.draft_us] if name in drafters else []
    return {
        "seconds": seconds, "forwards": len(fed), "nodes": sum(fed[1:]) - len(fed[1:]), "token_ids": tokens,
        "draft_us": draft_us,
    }  # fmt: skip


class RunLog:
    """The finished runs of a folder, one JSON line each; the first line holds the settings."""

    def __init__(self, folder: Path, settings: BenchSettings) -> None:
        self._path = folder / "runs.jsonl"
        self._runs: list[Run] = []
        wanted = {"settings": asdict(settings)}
        folder.mkdir(parents=True, exist_ok=True)
        if self._path.is_file():
            self._read(wanted)
        else:
            self._path.write_text(json.dumps(wanted) + "\n", encoding="utf-8")
        self.done = {(run["id"], run["system"]) for run in self._runs}

    def _read(self, wanted: dict[str, Any]) -> None:
        lines = self._path.read_bytes().split(b"\n")
        whole = [json.loads(line) for line in lines[:-1]]  # a line that was cut off by a kill has no newline
        if not whole or whole[0] != wanted:
            found = whole[0].get("settings", {}) if whole else {}
            other = [key for key, value in wanted["settings"].items() if found.get(key) != value]
            raise ValueError(
                f"{self._path} holds a run with other settings ({', '.join(other)}): choose another output folder, or "
                "remove the file"
            )
        self._runs = whole[1:]
        if lines[-1]:
            self._path.write_bytes(b"\n".join(lines[:-1]) + b"\n")

    def add(self, run: Run) -> None:
        """Keep a finished run, on disk before the next one begins."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._runs.append(run)
        self.done.add((run["id"], run["system"]))

    def runs(self, systems: list[str], ids: set[str]) -> dict[str, dict[str, Run]]:
        """Runs by system, then by prompt."""
        found: dict[str, dict[str, Run]] = {name: {} for name in systems}
        for run in self._runs:
            if run["system"] in found and run["id"] in ids:
                found[run["system"]][run["id"]] = run
        return found


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
    return {
        "settings": {**asdict(settings), "workload": Path(settings.workload).name},
        "machine": _machine(),
        "num_prompts": len(runs["plain"]),
        "categories": categories,
        "systems": systems,
        "first_differences": _first_differences(runs, settings, model, prompts),
    }  # fmt: skip


def _cell(pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """Figures of one system over some prompts, each paired with plain's run of the same prompt."""
    tokens = [len(run["token_ids"]) for run, _ in pairs]
    forwards = sum(run["forwards"] for run, _ in pairs)
    seconds = sum(run["seconds"] for run, _ in pairs)
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
    """Where greedy outputs leave plain's: the position, and the margin between the two tokens in plain's own logits."""
    found = []
    for name, by_id in runs.items():
        for identifier, run in by_id.items():
            mine, theirs = run["token_ids"], runs["plain"][identifier]["token_ids"]
            if mine == theirs or settings.temperature > 0:
                continue
            place = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            if place is None:
                place, margin = min(len(mine), len(theirs)), float("nan")
            else:
                text = torch.tensor([prompts[identifier] + theirs[:place]], device=model.device)
                with torch.inference_mode():
                    logits = model(input_ids=text, use_cache=False).logits[0, -1].float()
                margin = float((logits[theirs[place]] - logits[mine[place]]).abs())
            found.append({"id": identifier, "system": name, "position": place, "margin": margin})
    return found


def _machine() -> dict[str, Any]:
    processor = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            processor = next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # not Linux: the platform's own word stands
    return {
        "processor": processor, "cores": os.cpu_count(), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }  # fmt: skip


def _write_results(results: dict[str, Any], folder: Path) -> None:
    """Replace the three result files, each at once."""
    for name, text in (("results.json", json.dumps(results, indent=1)), ("results.md", markdown(results))):
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as file:
            file.write(text)
        os.replace(file.name, folder / name)
    if len(results["systems"]) > 1:
        plot_speedups(results, folder / "results.png")
