"""SuffixDecoding (2411.04975) in tree mode: the statistics of one suffix, local or global, whichever scores best."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from retrodraft.index.suffix_automaton import SuffixAutomaton
from retrodraft.kernels.suffix_automaton import LENGTH, LINK, step
from retrodraft.kernels.suffix_decoding import speculate
from retrodraft.strategy import TopLogits
from retrodraft.tree import DraftTree, Int32

MAX_DEPTH = 64  # of the authors' suffix trees: matched tokens and drafted ones together
MIN_PROB = 0.1
SEPARATOR = -2  # ends a response; no draft crosses it


class SuffixDecoding:
    """A tree over the request's text, and a global one over the responses of earlier requests (never their prompts).

    For each match length m the draft has min(budget, m) nodes, best-first by cumulative count ratio, while that is at
    least 0.1; its score is the sum of the ratios. The best score over m and over both trees is drafted, ties going to
    the longer match. Counts come from suffix automata, whose states are exactly the match lengths that agree.
    """

    proposers = {1: "suffix_local", 2: "suffix_global"}
    top_k = 0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.reset()

    def reset(self) -> None:
        """Forget the earlier responses."""
        self.responses = SuffixAutomaton()
        self._rows: list[SuffixDecodingRow] = []

    def row(self) -> SuffixDecodingRow:
        """State for a new sequence; the responses of earlier sequences join the global tree now."""
        for earlier in self._rows:
            if earlier.response:
                self.responses.extend([*earlier.response, SEPARATOR])
                earlier.response.clear()
        self._rows = [row for row in self._rows if not row.begun]
        row = SuffixDecodingRow(self)
        self._rows.append(row)
        return row


class SuffixDecodingRow:
    """One request: its text, its response, and its place in the global tree."""

    def __init__(self, shared: SuffixDecoding) -> None:
        self._shared = shared
        self._text = SuffixAutomaton()
        self._root = -1
        self._state = self._length = 0  # match of the text's end in the global tree
        self.response: list[int] = []
        self.begun = False

    def begin(self, token_ids: Int32, top: TopLogits | None) -> None:
        """Take the prompt."""
        self._append(token_ids)
        self.begun = True

    def draft(self, prices: npt.NDArray[np.float64], max_depth: int, chain: bool) -> DraftTree:
        """The best-scoring draft of both trees."""
        size = len(prices)
        tokens, parents = np.empty(size, np.int32), np.empty(size, np.int32)
        best = DraftTree.root_only(self._root)
        best_score = 0.0
        local = self._text.match()
        for source, automaton, (state, length) in (
            (1, self._text, local), (2, self._shared.responses, (self._state, self._length))
        ):  # fmt: skip
            while state > 0 and length > 0:
                matched = min(length, MAX_DEPTH - 1)
                count, score = speculate(
                    automaton.states, automaton.edges, state, min(size - 1, matched),
                    min(max_depth, MAX_DEPTH - matched), MIN_PROB, chain, tokens, parents,
                )  # fmt: skip
                if score > best_score:
                    best_score = score
                    best = DraftTree.from_nodes(
                        self._root, tokens[1:count].tolist(), parents[1:count].tolist(), source
                    )
                state = int(automaton.states[state, LINK])
                length = int(automaton.states[state, LENGTH])
        return best

    def commit(self, tree: DraftTree, path: list[int], token_ids: Int32, top: TopLogits | None) -> None:
        """Append what was emitted."""
        self._append(token_ids)
        self.response.extend(token_ids.tolist())

    def _append(self, token_ids: Int32) -> None:
        self._text.extend(token_ids)
        responses = self._shared.responses
        for token in token_ids:
            self._state, self._length = step(
                responses.states, responses.edges, responses.table, self._state, self._length, token
            )
        if len(token_ids):
            self._root = int(token_ids[-1])
