"""`retrodraft index`: make, extend, inspect and judge corpora to draft from."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from retrodraft.commands import dense
from retrodraft.commands.documents import (
    Selection,
    counted,
    disk_errors,
    find,
    index_tokenizer,
    ingest,
    named_tokenizer,
    print_skipped,
    standard_input,
)

if TYPE_CHECKING:
    from retrodraft.index.corpus import CorpusIndex
    from retrodraft.index.ingest import IngestReport

app = typer.Typer(
    help="Corpora on disk to draft from.\n\nMade of code, documents, logs of earlier answers.",
    epilog="Exit codes: 0 done; 1 damaged index (verify), or files skipped under --strict; 2 bad input, nothing "
    "to index, or a folder that can't be written; 130 interrupted. A build that fails leaves what was there before.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(dense.app, name="dense")

Index = Annotated[Path, typer.Argument(help="Folder of the index.")]
Sources = Annotated[list[str], typer.Argument(help="Files and folders; - is standard input.")]
Output = Annotated[Path, typer.Option("-o", "--output", help="Folder of the new index; one that is there is replaced.")]
Tokenizer = Annotated[str | None, typer.Option(help="'embedded', a folder, or a name on the hub; default the index's.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Include = Annotated[list[str] | None, typer.Option(help="Only these files, by .gitignore pattern; repeatable.")]
Exclude = Annotated[list[str] | None, typer.Option(help="Not these files and folders; repeatable.")]
Gitignore = Annotated[bool, typer.Option(help="Obey .gitignore files.")]
Field = Annotated[str | None, typer.Option(help="Of records, only this text field; default messages, else text.")]
Role = Annotated[str | None, typer.Option(help="Of records with messages, only those of this role.")]
Dedup = Annotated[bool, typer.Option("--dedup", help="Leave out documents that were read already.")]
Strict = Annotated[bool, typer.Option("--strict", help="Fail, and write nothing, if anything is skipped.")]
Workers = Annotated[int, typer.Option(min=0, max=1024, help="Tokenising threads; 0 takes all cores.")]
MaxMemory = Annotated[
    str, typer.Option(help="For sorting, for instance 500M; more tokens make more shards. auto: half of the machine's.")
]


@app.command()
def build(
    paths: Sources,
    output: Output,
    tokenizer: Annotated[str, typer.Option(help="'embedded', a folder, or a name on the hub.")] = "embedded",
    include: Include = None,
    exclude: Exclude = None,
    gitignore: Gitignore = True,
    field: Field = None,
    role: Role = None,
    dedup: Dedup = False,
    strict: Strict = False,
    workers: Workers = 0,
    max_memory: MaxMemory = "auto",
    as_json: Json = False,
) -> None:
    """Index text, code, .jsonl, .parquet and chat logs.

    Folders are searched without following links, under their .gitignore. Text is UTF-8; CRLF becomes LF. A record is a
    document, and so is each message of a chat. Standard input is text, or jsonl where --field or --role is given.

    Example: retrodraft index build src docs/guide.md -o my.index --include '*.py' --include '*.md'

    Example: retrodraft index build answers.jsonl -o answers.index --role assistant --dedup
    """
    from retrodraft.index.corpus import CorpusIndex
    from retrodraft.index.storage import check_outside

    shard_tokens = _shard_tokens(max_memory)
    check_outside(output)
    chosen = Selection(paths, include or [], exclude or [], gitignore, field, role, dedup)
    files, report = find(chosen)
    loaded, facts = named_tokenizer(tokenizer, workers)
    with ingest(chosen, files, report, loaded, output, strict=strict, as_json=as_json) as documents:
        corpus = CorpusIndex.build(
            documents, output, tokenizer=facts, shard_tokens=shard_tokens, options=asdict(chosen)
        )  # fmt: skip
    _print_built(corpus, report, as_json)


@app.command()
def add(
    index: Index,
    paths: Sources,
    tokenizer: Tokenizer = None,
    include: Include = None,
    exclude: Exclude = None,
    gitignore: Gitignore = True,
    field: Field = None,
    role: Role = None,
    dedup: Dedup = False,
    strict: Strict = False,
    workers: Workers = 0,
    max_memory: MaxMemory = "auto",
    as_json: Json = False,
) -> None:
    """Add files to an index.

    Small shards at its end are written anew with them.
    Options are those of build; --dedup compares the new files only.

    Example: retrodraft index add my.index more/ --strict
    """
    from retrodraft.index.corpus import CorpusIndex

    shard_tokens = _shard_tokens(max_memory)
    corpus = CorpusIndex.open(index)
    chosen = Selection(paths, include or [], exclude or [], gitignore, field, role, dedup)
    files, report = find(chosen)
    loaded = index_tokenizer(corpus, tokenizer, workers)
    with ingest(chosen, files, report, loaded, index, strict=strict, as_json=as_json) as documents:
        corpus.extend(documents, shard_tokens=shard_tokens, options=_given(asdict(chosen)))
    _print_built(corpus, report, as_json)


@app.command()
def merge(
    indexes: Annotated[list[Path], typer.Argument(help="Folders of indexes that share a tokenizer.")],
    output: Output,
    as_json: Json = False,
) -> None:
    """Join indexes into a new one.

    Shards are copied, nothing is sorted anew; keys for dense drafting stay with the old indexes.

    Example: retrodraft index merge code.index docs.index -o all.index
    """
    from retrodraft.index.corpus import CorpusIndex

    with disk_errors(str(output)):
        corpus = CorpusIndex.merge(indexes, output)
    _print_info(corpus, as_json)


@app.command()
def compact(index: Index, max_memory: MaxMemory = "auto", as_json: Json = False) -> None:
    """Sort an index's shards into one.

    Or into as few as --max-memory allows; larger shards stay. Look-ups search each shard, so few are quicker.

    Example: retrodraft index compact my.index
    """
    from retrodraft.index.corpus import CorpusIndex

    shard_tokens = _shard_tokens(max_memory)
    corpus = CorpusIndex.open(index)
    with disk_errors(str(index)):
        corpus.compact(shard_tokens=shard_tokens)
    _print_info(corpus, as_json)


@app.command()
def info(index: Index, as_json: Json = False) -> None:
    """Show size, documents, tokenizer and build options.

    Example: retrodraft index info my.index --json
    """
    from retrodraft.index.corpus import CorpusIndex

    _print_info(CorpusIndex.open(index), as_json)


@app.command()
def query(
    index: Index,
    text: Annotated[str, typer.Argument(help="Text whose end is looked up; - is standard input, less a last newline.")],
    k: Annotated[int, typer.Option(min=1, max=64, help="Continuations.")] = 8,
    documents: Annotated[int, typer.Option(min=0, help="Documents to name.")] = 5,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
) -> None:
    """Look up a text's end: what followed it, and where.

    The longest end that occurs, of at most 64 tokens, is looked up. Tokens are compared, not letters: most tokenizers
    make another token of a word behind a space. Of more than 64 occurrences in a shard, continuations are counted in 64
    and scaled up. Documents are samples, spread evenly over the occurrences.

    Example: retrodraft index query my.index "for i in range("
    """
    from retrodraft.index.corpus import CorpusIndex
    from retrodraft.index.ingest import IngestReport, Text, tokenize
    from retrodraft.kernels.suffix_array import MAX_SAMPLES

    corpus = CorpusIndex.open(index)
    loaded = index_tokenizer(corpus, tokenizer, 0)
    raw = standard_input().read() if text == "-" else os.fsencode(text)
    try:
        wanted = raw.decode("utf-8-sig").replace("\r\n", "\n")
        wanted = wanted.removesuffix("\n") if text == "-" else wanted  # which echo and editors put there
    except UnicodeDecodeError:
        raise ValueError("the text to look up is not UTF-8") from None
    found = list(tokenize([Text("query", wanted)], loaded, IngestReport()))
    context = found[0].token_ids if found else []
    interval = corpus.match(context)
    matched = list(context)[len(context) - interval.length :]
    continuations = corpus.continuations(interval, k) if interval.length else []
    places = corpus.occurrences(interval, documents) if interval.length else []
    sampled = any(right - left > MAX_SAMPLES for left, right in interval.ranges) and interval.length > 0
    result = {
        "match_length": interval.length, "matched": loaded.decode(matched),
        "occurrences": interval.count if interval.length else 0, "sampled": sampled,
        "continuations": [
            {"token": token, "text": loaded.decode([token]), "count": count, "share": count / interval.count}
            for token, count in continuations
        ],
        "documents": [{"name": place.name, "position": place.position} for place in places],
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps(result))
        return
    if not interval.length:
        typer.echo("No token of the text's end occurs in the index.")
        return
    counted = ", continuations counted in samples" if sampled else ""
    typer.echo(f"match length {interval.length}, occurrences {interval.count}{counted}: {result['matched']!r}")
    for token, count in continuations:
        typer.echo(f"{count:>10} {count / interval.count:>6.1%}  {loaded.decode([token])!r}")
    for place in places:
        typer.echo(f"in {place.name!r}, token {place.position}")


@app.command()
def verify(index: Index, as_json: Json = False) -> None:
    """Compare every file with its checksum.

    Keys for dense drafting are compared too. Exit code 1 if anything is damaged.

    Example: retrodraft index verify my.index
    """
    from retrodraft.index.corpus import DENSE, KIND, CorpusIndex
    from retrodraft.index.storage import MANIFEST, IndexFormatError, open_store

    if not index.is_dir():
        raise ValueError(f"{index} is not a folder; an index is one")
    try:
        stores = [open_store(index, None, check=True)]
        if stores[0].kind == KIND:
            CorpusIndex(stores[0]).check_tokens()  # and the facts of the manifest with the arrays
        if (index / DENSE / MANIFEST).exists():
            stores.append(open_store(index / DENSE, None, check=True))
    except IndexFormatError as error:
        typer.echo(json.dumps({"ok": False, "problem": str(error)}) if as_json else f"damaged: {error}")
        raise typer.Exit(1) from None
    num_files, num_bytes = sum(len(store.entries) for store in stores), sum(store.nbytes for store in stores)
    if as_json:
        typer.echo(json.dumps({"ok": True, "files": num_files, "bytes": num_bytes}))
    else:
        typer.echo(f"{index}: {num_files} files, {num_bytes:,} bytes, all as they were written")


@app.command(name="eval")
def evaluate_index(
    index: Index,
    workload: Annotated[list[str], typer.Option(help="Texts to replay: .jsonl, .parquet or text; repeatable.")],
    field: Field = None,
    role: Annotated[
        str, typer.Option(help="Of chat logs, only this role's messages; '' takes all, and standard input as text.")
    ] = "assistant",
    num_draft_tokens: Annotated[int, typer.Option(min=0, help="Longest draft.")] = 16,
    limit: Annotated[int, typer.Option(min=0, help="Documents, from the start; 0 takes all.")] = 0,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
) -> None:
    """Replay texts: how often drafts would be right.

    They are replayed as if a model wrote them, and drafted from the index alone; no model is needed. Use texts that are
    not in the index. --workload - is standard input: jsonl, or text under --role ''.

    Example: retrodraft index eval my.index --workload answers.jsonl --limit 100
    """
    from itertools import islice

    from retrodraft.index.corpus import CorpusIndex
    from retrodraft.index.evaluation import evaluate

    corpus = CorpusIndex.open(index)
    chosen = Selection(workload, field=field, role=role or None)
    files, report = find(chosen)
    loaded = index_tokenizer(corpus, tokenizer, 0)
    with ingest(chosen, files, report, loaded, index, as_json=as_json) as documents:
        started = time.perf_counter()
        result = evaluate(corpus, islice(documents, limit or None), num_draft_tokens).as_dict()
    result["seconds"] = time.perf_counter() - started
    result["skipped"] = [vars(item) for item in report.skipped]
    if as_json:
        typer.echo(json.dumps(result))
        return
    print_skipped(report.skipped)
    typer.echo(
        f"{counted(result['num_documents'], 'document')}, {counted(result['num_positions'], 'token')}: the most "
        f"frequent continuation was right {result['top_1_rate']:.1%} of the time, one of eight "
        f"{result['top_8_rate']:.1%}; matches of {result['mean_match_length']:.1f} tokens on average.\n"
        f"Drafts of up to {counted(num_draft_tokens, 'token')} from the index alone: "
        f"{result['tokens_per_forward']:.2f} tokens per forward."
    )


def _shard_tokens(max_memory: str) -> int:
    from retrodraft.index.corpus import BYTES_PER_TOKEN
    from retrodraft.index.shards import MAX_SHARD_TOKENS

    if max_memory.strip().lower() == "auto":
        return min(max(_machine_memory() // 2 // BYTES_PER_TOKEN, 1 << 20), MAX_SHARD_TOKENS)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)i?B?", max_memory.strip(), re.IGNORECASE)
    num_bytes = float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " ") if match else 0.0
    if num_bytes < 1 << 20:
        raise ValueError(f"max-memory must be auto, or a size of at least 1M, for instance 500M; got {max_memory!r}")
    return min(int(num_bytes / BYTES_PER_TOKEN), MAX_SHARD_TOKENS)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Without those that were left alone."""
    return {name: value for name, value in options.items() if value not in (None, [], False)}


def _machine_memory() -> int:
    """Bytes of memory that the machine has; 8 GiB where it does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 8 << 30


def _facts(corpus: CorpusIndex) -> dict[str, Any]:
    from retrodraft.index.corpus import DENSE
    from retrodraft.index.storage import MANIFEST, IndexFormatError, open_store

    keys: dict[str, Any] | None = None
    if (corpus.path / DENSE / MANIFEST).exists():
        try:
            store = open_store(corpus.path / DENSE, DENSE)
            num_keys = len(store.arrays.get("positions", ()))
            keys = {"num_keys": num_keys, "bytes": store.nbytes, "model": str(store.info.get("model_name", ""))}
        except IndexFormatError as error:
            keys = {"problem": str(error)}  # the rest can be used without them
    return {
        "path": str(corpus.path), "num_tokens": corpus.num_tokens, "num_documents": corpus.num_documents,
        "num_shards": len(corpus.arrays), "bytes": corpus.nbytes,
        "bytes_per_token": corpus.nbytes / max(corpus.num_tokens, 1), "tokenizer": corpus.info["tokenizer"],
        "options": corpus.info.get("options", {}), "dense": keys, "advice": _advice(corpus),
    }  # fmt: skip


def _advice(corpus: CorpusIndex) -> str | None:
    """What to do about too many shards, with the memory that this takes where the machine's is not enough by itself."""
    from retrodraft.index.corpus import BYTES_PER_TOKEN, MAX_SHARDS

    # Two neighbours hold more than one shard may: so many tokens in each make few enough, wherever documents end.
    needed = 2 * (corpus.num_tokens + corpus.num_documents) // (MAX_SHARDS - 1) + 1
    if not corpus.advice or needed <= _shard_tokens("auto"):
        return corpus.advice or None
    return f"{corpus.advice} --max-memory {needed * BYTES_PER_TOKEN // (1 << 20) + 1}M"


def _print_info(corpus: CorpusIndex, as_json: bool) -> None:
    facts = _facts(corpus)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    tokenizer = facts["tokenizer"]
    named = f"tokenizer {tokenizer['name']!r}" if tokenizer.get("name") else "no tokenizer named"
    if "vocab_size" in tokenizer:
        named += f", {counted(tokenizer['vocab_size'], 'token')}"
    if tokenizer.get("fingerprint"):
        named += f", fingerprint {tokenizer['fingerprint'][:16]}"
    typer.echo(
        f"{facts['path']}: {counted(facts['num_tokens'], 'token')} in {counted(facts['num_documents'], 'document')}, "
        f"{counted(facts['num_shards'], 'shard')}, {facts['bytes']:,} bytes "
        f"({facts['bytes_per_token']:.2f} a token)\n{named}"
    )
    typer.echo(f"options {json.dumps(_given(facts['options']))}")
    keys = facts["dense"]
    if keys and "problem" in keys:
        typer.echo(f"dense: damaged: {keys['problem']}")
    elif keys:
        typer.echo(f"dense: {counted(keys['num_keys'], 'key')} of model {keys['model']!r}, {keys['bytes']:,} bytes")
    if facts["advice"]:
        typer.echo(facts["advice"], err=True)


def _print_built(corpus: CorpusIndex, report: IngestReport, as_json: bool) -> None:
    if as_json:
        skipped = [vars(item) for item in report.skipped]
        facts = {**_facts(corpus), "skipped": skipped, "num_duplicates": report.num_duplicates}
        typer.echo(json.dumps(facts))
        return
    print_skipped(report.skipped)
    if report.num_duplicates:
        typer.echo(f"left out {counted(report.num_duplicates, 'repeated document')}", err=True)
    _print_info(corpus, False)
