"""The draft tree: what a strategy proposes and the target verifies in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from retrodraft.kernels.tree import ancestor_mask, spine_first

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class DraftTree:
    """Flat arrays over the nodes; node 0 is the root, the last committed token, whose KV is not in the cache yet.

    Invariants: `parents[i] < i`, the children of a node carry different tokens, and nodes are numbered depth-first with
    the likeliest child first, so that the spine is rows 0, 1, 2 ….
    """

    token_ids: Int32  # [num_nodes]
    parents: Int32  # [num_nodes], -1 for the root
    depths: Int32  # [num_nodes], 0 for the root
    probs: npt.NDArray[np.float32]  # [num_nodes] path probabilities, as the strategy believes
    sources: npt.NDArray[np.uint8]  # [num_nodes] bits naming the proposers, see `Strategy.proposers`

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def root_only(cls, root: int) -> DraftTree:
        """A tree without drafts: the forward is one of plain decoding."""
        return cls(
            np.array([root], np.int32),
            np.array([-1], np.int32),
            np.zeros(1, np.int32),
            np.ones(1, np.float32),
            np.zeros(1, np.uint8),
        )

    @classmethod
    def chain(cls, token_ids: Sequence[int]) -> DraftTree:
        """A root, `token_ids[0]`, and the others one below the other."""
        return cls.from_nodes(token_ids[0], token_ids[1:], range(len(token_ids) - 1))

    @classmethod
    def from_nodes(
        cls, root: int, token_ids: Sequence[int], parents: Sequence[int], source: int = 1, probs: Sequence[float] = ()
    ) -> DraftTree:
        """A tree of `root` and nodes 1, 2 … with those tokens and parents (0 = the root), renumbered spine first.

        Among siblings the one listed first counts as the likeliest. The caller sees to it that they differ.
        """
        count = len(token_ids) + 1
        tree = cls(
            np.array([root, *token_ids], np.int32),
            np.array([-1, *parents], np.int32),
            np.zeros(count, np.int32),
            np.array([1.0, *(probs or [1.0] * (count - 1))], np.float32),
            np.full(count, source, np.uint8),
        )
        for node in range(1, count):
            tree.depths[node] = tree.depths[tree.parents[node]] + 1
        spine_first(tree.token_ids, tree.parents, tree.depths, tree.probs, tree.sources, count)
        return tree

    def ancestor_mask(self) -> npt.NDArray[np.bool_]:
        """Bool [num_nodes, num_nodes]: whether the column's node is the row's node or an ancestor of it."""
        mask = np.empty((len(self), len(self)), np.bool_)
        ancestor_mask(self.parents, len(self), mask)
        return mask

    def child(self, node: int, token_id: int) -> int:
        """The child of `node` that carries `token_id`, or -1."""
        for index in range(node + 1, len(self)):
            if self.parents[index] == node and self.token_ids[index] == token_id:
                return index
        return -1
