"""How good a corpus would have been at drafting given texts: a replay that needs no model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from retrodraft.index.corpus import CorpusIndex, Document
from retrodraft.kernels import suffix_array as kernel


@dataclass
class Evaluation:
    """Counts over all texts; a position is a token with at least one before it."""

    num_documents: int = 0
    num_positions: int = 0
    num_matched: int = 0  # positions whose context had a match
    num_top_1: int = 0  # positions where the most frequent continuation was right
    num_top_8: int = 0
    sum_match_lengths: int = 0
    num_forwards: int = 0  # of a target that verifies a chain of most frequent continuations each time

    def as_dict(self) -> dict[str, Any]:
        """The counts, with the rates that they give."""
        positions, forwards = max(self.num_positions, 1), max(self.num_forwards, 1)
        return {
            **asdict(self),
            "top_1_rate": self.num_top_1 / positions,
            "top_8_rate": self.num_top_8 / positions,
            "mean_match_length": self.sum_match_lengths / max(self.num_matched, 1),
            "tokens_per_forward": self.num_positions / forwards,
        }


def evaluate(corpus: CorpusIndex, documents: Iterable[Document], num_draft_tokens: int = 16) -> Evaluation:
    """Replay documents as if they were a model's outputs, drafting from `corpus` alone. O(tokens log corpus).

    A draft is a chain of the most frequent continuations; the target accepts what agrees with the document and adds one
    token of its own. Texts that are in the corpus themselves say nothing.
    """
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens must not be negative, got {num_draft_tokens}")
    result = Evaluation()
    for document in documents:
        tokens = np.asarray(document.token_ids, np.int32)
        result.num_documents += 1
        right = 0  # drafted tokens that were accepted in the present forward
        for position in range(1, len(tokens)):
            interval = corpus.match(tokens[max(position - kernel.MAX_MATCH, 0) : position])
            found = [token for token, _ in corpus.continuations(interval, 8)] if interval.length else []
            result.num_positions += 1
            result.num_matched += interval.length > 0
            result.sum_match_lengths += interval.length
            result.num_top_8 += int(tokens[position]) in found
            hit = found[:1] == [int(tokens[position])]
            result.num_top_1 += hit
            right = right + 1 if hit and right < num_draft_tokens else 0
            if right == 0:  # the target's own token ends a forward
                result.num_forwards += 1
        result.num_forwards += right > 0
    return result
