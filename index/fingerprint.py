"""Which tokenizer a store's token ids belong to."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256, in hex, over the vocabulary, the merges and the added tokens.

    Equal for two loads of one tokenizer, whatever file format they came from; templates, normalisers, padding and
    names do not count. O(vocabulary).

    Args:
        tokenizer: a `tokenizers.Tokenizer`, or a transformers tokenizer, fast or slow.

    Raises:
        ValueError: the object has no vocabulary.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "get_vocab"):
        raise ValueError(f"a tokenizer of transformers or tokenizers is needed, got {type(tokenizer).__name__}")
    vocabulary = sorted(backend.get_vocab().items(), key=lambda item: (item[1], item[0]))
    if hasattr(backend, "to_str"):
        state = json.loads(backend.to_str())
        # Merges are pairs, or one text with a blank between, depending on the version that wrote them.
        merges = [m.split(" ", 1) if isinstance(m, str) else list(m) for m in state["model"].get("merges") or []]
        added = [(token["id"], token["content"]) for token in state.get("added_tokens", [])]
    else:
        merges = [list(pair) for pair in getattr(backend, "bpe_ranks", ())]
        added = [(number, content) for content, number in backend.get_added_vocab().items()]
    digest = hashlib.sha256()
    for part in (vocabulary, merges, sorted(added)):
        digest.update(json.dumps(part, ensure_ascii=True, separators=(",", ":")).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    """What a corpus keeps of its tokenizer: the `name` it was loaded by, `fingerprint` and `vocab_size`.

    A folder's name is made absolute, so that it is found from other folders too. `loaded_as` is what
    `retrodraft.models.load_tokenizer` calls the embedded one.
    """
    path = str(getattr(tokenizer, "name_or_path", ""))
    folder = os.path.expanduser(path)
    name = os.path.abspath(folder) if os.path.isdir(folder) else path
    return {
        "name": getattr(tokenizer, "loaded_as", name), "fingerprint": tokenizer_fingerprint(tokenizer),
        "vocab_size": tokenizer_size(tokenizer),
    }  # fmt: skip


def tokenizer_size(tokenizer: Any) -> int:
    """Number of token ids that the tokenizer can give, added tokens included."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(backend, "get_vocab_size"):
        return int(backend.get_vocab_size(with_added_tokens=True))
    return len(tokenizer)
