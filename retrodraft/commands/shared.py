"""What several commands share: the options about a model, and a check of folders that will be written to."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Option(help="'embedded', a folder, or a name on the hub.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")]
Device = Annotated[str, typer.Option(help="As torch names it, for instance cpu or cuda:0.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves torch's choice.")]
Attn = Annotated[str | None, typer.Option(help="Attention implementation: sdpa, eager, ...; default the model's.")]
Budget = Annotated[str, typer.Option(help="Draft nodes of a forward: a number, or auto (priced by the cost curve).")]


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
