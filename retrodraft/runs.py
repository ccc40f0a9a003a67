"""What a benchmark depends on, and its finished runs on disk."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrodraft.options import check_corpora, check_model, check_temperature, check_threads, parse_budget
from retrodraft.strategy import STRATEGIES

SYSTEMS = ("plain", "hf-prompt-lookup", *STRATEGIES)
Run = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Everything that a result depends on besides the machine; raises ValueError for what can't be run."""

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
    corpora: list[str] = field(default_factory=list)  # that retro drafts from

    def __post_init__(self) -> None:
        for name in self.systems:
            if name not in SYSTEMS:
                raise ValueError(f"systems: {name!r} is none of {', '.join(SYSTEMS)}")
        if not self.systems:
            raise ValueError(f"systems: name at least one of {', '.join(SYSTEMS)}")
        parse_budget(self.budget)
        check_temperature(self.temperature)
        check_threads(self.threads)
        check_model(self.model, self.dtype)
        check_corpora(self.corpora, self.systems)


class RunLog:
    """The finished runs of a folder, one JSON line each; the first line holds what they depend on."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.num_restarts = 0  # of warm runs, each of which forgot what had been learned
        self._path = folder / "runs.jsonl"
        self._settings = settings
        self._runs: list[Run] = []
        self._fresh = True  # the file is yet to be begun
        if self._path.is_file():
            self._read()
        self.done = {(run["id"], run["system"]) for run in self._runs}

    def _read(self) -> None:
        *lines, tail = self._path.read_bytes().split(b"\n")  # a line that was cut off by a kill has no newline
        records = []
        for number, line in enumerate(lines, 1):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{self._path} line {number} is damaged: remove the line, or the file") from error
        if len(records) < 2:
            return  # nothing was finished, so whatever the settings were, nothing is lost
        found = records[0].get("settings", {})
        other = [key for key in {**self._settings, **found} if found.get(key) != self._settings.get(key)]
        if other:
            raise ValueError(
                f"{self._path} holds a run with other settings ({', '.join(other)}): choose another output folder, or "
                "remove the file"
            )
        self._runs = [record for record in records[1:] if "system" in record]
        self.num_restarts = len(records) - 1 - len(self._runs)
        self._fresh = False
        if tail:
            self._path.write_bytes(b"\n".join(lines) + b"\n")

    def add_restart(self) -> None:
        """Note that a warm run began anew."""
        self.num_restarts += 1
        self._append({"restart": self.num_restarts})

    def add(self, run: Run) -> None:
        """Keep a finished run, on disk before the next one begins."""
        self._append(run)
        self._runs.append(run)
        self.done.add((run["id"], run["system"]))

    def _append(self, record: dict[str, Any]) -> None:
        if self._fresh:
            self._path.write_text(json.dumps({"settings": self._settings}) + "\n", encoding="utf-8")
            self._fresh = False
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def runs(self, systems: list[str], ids: set[str]) -> dict[str, dict[str, Run]]:
        """Runs by system, then by prompt."""
        found: dict[str, dict[str, Run]] = {name: {} for name in systems}
        for run in self._runs:
            if run["system"] in found and run["id"] in ids:
                found[run["system"]][run["id"]] = run
        return found
