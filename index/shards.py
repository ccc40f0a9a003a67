"""A corpus' shards on disk: writing them, each with its sorted positions, and checking what a manifest says of them.

The arrays are described in docs/index-format.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from retrodraft.index.storage import IndexFormatError, Store, StoreWriter
from retrodraft.kernels import suffix_array as kernel
from retrodraft.kernels.suffix_sorting import suffix_array

Int32 = npt.NDArray[np.int32]
BORDER = -1  # closes each document
MAX_SHARD_TOKENS = (1 << 31) - 2
MAX_TOKEN = kernel.MAX_TOKEN
PARTS = ("tokens", "order", "keys", "borders", "names", "name_ends")


def write_shards(
    writer: StoreWriter, documents: Iterable[tuple[str, Sequence[int] | Int32]], first: int, shard_tokens: int
) -> list[dict[str, int]]:
    """Write documents, names and token ids, as shards `first`, `first` + 1 …; returns a manifest record for each.

    Raises ValueError for ids out of range, and `shard_tokens` too.
    """
    if not 2 <= shard_tokens <= MAX_SHARD_TOKENS:
        raise ValueError(f"shard_tokens must be from 2 to {MAX_SHARD_TOKENS}, got {shard_tokens}")
    records: list[dict[str, int]] = []
    pieces: list[Int32] = []
    names: list[bytes] = []
    size = 0
    for name, token_ids in documents:
        tokens = _checked(token_ids, name)
        encoded = _encoded(name)
        for start in range(0, len(tokens), shard_tokens - 1):  # a document that no shard could hold is cut
            piece = tokens[start : start + shard_tokens - 1]
            if size + len(piece) + 1 > shard_tokens:
                records.append(_write_shard(writer, first + len(records), pieces, names))
                size = 0
            pieces.append(piece)
            names.append(encoded)
            size += len(piece) + 1
    if pieces:
        records.append(_write_shard(writer, first + len(records), pieces, names))
    return records


def _encoded(name: str) -> bytes:
    """A name in UTF-8; one from the file system in its own bytes, whatever the locale made of them."""
    try:
        return name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return name.encode("utf-8", "backslashreplace")


def _checked(token_ids: Sequence[int] | Int32, name: str) -> Int32:
    tokens = np.asarray(token_ids)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ValueError(f"document {name!r} must be a list of whole numbers, got {tokens.dtype} {tokens.shape}")
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) <= MAX_TOKEN:
        raise ValueError(f"document {name!r} holds ids from {tokens.min()} to {tokens.max()}, not 0 to {MAX_TOKEN}")
    return tokens.astype(np.int32)


def _write_shard(writer: StoreWriter, number: int, pieces: list[Int32], names: list[bytes]) -> dict[str, int]:
    """Sort and write one shard; empties `pieces` and `names`."""
    borders = (np.cumsum([len(piece) + 1 for piece in pieces]) - 1).astype(np.int32)
    tokens = np.full(int(borders[-1]) + 1, BORDER, np.int32)
    start = 0
    for piece, end in zip(pieces, borders.tolist(), strict=True):
        tokens[start:end] = piece
        start = end + 1
    pieces.clear()
    order, keys = sorted_positions(tokens)
    arrays: tuple[npt.NDArray[Any], ...] = (
        tokens, order, keys, borders, np.frombuffer(b"".join(names), np.uint8),
        np.cumsum([len(name) for name in names], dtype=np.int64),
    )  # fmt: skip
    for part, array in zip(PARTS, arrays, strict=True):
        writer.add(f"{part}-{number}", array)
    record = {"num_positions": len(tokens), "num_documents": len(names), "max_token": int(tokens.max())}
    names.clear()
    return record


def sorted_positions(tokens: Int32) -> tuple[Int32, npt.NDArray[np.int64]]:
    """Positions of `tokens` in the order of the reversed text before them, and the keys to them; O(tokens)."""
    order = np.empty(len(tokens), np.int32)
    kernel.reverse(tokens)
    suffix_array(tokens, order)
    kernel.reverse(tokens)
    kernel.complement(order)
    keys = np.empty(-(-len(tokens) // kernel.STRIDE), np.int64)
    kernel.pack_keys(tokens, order, keys)
    return order, keys


def check_shards(store: Store) -> None:
    """Raise IndexFormatError unless the manifest's facts and the arrays' shapes agree."""
    shards = store.info.get("shards")
    facts = ("num_positions", "num_documents", "max_token")
    tokenizer = store.info.get("tokenizer")
    if not isinstance(shards, list) or not isinstance(tokenizer, dict):
        raise IndexFormatError(f"{store.folder}: the manifest lists no shards or no tokenizer")
    wanted = {"name": str, "fingerprint": str, "vocab_size": int}
    if any(not isinstance(tokenizer[key], wanted[key]) for key in tokenizer if key in wanted):
        raise IndexFormatError(f"{store.folder}: the manifest's facts about the tokenizer are damaged")
    options = store.info.get("options", {})
    if not isinstance(options, dict) or not isinstance(options.get("added", []), list):
        raise IndexFormatError(f"{store.folder}: the manifest's options are damaged")
    for number, shard in enumerate(shards):
        if not isinstance(shard, dict) or any(type(shard.get(fact)) is not int for fact in facts):
            raise IndexFormatError(f"{store.folder}: shard {number} of the manifest is damaged")
        size, documents = shard["num_positions"], shard["num_documents"]
        if not 1 <= documents <= size:
            raise IndexFormatError(f"{store.folder}: shard {number} has {documents} documents in {size} positions")
        expected = {
            "tokens": (np.int32, size), "order": (np.int32, size), "keys": (np.int64, -(-size // kernel.STRIDE)),
            "borders": (np.int32, documents), "names": (np.uint8, None), "name_ends": (np.int64, documents),
        }  # fmt: skip
        for part, (dtype, length) in expected.items():
            array = store.arrays.get(f"{part}-{number}")
            if array is None or array.dtype != dtype or array.ndim != 1 or length not in (None, len(array)):
                raise IndexFormatError(f"{store.folder}: {part}-{number} is missing or not the array of shard {number}")
