"""Models whose forward was compiled whole: the hooks that read their forwards must not break the graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import random_prompt, tiny_llama

from retrodraft import RetroDraft
from retrodraft.target import PromptHarvest

GREEDY: Any = dict(max_new_tokens=24, do_sample=False)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing of what others compiled, and nothing left for them."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("way", ["module", pytest.param("forward", marks=pytest.mark.slow)])
def test_a_forward_compiled_as_one_graph(way: str) -> None:
    """The output is plain generate's, drafts are accepted, and nothing was broken off the graph."""
    model = tiny_llama()
    prompt = random_prompt(12, seed=3).repeat(1, 3)
    inputs = dict(input_ids=prompt, attention_mask=torch.ones_like(prompt))
    reference = model.generate(**inputs, **GREEDY)
    model.forward = torch.compile(model.forward, backend="eager")
    assert RetroDraft(model).capabilities.mode == "tree"  # which is no verdict for one that must not be broken in two
    del model.forward
    torch._dynamo.reset()
    if way == "forward":
        model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    else:
        model.compile(fullgraph=True, backend="eager")
    # The probe's forwards and a call's have some ten forms together; torch gives a compiled function eight.
    with torch._dynamo.config.patch(recompile_limit=32):
        rd = RetroDraft(model, budget=8)
        for _ in range(2):
            assert torch.equal(rd.generate(**inputs, **GREEDY), reference)
    assert rd.stats.num_target_forwards < rd.stats.num_new_tokens  # the second call has seen the first one's text


def test_a_decoder_compiled_alone_is_harvested() -> None:
    """The hook runs outside of what was compiled; what it reads is what the model without compilation says."""
    model = tiny_llama()
    prompt = random_prompt(20, seed=4)
    found = []
    for compiled in (False, True):
        if compiled:
            model.model.forward = torch.compile(model.model.forward, fullgraph=True, backend="eager")
        harvest = PromptHarvest(model)
        with torch.inference_mode():
            with harvest.listening():
                model(input_ids=prompt, use_cache=False)
            found.append(harvest.read(0, 20, 4))
    plain, ours = found
    assert plain is not None and ours is not None and plain.token_ids.shape == (20, 4)
    assert (plain.token_ids[:, 0] == ours.token_ids[:, 0]).all()
