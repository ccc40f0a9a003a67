"""A model that is changed after it was wrapped, and calls that meet at the same time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import letters
from tiny import copy_prompt, tiny_llama

from retrodraft import RetroDraft
from retrodraft.index import CorpusIndex

OPTIONS: dict[str, Any] = dict(max_new_tokens=30, do_sample=False)


@pytest.mark.parametrize("before,after", [("sdpa", "eager"), ("eager", "sdpa")])
def test_attention_switched_after_wrapping(before: str, after: str) -> None:
    model, prompt = tiny_llama(0), copy_prompt(30)
    model.set_attn_implementation(before)
    rd = RetroDraft(model, budget=16)
    rd.generate(prompt, **OPTIONS)
    model.set_attn_implementation(after)
    assert torch.equal(rd.generate(prompt, **OPTIONS), model.generate(prompt, **OPTIONS))
    assert rd.stats.num_target_forwards < 30


def test_dtype_changed_after_wrapping() -> None:
    model, prompt = tiny_llama(0), copy_prompt(30)
    rd = RetroDraft(model, budget=16)
    rd.generate(prompt, **OPTIONS)
    model.double()
    assert torch.equal(rd.generate(prompt, **OPTIONS), model.generate(prompt, **OPTIONS))


def test_a_sessions_keys_are_those_of_the_weights() -> None:
    """Other weights: all is fed again, also in a session that would copy another one's keys and values."""
    model, prompt = tiny_llama(0), copy_prompt(100)
    rd = RetroDraft(model, letters(), budget=16)
    session = rd.session("a")
    session.generate(input_ids=prompt, **OPTIONS)
    session.generate(input_ids=prompt, **OPTIONS)
    assert session.cached_tokens == prompt.shape[1] - 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    expected = model.generate(prompt, **OPTIONS)
    for each in (rd.session("b"), session):
        assert torch.equal(each.generate(input_ids=prompt, **OPTIONS), expected)
    assert session.cached_tokens == 0 or session.cached_tokens == prompt.shape[1] - 1  # a copy of b's, made since
    model.double()
    assert torch.equal(session.generate(input_ids=prompt, **OPTIONS), model.generate(prompt, **OPTIONS))
    assert session.cached_tokens == 0


def test_training_mode_is_left_to_plain_generate() -> None:
    model, prompt = tiny_llama(0), copy_prompt(20)
    rd = RetroDraft(model, budget=8)
    rd.generate(prompt, **OPTIONS)
    model.train()
    with pytest.warns(UserWarning, match="training mode"):
        rd.generate(prompt, **OPTIONS)
    assert rd.stats.num_new_tokens == 0  # of this call, in which nothing was drafted


def test_padded_batch_with_a_repetition_penalty() -> None:
    """Its processor holds the padding of every row."""
    model = tiny_llama(0)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), copy_prompt(15)], 1)
    ids = torch.cat([padded, copy_prompt(20, 1)])
    mask = (torch.arange(20) >= torch.tensor([[5], [0]])).long()
    options: dict[str, Any] = dict(attention_mask=mask, repetition_penalty=1.3, pad_token_id=0, **OPTIONS)
    rd = RetroDraft(model, budget=16)
    assert torch.equal(rd.generate(ids, **options), model.generate(ids, **options))
    assert rd.stats.num_row_forwards > 0


def test_enabled_is_left_in_any_order() -> None:
    model = tiny_llama(0)
    rd = RetroDraft(model, budget=8)
    first, second = rd.enabled(), rd.enabled()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert "generate" in model.__dict__
    second.__exit__(None, None, None)
    assert "generate" not in model.__dict__


def test_two_wrappers_enabled_on_one_model() -> None:
    """The one that began last drafts, until it ends; the model's own override comes back at the end."""
    model = tiny_llama(0)
    wrappers = [RetroDraft(model, budget=8, strategy=name) for name in ("retro", "suffix")]
    for own in (None, lambda *args, **kwargs: "own"):
        if own is not None:
            model.generate = own
        blocks = [rd.enabled() for rd in wrappers]
        for block, rd in zip(blocks, wrappers, strict=True):
            block.__enter__()
            assert model.generate == rd.generate
        blocks[0].__exit__(None, None, None)
        assert model.generate == wrappers[1].generate
        blocks[1].__exit__(None, None, None)
        assert vars(model).get("generate") is own


def test_fewer_tokens_than_when_it_was_wrapped() -> None:
    model = tiny_llama(0)
    rd = RetroDraft(model, budget=8)
    model.resize_token_embeddings(50, mean_resizing=False)
    with pytest.raises(ValueError, match="wrap it again"):
        rd.generate(copy_prompt(24) % 50, **OPTIONS)
    model.resize_token_embeddings(120, mean_resizing=False)
    expected = model.generate(copy_prompt(24), **OPTIONS)
    assert torch.equal(RetroDraft(model, budget=8).generate(copy_prompt(24), **OPTIONS), expected)


def test_harvests_that_end_together(tmp_path: Path) -> None:
    """Into a new folder: no answer is lost."""
    rd = RetroDraft(tiny_llama(0), budget=8)
    barrier = threading.Barrier(2)
    failures: list[BaseException] = []

    def harvest(seed: int) -> None:
        try:
            with rd.harvest(tmp_path / "answers"):
                rd.generate(copy_prompt(20, seed), **OPTIONS)
                barrier.wait(60)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=harvest, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert CorpusIndex.open(tmp_path / "answers").num_documents == 2, failures
