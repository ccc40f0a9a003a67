"""Strategies by name."""

from __future__ import annotations

from typing import cast

from retrodraft.strategy import STRATEGIES, Strategy


def make_strategy(name: str, vocab_size: int) -> Strategy:
    """A fresh strategy for a vocabulary of `vocab_size` embedding rows; raises ValueError for an unknown name."""
    if name not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}; got {name!r}")
    if name == "retro":
        from retrodraft.retro import RetroStrategy

        return RetroStrategy(vocab_size)
    from retrodraft.baselines_goose import Goose
    from retrodraft.baselines_lookup import PromptLookup
    from retrodraft.baselines_recycling import TokenRecycling
    from retrodraft.baselines_suffix import SuffixDecoding

    kinds = {
        "goose": Goose, "token_recycling": TokenRecycling, "suffix": SuffixDecoding, "prompt_lookup": PromptLookup
    }  # fmt: skip
    return cast(Strategy, kinds[name](vocab_size))
