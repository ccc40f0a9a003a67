"""What a verify forward costs, and so how large a draft tree may be.

The latency of a forward over n draft nodes is measured once for a model on its device, relative to plain decoding's
one-token forward, and cached. A tree is worth its expected tokens; a node is priced at the tokens that its extra time
would have yielded at the current rate (tokens per unit of time, learned while decoding), less a little for what the
target's logits at it teach. Maximising value minus price in every step maximises tokens per second over the run, and an
empty tree is a legal answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from retrodraft.cache import DraftCache
from retrodraft.compat import cache_arg
from retrodraft.folders import cache_folder, keep
from retrodraft.kernels.tile_product import PROCESSOR
from retrodraft.target import TargetModel, top_logits, tree_hooks
from retrodraft.tree import DraftTree

VERSION = 5  # of the measurement; stored curves of another one are not used
TREE_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 33, 48, 64)  # tokens in the forward, the root included
CONTEXT_LENGTHS = (256, 2048)
REPEATS = 5
HARVEST_WIDTH = 8
CONTEXT_STEP = 128  # prices are interpolated anew each time the context has grown by this much
MAX_NODES = TREE_SIZES[-1] - 1
PADDING_GAIN = 0.95  # share of a forward's time below which a larger one replaces it
RATE_DECAY = 0.97  # the rate remembers about the last 30 steps
LESSON = 0.004  # tokens that a node is worth later, right or wrong: the target says what follows it


@dataclass(frozen=True)
class CostCurve:
    """Median seconds of a forward by context length and number of tokens in it."""

    context_lengths: list[int]
    tree_sizes: list[int]
    seconds: list[list[float]]  # [len(context_lengths)][len(tree_sizes)]

    def relative(self, context_length: int) -> npt.NDArray[np.float64]:
        """Cost of a forward over the root and 0, 1, … MAX_NODES nodes; plain decoding is 1. Rises with the nodes.

        A forward is padded where more tokens were measured to be cheaper (see `padded`).
        """
        curve = self._at(context_length)
        cheapest = np.minimum.accumulate(curve[::-1])[::-1]
        return np.asarray(np.maximum(np.concatenate([curve[:1], cheapest[1:]]) / curve[0], 1.0))

    def padded(self, context_length: int) -> npt.NDArray[np.int64]:
        """To how many tokens a forward of 1, 2, … tokens is best padded: matrix kernels like some sizes better."""
        curve = self._at(context_length)
        sizes = np.arange(1, len(curve) + 1)
        for index in range(len(curve) - 2, 0, -1):  # plain decoding's forward stays as it is
            larger = sizes[index + 1] - 1
            if PADDING_GAIN * curve[index] > curve[larger]:
                sizes[index] = sizes[index + 1]
        return sizes

    def _at(self, context_length: int) -> npt.NDArray[np.float64]:
        """Seconds of a forward over 1, 2, … tokens, by straight lines between what was measured."""
        sizes = np.arange(1, self.tree_sizes[-1] + 1)
        curves = [np.interp(sizes, self.tree_sizes, row) for row in self.seconds]
        if len(curves) == 1:
            return curves[0]
        low, high = self.context_lengths[0], self.context_lengths[-1]
        share = min(max((context_length - low) / (high - low), 0.0), 4.0)
        return np.asarray(curves[0] + share * np.maximum(curves[-1] - curves[0], 0.0))  # a context never makes faster


def measure_cost_curve(
    model: Any,
    context_lengths: tuple[int, ...] = CONTEXT_LENGTHS,
    tree_sizes: tuple[int, ...] = TREE_SIZES,
    repeats: int = REPEATS,
) -> CostCurve:
    """Time verify forwards over chains of random tokens, in `repeats` shuffled rounds; medians are kept.

    Context lengths that the model's position limit rules out are left out.
    """
    target = TargetModel(model)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    lengths = [n for n in context_lengths if n + tree_sizes[-1] <= limit] or [max(limit - tree_sizes[-1] - 1, 1)]
    seconds = []
    shuffled = np.random.default_rng(0)
    with torch.inference_mode(), tree_hooks():
        for length in lengths:
            cache, mask = _filled_cache(model, length), target.prefix_mask()
            rounds: list[list[float]] = [[] for _ in tree_sizes]
            for attempt in range(repeats + 1):
                for index in shuffled.permutation(len(tree_sizes)):  # a large forward leaves a cold cache behind
                    size = tree_sizes[index]
                    tree = DraftTree.chain([1] * size)
                    start = time.perf_counter()
                    logits = target.verify([tree], cache, mask).logits[0]
                    top_logits(logits, HARVEST_WIDTH)  # part of every step, and it grows with the nodes as well
                    if attempt:  # the first round warms up
                        rounds[index].append(time.perf_counter() - start)
            seconds.append([statistics.median(times) for times in rounds])
    return CostCurve(list(lengths), list(tree_sizes), seconds)


def _filled_cache(model: Any, length: int) -> DraftCache:
    """A cache of `length` committed random tokens."""
    cache = DraftCache(DynamicCache(config=model.config.get_text_config()), 1)
    generator = torch.Generator("cpu").manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    token_ids = torch.randint(0, vocab_size, (1, length), generator=generator, device="cpu")
    model(input_ids=token_ids.to(model.device), use_cache=True, **{cache_arg(model): cache})
    return cache


def cached_cost_curve(model: Any) -> CostCurve:
    """The curve of this model on this machine: from the cache folder, else measured now and stored there."""
    path = cache_folder() / f"cost-{curve_key(model)}.json"
    try:
        curve = CostCurve(**json.loads(path.read_text(encoding="utf-8")))
        if _is_sound(curve):
            return curve
    except (OSError, ValueError, TypeError, RecursionError):
        pass  # absent, damaged or of another version: measured anew
    curve = measure_cost_curve(model)
    store_cost_curve(model, curve)
    return curve


def _is_sound(curve: CostCurve) -> bool:
    """Whether what was read is a curve of this version."""
    lengths, times = np.asarray(curve.context_lengths), np.asarray(curve.seconds)
    if curve.tree_sizes != list(TREE_SIZES) or times.shape != (len(lengths), len(TREE_SIZES)):
        return False
    numbers = lengths.dtype.kind == "i" and times.dtype.kind == "f"
    return numbers and bool((np.diff(lengths) > 0).all() and (np.isfinite(times) & (times > 0)).all())


def store_cost_curve(model: Any, curve: CostCurve) -> None:
    """Replace the stored curve of this model."""
    keep(cache_folder() / f"cost-{curve_key(model)}.json", asdict(curve))


def curve_key(model: Any) -> str:
    """What a latency depends on, as a short hash."""
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{PROCESSOR}-{os.cpu_count()}"
    shape = (
        VERSION, type(model).__name__, sum(p.numel() for p in model.parameters()), str(model.dtype), name,
        torch.get_num_threads(), model.config._attn_implementation, torch.__version__,
    )  # fmt: skip
    return hashlib.sha256(repr(shape).encode()).hexdigest()[:16]


class Budget:
    """Prices of the nodes of the next tree, for `budget="auto"` or a fixed number of nodes."""

    def __init__(self, fixed: int | None, curve: CostCurve | None) -> None:
        self._fixed, self._curve = fixed, curve
        self._relative: dict[int, npt.NDArray[np.float64]] = {}
        self._sizes: dict[int, npt.NDArray[np.int64]] = {}
        self.reset()

    def reset(self) -> None:
        """Forget the learned rate."""
        self._tokens = self._cost = 8.0  # the rate begins at plain decoding's one token a unit

    def prices(self, context_length: int, room: int) -> npt.NDArray[np.float64]:
        """`prices[n]`: cost of n nodes in expected tokens, less what they teach, for up to `room` nodes."""
        if self._fixed is not None or self._curve is None:
            return np.zeros(min(self._fixed or 0, room) + 1)
        prices = (self._costs(context_length)[: room + 1] - 1.0) * (self._tokens / self._cost)
        return np.asarray(prices - LESSON * np.arange(len(prices)))

    def forward_size(self, context_length: int, tokens: int) -> int:
        """How many tokens a forward over a tree of so many is best padded to."""
        if self._fixed is not None or self._curve is None:
            return tokens
        step = context_length // CONTEXT_STEP
        if step not in self._sizes:
            self._sizes[step] = self._curve.padded(step * CONTEXT_STEP)
        sizes = self._sizes[step]
        return int(sizes[tokens - 1]) if tokens <= len(sizes) else tokens

    def learn(self, context_length: int, nodes: int, tokens: int) -> None:
        """A row's forward over `nodes` draft nodes emitted `tokens`."""
        if self._curve is not None and self._fixed is None:
            costs = self._costs(context_length)
            self._tokens = RATE_DECAY * self._tokens + tokens
            self._cost = RATE_DECAY * self._cost + costs[min(nodes, len(costs) - 1)]

    def _costs(self, context_length: int) -> npt.NDArray[np.float64]:
        assert self._curve is not None
        step = context_length // CONTEXT_STEP
        if step not in self._relative:
            self._relative[step] = self._curve.relative(step * CONTEXT_STEP)
        return self._relative[step]
