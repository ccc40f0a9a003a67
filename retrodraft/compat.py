"""The only module that knows how transformers versions differ (5.17 to 5.24)."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from transformers import cache_utils
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMixin

# 5.2x renamed the keyword `past_key_values` of forward, generate and the outputs to `cache`.
CACHE_ARG = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
INDEXED_LAYER = getattr(cache_utils, "DynamicIndexedLayer", None)  # sparse attention (DeepSeek 3.2)
DUMMY_LAYER = getattr(cache_utils, "DummyLayer", None)  # layers that share another one's keys and values


def decoding_methods() -> dict[Any, str]:
    """Generation mode -> name of the `GenerationMixin` method that decodes it, for the modes the library holds."""
    return {mode: name for mode, name in GENERATION_MODES_MAPPING.items() if "/" not in name}


def cache_in(kwargs: dict[str, Any]) -> Any:
    """The cache among the keyword arguments of a call, under either of its names, or None."""
    found = kwargs.get("cache")
    return found if found is not None else kwargs.get("past_key_values")


def streamer_of_caller() -> Any:
    """The `streamer` of the `generate` call that we are in, or None.

    transformers does not hand a streamer to a `custom_generate` callable, and one that is never ended hangs its reader.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and "custom_generate" in frame.f_locals:
            return frame.f_locals.get("streamer")
        frame = frame.f_back  # type: ignore[assignment]
    return None
