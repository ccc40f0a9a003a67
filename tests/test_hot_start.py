"""Rows of the hot start: right, kept, resumed, never a cause of failure, and no change of output."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import letters
from tiny import ForwardCount, random_prompt, tiny_llama

from retrodraft import RetroDraft, hot_start
from retrodraft.hot_start import MAX_PREFIX, SIBLINGS, hot_rows
from retrodraft.kernels.adjacency import WIDTH
from retrodraft.target import _top_on_device, top_logits
from retrodraft.workloads import render_prompt


def test_rows_are_what_the_model_says(cache_folder: Path) -> None:
    """Each token's row is the top of a plain forward that ends with it."""
    model = tiny_llama(0)
    ids, probs = hot_rows(model)
    begin = model.config.bos_token_id or 0
    assert ids.shape == probs.shape == (model.config.vocab_size, WIDTH)
    for token in range(0, model.config.vocab_size, 7):
        said = model(torch.tensor([[begin, begin, token]])).logits[0, -1].softmax(-1)
        assert np.allclose(probs[token], said.topk(WIDTH).values.detach().numpy(), rtol=0.01)
        assert np.allclose(said[torch.from_numpy(ids[token]).long()].detach().numpy(), probs[token], rtol=0.01)


def test_rows_are_kept_and_completed(cache_folder: Path) -> None:
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


def test_rows_follow_the_begin_of_an_answer(cache_folder: Path) -> None:
    """The last tokens of the tokenizer's own template; each template has rows of its own."""
    model, tokenizer = tiny_llama(0), letters()
    seen = []
    for template in ("{{ 'system text ' * 20 }}<assistant>", "{{ 'system text ' * 20 }}<bot>"):
        tokenizer.chat_template = template
        ids, probs = hot_rows(model, tokenizer)
        prompt = render_prompt(tokenizer, [{"role": "user", "content": ""}])[-MAX_PREFIX:]
        assert len(prompt) == MAX_PREFIX and tokenizer.decode(prompt).endswith(template[-5:])
        for token in (3, 40, 90):
            said = model(torch.tensor([[*prompt, token]])).logits[0, -1].softmax(-1)
            assert np.allclose(probs[token], said.topk(WIDTH).values.detach().numpy(), rtol=0.01)
        seen.append(probs)
    assert not np.allclose(*seen) and len(list(cache_folder.glob("rows-*.npz"))) == 2


def test_measuring_leaves_the_model_as_it_was(cache_folder: Path) -> None:
    """Training mode comes back; progress is told in tokens of the whole vocabulary."""
    model = tiny_llama(0, vocab_size=2 * SIBLINGS + 10)
    model.train()
    told: list[tuple[int, int]] = []
    hot_rows(model, seconds=math.inf, progress=lambda done, total: told.append((done, total)))
    assert model.training
    size = 2 * SIBLINGS + 10
    assert told == [(SIBLINGS, size), (2 * SIBLINGS, size), (size, size)]


@pytest.mark.parametrize("damage", [b"", b"not an archive", b"PK\x03\x04 cut"])
def test_damaged_rows_are_measured_anew(cache_folder: Path, damage: bytes) -> None:
    model = tiny_llama(0)
    expected, _ = hot_rows(model)
    (path,) = cache_folder.glob("rows-*.npz")
    path.write_bytes(damage)
    assert np.array_equal(hot_rows(model)[0], expected)


@pytest.mark.parametrize(
    "ids,probs",
    [
        (np.full((4, WIDTH), 10**6, np.int32), np.ones((4, WIDTH), np.float32)),
        (np.ones((4, WIDTH + 1), np.int32), np.ones((4, WIDTH + 1), np.float32)),
        (np.ones((4, 0), np.int32), np.ones((4, 0), np.float32)),
        (np.ones((0, WIDTH), np.int32), np.ones((0, WIDTH), np.float32)),
        (np.ones((4, WIDTH), np.int32), np.full((4, WIDTH), np.nan, np.float32)),
        (np.int32(3), np.float32(1)),
    ],
)
def test_rows_that_cannot_be_are_measured_anew(cache_folder: Path, ids: Any, probs: Any) -> None:
    model = tiny_llama(0)
    expected, _ = hot_rows(model)
    (path,) = cache_folder.glob("rows-*.npz")
    np.savez(path, ids=ids, probs=probs)
    assert np.array_equal(hot_rows(model)[0], expected)


def test_no_damage_is_fatal(cache_folder: Path) -> None:
    """Whatever byte changed, or were it another kind of file."""
    model = tiny_llama(0)
    rows = hot_rows(model)
    (path,) = cache_folder.glob("rows-*.npz")
    sound = path.read_bytes()
    generator = np.random.default_rng(0)
    for place in generator.integers(len(sound) - 400, len(sound), 200):  # the archive's directory
        damaged = bytearray(sound)
        damaged[place] ^= 1 << generator.integers(8)
        path.write_bytes(damaged)
        hot_start._stored(path, len(rows[0]))
    with path.open("wb") as file:
        np.save(file, rows[0])
    assert hot_start._stored(path, len(rows[0])) is None
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ids", b"")
        archive.writestr("probs", b"")
    assert hot_start._stored(path, len(rows[0])) is None


def test_output_is_the_same_with_and_without(cache_folder: Path) -> None:
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


@pytest.mark.parametrize("vocab_size", [5, 64, 1000])
def test_top_logits_as_on_other_devices(vocab_size: int) -> None:
    """torch's own kernels: the first id is argmax's among equal logits, however `topk` orders those."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(9, vocab_size, generator=generator) * 4
    logits[0] = 0.0
    logits[1, vocab_size // 3 :] = 50.0
    logits[2, [1, vocab_size - 1]] = 60.0
    k = min(WIDTH, vocab_size)
    top = _top_on_device(logits, k)
    assert top.token_ids.dtype == np.int32 and top.probs.dtype == np.float32
    assert top.token_ids[:, 0].tolist() == logits.argmax(-1).tolist()
    assert all(len(set(row)) == k for row in top.token_ids.tolist())
    picked = logits.gather(-1, torch.from_numpy(top.token_ids).long())
    assert torch.equal(picked, logits.topk(k, dim=-1).values)  # falling, and none larger is left out
    expected = logits.softmax(-1).gather(-1, torch.from_numpy(top.token_ids).long())
    assert np.allclose(top.probs, expected.numpy(), rtol=1e-5, atol=1e-7)
