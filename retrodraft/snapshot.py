"""Drafting on recurrent states (Mamba-2, gated delta nets and hybrids): chains, with a snapshot to return to.

A recurrent state cannot branch and cannot be cut back, but it is small: it is copied before a chain is verified. Where
the tail of the chain is rejected, the copy is put back, keys and values are cropped, and the accepted tokens are fed
again in front of the next chain.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from retrodraft.compat import cache_arg


class SnapshotVerifier:
    """One row's cache, its newest snapshot, and the tokens that wait to be fed again."""

    def __init__(self, model: Any, cache: Cache | None = None) -> None:
        self.model = model
        self.cache = cache if cache is not None else DynamicCache(config=model.config.get_text_config(decoder=True))
        self.replay: list[int] = []  # accepted tokens that are not in the cache
        self._fed: list[int] = []  # tokens of the last forward
        self._snapshot: list[Any] = []

    def prefill(self, input_ids: torch.Tensor) -> Any:
        """Feed the prompt [1, length]; returns the model's output."""
        return self.model(input_ids=input_ids, use_cache=True, **{cache_arg(self.model): self.cache})

    def verify(self, token_ids: list[int], **forward_kwargs: Any) -> torch.Tensor:
        """Logits [len(token_ids), vocab_size] after each of the tokens, root first."""
        return self.forward(token_ids, **forward_kwargs).logits[0, -len(token_ids) :]

    def forward(self, token_ids: list[int], **forward_kwargs: Any) -> Any:
        """One forward over what is to be fed again and `token_ids`; its positions are the last ones of the output."""
        for layer in self.cache.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()  # else a window that has moved on can't be cropped
        self._snapshot = [_copied(layer) for layer in self.cache.layers]
        self._fed = self.replay + token_ids
        ids = torch.tensor([self._fed], device=self.model.device)
        return self.model(input_ids=ids, use_cache=True, **{cache_arg(self.model): self.cache}, **forward_kwargs)

    def commit(self, accepted: int) -> None:
        """Keep the first `accepted` tokens of the last `verify`."""
        kept = len(self.replay) + accepted
        complete = kept == len(self._fed)
        for index, layer in enumerate(self.cache.layers):
            if self._snapshot[index] is None:
                layer.crop(0 if complete else -len(self._fed))
            elif not complete:
                self.cache.layers[index] = self._snapshot[index]
        self.replay = [] if complete else self._fed[:kept]

    def flush(self) -> None:
        """Feed what still waits, so that the cache holds every committed token."""
        if self.replay:
            self.forward([])
            self.commit(0)


def _copied(layer: Any) -> Any:
    """A copy of a layer with recurrent or convolution states; None for plain keys and values, which can be cropped."""
    if isinstance(layer, CacheLayerMixin) and not hasattr(layer, "recurrent_states"):
        return None
    return copy.deepcopy(layer)
