"""Rows of the hot start: right, kept, resumed, never a cause of failure, and no change of output."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import ForwardCount, random_prompt, tiny_llama

from retrodraft import RetroDraft
from retrodraft.hot_start import SIBLINGS, hot_rows
from retrodraft.kernels.adjacency import WIDTH
from retrodraft.target import top_logits


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("RETRODRAFT_CACHE", str(tmp_path))
    return tmp_path


def test_rows_are_what_the_model_says(folder: Path) -> None:
    """Each token's row is the top of a plain forward that ends with it."""
    model = tiny_llama(0)
    ids, probs = hot_rows(model)
    begin = model.config.bos_token_id or 0
    assert ids.shape == probs.shape == (model.config.vocab_size, WIDTH)
    for token in range(0, model.config.vocab_size, 7):
        said = model(torch.tensor([[begin, begin, token]])).logits[0, -1].softmax(-1)
        assert np.allclose(probs[token], said.topk(WIDTH).values.detach().numpy(), rtol=0.01)
        assert np.allclose(said[torch.from_numpy(ids[token]).long()].detach().numpy(), probs[token], rtol=0.01)


def test_rows_are_kept_and_completed(folder: Path) -> None:
    """A short first measurement is continued by a long one; another model's weights have their own rows."""
    model = tiny_llama(0, vocab_size=3 * SIBLINGS)
    first, _ = hot_rows(model, seconds=0.0)
    assert len(first) == SIBLINGS
    with ForwardCount(model) as count:
        assert len(hot_rows(model)[0]) == SIBLINGS
    assert count.count == 0
    whole, _ = hot_rows(model, seconds=math.inf)
    assert len(whole) == 3 * SIBLINGS and np.array_equal(whole[:SIBLINGS], first)
    other, _ = hot_rows(tiny_llama(1, vocab_size=3 * SIBLINGS), seconds=math.inf)
    assert not np.array_equal(other, whole)


@pytest.mark.parametrize("damage", [b"", b"not an archive", b"PK\x03\x04 cut"])
def test_damaged_rows_are_measured_anew(folder: Path, damage: bytes) -> None:
    model = tiny_llama(0)
    expected, _ = hot_rows(model)
    (path,) = folder.glob("rows-*.npz")
    path.write_bytes(damage)
    assert np.array_equal(hot_rows(model)[0], expected)
    np.savez(path, ids=np.full((4, WIDTH), 10**6, np.int32), probs=np.ones((4, WIDTH), np.float32))
    assert np.array_equal(hot_rows(model)[0], expected)


def test_output_is_the_same_with_and_without(folder: Path) -> None:
    model = tiny_llama(0)
    prompt = random_prompt(12)
    expected = model.generate(prompt, max_new_tokens=40, do_sample=False)
    hot, cold = RetroDraft(model, budget=8), RetroDraft(model, budget=8, hot_start=False)
    for rd in (hot, cold):
        assert torch.equal(rd.generate(prompt, max_new_tokens=40, do_sample=False), expected)
    assert hot.stats.num_drafts > cold.stats.num_drafts  # no token is without a row
    hot.reset()
    assert hot.strategy.adjacency.row(5)


@pytest.mark.parametrize("vocab_size", [5, 64, 1000, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_logits_against_torch(vocab_size: int, dtype: torch.dtype) -> None:
    """Ids and probabilities of the compiled pass are those of a sort and a softmax; ties go to the lower id."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(7, vocab_size, generator=generator) * 4).to(dtype)
    logits[0] = 0.0
    logits[1, 1:] = -torch.inf
    logits[2] += 3e4
    top = top_logits(logits, WIDTH)
    wide = logits.double()
    order = torch.sort(wide, dim=-1, descending=True, stable=True).indices[:, :WIDTH]
    assert top.token_ids.tolist() == order.tolist()
    expected = wide.softmax(-1).gather(-1, order).numpy()
    assert np.allclose(top.probs, expected, rtol=0.02, atol=1e-4)
