"""What tests of exactness share: a plain reference that hangs on no tie, and the comparison with it."""

from __future__ import annotations

from typing import Any

import torch
from tiny import ForwardCount, max_difference, random_prompt

from retrodraft import RetroDraft

TOKENS = 40


def plain(model: Any, prompt: torch.Tensor, **options: Any) -> Any:
    """Plain `generate` with logits."""
    options = {"max_new_tokens": TOKENS, "do_sample": False, **options}
    return model.generate(prompt, return_dict_in_generate=True, output_logits=True, **options)


def margin(logits: Any) -> float:
    """Smallest gap between the best two entries over all steps."""
    best = [step.topk(2, dim=-1).values for step in logits]
    return min(float((pair[:, 0] - pair[:, 1]).min()) for pair in best)


def clear_prompt(model: Any, length: int, seed: int = 0, make: Any = random_prompt, **options: Any) -> torch.Tensor:
    """A prompt whose plain output hangs on no tie: shapes of matrix products may decide those even in float32."""
    for attempt in range(50):
        prompt = make(length, seed + 100 * attempt)
        if margin(plain(model, prompt, **options).logits) > 1e-3:
            return prompt
    raise AssertionError("every prompt led to a tie")


def text_of(reference: Any, prompt: torch.Tensor) -> list[int]:
    """Generated ids of the first row."""
    return reference.sequences[0, prompt.shape[1] :].tolist()


def check_equal(rd: RetroDraft, prompt: torch.Tensor, reference: Any, tolerance: float = 2e-4, **options: Any) -> Any:
    """Run the same call drafted: ids equal, logits close, fewer forwards than tokens."""
    options = {"max_new_tokens": TOKENS, "do_sample": False, **options}
    with ForwardCount(rd.model) as forwards:
        out = rd.generate(prompt, return_dict_in_generate=True, output_logits=True, **options)
    assert out.sequences.tolist() == reference.sequences.tolist()
    assert max_difference(out.logits, reference.logits) < tolerance
    assert forwards.count < out.sequences.shape[1] - prompt.shape[1]
    return out
