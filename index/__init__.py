"""Stores of what was seen before, and of what came after it. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrodraft.index.adjacency import AdjacencyRows
    from retrodraft.index.corpus import CorpusIndex, Document
    from retrodraft.index.dense import DenseIndex
    from retrodraft.index.fingerprint import tokenizer_facts, tokenizer_fingerprint
    from retrodraft.index.ngram import NgramStore
    from retrodraft.index.storage import IndexBusyError, IndexFormatError
    from retrodraft.index.suffix_automaton import SuffixAutomaton

_HOMES = {
    "AdjacencyRows": "adjacency", "CorpusIndex": "corpus", "DenseIndex": "dense", "Document": "corpus",
    "IndexBusyError": "storage", "IndexFormatError": "storage", "NgramStore": "ngram",
    "SuffixAutomaton": "suffix_automaton", "tokenizer_facts": "fingerprint",
    "tokenizer_fingerprint": "fingerprint",
}  # fmt: skip

__all__ = [
    "AdjacencyRows", "CorpusIndex", "DenseIndex", "Document", "IndexBusyError", "IndexFormatError", "NgramStore",
    "SuffixAutomaton", "tokenizer_facts", "tokenizer_fingerprint",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'retrodraft.index' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"retrodraft.index.{_HOMES[name]}"), name)
