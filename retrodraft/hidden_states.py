"""The target's hidden states, read from forwards: what its output head is given, after the last norm."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Float32 = npt.NDArray[np.float32]


class HeadStates:
    """The hidden states that the output head was last given in this thread, and those of a call's visited nodes."""

    def __init__(self, model: Any, num_rows: int, keep: bool) -> None:
        self._head = model.get_output_embeddings()
        self._seen: torch.Tensor | None = None  # [batch_size, num_positions, hidden]
        self._keep = keep
        self._visited: list[list[Float32]] = [[] for _ in range(num_rows)]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Watch the forwards inside."""
        own = threading.get_ident()

        def watch(module: Any, args: Any) -> None:
            # The head is also applied to pieces of the prompt, which are matrices.
            if threading.get_ident() == own and args and args[0].dim() == 3:
                self._seen = args[0].detach()

        handle = self._head.register_forward_pre_hook(watch)
        try:
            yield
        finally:
            handle.remove()

    def take(self, row: int, nodes: list[int]) -> Float32 | None:
        """State [hidden] of the last of the visited `nodes` of a row; all of them are kept where that was asked for."""
        if self._seen is None:
            if self._keep:
                raise ValueError("this model's hidden states can't be read: its output head is not called as a module")
            return None
        wanted = nodes if self._keep else nodes[-1:]
        states: Float32 = self._seen[row, wanted].float().cpu().numpy()
        if self._keep:
            self._visited[row].append(states)
        return states[-1]

    def visited(self, row: int) -> Float32:
        """States [num_nodes, hidden] of all visited nodes of a row, in their order: the prompt's last token first."""
        return np.concatenate(self._visited[row])


def last_hidden_states(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """What the output head is given at `token_ids` [batch_size, num_positions]; one position's logits only are made."""
    seen: list[torch.Tensor] = []

    def cut(module: Any, args: Any) -> Any:
        seen.append(args[0])
        return (args[0][:, :1], *args[1:])

    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output head, whose inputs the keys are made of")
    handle = head.register_forward_pre_hook(cut)
    try:
        with torch.inference_mode():
            model(input_ids=token_ids.to(model.device), use_cache=False, return_dict=True)
    finally:
        handle.remove()
    if not seen:
        raise ValueError(f"{type(model).__name__}'s hidden states can't be read: its output head is not called")
    return seen[0]
