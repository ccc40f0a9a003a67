"""`retrodraft index dense`: keys of a corpus from a model's hidden states."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from retrodraft.commands.documents import counted, disk_errors
from retrodraft.options import check_model

app = typer.Typer(
    help="Find places in a corpus by a model's state. Needs FAISS.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.callback()
def dense() -> None:
    """Find places in a corpus by a model's state. Needs FAISS."""


@app.command()
def build(
    index: Annotated[Path, typer.Argument(help="Folder of the index.")],
    model: Annotated[str, typer.Option(help="'embedded', a folder, or a name on the hub.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto.")] = "float32",
    device: Annotated[str, typer.Option(help="As torch names it, for instance cpu or cuda:0.")] = "cpu",
    limit: Annotated[int, typer.Option(min=0, help="So many tokens, of documents at random; 0 takes all.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Keep a model's hidden states along an index.

    Its documents are run through the model that will draft from it; the states become the keys.
    About 150 bytes a token. They mean something to this model only. An earlier dense index is replaced at the end;
    documents that are added to the index later have no keys until it is built again.

    Example: retrodraft index dense build answers.index --model embedded --limit 1000000
    """
    check_model(model, dtype)
    from retrodraft.index.corpus import DENSE, CorpusIndex

    corpus = CorpusIndex.open(index)
    try:
        import retrodraft.index.dense  # noqa: F401  (FAISS)
    except ImportError as error:
        raise ValueError(str(error)) from error
    from retrodraft.harvest import build_dense
    from retrodraft.index.fingerprint import tokenizer_fingerprint
    from retrodraft.models import load_model, quiet_loading

    quiet_loading()
    started = time.perf_counter()
    loaded, tokenizer = load_model(model, dtype=dtype, device=device)
    corpus.check_tokenizer(tokenizer_fingerprint(tokenizer), loaded.get_input_embeddings().weight.shape[0])
    with disk_errors(str(corpus.path / DENSE)), _bar(as_json) as bar:
        task = bar.add_task("running", total=None, rate="")

        def progress(done: int, total: int) -> None:
            rate = done / (time.perf_counter() - started)
            bar.update(task, completed=done, total=total, rate=f"{rate:,.0f} tokens/s")

        made = build_dense(corpus, loaded, limit, progress)
    folder = corpus.path / DENSE
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    facts = {
        "path": str(folder), "num_keys": len(made), "num_tokens": corpus.num_tokens, "num_skipped": made.num_skipped,
        "bytes": num_bytes, "seconds": time.perf_counter() - started, "model": model,
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        typer.echo(
            f"{folder}: {counted(len(made), 'key')} over {counted(corpus.num_tokens, 'token')}, {num_bytes:,} bytes, "
            f"{facts['seconds']:.0f} s"
        )


def _bar(quiet: bool) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
        console=Console(stderr=True), disable=quiet or not sys.stderr.isatty(), transient=True,
    )  # fmt: skip
