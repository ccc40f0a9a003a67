"""The KV cache of drafting: preallocated, compacted in place. The only module that knows how HF caches are laid out.

Invariant: row r holds its `lengths[r]` committed tokens in slots 0 … lengths[r]-1 (minus `first` in a sliding layer):
a slot is a logical position, also in a left-padded batch. A forward writes its nodes behind them; `commit` keeps the
accepted ones. The spine lies first, so the usual commit only moves a length.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from retrodraft.compat import CACHE_ARGS, DUMMY_LAYER, INDEXED_LAYER

FIRST_ROOM = 256  # slots beyond the prompt of a first allocation
GRAIN, FIRST_GRAIN = 64, 512  # slots; an aligned view ends at a multiple of one and begins at one of the other
ROLLBACK_ROOM = 64  # tokens by which a layer that keeps a window alone can be rolled back at any time


class DraftLayer(CacheLayerMixin):
    """Keys and values [batch_size, num_heads, capacity, head_dim] of one layer.

    With a `window`, a single row keeps what the window can still see (as HF does); several rows keep all and leave the
    window to the mask, since rows that accept different numbers of tokens have no common window.
    """

    is_croppable = False  # `commit` and `DraftCache.rollback` are the ways back
    is_compileable = False

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.is_sliding = window is not None  # which transformers asks where it sizes the masks
        self.lengths: list[int] = []  # committed tokens of each row
        self.first = 0  # logical position of slot 0
        self.staged = False  # whether a forward's tokens wait for `commit`
        self.aligned = False  # whether queries are shown whole blocks of slots: kernels then add in the same order

    @property
    def _slides(self) -> bool:
        return len(self.lengths) <= 1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the first states seen."""
        self.dtype, self.device = key_states.dtype, key_states.device
        if not self.lengths:
            self.lengths = [0] * key_states.shape[0]
        room = key_states.shape[-2] + FIRST_ROOM
        self.keys, self.values = _room(key_states, room), _room(value_states, room)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write behind the committed tokens; returns what the queries may attend to, as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        count = key_states.shape[-2]
        start, end = self._visible(count)
        begin = max(self.lengths) - self.first
        if end > self.keys.shape[-2]:
            self.keys, self.values = _grown(self.keys, end), _grown(self.values, end)
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if min(self.lengths) == max(self.lengths):
                buffer[:, :, begin : begin + count] = states
            else:
                for row, length in enumerate(self.lengths):
                    place = length - self.first
                    buffer[row, :, place : place + count] = states[row]
        views = self.keys[:, :, start:end], self.values[:, :, start:end]
        if not self.staged:
            self.lengths = [length + count for length in self.lengths]
            self._trim()
        return views

    def _visible(self, count: int) -> tuple[int, int]:
        """First and last slot + 1 that `count` new queries attend to."""
        end = max(self.lengths) - self.first
        start = max(end - self.window + 1, 0) if self.window is not None and self._slides else 0
        end += count
        if self.aligned:
            start, end = start - start % FIRST_GRAIN, end + -end % GRAIN
        return start, end

    def commit(self, lengths: list[int], moves: list[list[tuple[int, int, int]]]) -> None:
        """Keep so many more slots of each row, after `moves[r]`: (to, from, count) among the nodes of its tree."""
        if not self.is_initialized:
            return
        assert self.keys is not None and self.values is not None
        for row, length in enumerate(lengths):
            begin = self.lengths[row] - self.first
            for to, source, count in moves[row]:
                for buffer in (self.keys, self.values):
                    states = buffer[row, :, begin + source : begin + source + count]
                    overlap = source < to + count
                    buffer[row, :, begin + to : begin + to + count] = states.clone() if overlap else states
            self.lengths[row] += length
        self._trim()

    def align(self, pads: list[int]) -> None:
        """Drop the left padding of a prompt: move each row so that its first token lies in slot 0."""
        if not self.is_initialized:
            return
        assert self.keys is not None and self.values is not None
        for row, pad in enumerate(pads):
            drop = max(pad - self.first, 0)
            held = self.lengths[row] - self.first
            for buffer in (self.keys, self.values) if drop else ():
                buffer[row, :, : held - drop] = buffer[row, :, drop:held].clone()
            self.lengths[row] -= pad
        self.first = max(self.first - max(pads), 0)

    def rollback(self, length: int) -> bool:
        """Forget all but the first `length` tokens of every row; False if a window does not reach back from there."""
        if self.window is not None and self.first > max(length - self.window + 1, 0):
            return False
        if length < max(self.lengths, default=0):
            self.lengths = [min(length, held) for held in self.lengths]
        return True

    def _trim(self) -> None:
        """Slide a window's tail to the front once the slots run out; amortised O(1) a token."""
        if self.window is None or not self._slides:
            return
        assert self.keys is not None and self.values is not None
        end = self.lengths[0] - self.first
        kept = min(end, self.window - 1 + ROLLBACK_ROOM)
        if self.aligned:
            kept += (end - kept) % FIRST_GRAIN  # a slot stays where it was within its block
        if end - kept <= max(self.window, FIRST_ROOM):
            return
        capacity = 2 * max(self.window, FIRST_ROOM)
        self.keys, self.values = (
            _room(buffer[:, :, end - kept : end], capacity, copy=True) for buffer in (self.keys, self.values)
        )
        self.first = self.lengths[0] - kept

    def get_seq_length(self) -> int:
        """Committed tokens of the longest row."""
        return max(self.lengths, default=0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys the next `query_length` queries see, and the logical position of the first one."""
        if not self.lengths:
            return query_length, 0
        start, end = self._visible(query_length)
        return end - start, self.first + start

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    def restored(self, pads: list[int], total: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in HF's layout: `pads[r]` empty slots, the row's tokens, empty slots up to `total`."""
        assert self.keys is not None and self.values is not None
        if len(self.lengths) == 1 and not pads[0]:
            end = self.lengths[0] - self.first
            start = max(end - self.window + 1, 0) if self.window is not None else 0
            return self.keys[:, :, start:end], self.values[:, :, start:end]
        laid_out = []
        for buffer in (self.keys, self.values):
            full = buffer.new_zeros(*buffer.shape[:2], total - self.first, buffer.shape[-1])
            for row, (pad, length) in enumerate(zip(pads, self.lengths, strict=True)):
                full[row, :, pad : pad + length - self.first] = buffer[row, :, : length - self.first]
            laid_out.append(full if self.window is None else full[:, :, -self.window + 1 :])
        return laid_out[0], laid_out[1]


def _room(states: torch.Tensor, capacity: int, copy: bool = False) -> torch.Tensor:
    """Buffer of `capacity` slots for states of this shape; with `copy`, the states lie at its front.

    Zeros, since a short row's unused slots take part in attention: masked, but zero times NaN is NaN.
    """
    with torch.inference_mode(False):  # a buffer that grows in a forward is written to outside of it as well
        buffer = states.new_zeros(*states.shape[:2], max(capacity, states.shape[-2]), states.shape[-1])
    if copy:
        buffer[:, :, : states.shape[-2]] = states
    return buffer


def _grown(buffer: torch.Tensor, needed: int) -> torch.Tensor:
    return _room(buffer, max(needed, 2 * buffer.shape[-2]), copy=True)


class DraftCache(Cache):
    """A `DraftLayer` for each attention layer of an HF dynamic cache, in place of which the model runs on it."""

    def __init__(self, native: Cache, batch_size: int) -> None:
        layers = [_layer_for(layer) for layer in native.layers]
        if layers:
            super().__init__(layers=layers)
        else:
            super().__init__(layer_class_to_replicate=DraftLayer)
        for layer, source in zip(self.layers, native.layers, strict=True):
            if isinstance(layer, DraftLayer) and source.is_initialized and source.get_seq_length():
                layer.lengths = [source.get_seq_length()] * batch_size
                layer.first = source.get_seq_length() - source.keys.shape[-2]
                layer.dtype, layer.device = source.keys.dtype, source.keys.device
                layer.keys = _room(source.keys, source.keys.shape[-2] + FIRST_ROOM, copy=True)
                layer.values = _room(source.values, source.keys.shape[-2] + FIRST_ROOM, copy=True)
                layer.is_initialized = True

    @property
    def draft_layers(self) -> list[DraftLayer]:
        """The layers that hold keys and values."""
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        return self.draft_layers[0].lengths

    def stage(self, staged: bool = True, aligned: bool = False) -> None:
        """From now on a forward's tokens wait for `commit` (or, with False, count at once).

        `aligned` forwards are shown slots behind their own as well, up to a round number; masks must hide those.
        """
        for layer in self.draft_layers:
            layer.staged, layer.aligned = staged, aligned

    def align(self, pads: list[int]) -> None:
        """Drop the left padding of the prompt, row by row."""
        if any(pads):
            for layer in self.draft_layers:
                layer.align(pads)

    def commit(self, paths: list[list[int]]) -> None:
        """Keep the nodes `paths[r]` (ascending, root first) of each row's last tree and forget the others."""
        lengths, moves = [len(path) for path in paths], [moves_of(path) for path in paths]
        for layer in self.draft_layers:
            layer.commit(lengths, moves)

    def rollback(self, length: int) -> bool:
        """Forget all but the first `length` tokens; False, with an unusable cache, if a sliding window is past them."""
        return all([layer.rollback(length) for layer in self.draft_layers])

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, used or not."""
        held = (buffer for layer in self.draft_layers for buffer in (layer.keys, layer.values))
        return sum(buffer.numel() * buffer.element_size() for buffer in held if buffer is not None)

    def export(self, native: Cache, pads: list[int], total: int) -> None:
        """Write the committed tokens back into the HF cache that this one stood in for, `total` slots long."""
        if isinstance(native, DynamicCache) and not native.layers:
            native.layers.extend(DynamicLayer() for _ in self.layers)
        for layer, target in zip(self.layers, native.layers, strict=True):
            if not isinstance(layer, DraftLayer) or not layer.is_initialized:
                continue
            keys, values = layer.restored(pads, total)
            target.lazy_initialization(keys, values)
            target.keys, target.values = keys, values
            if hasattr(target, "cumulative_length"):
                target.cumulative_length = total


def moves_of(path: list[int]) -> list[tuple[int, int, int]]:
    """(to, from, count) of each run of an ascending path that does not lie where it belongs; none of a spine's."""
    moves: list[tuple[int, int, int]] = []
    for to, source in enumerate(path):
        if to == source:
            continue
        if moves and moves[-1][1] + moves[-1][2] == source:
            moves[-1] = (moves[-1][0], moves[-1][1], moves[-1][2] + 1)
        else:
            moves.append((to, source, 1))
    return moves


def cached_length(cache: Cache) -> int:
    """Tokens whose keys and values a cache holds; 0 where it holds recurrent states alone, which have no length."""
    return int(cache.get_seq_length()) if any(isinstance(layer, CacheLayerMixin) for layer in cache.layers) else 0


def fresh_cache(model: Any, kwargs: dict[str, Any]) -> None:
    """Put an empty HF cache in place of a `DraftCache` among the arguments of a decoding loop that is not ours.

    The loop is given the whole text, so nothing is lost but the time to feed it again.
    """
    for name in CACHE_ARGS:
        if isinstance(kwargs.get(name), DraftCache):
            kwargs[name] = DynamicCache(config=model.config.get_text_config(decoder=True))


def unsupported_layer(native: Cache) -> str | None:
    """Why a cache can't be drafted on, or None: only plain, growing keys and values can be rolled back row by row."""
    if type(native) is not DynamicCache or getattr(native, "offloading", False):
        return f"a {type(native).__name__} can't be rolled back"
    if INDEXED_LAYER is not None and any(type(layer) is INDEXED_LAYER for layer in native.layers):
        return "its sparse-attention cache (DynamicIndexedLayer) can't be rolled back row by row"
    known = (DynamicLayer, DynamicSlidingWindowLayer, DUMMY_LAYER)
    for layer in native.layers:
        if type(layer) not in known:
            return f"its cache layer {type(layer).__name__} can't be rolled back"
    return None


def _layer_for(layer: Any) -> Any:
    """Our counterpart of an HF cache layer; a layer without states of its own is used as it is."""
    if DUMMY_LAYER is not None and isinstance(layer, DUMMY_LAYER):
        return layer
    return DraftLayer(getattr(layer, "sliding_window", None))
