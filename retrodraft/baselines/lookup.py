"""Prompt lookup decoding (Saxena 2023): copy what followed the context's last few tokens the first time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from retrodraft.kernels.baselines import first_window
from retrodraft.strategy import TopLogits
from retrodraft.tree import DraftTree, Int32


class Text:
    """A growing int32 array; appending is amortised O(1)."""

    def __init__(self, token_ids: Int32 | None = None) -> None:
        self._buffer = np.empty(64, np.int32)
        self.length = 0
        if token_ids is not None:
            self.extend(token_ids)

    def extend(self, token_ids: Int32) -> None:
        """Append tokens."""
        length = self.length + len(token_ids)
        if length > len(self._buffer):
            grown = np.empty(2 * length, np.int32)
            grown[: self.length] = self._buffer[: self.length]
            self._buffer = grown
        self._buffer[self.length : length] = token_ids
        self.length = length

    @property
    def buffer(self) -> Int32:
        """The array; only its first `length` entries are text."""
        return self._buffer

    @property
    def root(self) -> int:
        """The newest token, -1 where there is none."""
        return int(self._buffer[self.length - 1]) if self.length else -1


class PromptLookup:
    """For n = 3, 2, 1: the first earlier window equal to the last n tokens, and a chain of the 10 tokens after it.

    The original code and Spec-Bench begin at n = 3. Hugging Face's `PromptLookupCandidateGenerator` is the same search
    (first window from the left that has a token after it, never the query itself) and begins at n = 2 unless told
    otherwise (`max_matching_ngram_size`); its draft length is the user's `prompt_lookup_num_tokens`, 10 by default.
    Hugging Face also cuts the chain at an end-of-sequence token and at tokens that the logits processors forbid; here
    the accept walk stops there.
    """

    proposers = {1: "prompt_lookup"}
    top_k = 0

    def __init__(self, vocab_size: int, max_ngram: int = 3, max_tokens: int = 10) -> None:
        self.vocab_size, self.max_ngram, self.max_tokens = (vocab_size, max_ngram, max_tokens)

    def row(self) -> PromptLookupRow:
        """State for a new sequence."""
        return PromptLookupRow(self)

    def reset(self) -> None:
        """Nothing is kept between sequences."""


class PromptLookupRow:
    """The text of one sequence."""

    def __init__(self, shared: PromptLookup) -> None:
        self._shared = shared
        self._text = Text()

    def begin(self, token_ids: Int32, top: TopLogits | None) -> None:
        """Take the prompt; see `StrategyRow.begin`."""
        self._text = Text(token_ids)

    def draft(self, prices: npt.NDArray[np.float64], max_depth: int, chain: bool) -> DraftTree:
        """The chain after the first window, or no draft where no window matches; see `StrategyRow.draft`."""
        text, shared = self._text, self._shared
        limit = min(shared.max_tokens, len(prices) - 1, max_depth)
        start = first_window(text.buffer, text.length, shared.max_ngram) if limit > 0 else -1
        if start < 0:
            return DraftTree.root_only(text.root)
        found = text.buffer[start : min(start + limit, text.length)]
        foreign = np.flatnonzero((found < 0) | (found >= shared.vocab_size))  # placeholders of images and the like
        return chain_of(text.root, found[: foreign[0]] if len(foreign) else found)

    def commit(self, tree: DraftTree, path: list[int], token_ids: Int32, top: TopLogits | None) -> None:
        """Append what was emitted."""
        self._text.extend(token_ids)


def chain_of(root: int, token_ids: Int32) -> DraftTree:
    """`root` with a chain below it."""
    size = len(token_ids) + 1
    tokens = np.empty(size, np.int32)
    tokens[0], tokens[1:] = root, token_ids
    depths = np.arange(size, dtype=np.int32)
    sources = np.ones(size, np.uint8)
    sources[0] = 0
    return DraftTree(tokens, depths - np.int32(1), depths, np.ones(size, np.float32), sources)
