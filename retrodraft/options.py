"""Checks of what a user typed. Nothing heavy is imported, so a mistake is told before a model is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

EMBEDDED = "embedded"
DTYPES = ("float32", "bfloat16", "float16", "auto")
STRATEGY_NAMES = "retro, goose, token_recycling, suffix or prompt_lookup"


def check_model(name: str, dtype: str) -> None:
    """Raise ValueError for an unknown dtype, an empty name, and a path to no folder."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    check_model_name(name)


def check_model_name(name: str) -> None:
    """Raise ValueError for an empty name, a file, and a path to no folder."""
    if not name.strip():
        raise ValueError(f"model must be {EMBEDDED!r}, a folder or a name on the hub; got an empty name")
    if os.path.isfile(name):
        raise ValueError(f"model {name!r} can't be loaded: it is a file, and a model is a folder")
    if name.startswith(("/", "./", "../", "~")) and not os.path.isdir(os.path.expanduser(name)):
        raise ValueError(f"model {name!r} can't be loaded: there is no such folder")


def check_strategy(name: str) -> None:
    """Raise ValueError for a name that is none of STRATEGIES."""
    from retrodraft.strategy import STRATEGIES  # brings numba, which no help text needs

    if name not in STRATEGIES:
        raise ValueError(f"strategy must be {STRATEGY_NAMES}; got {name!r}")


def check_corpora(paths: Sequence[Path | str], strategies: Sequence[str]) -> None:
    """Raise ValueError for what is no corpus, and where no strategy is one that drafts from corpora."""
    if paths and "retro" not in strategies:
        raise ValueError("only strategy retro drafts from a corpus")
    if paths:
        from retrodraft.index.corpus import CorpusIndex

        for path in paths:
            CorpusIndex.open(path)


def check_threads(threads: int) -> None:
    """Raise ValueError for more CPU threads than there are cores."""
    cores = os.cpu_count() or 1
    if threads > cores:
        raise ValueError(f"threads must be at most {cores}, the cores of this machine; got {threads}")


def check_temperature(temperature: float) -> None:
    """Raise ValueError for infinity and not-a-number, which a lower bound lets pass."""
    if not math.isfinite(temperature):
        raise ValueError(f"temperature must be a finite number; got {temperature}")


def parse_budget(text: str) -> int | str:
    """`auto` or a number of nodes; raises ValueError."""
    if text == "auto":
        return text
    if not text.isdecimal() or not 0 <= int(text) <= 1024:
        raise ValueError(f"budget must be auto or a whole number from 0 to 1024; got {text!r}")
    return int(text)
