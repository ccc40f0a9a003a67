"""Token Recycling (Luo et al., ACL 2025, 2408.08696): each token's last top-8, read along one static tree."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from retrodraft.kernels.baselines import fill_template, overwrite_rows
from retrodraft.kernels.tree import spine_first
from retrodraft.strategy import TopLogits
from retrodraft.tree import DraftTree, Int32

WIDTH = 8  # successors kept for each token

# The paper's tree of 80 nodes: for each path of ranks that has children, how many. Ranks of children count from 0.
TEMPLATE: dict[tuple[int, ...], int] = {
    (): 8,
    (0,): 8, (1,): 4, (2,): 3, (3,): 2, (4,): 1, (5,): 1, (6,): 1, (7,): 1,
    (0, 0): 8, (0, 1): 3, (0, 2): 2, (0, 3): 1, (0, 4): 1, (0, 5): 1, (0, 6): 1, (0, 7): 1,
    (1, 0): 2, (1, 1): 1, (2, 0): 1, (3, 0): 1, (4, 0): 1, (5, 0): 1,
    (0, 0, 0): 5, (0, 0, 1): 2, (0, 0, 2): 1, (0, 0, 3): 1, (0, 0, 4): 1,
    (0, 1, 0): 1, (0, 2, 0): 1, (1, 0, 0): 1, (2, 0, 0): 1, (3, 0, 0): 1,
    (0, 0, 0, 0): 3, (0, 0, 0, 1): 1, (0, 0, 0, 2): 1, (0, 0, 1, 0): 1, (0, 1, 0, 0): 1, (1, 0, 0, 0): 1,
    (0, 0, 0, 0, 0): 2, (0, 0, 0, 1, 0): 1,
}  # fmt: skip


def template_paths() -> list[tuple[int, ...]]:
    """Rank paths of the paper's tree, level by level, ranks rising: the order in which the authors number its nodes."""
    paths = [(*parent, rank) for parent, children in TEMPLATE.items() for rank in range(children)]
    return sorted(paths, key=lambda path: (len(path), path))


def path_weight(path: tuple[int, ...]) -> float:
    """What a path of ranks is worth next to others: 0.7 / (rank + 1) for each step, so deeper and rarer counts less."""
    weight = 1.0
    for rank in path:
        weight *= 0.7 / (rank + 1)
    return weight


class Template:
    """The static tree of at most `num_nodes` nodes as arrays over its nodes, node 0 being the root.

    The paper has one size. A smaller budget keeps its paths of the largest `path_weight` (of equal ones the shallower),
    which keeps every path's prefix too, since each step makes the weight smaller. A larger budget is not used.
    """

    def __init__(self, num_nodes: int, chain: bool) -> None:
        paths = [path for path in template_paths() if not chain or not any(path)]
        kept = sorted(paths, key=lambda path: (-path_weight(path), len(path), path))[:num_nodes]
        kept.sort(key=lambda path: (len(path), path))
        index = {(): 0} | {path: i for i, path in enumerate(kept, 1)}
        self.paths = kept
        self.parents = np.array([-1, *(index[path[:-1]] for path in kept)], np.int32)
        self.ranks = np.array([-1, *(path[-1] for path in kept)], np.int32)
        self.weights = np.array([1.0, *map(path_weight, kept)], np.float32)


class TokenRecycling:
    """The matrix, shared by all sequences and kept between them, as in the authors' code.

    After each forward the top-8 at every verified node, accepted or rejected, overwrites the row of the node's token.
    The prompt's logits are not harvested (authors' code). A token at several nodes keeps the last one's in the authors'
    node order, level by level; their scatter on the GPU leaves it to chance. Rows begin cold (-1) and a cold row has no
    children; theirs begin as token 0.
    """

    proposers = {1: "token_recycling"}
    top_k = WIDTH

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._templates: dict[tuple[int, bool], Template] = {}
        self.reset()

    def reset(self) -> None:
        """Empty the matrix."""
        self.matrix = np.full((self.vocab_size, WIDTH), -1, np.int32)

    def row(self) -> TokenRecyclingRow:
        """State for a new sequence."""
        return TokenRecyclingRow(self)

    def template(self, num_nodes: int, chain: bool) -> Template:
        """The static tree of at most `num_nodes` nodes; a chain keeps to rank 0."""
        key = min(num_nodes, len(template_paths())), chain
        if key not in self._templates:
            self._templates[key] = Template(*key)
        return self._templates[key]


class TokenRecyclingRow:
    """The newest token of one sequence: nothing else of the context is looked at."""

    def __init__(self, shared: TokenRecycling) -> None:
        self._shared = shared
        self._root = -1

    def begin(self, token_ids: Int32, top: TopLogits | None) -> None:
        """Take the prompt, not its logits."""
        self._root = int(token_ids[-1]) if len(token_ids) else -1

    def draft(self, prices: npt.NDArray[np.float64], max_depth: int, chain: bool) -> DraftTree:
        """Fill the static tree from the matrix; see `StrategyRow.draft`."""
        template = self._shared.template(len(prices) - 1, chain)
        size = len(template.parents)
        tokens, parents, depths, origins = np.empty((4, size), np.int32)
        count = fill_template(
            self._shared.matrix, self._root, template.parents, template.ranks, max_depth,
            tokens, parents, depths, origins,
        )  # fmt: skip
        sources = np.ones(count, np.uint8)
        sources[0] = 0
        tree = DraftTree(tokens[:count], parents[:count], depths[:count], template.weights[origins[:count]], sources)
        spine_first(tree.token_ids, tree.parents, tree.depths, tree.probs, tree.sources, count)
        return tree

    def commit(self, tree: DraftTree, path: list[int], token_ids: Int32, top: TopLogits | None) -> None:
        """Overwrite the rows of all verified tokens, level by level."""
        if top is not None:
            levels = np.argsort(tree.depths[: len(top)], kind="stable")
            overwrite_rows(self._shared.matrix, levels, tree.token_ids, top.token_ids)
        if len(token_ids):
            self._root = int(token_ids[-1])
