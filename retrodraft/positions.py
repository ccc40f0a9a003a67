"""How far a model's positions reach, and where they change: that limits prompts, and the depth and size of trees."""

from __future__ import annotations

from typing import Any


def check_context(config: Any, length: int) -> None:
    """Raise ValueError if a prompt of `length` tokens is longer than the positions that the model knows."""
    maximum = _context_window(config)
    if rope_type(config) == "dynamic":  # made for texts beyond the maximum
        return
    if maximum is not None and maximum < length:
        raise ValueError(
            f"the prompt has {length} tokens, the model's context window (max_position_embeddings) only {maximum}: "
            "shorten the prompt"
        )


def _context_window(config: Any) -> int | None:
    """Positions that the model knows, as its RoPE scaling stretches them; None where there is no end (ALiBi)."""
    maximum = getattr(config, "max_position_embeddings", None)
    if not isinstance(maximum, int) or maximum <= 0 or getattr(config, "alibi", False):
        return None
    scaling = _rope_scaling(config)
    factor = scaling.get("factor") if rope_type(config) in ("linear", "yarn") else None
    if not isinstance(factor, int | float):
        return maximum
    return max(maximum, int(factor * (scaling.get("original_max_position_embeddings") or maximum)))


def _rope_scaling(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def rope_type(config: Any) -> Any:
    """Kind of the model's RoPE scaling, as transformers names it; None without one."""
    scaling = _rope_scaling(config)
    return scaling.get("rope_type", scaling.get("type"))


def rope_switch(config: Any) -> int:
    """Length from which dynamic and long RoPE use other frequencies."""
    scaling, name = _rope_scaling(config), "original_max_position_embeddings"
    for length in (scaling.get(name), getattr(config, name, None), getattr(config, "max_position_embeddings", None)):
        if isinstance(length, int):
            return length
    return 1 << 30


def depth_limit(config: Any, length: int) -> int:
    """How deep a tree below a root at position `length` may go without leaving what the positions are good for.

    Learned and scaled positions end at `max_position_embeddings`; dynamic and long RoPE change every frequency at a
    length, which plain decoding passes one token at a time; Llama 4 scales its queries by the cache slot.
    """
    limits = []
    maximum = _context_window(config)
    if maximum is not None:
        limits.append(maximum - 1 - length)
    kind = rope_type(config)
    if kind in ("dynamic", "longrope"):
        switch = rope_switch(config)
        if length < switch:
            limits.append(switch - 1 - length)
        elif kind == "dynamic":
            limits.append(0)
    return max(min(limits), 0) if limits else 1 << 30


def node_limit(config: Any, length: int) -> int:
    """How many nodes fit behind `length` tokens before the cache slot itself changes the attention (Llama 4)."""
    if not getattr(config, "attn_temperature_tuning", False):
        return 1 << 30
    scale = int(getattr(config, "floor_scale", 8192))
    return max(scale - 2 - length % scale, 0)
