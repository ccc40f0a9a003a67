"""The only module that knows how transformers versions differ (5.17 to 5.24)."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from transformers import __version__, cache_utils
from transformers.generation.utils import GENERATION_MODES_MAPPING, GenerationMixin

# Later versions call the keyword `past_key_values` of forward, generate and the outputs `cache`.
CACHE_ARG = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
CACHE_ARGS = ("cache", "past_key_values", "cache_params")
INDEXED_LAYER = getattr(cache_utils, "DynamicIndexedLayer", None)  # sparse attention (DeepSeek 3.2)
# Earlier versions feed the whole prompt again where `prefill_chunk_size` meets a cache that holds its beginning.
CHUNKS_CONTINUE_CACHE = tuple(map(int, __version__.split(".")[:2])) >= (5, 21)
DUMMY_LAYER = getattr(cache_utils, "DummyLayer", None)  # layers that share another one's keys and values


def decoding_methods() -> dict[Any, str]:
    """Generation mode -> name of the `GenerationMixin` method that decodes it, for the modes the library holds."""
    return {mode: name for mode, name in GENERATION_MODES_MAPPING.items() if "/" not in name}


def cache_arg(model: Any) -> str:
    """Name under which a model's forward takes its cache; before the renaming, Mamba models had one of their own."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in (CACHE_ARG, "cache_params") if name in parameters), CACHE_ARG)


def cache_in(kwargs: dict[str, Any]) -> Any:
    """The cache among the keyword arguments of a call, under whichever name, or None."""
    return next((kwargs[name] for name in CACHE_ARGS if kwargs.get(name) is not None), None)


def streamer_of_caller() -> Any:
    """The `streamer` of the `generate` call that we are in, or None.

    transformers does not hand a streamer to a `custom_generate` callable, and one that is never ended hangs its reader.
    """
    return _arguments_of_caller().get("streamer")


def cache_of_caller() -> Any:
    """The cache that the caller of `generate` handed over, or None: otherwise `generate` makes one for the call."""
    return cache_in(_arguments_of_caller().get("kwargs", {}))


def _arguments_of_caller() -> dict[str, Any]:
    """Local names of the `generate` call that we are in."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and "custom_generate" in frame.f_locals:
            return frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
    return {}
