"""Strategies by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from retrodraft.strategy import STRATEGIES, Strategy

if TYPE_CHECKING:
    from retrodraft.dense import DenseDrafts
    from retrodraft.index.corpus import CorpusIndex


def make_strategy(
    name: str, vocab_size: int, corpora: Sequence[CorpusIndex] = (), dense: DenseDrafts | None = None
) -> Strategy:
    """A fresh strategy for a vocabulary of `vocab_size` embedding rows; `corpora` and `dense` are for "retro" alone.

    Raises ValueError for an unknown name, or one that takes no corpora.
    """
    if name not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}; got {name!r}")
    if name == "retro":
        from retrodraft.retro import RetroStrategy

        return RetroStrategy(vocab_size, corpora, dense)
    if corpora:
        raise ValueError(f"strategy {name!r} takes no corpora: use strategy='retro'")
    from retrodraft.baselines.goose import Goose
    from retrodraft.baselines.lookup import PromptLookup
    from retrodraft.baselines.recycling import TokenRecycling
    from retrodraft.baselines.suffix import SuffixDecoding

    kinds = {
        "goose": Goose, "token_recycling": TokenRecycling, "suffix": SuffixDecoding, "prompt_lookup": PromptLookup
    }  # fmt: skip
    return cast(Strategy, kinds[name](vocab_size))
