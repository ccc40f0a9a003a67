"""The documents that `retrodraft index` reads: which files, under a progress bar, by which tokenizer."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import typer

if TYPE_CHECKING:
    from retrodraft.index.corpus import CorpusIndex, Document
    from retrodraft.index.files import FoundFile, Skipped
    from retrodraft.index.ingest import IngestReport

LISTED = 20  # skipped files that are named on the terminal; --json names all


@dataclass(frozen=True)
class Selection:
    """Which documents a command takes; kept in the manifest."""

    paths: list[str]
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    gitignore: bool = True
    field: str | None = None
    role: str | None = None
    dedup: bool = False

    def __post_init__(self) -> None:
        for option, value in (("field", self.field), ("role", self.role)):
            if value is not None and not value.strip():
                raise ValueError(f"{option} must not be empty")


def find(chosen: Selection) -> tuple[list[FoundFile], IngestReport]:
    """The files to read, and a report that names what was skipped."""
    from retrodraft.index.files import find_files
    from retrodraft.index.ingest import IngestReport

    report = IngestReport()
    paths = [path for path in chosen.paths if path != "-"]
    with disk_errors("the current folder"):  # which may be gone
        files = find_files(
            paths, report.skipped, include=chosen.include, exclude=chosen.exclude, gitignore=chosen.gitignore
        )  # fmt: skip
    return files, report


@contextmanager
def ingest(
    chosen: Selection,
    files: list[FoundFile],
    report: IngestReport,
    tokenizer: Any,
    index: Path,
    *,
    strict: bool = False,
    as_json: bool = False,
) -> Iterator[Iterable[Document]]:
    """The documents, read as they are consumed, under a progress bar; `report` fills meanwhile.

    `index` is the folder that a full disk is about. With `strict` a skipped file ends the command.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from retrodraft.index.ingest import read_jsonl, read_text, read_texts, tokenize

    options = {"text_field": chosen.field, "role": chosen.role}

    def texts() -> Iterator[Any]:
        if "-" in chosen.paths and (chosen.field is not None or chosen.role is not None):
            yield from read_jsonl(standard_input(), "standard input", report, **options)
        elif "-" in chosen.paths:
            yield from read_text(standard_input(), "standard input", report)
        yield from read_texts(files, report, **options)

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
        console=Console(stderr=True), disable=as_json or not sys.stderr.isatty(), transient=True,
    )  # fmt: skip
    total = None if "-" in chosen.paths else sum(file.size for file in files)

    def documents() -> Iterator[Document]:
        started = time.perf_counter()
        task = bar.add_task("reading", total=total, rate="")
        for document in tokenize(texts(), tokenizer, report, chosen.dedup):
            rate = report.num_tokens / (time.perf_counter() - started)
            bar.update(task, completed=report.num_bytes, rate=f"{rate:,.0f} tokens/s")
            yield document
        bar.update(task, description="sorting", completed=report.num_bytes)
        if strict and report.skipped:
            if as_json:
                problem = f"{counted(len(report.skipped), 'file or record', 'files or records')} skipped"
                skipped = [vars(item) for item in report.skipped]
                typer.echo(json.dumps({"ok": False, "problem": problem, "skipped": skipped}))
            else:
                print_skipped(report.skipped)
            raise typer.Exit(1)
        if report.num_documents == 0:
            print_skipped(report.skipped)
            of_role = f" of role {chosen.role!r}" if chosen.role else ""
            where = ", ".join("standard input" if path == "-" else path for path in chosen.paths)
            raise ValueError(f"nothing to index in {where}: no text{of_role} was found")

    with bar, disk_errors(str(index)):
        yield documents()


def standard_input() -> BinaryIO:
    """Its bytes; raises ValueError where it is closed."""
    if sys.stdin is None:
        raise ValueError("standard input is closed")
    return sys.stdin.buffer


@contextmanager
def disk_errors(unnamed: str = "the index") -> Iterator[None]:
    """A full or read-only disk is one line, not a traceback; `unnamed` is what errors without a file name are about."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{error.filename or unnamed}: {error.strerror or error}") from error


def named_tokenizer(name: str, workers: int) -> tuple[Any, dict[str, Any]]:
    """A tokenizer, and what an index keeps about it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    if workers:
        os.environ["RAYON_NUM_THREADS"] = str(workers)  # read when the first batch is tokenised
    from retrodraft.index.fingerprint import tokenizer_facts
    from retrodraft.models import load_tokenizer

    loaded = load_tokenizer(name)
    return loaded, tokenizer_facts(loaded)


def index_tokenizer(corpus: CorpusIndex, name: str | None, workers: int) -> Any:
    """The tokenizer of an index, by the name in its manifest or the one given; raises ValueError if it is another."""
    own = str(corpus.info["tokenizer"].get("name", ""))
    if not (name or own):
        raise ValueError(f"{corpus.path} does not name its tokenizer; give --tokenizer")
    try:
        loaded, facts = named_tokenizer(name or own, workers)
    except ValueError as error:
        if name:
            raise
        raise ValueError(f"{corpus.path}: {error}; if it is elsewhere now, give --tokenizer") from error
    if corpus.fingerprint and facts["fingerprint"] != corpus.fingerprint:
        is_own = not name or name == own
        raise ValueError(
            f"{corpus.path} was built with tokenizer {own!r}, fingerprint {corpus.fingerprint[:12]}; "
            f"{'that' if is_own else repr(name)} has fingerprint {facts['fingerprint'][:12]}"
            f"{' now: build the index anew' if is_own else ': leave --tokenizer out' if own else ''}"
        )
    corpus.check_tokenizer(facts["fingerprint"], facts["vocab_size"])
    return loaded


def counted(number: int, name: str, names: str = "") -> str:
    """A number with its noun, in the plural where that is due."""
    return f"{number:,} {name if number == 1 else names or name + 's'}"


def print_skipped(skipped: Sequence[Skipped]) -> None:
    """Name what was not read; `!r` keeps names with line ends on one line."""
    for item in skipped[:LISTED]:
        typer.echo(f"skipped {item.name!r}: {item.reason}", err=True)
    if skipped:
        more = f", {LISTED} of them named here; --json names all" if len(skipped) > LISTED else ""
        typer.echo(f"skipped {len(skipped)} in all{more}", err=True)
