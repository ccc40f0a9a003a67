"""From files to documents of token ids: text, jsonl, parquet, chat logs, standard input.

Text is UTF-8; a byte order mark is dropped and CRLF becomes LF, since that is what models emit. Special tokens that are
spelled out inside a text stay text. What can't be read is skipped and named, and the rest goes on.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from retrodraft.index.corpus import Document
from retrodraft.index.files import FoundFile, Skipped

BLOCK_BYTES = 16 << 20  # larger texts become several documents
MAX_LINE_BYTES = 64 << 20  # of jsonl
BINARY_PROBE = 8192  # bytes that a NUL is looked for in, as git does
PIECE_CHARS = 100_000  # a longer text is tokenised in pieces, cut at line ends where there are any
BATCH_CHARS = 4_000_000  # texts tokenised at once, on all cores
JSONL, PARQUET = (".jsonl", ".ndjson"), (".parquet",)


@dataclass
class IngestReport:
    """What was read so far."""

    num_bytes: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_duplicates: int = 0
    skipped: list[Skipped] = field(default_factory=list)


@dataclass(frozen=True)
class Text:
    """A document before tokenisation."""

    name: str
    text: str


def read_texts(
    files: Iterable[FoundFile], report: IngestReport, *, text_field: str | None = None, role: str | None = None
) -> Iterator[Text]:
    """The documents of `files`: one a text file, one a jsonl or parquet record, one a message of a chat log.

    Args:
        report: gets bytes read and what was skipped.
        text_field: where a record holds its text; None takes `messages` where a record has them, else `text`.
        role: of chats, only messages of this role, for instance "assistant"; None takes all.

    Raises:
        ValueError: a parquet file is among them and pyarrow is not installed.
    """
    for file in files:
        before = report.num_bytes
        try:
            if file.path.suffix.lower() in PARQUET:
                yield from _read_parquet(file.path, report, text_field, role)
            else:
                with open(file.path, "rb") as stream:
                    if file.path.suffix.lower() in JSONL:
                        yield from read_jsonl(stream, str(file.path), report, text_field=text_field, role=role)
                    else:
                        yield from read_text(stream, str(file.path), report)
        except OSError as error:
            report.skipped.append(Skipped(str(file.path), error.strerror or str(error)))
        report.num_bytes = before + file.size


def read_text(stream: BinaryIO, name: str, report: IngestReport) -> Iterator[Text]:
    """One text, as several documents where it is larger than BLOCK_BYTES."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    rest = ""
    for number in itertools.count():
        block = stream.read(BLOCK_BYTES)
        last = len(block) < BLOCK_BYTES
        problem = _not_text(block) if number == 0 else ""
        if problem:
            report.skipped.append(Skipped(name, problem))
            return
        try:
            text = rest + decoder.decode(block, final=last)
        except UnicodeDecodeError as error:
            report.skipped.append(Skipped(name, f"not UTF-8 (near byte {number * BLOCK_BYTES + error.start})"))
            return
        report.num_bytes += len(block)
        rest = ""
        if not last:
            # The next block may be of the same line, or begin with the other half of a CRLF.
            cut = text.rfind("\n") + 1 or len(text) - text.endswith("\r")
            text, rest = text[:cut], text[cut:]
        if text:
            yield Text(name if number == 0 else f"{name} (part {number + 1})", text.replace("\r\n", "\n"))
        if last:
            return


def read_jsonl(
    stream: BinaryIO, name: str, report: IngestReport, *, text_field: str | None = None, role: str | None = None
) -> Iterator[Text]:
    """The records of a jsonl stream; broken lines are skipped and numbered."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES):
        number += 1
        where = f"{name}:{number}"
        report.num_bytes += len(line)
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (more := stream.readline(MAX_LINE_BYTES)) and not more.endswith(b"\n"):
                pass
            report.skipped.append(Skipped(where, f"longer than {MAX_LINE_BYTES >> 20} MB"))
            continue
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            report.skipped.append(Skipped(where, "not UTF-8"))
        except (ValueError, RecursionError):
            report.skipped.append(Skipped(where, "not JSON"))
        else:
            yield from _record_texts(record, where, report, text_field, role)


def tokenize(texts: Iterable[Text], tokenizer: Any, report: IngestReport, dedup: bool = False) -> Iterator[Document]:
    """Token ids of each text, without special tokens, in order. Fast tokenizers work on all cores.

    Args:
        tokenizer: of transformers, or a `tokenizers.Tokenizer`; it is not changed.
        report: gets documents (empty texts are none), tokens and, with `dedup`, the number of exact repeats left out.
    """
    encode = _encoder(tokenizer)
    digests: set[bytes] = set()
    batch: list[Text] = []
    size = 0
    for text in texts:
        if dedup:
            digest = hashlib.blake2b(text.text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if digest in digests:
                report.num_duplicates += 1
                continue
            digests.add(digest)
        batch.append(text)
        size += len(text.text)
        if size >= BATCH_CHARS:
            yield from _encode_batch(encode, batch, report)
            batch, size = [], 0
    yield from _encode_batch(encode, batch, report)


def _encode_batch(encode: Any, batch: list[Text], report: IngestReport) -> Iterator[Document]:
    pieces = [_pieces(text.text) for text in batch]
    ids = iter(encode([piece for group in pieces for piece in group]))
    for text, group in zip(batch, pieces, strict=True):
        tokens = np.array([token for _ in group for token in next(ids)], np.int32)
        if len(tokens):
            report.num_documents += 1
            report.num_tokens += len(tokens)
            yield Document(tokens, text.name)


def _encoder(tokenizer: Any) -> Any:
    """A function from texts to lists of ids that leaves special tokens in the texts alone."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(backend, "to_str"):
        own = type(backend).from_str(backend.to_str())  # options are set on a copy
        own.no_truncation()
        own.no_padding()
        own.encode_special_tokens = True
        batch = getattr(own, "encode_batch_fast", own.encode_batch)
        return lambda texts: [encoding.ids for encoding in batch(texts, add_special_tokens=False)]
    return lambda texts: [
        tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        for text in texts
    ]


def _pieces(text: str) -> list[str]:
    """Cut a long text behind line ends, else before blanks, else anywhere: some tokenizers are quadratic in a text."""
    pieces = []
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = text.rfind("\n", start, start + PIECE_CHARS) + 1
        if end <= start:
            end = text.rfind(" ", start + 1, start + PIECE_CHARS)
        if end <= start:
            end = start + PIECE_CHARS
        pieces.append(text[start:end])
        start = end
    pieces.append(text[start:])
    return pieces


def _not_text(block: bytes) -> str:
    """Why a file that begins with `block` is no UTF-8 text; empty where it may be."""
    if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16; convert it to UTF-8 to index it"
    if b"\0" in block[:BINARY_PROBE]:
        return "binary"
    return ""


def _record_texts(
    record: Any, where: str, report: IngestReport, text_field: str | None, role: str | None
) -> Iterator[Text]:
    """The text of a record, or those of its messages."""
    if not isinstance(record, dict):
        report.skipped.append(Skipped(where, "not an object"))
    elif text_field is None and isinstance(record.get("messages"), list):
        contents = [_content(message) for message in record["messages"]]
        if not any(contents) and None not in contents:
            report.skipped.append(Skipped(where, "no text in its messages"))
        for number, (message, content) in enumerate(zip(record["messages"], contents, strict=True)):
            if content is None:
                report.skipped.append(Skipped(where, f"message {number} has no text"))
            elif content and role in (None, message.get("role")):
                yield Text(where, _clean(content))
    elif isinstance(record.get(text_field or "text"), str):
        yield Text(where, _clean(record[text_field or "text"]))
    else:
        needed = f"text in {text_field!r}" if text_field else "'messages' and no text in 'text'"
        report.skipped.append(Skipped(where, f"no {needed}"))


def _content(message: Any) -> str | None:
    """Text of a chat message, whose content is a text, a list of parts, or nothing (a tool call); None if broken."""
    content = message.get("content", "") if isinstance(message, dict) else None
    if isinstance(message, dict) and content is None:
        return ""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else None


def _clean(text: str) -> str:
    """LF line ends, and no lone surrogates (JSON can spell them, UTF-8 can't)."""
    return text.replace("\r\n", "\n").encode("utf-8", "replace").decode("utf-8")


def _read_parquet(path: Path, report: IngestReport, text_field: str | None, role: str | None) -> Iterator[Text]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ValueError(f"{path}: reading parquet needs pyarrow: pip install 'retrodraft[parquet]'") from error
    try:
        with ParquetFile(path) as file:
            wanted = (text_field,) if text_field else ("messages", "text")
            columns = [name for name in wanted if name in file.schema_arrow.names]
            if not columns:
                report.skipped.append(Skipped(str(path), f"no column {' or '.join(map(repr, wanted))}"))
                return
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for record in batch.to_pylist():
                    number += 1
                    yield from _record_texts(record, f"{path}:{number}", report, text_field, role)
    except (ArrowException, UnicodeDecodeError) as error:
        report.skipped.append(Skipped(str(path), f"broken parquet: {str(error).splitlines()[0]}"))
