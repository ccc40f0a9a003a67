"""What `generate` returns besides tokens: scores, logits, attentions and hidden states of the accepted positions."""

from __future__ import annotations

from typing import Any

import torch


class Recorder:
    """Collects one row's outputs, an entry for each emitted token, in the shapes of plain decoding."""

    def __init__(self, generation_config: Any, layer_windows: list[int | None]) -> None:
        wanted = bool(generation_config.return_dict_in_generate)
        self.logits: list[torch.Tensor] | None = [] if wanted and generation_config.output_logits else None
        self.attentions: list[Any] | None = [] if wanted and generation_config.output_attentions else None
        self.hidden_states: list[Any] | None = [] if wanted and generation_config.output_hidden_states else None
        self.layer_windows = layer_windows

    def record_prefill(self, output: Any, row: int) -> None:
        """The first token's entries come from the prompt's forward, whole."""
        if self.logits is not None:
            self.logits.append(output.logits[row : row + 1, -1].to(copy=True, dtype=torch.float32))
        if self.attentions is not None:
            self.attentions.append(output.attentions)
        if self.hidden_states is not None:
            self.hidden_states.append(output.hidden_states)

    def record(self, output: Any, row: int, path: list[int], offset: int = 0) -> None:
        """Entries of the visited nodes; node n of the tree is the forward's query `offset + n`."""
        for depth, node in enumerate(path):
            query = offset + node
            if self.logits is not None:
                self.logits.append(output.logits[row : row + 1, query].to(copy=True, dtype=torch.float32))
            if self.hidden_states is not None:
                self.hidden_states.append(tuple(layer[:, query : query + 1] for layer in output.hidden_states))
            if self.attentions is not None:
                visible = [*range(offset), *(offset + kept for kept in path[: depth + 1])]  # what was fed again, too
                self.attentions.append(
                    tuple(
                        _attention_row(layer, query, visible, self.layer_windows[index])
                        for index, layer in enumerate(output.attentions)
                    )
                )


def _attention_row(layer: torch.Tensor, query: int, visible: list[int], window: int | None) -> torch.Tensor:
    """Attention [1, heads, 1, keys] of one query as plain decoding has it: the committed keys, then its ancestors."""
    prefix = layer.shape[-1] - layer.shape[-2]
    columns = list(range(prefix)) + [prefix + node for node in visible]
    if window is not None:
        columns = columns[-window:]
    return layer[:, :, query : query + 1, columns]


def stacked(rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """One [batch_size, vocab_size] tensor a step; rows that had finished by then have zeros."""
    steps = max(len(row) for row in rows)
    blank = torch.zeros_like(rows[0][0])
    return tuple(torch.cat([row[step] if step < len(row) else blank for row in rows]) for step in range(steps))
