"""SuffixDecoding (Oliaro et al., NeurIPS 2025, 2411.04975) in tree mode: what followed a suffix, by its counts."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from retrodraft.baselines.lookup import Text
from retrodraft.index.suffix_automaton import SuffixAutomaton
from retrodraft.kernels.baselines import best_suffix_draft, longest_match
from retrodraft.kernels.tree import spine_first
from retrodraft.strategy import TopLogits
from retrodraft.tree import DraftTree, Int32

MAX_DEPTH = 64  # of the authors' trees: a match and its draft lie within so many tokens
MIN_PROB = 0.1  # of a drafted path
BORDER = -1  # stands after a response; no draft crosses it
LOCAL, GLOBAL = 1, 2


class SuffixDecoding:
    """A tree over each request's text, and a global one over the responses of earlier requests (never their prompts).

    For each match length m a draft of at most min(budget, alpha * m) nodes is taken best-first by cumulative share of
    counts, down to 0.1; its score is the sum of the shares. The best score over m wins, of equal ones the longer match;
    the global tree has to beat the local one. As in the authors' trees a suffix's count includes the occurrence at the
    text's end, which has nothing after it yet.

    The trees are suffix automata, whose counts are the same (a state is a class of suffixes with equal occurrences) and
    which need no 64 nodes a token. They can't forget one response, so the first-in first-out bound is kept by building
    the global one anew from the newer responses; it counts tokens, not requests.

    When a request ends is not told. A response joins the global tree when the next sequence is announced by `row()`:
    in one batch all rows are made before any is begun. What a still running sequence emits later joins in the same way.
    """

    proposers = {LOCAL: "suffix_local", GLOBAL: "suffix_global"}
    top_k = 0

    def __init__(self, vocab_size: int, alpha: float = 1.0, max_cached_tokens: int = 1 << 18) -> None:
        self.vocab_size, self.alpha, self.max_cached_tokens = (vocab_size, alpha, max_cached_tokens)
        self.reset()

    def reset(self) -> None:
        """Forget the responses, those of the running sequences included."""
        self.responses = SuffixAutomaton()
        self._cached: deque[Int32] = deque()
        self._num_cached = 0
        self._open: list[tuple[weakref.ref[SuffixDecodingRow], list[int]]] = []

    def row(self) -> SuffixDecodingRow:
        """State for a new sequence; what earlier ones emitted joins the global tree."""
        for _, response in self._open:
            if response:
                self._add(np.array([*response, BORDER], np.int32))
                response.clear()
        self._open = [entry for entry in self._open if entry[0]() is not None]
        response = []
        row = SuffixDecodingRow(self, response)
        self._open.append((weakref.ref(row), response))
        return row

    def _add(self, response: Int32) -> None:
        self._cached.append(response)
        self._num_cached += len(response)
        if self._num_cached <= self.max_cached_tokens:
            self.responses.extend(response)
            return
        while self._cached and self._num_cached > self.max_cached_tokens * 3 // 4:  # room, so that this is rare
            self._num_cached -= len(self._cached.popleft())
        self.responses = SuffixAutomaton()
        for kept in self._cached:
            self.responses.extend(kept)


class SuffixDecodingRow:
    """One request's text: prompt and output."""

    def __init__(self, shared: SuffixDecoding, response: list[int]) -> None:
        self._shared = shared
        self._response = response  # shared with the strategy, which empties it
        self._text = Text()
        self._local = SuffixAutomaton()

    def begin(self, token_ids: Int32, top: TopLogits | None) -> None:
        """Take the prompt; see `StrategyRow.begin`."""
        self._text, self._local = Text(token_ids), SuffixAutomaton(token_ids)

    def draft(self, prices: npt.NDArray[np.float64], max_depth: int, chain: bool) -> DraftTree:
        """The best-scoring draft of both trees; see `StrategyRow.draft`."""
        shared, text = self._shared, self._text
        size = len(prices)
        tokens, parents, depths = np.empty((3, size), np.int32)
        tokens[0], parents[0], depths[0] = text.root, -1, 0
        probs = np.ones(size, np.float32)
        count, score, source = 1, 0.0, 0
        for bit, store in ((LOCAL, self._local), (GLOBAL, shared.responses)):
            if bit == LOCAL:
                state, length = store.match()
            else:
                # Found anew each time: following it from step to step breaks when responses join.
                state, length = longest_match(
                    store.states, store.edges, store.table, text.buffer, text.length, MAX_DEPTH - 1
                )
            found, score, match_len = best_suffix_draft(
                store.states, store.edges, state, length, size - 1, max_depth, MAX_DEPTH, shared.alpha, MIN_PROB,
                shared.vocab_size, chain, score, tokens, parents, depths, probs,
            )  # fmt: skip
            if match_len:
                count, source = found, bit
        sources = np.full(count, source, np.uint8)
        sources[0] = 0
        tree = DraftTree(tokens[:count], parents[:count], depths[:count], probs[:count], sources)
        spine_first(tree.token_ids, tree.parents, tree.depths, tree.probs, tree.sources, count)
        return tree

    def commit(self, tree: DraftTree, path: list[int], token_ids: Int32, top: TopLogits | None) -> None:
        """Append what was emitted to the text and to the response."""
        self._text.extend(token_ids)
        self._local.extend(token_ids)
        self._response.extend(token_ids.tolist())
