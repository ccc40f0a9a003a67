"""What a model can verify: decided by running it, not by a list of names.

At wrap time a small random tree is verified and its logits are compared with those of plain forwards over the same
paths; then a path is committed and a second tree compared, so that compaction is tried as well. At last, a chain of
what plain `generate` emits is compared with the logits that it saw, one token a forward. What fails is tried as a
chain, then as a chain whose recurrent states are restored from a snapshot, and at last left to plain decoding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import transformers
from transformers import DynamicCache, GenerationConfig
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.utils import GenerationMixin

from retrodraft.arguments import embedding_rows
from retrodraft.cache import DraftCache, cached_length, unsupported_layer
from retrodraft.compat import CACHE_ARGS, INDEXED_LAYER, cache_arg, cache_in
from retrodraft.folders import cache_folder, keep
from retrodraft.snapshot import SnapshotVerifier
from retrodraft.target import TargetModel, own_parts, takes_positions, tree_hooks
from retrodraft.tree import DraftTree

Mode = Literal["tree", "chain", "snapshot", "plain"]

VERSION = 2  # of the probe; a stored verdict of another one is not used
LONGEST_PREFIX = 1100  # windows up to about this size are crossed by the probe
PLAIN_STEPS = 6  # tokens of plain `generate` that are compared with
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
LOW_PRECISION_TOLERANCE = 5e-2  # of the largest logit: a wrong mask is off by far more, rounding by less
# A model's own code may fail in any of these ways on a shape that it does not know; that is a verdict, not a fault.
PROBE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError)


@dataclass(frozen=True)
class Capabilities:
    """Verdict of the probe on one model."""

    mode: Mode  # "tree", "chain", "snapshot" (a chain over recurrent states) or "plain" (no drafting)
    reason: str  # why not a better mode; empty for "tree"
    max_difference: float  # largest logit difference seen in that mode, relative to the largest logit

    def __str__(self) -> str:
        return f"{self.mode} (logits within {self.max_difference:.1e})" + (f": {self.reason}" if self.reason else "")


def probe(model: Any) -> Capabilities:
    """The verdict on `model`: one stored for this class, configuration, attention and versions, else a new one.

    A model with parts of its own (`target.own_parts`), or of a class that transformers does not hold, is probed each
    time.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        return Capabilities("plain", "it is an encoder-decoder", 0.0)
    if model.config._attn_implementation == "flex_attention" and model.device.type == "cpu":
        return Capabilities("plain", "flex attention over several tokens crashes on the CPU", 0.0)  # with torch 2.13
    if reason := _reason_against(model):
        return Capabilities("plain", reason, 0.0)
    if own_parts(model) or not type(model).__module__.startswith("transformers."):
        return run_probe(model)
    path = cache_folder() / f"probe-{_key(model)}.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return Capabilities(**stored)
    except (OSError, ValueError, TypeError):
        pass  # absent or damaged: probed anew
    verdict = run_probe(model)
    if verdict.mode == "plain":
        return verdict  # not kept: broken weights, say, must not tell on the next model of this configuration
    keep(path, asdict(verdict))
    return verdict


def _reason_against(model: Any) -> str:
    """Why no run is needed to know that the model can't be drafted for; empty if it is."""
    if type(model)._sample is not GenerationMixin._sample or "_sample" in vars(model):
        return "it has a decoding loop of its own"
    adapter = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)  # PEFT, while it generates
    if getattr(getattr(adapter, "active_peft_config", None), "is_prompt_learning", False):
        return "its adapter puts virtual tokens before the prompt"
    if getattr(model.get_output_embeddings(), "out_features", 0) > embedding_rows(model):
        return "its output head has more rows than its embeddings"
    return ""


def run_probe(model: Any) -> Capabilities:
    """Try the modes in order of speed and return the first whose logits are right."""
    training = model.training
    model.eval()
    attempts: list[tuple[Mode, Callable[[Any], float]]] = [
        ("tree", _try_tree), ("chain", _try_chain), ("snapshot", _try_snapshot)
    ]  # fmt: skip
    if str(model.config._attn_implementation).startswith("flash"):
        attempts = attempts[1:]
    reasons = []
    try:
        with torch.inference_mode(), tree_hooks():
            for mode, attempt in attempts:
                try:
                    difference = max(attempt(model), _try_steps(model, mode))
                except PROBE_ERRORS as error:
                    reasons.append(
                        f"{mode}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                    )
                    continue
                if difference <= TOLERANCE.get(model.dtype, LOW_PRECISION_TOLERANCE):
                    return Capabilities(mode, "; ".join(reasons), difference)
                reasons.append(f"{mode}: logits differ by {difference:.1e}")
    finally:
        model.train(training)
    return Capabilities("plain", "; ".join(reasons), 0.0)


def _try_tree(model: Any) -> float:
    """Largest difference over two trees with a commit of a path with gaps between them."""
    return _try_shapes(model, [([-1, 0, 1, 2, 1, 0, 5, 0], [0, 5, 6]), ([-1, 0, 1, 0, 3, 3, 0], [0, 3, 5])])


def _try_chain(model: Any) -> float:
    return _try_shapes(model, [([-1, 0, 1, 2, 3], [0, 1, 2]), ([-1, 0, 1, 2], [0, 1])])


def _try_shapes(model: Any, shapes: list[tuple[list[int], list[int]]]) -> float:
    native = DynamicCache(config=model.config.get_text_config(decoder=True))
    if reason := unsupported_layer(native):
        raise ValueError(reason)
    prefix, fresh = _probe_text(model)
    cache = DraftCache(native, 1)
    _feed(model, prefix, use_cache=True, **{cache_arg(model): cache})
    target = TargetModel(model)
    mask = target.prefix_mask()
    worst = 0.0
    for parents, path in shapes:
        tree = DraftTree.from_nodes(fresh.pop(), [fresh.pop() for _ in parents[1:]], parents[1:])
        logits = target.verify([tree], cache, mask).logits[0]
        ancestors = tree.ancestor_mask()
        for node in range(len(tree)):
            if node not in tree.parents:  # a leaf; its path covers its ancestors
                nodes = ancestors[node].nonzero()[0]
                worst = max(worst, _difference(model, prefix, tree.token_ids[nodes].tolist(), logits[nodes]))
        cache.commit([path])
        prefix = prefix + tree.token_ids[path].tolist()
    return worst


def _try_snapshot(model: Any) -> float:
    """A chain whose tail is rejected, then one that replays what was accepted."""
    prefix, fresh = _probe_text(model)
    verifier = SnapshotVerifier(model)
    if INDEXED_LAYER is not None and any(isinstance(layer, INDEXED_LAYER) for layer in verifier.cache.layers):
        raise ValueError("its sparse attention chooses other keys for several tokens than for one")
    verifier.prefill(torch.tensor([prefix], device=model.device))
    worst = 0.0
    for accepted in (2, 3, 1):
        tokens = [fresh.pop() for _ in range(4)]
        logits = verifier.verify(tokens)
        worst = max(worst, _difference(model, prefix, tokens, logits))
        verifier.commit(accepted)
        prefix = prefix + tokens[:accepted]
    return worst


def _try_steps(model: Any, mode: Mode) -> float:
    """Largest difference over a chain of the tokens that plain `generate` emits, from the logits that it saw."""
    prefix, _ = _probe_text(model)
    plain: Any = object.__new__(type(model))
    plain.__dict__ = {**model.__dict__, "generation_config": GenerationConfig()}  # the same but for its settings
    text = torch.tensor([prefix], device=model.device)
    output = type(model).generate(
        plain, text, attention_mask=torch.ones_like(text), max_new_tokens=PLAIN_STEPS, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    tokens, expected = output.sequences[0, len(prefix) :].tolist(), torch.cat(output.logits)
    if mode == "snapshot":
        verifier = SnapshotVerifier(model)
        first = verifier.prefill(text)
        logits = verifier.verify(tokens[:-1])
    else:
        cache = DraftCache(DynamicCache(config=model.config.get_text_config(decoder=True)), 1)
        first = _feed(model, prefix, use_cache=True, **{cache_arg(model): cache})
        chain = DraftTree.from_nodes(tokens[0], tokens[1:-1], list(range(len(tokens) - 2)))
        logits = TargetModel(model).verify([chain], cache).logits[0]
    return _apart(torch.cat([first.logits[0, -1:], logits]), expected)


def _feed(model: Any, tokens: list[int], **kwargs: Any) -> Any:
    """A plain forward, with positions where `generate` gives them."""
    if takes_positions(model):
        kwargs["position_ids"] = torch.arange(len(tokens), device=model.device)[None]
    return model(input_ids=torch.tensor([tokens], device=model.device), **kwargs)


def _probe_text(model: Any) -> tuple[list[int], list[int]]:
    """A random prefix, longer than the attention window where that is short enough, and fresh tokens to draft."""
    config = model.config.get_text_config(decoder=True)
    sizes = (getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None))
    window = max((size for size in sizes if isinstance(size, int) and size < LONGEST_PREFIX), default=0)
    length = window + 9
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and limit > 0:
        length = max(min(length, limit - 16), 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (length + 40,), generator=generator).tolist()
    return tokens[:length], tokens[length:]


def _difference(model: Any, prefix: list[int], tokens: list[int], logits: torch.Tensor) -> float:
    """Largest difference between `logits` and a plain forward over `prefix` and `tokens`, over the largest logit."""
    return _apart(logits, _feed(model, prefix + tokens, use_cache=False).logits[0, len(prefix) :])


def _apart(logits: torch.Tensor, expected: torch.Tensor) -> float:
    worst = (logits.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1.0)
    return float(worst) if torch.isfinite(worst) else float("inf")


def _key(model: Any) -> str:
    parts = (
        VERSION, type(model).__module__, type(model).__name__,
        model.config.to_json_string(use_diff=False), model.config._attn_implementation,
        str(model.dtype), model.device.type, torch.__version__, transformers.__version__,
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


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
    if _rope_type(config) == "longrope" and generation_config.max_length > (switch := _rope_switch(config)) + 1:
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
    padded = mask is not None and bool((mask == 0).any())
    if padded and cached_length(cache):
        return "a padded prompt can't continue a passed-in cache"
    if capabilities.mode == "snapshot" and (batch_size > 1 or padded):
        return "recurrent states are drafted for one unpadded row only"
    if batch_size > 1:
        if streamer is not None:
            return "a streamer takes the tokens of all rows at once, whose rows draft at their own pace"
        return _reason_against_batch(model, generation_config, processors, criteria)
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
    shown = mask != 0
    return bool((shown[:, 1:] | ~shown[:, :-1]).all()) and bool((mask[:, -1] == 1).all())


def check_context(config: Any, length: int) -> None:
    """Raise ValueError if a prompt of `length` tokens is longer than the positions that the model knows."""
    maximum = _context_window(config)
    if _rope_type(config) == "dynamic":  # made for texts beyond the maximum
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
    factor = scaling.get("factor") if _rope_type(config) in ("linear", "yarn") else None
    if not isinstance(factor, int | float):
        return maximum
    return max(maximum, int(factor * (scaling.get("original_max_position_embeddings") or maximum)))


def _rope_scaling(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def _rope_type(config: Any) -> Any:
    scaling = _rope_scaling(config)
    return scaling.get("rope_type", scaling.get("type"))


def _rope_switch(config: Any) -> int:
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
    kind = _rope_type(config)
    if kind in ("dynamic", "longrope"):
        switch = _rope_switch(config)
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
