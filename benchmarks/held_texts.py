"""Holding a generation to a text that is known: what benchmarks use that compare drafts on the same words."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor, LogitsProcessorList


class HeldTo(LogitsProcessor):
    """Leaves only the recorded token of each position possible."""

    def __init__(self, text: torch.Tensor) -> None:
        self.text = text

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        held = torch.full_like(scores, -torch.inf)
        held[:, self.text[input_ids.shape[1]]] = 0.0
        return held


def held_to(text: torch.Tensor) -> LogitsProcessorList:
    """Processors under which `generate` can only emit `text`, int64 [length], the prompt included."""
    return LogitsProcessorList([HeldTo(text)])
