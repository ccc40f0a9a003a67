"""Which keys and values of an earlier call serve a later one: those of a common prefix, if both calls make the same."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from retrodraft.tree import Int32

if TYPE_CHECKING:
    from retrodraft.decoder import RetroDraft

# Arguments that leave keys and values alone, besides those of a GenerationConfig. Others may reach the model's forward
# (position_ids, images, an adapter's name), so that what it makes of a prefix in one call is not what it would make of
# it in another.
HARMLESS = {
    "input_ids", "attention_mask", "generation_config", "logits_processor", "stopping_criteria",
    "prefix_allowed_tokens_fn", "synced_gpus", "streamer", "tokenizer", "use_model_defaults",
}  # fmt: skip


def keeps_cache(rd: RetroDraft, kwargs: dict[str, Any]) -> bool:
    """Whether a call of `generate` with these arguments, `input_ids` among them, can use and leave a session's cache.

    Not if its keys and values can't be kept, or differ from those that other calls make.
    """
    input_ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
    configs = [kwargs.get("generation_config"), rd.model.generation_config]

    def setting(name: str) -> Any:
        found = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in found if value is not None), None)

    if rd.capabilities.mode not in ("tree", "chain"):
        return False
    if input_ids.shape[0] * (setting("num_return_sequences") or 1) != 1:
        return False
    if any(value is not None and name not in _harmless() for name, value in kwargs.items()):
        return False
    if setting("use_cache") is False or setting("cache_implementation") is not None:
        return False
    if setting("prefill_chunk_size") is not None and not _chunks_continue_cache():
        return False
    if mask is None:
        pad = setting("pad_token_id")  # generate takes these for padding
        if pad is not None and bool((input_ids == pad).any()):
            return False
    elif mask.shape != input_ids.shape or not bool(mask.all()):
        return False
    return bool(input_ids.shape[1] < rotary_switch(rd.model.config.get_text_config(decoder=True)))


def _chunks_continue_cache() -> bool:
    from retrodraft.compat import CHUNKS_CONTINUE_CACHE  # imports transformers; a replay wants none

    return CHUNKS_CONTINUE_CACHE


@cache
def _harmless() -> frozenset[str]:
    from transformers import GenerationConfig  # which imports torch; a replay wants none

    return frozenset({*HARMLESS, *GenerationConfig().to_dict()})


def common_prefix(first: Int32, second: Int32) -> int:
    """Number of leading tokens that two texts share."""
    size = min(len(first), len(second))
    differing = np.flatnonzero(first[:size] != second[:size])
    return int(differing[0]) if len(differing) else size


def rotary_switch(config: Any) -> int:
    """Length of a text from which on a model turns its keys by other frequencies than in shorter texts, all of them.

    Dynamic and long RoPE: what was cached below no longer serves. 2**30 for the many models that do not.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    limits = [1 << 30]
    for each in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # or one for each layer type
        if each.get("rope_type", each.get("type")) in ("dynamic", "longrope"):
            limits += [
                length
                for length in (
                    each.get("original_max_position_embeddings"),
                    getattr(config, "original_max_position_embeddings", None),
                    getattr(config, "max_position_embeddings", None),
                )
                if isinstance(length, int)
            ][:1]
    return min(limits)
