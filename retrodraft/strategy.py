"""What a drafting strategy is to the decoder. A strategy knows text and logits, and nothing of models or caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from retrodraft.tree import DraftTree, Int32

STRATEGIES = ("retro", "goose", "token_recycling", "suffix", "prompt_lookup")


@dataclass(slots=True)
class TopLogits:
    """The target's most probable next tokens at some positions, most probable first, as it said them (unprocessed)."""

    token_ids: Int32  # [num_positions, k]; a first id of -1 marks a position that was not looked at
    probs: npt.NDArray[np.float32]  # [num_positions, k] softmax over the whole vocabulary

    def __len__(self) -> int:
        return len(self.token_ids)


class StrategyRow(Protocol):
    """A strategy's state of one sequence."""

    def begin(self, token_ids: Int32, top: TopLogits | None) -> None:
        """Take the prompt. `top[i]`, where given, is what the target said after the prompt's token i.

        `top` may be shorter than the prompt: it then belongs to the prompt's last `len(top)` tokens.
        """

    def draft(self, prices: npt.NDArray[np.float64], max_depth: int, chain: bool) -> DraftTree:
        """Propose a tree below the newest token: at most `len(prices) - 1` nodes and `max_depth` deep.

        `prices[n]` is what a forward over n nodes costs more than one over none, in expected tokens; all zeros ask for
        as many nodes as there are good candidates. `chain` asks for at most one child a node.
        """

    def commit(self, tree: DraftTree, path: list[int], token_ids: Int32, top: TopLogits | None) -> None:
        """Learn from a verified tree.

        `path` are the visited nodes, root first; `token_ids[i]` is what the target emitted at `path[i]`, so the two
        have one length and the last emitted token is the new root. `top[n]` is what the target said at node n.
        """


class Strategy(Protocol):
    """A strategy's state across sequences."""

    proposers: dict[int, str]  # source bit of a tree node -> the proposer's name in the statistics
    top_k: int  # how many logits of each verified node `commit` wants; 0 = none

    def row(self) -> StrategyRow:
        """State for a new sequence."""

    def reset(self) -> None:
        """Forget what was learned."""
