"""Prompt lookup and Token Recycling, as their papers and codes have them, in this package's engine."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from retrodraft.strategy import TopLogits
from retrodraft.tree import DraftTree, Int32


class NgramStarts:
    """First earlier occurrence of the text's last n tokens, for some sizes n, longest first; O(1) a token."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.tokens: list[int] = []
        self._first: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token that followed it first

    def extend(self, token_ids: list[int]) -> None:
        """Append tokens; an n-gram counts once a token follows it, so the text's end never finds itself."""
        for token in token_ids:
            for size in self.sizes:
                if len(self.tokens) >= size:
                    self._first.setdefault(tuple(self.tokens[-size:]), len(self.tokens))
            self.tokens.append(token)

    def following(self) -> int:
        """Index of what followed the longest of the n-grams first, or -1."""
        for size in self.sizes:
            start = self._first.get(tuple(self.tokens[-size:]), -1) if len(self.tokens) >= size else -1
            if start >= 0:
                return start
        return -1


class PromptLookup:
    """Prompt lookup decoding: a chain of the tokens that followed the last 3 (2, 1) tokens the first time.

    The original's sizes; Hugging Face's `prompt_lookup_num_tokens` begins at 2 unless told otherwise.
    """

    proposers = {1: "prompt_lookup"}
    top_k = 0
    sizes = (3, 2, 1)
    num_tokens = 10

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def row(self) -> PromptLookupRow:
        """State for a new sequence."""
        return PromptLookupRow()

    def reset(self) -> None:
        """Nothing is kept between sequences."""


class PromptLookupRow:
    """The text of one sequence and its n-grams."""

    def __init__(self) -> None:
        self._text = NgramStarts(PromptLookup.sizes)

    def begin(self, token_ids: Int32, top: TopLogits | None) -> None:
        """Take the prompt."""
        self._text.extend(token_ids.tolist())

    def draft(self, prices: npt.NDArray[np.float64], max_depth: int, chain: bool) -> DraftTree:
        """The chain, no longer than 10 tokens."""
        tokens = self._text.tokens
        start = self._text.following()
        if start < 0:
            return DraftTree.root_only(tokens[-1])
        length = min(PromptLookup.num_tokens, len(prices) - 1, max_depth)
        found = tokens[start : start + length]
        return DraftTree.from_nodes(tokens[-1], found, range(len(found)))

    def commit(self, tree: DraftTree, path: list[int], token_ids: Int32, top: TopLogits | None) -> None:
        """Append what was emitted."""
        self._text.extend(token_ids.tolist())


# Ranks below each path of ranks in Token Recycling's static tree: path -> number of children.
_TEMPLATE: dict[tuple[int, ...], int] = {
    (): 8,
    (0,): 8, (1,): 4, (2,): 3, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1,
    (0, 0): 8, (0, 1): 3, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1, (0, 6): 1, (0, 7): 1,
    (1, 0): 2, (1, 1): 1, (2, 0): 1, (3, 0): 1, (4, 0): 1, (5, 0): 1,
    (0, 0, 0): 5, (0, 0, 1): 2, (0, 0, 2): 1, (0, 0, 3): 1, (0, 0, 4): 1,
    (0, 1, 0): 1, (0, 2, 0): 1, (1, 0, 0): 1, (2, 0, 0): 1, (3, 0, 0): 1,
    (0, 0, 0, 0): 3, (0, 0, 0, 1): 1, (0, 0, 0, 2): 1, (0, 0, 1, 0): 1, (0, 1, 0, 0): 1, (1, 0, 0, 0): 1,
    (0, 0, 0, 0, 0): 2, (0, 0, 0, 1, 0): 1,
}  # fmt: skip


def recycling_template(num_nodes: int) -> list[tuple[int, ...]]:
    """Paths of ranks of the static tree, cut to `num_nodes` best-first.

    The paper has one size, 80. A smaller tree keeps the paths whose ranks, discounted with depth, promise most: each
    step of rank r counts 1 / (r + 2).
    """
    heap: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    paths: list[tuple[int, ...]] = []
    while heap and len(paths) <= num_nodes:
        promise, path = heapq.heappop(heap)
        paths.append(path)
        for rank in range(_TEMPLATE.get(path, 0)):
            heapq.heappush(heap, (promise / (rank + 2), (*path, rank)))
    return sorted(paths[1 : num_nodes + 1], key=lambda path: (len(path), path))


class TokenRecycling:
    """Token Recycling (2408.08696): a matrix of each token's last top-8, read along one static tree.

    As in the authors' code, logits of all verified nodes overwrite the rows and the prompt's are not harvested. Where a
    token was verified at several nodes the last node counts; their GPU scatter leaves that to chance.
    """

    proposers = {1: "token_recycling"}
    top_k = 8

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.reset()

    def reset(self) -> None:
        """Empty the matrix."""
        self.matrix = np.full((self.vocab_size, self.top_k), -1, np.int32)
        self._templates: dict[int, list[tuple[int, ...]]] = {}

    def row(self) -> TokenRecyclingRow:
        """State for a new sequence."""
        return TokenRecyclingRow(self)

    def template(self, num_nodes: int) -> list[tuple[int, ...]]:
        """The static tree of a size."""
        if num_nodes not in self._templates:
            self._templates[num_nodes] = recycling_template(num_nodes)
        return self._templates[num_nodes]


class TokenRecyclingRow:
    """The newest token of one sequence."""

    def __init__(self, shared: TokenRecycling) -> None:
        self._shared = shared
        self._root = -1

    def begin(self, token_ids: Int32, top: TopLogits | None) -> None:
        """Take the prompt."""
        self._root = int(token_ids[-1]) if len(token_ids) else -1

    def draft(self, prices: npt.NDArray[np.float64], max_depth: int, chain: bool) -> DraftTree:
        """Fill the static tree from the matrix; a cold row has no children."""
        matrix = self._shared.matrix
        nodes: dict[tuple[int, ...], int] = {(): 0}
        tokens, parents = [self._root], [-1]
        for path in self._shared.template(len(prices) - 1):
            parent = nodes.get(path[:-1])
            if parent is None or len(path) > max_depth or (chain and any(path)):
                continue
            token = int(matrix[tokens[parent], path[-1]]) if tokens[parent] >= 0 else -1
            if token < 0:
                continue
            nodes[path] = len(tokens)
            tokens.append(token)
            parents.append(parent)
        return DraftTree.from_nodes(self._root, tokens[1:], parents[1:])

    def commit(self, tree: DraftTree, path: list[int], token_ids: Int32, top: TopLogits | None) -> None:
        """Overwrite the rows of all verified tokens."""
        if top is not None:
            for token, ids in zip(tree.token_ids.tolist(), top.token_ids, strict=False):
                if token >= 0:
                    self._shared.matrix[token, : len(ids)] = ids
        self._root = int(token_ids[-1])
