"""What several commands share: the options about a model, loading and wrapping it, a check of folders to write to."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from retrodraft.options import check_corpora, check_model, check_strategy, check_threads, parse_budget

Model = Annotated[str, typer.Option(help="'embedded', a folder, or a name on the hub.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")]
Device = Annotated[str, typer.Option(help="As torch names it, for instance cpu or cuda:0.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves torch's choice.")]
Attn = Annotated[str | None, typer.Option(help="Attention implementation: sdpa, eager, ...; default the model's.")]
Budget = Annotated[str, typer.Option(help="Draft nodes of a forward: a number, or auto (priced by the cost curve).")]

Corpus = Annotated[list[Path] | None, typer.Option(help="Index that retro drafts from besides; repeatable.")]
Dense = Annotated[bool, typer.Option("--dense", help="Draft by the model's state too: index dense build.")]


def load(model: str, dtype: str, device: str, threads: int, attn: str | None) -> tuple[Any, Any]:
    """A model by what the options say, and its tokenizer; raises ValueError, before torch is imported where it can."""
    check_model(model, dtype)
    check_threads(threads)
    import torch

    from retrodraft.models import load_model, quiet_loading

    quiet_loading()
    if threads:
        torch.set_num_threads(threads)
    return load_model(model, dtype=dtype, device=device, attn=attn)


def wrap(
    model: str,
    dtype: str,
    device: str,
    threads: int,
    attn: str | None,
    strategy: str,
    budget: str,
    corpora: Sequence[Path] = (),
    dense: bool = False,
) -> tuple[Any, Any]:
    """A `RetroDraft` on such a model, and its tokenizer; raises ValueError as `load`."""
    number = parse_budget(budget)
    check_strategy(strategy)
    check_corpora(corpora, [strategy])
    if dense and not corpora:
        raise ValueError("--dense drafts from a corpus that has a dense index: name one with --corpus")
    loaded, tokenizer = load(model, dtype, device, threads, attn)
    from rich.console import Console

    from retrodraft.decoder import RetroDraft

    with Console(stderr=True).status("looking at the model: half a minute at its first use"):
        return RetroDraft(loaded, tokenizer, strategy=strategy, budget=number, corpora=corpora, dense=dense), tokenizer


def expanded(folder: Path, what: str) -> Path:
    """A folder with its ~ written out; raises ValueError, which names it as `what`, where ~ stands for nothing."""
    try:
        return folder.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{what} {str(folder)!r}: nobody here has the home folder that ~ stands for") from error


def make_folder(folder: Path, what: str, mode: int = 0o777) -> None:
    """Make a folder unless it is there; raises ValueError, which names it as `what`, if it can't be written to.

    So a mistake is told now rather than after minutes of work.
    """
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except FileExistsError as error:
        raise ValueError(f"{what} {str(folder)!r} must be a folder, and is a file") from error
    except OSError as error:
        raise ValueError(f"{what} {str(folder)!r} can't be written: {error.strerror or error}") from error
