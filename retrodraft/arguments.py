"""What `RetroDraft` accepts: each argument checked before any work, with an error that says what to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.utils import GenerationMixin

from retrodraft.errors import UnsupportedModelError

if TYPE_CHECKING:
    from retrodraft.dense import DenseDrafts
    from retrodraft.index.corpus import CorpusIndex

_WRAPPED = ("_orig_mod", "base_model.model", "base_model", "module")  # where torch.compile, PEFT and others keep it


def opened_corpora(corpora: Any, tokenizer: Any, vocab_size: int) -> list[CorpusIndex]:
    """The corpora, each checked against the tokenizer (where there is one) and the model's number of tokens."""
    if isinstance(corpora, str | Path):
        raise ValueError(f"corpora must be a list of indexes, got {str(corpora)!r}: write corpora=[{str(corpora)!r}]")
    if not isinstance(corpora, Sequence):
        raise ValueError(f"corpora must be a list of indexes, or of their folders, got {corpora!r}")
    if not corpora:
        return []
    from retrodraft.index.corpus import CorpusIndex
    from retrodraft.index.fingerprint import tokenizer_fingerprint

    for corpus in corpora:
        if not isinstance(corpus, CorpusIndex | Path | str):
            raise ValueError(f"corpora must hold indexes, or their folders, got {corpus!r}")
    opened = [corpus if isinstance(corpus, CorpusIndex) else CorpusIndex.open(corpus) for corpus in corpora]
    for corpus in opened:
        fingerprint = corpus.fingerprint if tokenizer is None else tokenizer_fingerprint(tokenizer)
        corpus.check_tokenizer(fingerprint, vocab_size)
    return opened


def opened_dense(corpora: list[CorpusIndex], model: Any) -> DenseDrafts:
    """The dense indexes of those of the corpora that have one; they must be of this model."""
    if not corpora:
        raise ValueError("dense=True drafts from the corpora's dense indexes: pass corpora=[...]")
    from retrodraft.dense import DenseDrafts

    return DenseDrafts.open(corpora, model)


def check_prompt(inputs: Any) -> None:
    """Raise ValueError for what can't be a batch of token ids; `generate` would fail on it somewhere inside."""
    whole = isinstance(inputs, torch.Tensor) and not inputs.is_floating_point()
    if inputs is None or (isinstance(inputs, torch.Tensor) and (inputs.dim() == 2) == whole):
        return
    got = f"a {type(inputs).__name__}"
    if isinstance(inputs, torch.Tensor):
        got = f"one of shape {list(inputs.shape)}" if whole else f"a tensor of {inputs.dtype}"
    raise ValueError(
        f"generate takes token ids, a tensor [batch_size, length], got {got}: "
        'use **tokenizer(text, return_tensors="pt")'
    )


def check_filled(input_ids: torch.Tensor) -> None:
    """Raise ValueError for an empty prompt."""
    if not input_ids.numel():
        raise ValueError(f"the prompt is empty ({list(input_ids.shape)}): it needs at least one token")


def check_ids(model: Any, input_ids: torch.Tensor) -> None:
    """Raise ValueError for ids that a model of transformers has no embeddings for."""
    vocab_size = embedding_rows(model)
    low, high = (int(bound) for bound in input_ids.aminmax())
    if (low < 0 or high >= vocab_size) and type(model).__module__.startswith("transformers."):
        raise ValueError(f"token ids must lie between 0 and {vocab_size - 1}, got {low if low < 0 else high}")


def embedding_rows(model: Any) -> int:
    """Number of token ids that the model has embeddings for."""
    return int(model.get_input_embeddings().weight.shape[0])


def checked_model(model: Any) -> Any:
    """`model`, if it is one that generates text from text; raises UnsupportedModelError."""
    if not isinstance(model, torch.nn.Module) or not isinstance(model, GenerationMixin):
        inside = next((name for name in _WRAPPED if isinstance(_attribute(model, name), GenerationMixin)), None)
        advice = f"wrap the model inside, .{inside}" if inside else "load one with AutoModelForCausalLM.from_pretrained"
        raise UnsupportedModelError(f"RetroDraft needs a transformers model, got {type(model).__name__}: {advice}")
    language_model: Any = model
    if not language_model.config.is_encoder_decoder and language_model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language-modeling head: load it with AutoModelForCausalLM"
        )
    return model


def _attribute(model: Any, path: str) -> Any:
    for name in path.split("."):
        model = getattr(model, name, None)
    return model


def check_tokenizer(tokenizer: Any, vocab_size: int) -> None:
    """Raise ValueError for what is no tokenizer, or one of another model."""
    if tokenizer is None:
        return
    if not hasattr(tokenizer, "decode"):
        raise ValueError(f"tokenizer must be a tokenizer, as AutoTokenizer loads one, got {tokenizer!r}")
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model only {vocab_size} embedding rows: "
            "pass the tokenizer that belongs to the model"
        )


def checked_flag(name: str, value: Any) -> bool:
    """`value`, if it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def checked_bytes(name: str, value: Any) -> int:
    """`value`, if it is a number of bytes."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a number of bytes, got {value!r}")
    return value


def checked_count(name: str, value: Any, least: int) -> int | None:
    """`value`, if it is None or a number of nodes or tokens, from `least` to 1024."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        also = ' or "auto"' if name == "budget" else ""
        raise ValueError(f"{name} must be a whole number{also}, got {value!r}")
    if not least <= value <= 1024:
        raise ValueError(f"{name} must lie between {least} and 1024, got {value}")
    return value
