"""The embedded model and its cache folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from retrodraft import RetroDraft
from retrodraft.models import embedded_folder, load_model
from retrodraft.workloads import render_prompt


def test_embedded_model_speaks_and_stops(embedded: tuple[Any, Any]) -> None:
    """A chat answer ends at the template's own end token; drafted equals plain, greedy and sampled."""
    model, tokenizer = embedded
    prompt = torch.tensor([render_prompt(tokenizer, [{"role": "user", "content": "Say the word yes, nothing else."}])])
    rd = RetroDraft(model, tokenizer, budget=8)
    options: dict[str, Any] = dict(max_new_tokens=60, attention_mask=torch.ones_like(prompt))
    expected = model.generate(prompt, do_sample=False, **options)
    assert rd.generate(prompt, do_sample=False, **options).tolist() == expected.tolist()
    assert "<|im_end|>" in tokenizer.decode(expected[0, -1:]) or expected.shape[1] == prompt.shape[1] + 60
    torch.manual_seed(1)
    expected = model.generate(prompt, do_sample=True, temperature=0.8, top_p=0.9, **options)
    torch.manual_seed(1)
    assert rd.generate(prompt, do_sample=True, temperature=0.8, top_p=0.9, **options).tolist() == expected.tolist()


def test_copying_saves_forwards(embedded: tuple[Any, Any]) -> None:
    """On a text that repeats, the real model's output comes in a fraction of the forwards."""
    model, tokenizer = embedded
    code = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n"
    prompt = tokenizer(code * 3, return_tensors="pt").input_ids
    rd = RetroDraft(model, tokenizer)
    out = rd.generate(prompt, max_new_tokens=60, do_sample=False)
    assert out.tolist() == model.generate(prompt, max_new_tokens=60, do_sample=False).tolist()
    assert rd.stats.tokens_per_forward > 2


@pytest.mark.slow
def test_damaged_conversion_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut weight file is noticed by its size; nothing half-written is left."""
    monkeypatch.setenv("RETRODRAFT_CACHE", str(tmp_path))
    folder = embedded_folder()
    weights = folder / "model.safetensors"
    whole = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[: whole // 2])
    assert embedded_folder() == folder and weights.stat().st_size == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, f"{folder.name}.lock"]


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(name=""), "got an empty name"),
        (dict(dtype="int3"), "dtype must be one of"),
        (dict(name="/no/such/model"), "can't be loaded"),
    ],
)
def test_bad_names(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(**options)
