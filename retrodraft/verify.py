"""The accept walk: which of a tree's tokens the target would have produced itself.

Terms. The *root* is the last committed token. At each *visited* node one decision is taken from the target's processed
distribution: the most probable token, or one draw. Where a child carries that token the walk descends and the child is
*accepted*; else the walk ends, and the token is the *bonus* token, the root of the next tree.

Retrieved drafts are one-hot proposals chosen before the draw, so one draw a node is exact, and optimal for the tree:
the emitted tokens follow the target's distribution whatever the tree holds, and with one row they use up the random
stream as plain sampling does. Processors and criteria see every emitted token once, in order, with its own prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from retrodraft.tree import DraftTree, Int32


@dataclass(slots=True)
class Acceptance:
    """Outcome of a walk; `path` and `token_ids` have one length."""

    path: list[int] = field(default_factory=list)  # visited nodes, root first
    token_ids: list[int] = field(default_factory=list)  # token emitted at each of them; the last is the bonus token
    finished: bool = False  # whether a stopping criterion held after the last token


class Chooser:
    """`generate`'s per-token decisions for one row: processors, argmax or draw, stopping criteria."""

    def __init__(
        self,
        input_ids: torch.Tensor,  # int64 [1, prompt_length], left padding included as HF's processors expect
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        max_length: int,
        do_sample: bool,
        keep_scores: bool,
        on_token: Callable[[int], None],
    ) -> None:
        self._processor, self._criteria = logits_processor, stopping_criteria
        self._do_sample, self._on_token = do_sample, on_token
        self._ids = input_ids.new_empty((1, max(max_length, input_ids.shape[1]) + 1))
        self.length = input_ids.shape[1]
        self.prompt_length = self.length
        self._ids[:, : self.length] = input_ids
        self.scores: list[torch.Tensor] | None = [] if keep_scores else None
        self._eos: set[int] = set()
        self._max_length: int | None = None
        for criterion in stopping_criteria:
            if isinstance(criterion, EosTokenCriteria):
                self._eos.update(criterion.eos_token_id.flatten().tolist())
            elif isinstance(criterion, MaxLengthCriteria):
                lengths = (criterion.max_length, self._max_length)
                self._max_length = min(length for length in lengths if length is not None)
        self._plain_criteria = all(type(c) in (EosTokenCriteria, MaxLengthCriteria) for c in stopping_criteria)
        self.plain = not do_sample and not len(logits_processor) and not keep_scores

    @property
    def ids(self) -> torch.Tensor:
        """int64 [1, length]: the prompt and everything emitted."""
        return self._ids[:, : self.length]

    def walk(self, tree: DraftTree, logits: torch.Tensor, best: Int32 | None = None) -> Acceptance:
        """Walk `tree` with the target's raw `logits` [num_nodes, vocab_size]; see the module's text.

        `best`, where it is known, is the first token of the largest logit at each node.
        """
        if not self.plain:
            best = None
        elif best is None:
            best = logits[: len(tree)].float().argmax(-1).cpu().numpy()
        outcome = Acceptance()
        node = 0
        while node >= 0:
            token = int(best[node]) if best is not None else self._choose(logits[node : node + 1])
            outcome.path.append(node)
            outcome.token_ids.append(token)
            self._append(token)
            outcome.finished = self._stops(token)
            self._on_token(token)
            if outcome.finished:
                break
            node = tree.child(node, token)
        return outcome

    def _choose(self, logits: torch.Tensor) -> int:
        scores = self._processor(self.ids, logits.to(copy=True, dtype=torch.float32, device=self._ids.device))
        if self.scores is not None:
            self.scores.append(scores)
        if self._do_sample:
            return int(torch.multinomial(scores.softmax(-1), num_samples=1))
        return int(scores.argmax(-1))

    def _append(self, token: int) -> None:
        if self.length == self._ids.shape[1]:
            self._ids = torch.cat([self._ids, torch.empty_like(self._ids)], dim=1)
        self._ids[0, self.length] = token
        self.length += 1

    def _stops(self, token: int) -> bool:
        if self._plain_criteria:
            return token in self._eos or (self._max_length is not None and self.length >= self._max_length)
        scores: Any = tuple(self.scores) if self.scores is not None else None
        return bool(self._criteria(self.ids, scores).all())
