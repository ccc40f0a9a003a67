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
from transformers.generation.utils import GenerationMixin

from retrodraft.arguments import embedding_rows
from retrodraft.cache import DraftCache, unsupported_layer
from retrodraft.compat import INDEXED_LAYER, cache_arg
from retrodraft.folders import cache_folder, keep
from retrodraft.snapshot import SnapshotVerifier
from retrodraft.target import TargetModel, evaluating, own_parts, takes_positions, tree_hooks
from retrodraft.tree import DraftTree

Mode = Literal["tree", "chain", "snapshot", "plain"]

VERSION = 2  # of the probe; a stored verdict of another one is not used
LONGEST_PREFIX = 1100  # windows up to about this size are crossed by the probe
PLAIN_STEPS = 6  # tokens of plain `generate` that are compared with
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
LOW_PRECISION_TOLERANCE = 5e-2  # of the largest logit: a wrong mask is off by far more, rounding by less
# A model's own code may fail in any of these ways on a shape that it does not know; that is a verdict, not a fault.
PROBE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError)


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
    attempts: list[tuple[Mode, Callable[[Any], float]]] = [
        ("tree", _try_tree), ("chain", _try_chain), ("snapshot", _try_snapshot)
    ]  # fmt: skip
    if str(model.config._attn_implementation).startswith("flash"):
        attempts = attempts[1:]
    reasons = []
    with evaluating(model), torch.inference_mode(), tree_hooks():
        for mode, attempt in attempts:
            try:
                difference = max(attempt(model), _try_steps(model, mode))
            except PROBE_ERRORS as error:
                reasons.append(f"{mode}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
                continue
            if difference <= TOLERANCE.get(model.dtype, LOW_PRECISION_TOLERANCE):
                return Capabilities(mode, "; ".join(reasons), difference)
            reasons.append(f"{mode}: logits differ by {difference:.1e}")
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
    output = GenerationMixin.generate(
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
        logits = TargetModel(model).verify([DraftTree.chain(tokens[:-1])], cache).logits[0]
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
    generator = torch.Generator("cpu").manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (length + 40,), generator=generator, device="cpu").tolist()
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
