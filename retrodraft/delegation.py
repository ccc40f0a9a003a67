"""Which calls are left to plain `generate`, and why; decided before the first forward."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.utils import GenerationMixin

from retrodraft.cache import DraftCache, cached_length, unsupported_layer
from retrodraft.capabilities import Capabilities
from retrodraft.compat import CACHE_ARGS, cache_in
from retrodraft.positions import rope_switch, rope_type
from retrodraft.target import home

# Processors that treat each row by itself, so that rows may be at different lengths.
_ROWWISE_PROCESSORS = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper",
        "EpsilonLogitsWarper", "EtaLogitsWarper", "TopHLogitsWarper", "RepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor", "NoBadWordsLogitsProcessor", "SequenceBiasLogitsProcessor",
        "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor", "ExponentialDecayLengthPenalty", "SuppressTokensLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization",
    )
    if hasattr(logits_process, name)
)  # fmt: skip
_ROWWISE_CRITERIA = (
    stopping_criteria.EosTokenCriteria, stopping_criteria.MaxLengthCriteria, stopping_criteria.StopStringCriteria
)  # fmt: skip
_KNOWN_KWARGS = {
    *CACHE_ARGS, "attention_mask", "position_ids", "use_cache", "logits_to_keep", "output_attentions",
    "output_hidden_states", "inputs_embeds", "return_dict",
}  # fmt: skip


def reason_to_delegate(
    capabilities: Capabilities,
    model: Any,
    input_ids: torch.Tensor,
    generation_config: Any,
    processors: Any,
    criteria: Any,
    synced_gpus: bool,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Why this call is left to plain `generate`, or None; decided before the first forward."""
    if capabilities.mode == "plain":
        return f"the model can't verify drafts ({capabilities.reason})"
    if model.training:
        return "it is in training mode, in which dropout may change every forward: call model.eval()"
    if synced_gpus:
        return "synced_gpus needs the same number of forwards on every device"
    batch_size, config = input_ids.shape[0], model.config.get_text_config(decoder=True)
    if rope_type(config) == "longrope" and generation_config.max_length > (switch := rope_switch(config)) + 1:
        if type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation:
            return f"the model computes its keys and values anew where the text grows beyond {switch} tokens"
    cache = cache_in(model_kwargs)
    if not generation_config.use_cache or cache is None:
        return "drafting needs the KV cache (use_cache=False, or the model brings a cache of its own)"
    if capabilities.mode != "snapshot" and not isinstance(cache, DraftCache) and (why := unsupported_layer(cache)):
        return why
    for name, value in model_kwargs.items():
        if name not in _KNOWN_KWARGS and _may_be_per_token(value):
            return f"the model input {name!r} would have to be drafted too"
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.dim() != 2:
        return "its positions have more than one dimension"
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not _left_padded(mask):
        return "the attention_mask hides tokens that are not left padding (a batch is padded with padding_side='left')"
    if positions is not None:
        shown = positions.shape[-1] if mask is None else mask.sum(-1)
        if not bool((positions[:, -1] + 1 == shown).all()):
            return "its positions are not those of the tokens that the attention_mask shows"
    why = _reason_against_lengths(cache, input_ids, generation_config, model_kwargs)
    if capabilities.mode != "snapshot" and why is not None:
        return why
    padded = mask is not None and bool((mask == 0).any())
    if padded and not home(model._update_model_kwargs_for_generation).startswith("transformers."):
        return "the model changes its inputs from step to step, which was probed with an unpadded prompt"
    if padded and cached_length(cache):
        return "a padded prompt can't continue a passed-in cache"
    if capabilities.mode == "snapshot" and (batch_size > 1 or padded):
        return "recurrent states are drafted for one unpadded row only"
    if batch_size > 1:
        if streamer is not None:
            return "a streamer takes the tokens of all rows at once, whose rows draft at their own pace"
        return _reason_against_batch(model, generation_config, processors, criteria)
    return None


def _reason_against_lengths(
    cache: Any, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any]
) -> str | None:
    """Why prompt, mask and passed-in cache do not make one text; the prompt is all of it, or what is to be fed."""
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    given, cached = (input_ids if embeds is None else embeds).shape[1], cached_length(cache)
    # transformers leaves a mask that shows everything out, and keeps its length.
    shown = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
    if shown == given and cached >= given:
        return "the passed-in cache holds the whole prompt already"
    if shown is not None and shown not in (given, cached + given):
        return f"the attention_mask has {shown} columns, but there are {cached + given} tokens"
    return None


def _reason_against_batch(model: Any, generation_config: Any, processors: Any, criteria: Any) -> str | None:
    if str(model.config._attn_implementation).startswith("flash"):
        return "flash attention can't verify rows of different lengths"
    for kind, items, known in (
        ("logits processor", processors, _ROWWISE_PROCESSORS), ("stopping criterion", criteria, _ROWWISE_CRITERIA)
    ):  # fmt: skip
        for item in items:
            if type(item) not in known:
                return (
                    f"the {kind} {type(item).__name__} may look at the whole batch, whose rows draft at their own pace"
                )
    has_eos = any(isinstance(item, stopping_criteria.EosTokenCriteria) for item in criteria)
    if not has_eos and any(isinstance(item, stopping_criteria.StopStringCriteria) for item in criteria):
        return "without an EOS token, plain generate goes on with rows that met a stop string"
    if generation_config.output_attentions or generation_config.output_hidden_states:
        return "attentions and hidden states of rows that draft at their own pace have no common shape"
    return None


def _may_be_per_token(value: Any) -> bool:
    """Whether an argument to the model is, or holds, tensors: what they say of drafted tokens is not known."""
    return isinstance(value, torch.Tensor) or (isinstance(value, dict | list | tuple) and len(value) > 0)


def _left_padded(mask: torch.Tensor) -> bool:
    """Whether each row of a 0/1 mask is zeros, then at least a one, then only ones."""
    if mask.dim() != 2:
        return False
    shown = mask == 1
    return bool(((mask == 0) | shown).all() and (shown[:, 1:] | ~shown[:, :-1]).all() and shown[:, -1].all())
