"""Tree attention for any Hugging Face model: its own mask functions, asked about logical positions.

Every mask of a transformers model is built from a function of (batch, head, query index, key index): causal, sliding,
chunked. A draft tree is appended to the cache behind `length` committed tokens: slot `length + i` holds node i, whose
position is `length + depth[i]`. `tree_mask_function` asks the model's own function about those positions and allows,
within the tree, ancestors alone. One code path serves every attention pattern, and rows may have different trees.
"""

from collections.abc import Callable

import torch

MaskFunction = Callable[..., torch.Tensor]


class TreeLayout:
    """Where the nodes of a batch of trees lie: lengths, depths and ancestors, padded to one number of nodes."""

    def __init__(
        self,
        lengths: torch.Tensor,  # int64 [batch_size] committed tokens of each row
        depths: torch.Tensor,  # int64 [batch_size, num_nodes]
        ancestors: torch.Tensor,  # bool [batch_size, num_nodes, num_nodes]
        length: int = 0,  # of the first row, where it is the only one
        prefix_mask: "PrefixMask | None" = None,  # for one row: the full-attention mask is cut from it
    ) -> None:
        self.lengths, self.depths, self.ancestors = lengths, depths, ancestors
        self.num_nodes = depths.shape[1]
        self.length, self.prefix_mask = length, prefix_mask
        self.group_masks: dict[int, torch.Tensor] = {}  # by `id` of the mask that each was made of

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 [batch_size, num_nodes]: committed length + depth."""
        return self.lengths[:, None] + self.depths


def tree_mask_function(layout: TreeLayout, mask_function: MaskFunction, query_offset: int) -> MaskFunction:
    """The model's `mask_function` over a cache that ends in a tree; queries are numbered from `query_offset` on."""

    def inner(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        node = query - query_offset
        length = layout.lengths[batch]
        key_node = key - length
        in_tree = key_node >= 0
        column = key_node.clamp(0, layout.num_nodes - 1)
        key_position = torch.where(in_tree, length + layout.depths[batch, column], key)
        allowed = mask_function(batch, head, length + layout.depths[batch, node], key_position)
        visible = ~in_tree | ((key_node < layout.num_nodes) & layout.ancestors[batch, node, column])
        return allowed & visible

    return inner


def grouped_attention(
    layout: TreeLayout,
    query: torch.Tensor,  # [batch_size, num_heads, num_nodes, head_dim]
    key: torch.Tensor,  # [batch_size, num_kv_heads, num_keys, head_dim]
    value: torch.Tensor,
    mask: torch.Tensor,  # [batch_size or 1, 1, num_nodes, num_keys]
    scale: float | None,
) -> torch.Tensor:
    """Attention [batch_size, num_nodes, num_heads, head_dim] in which a group's query heads read their keys once.

    The group is laid out along the queries. Repeating keys and values for each query head instead, as transformers does
    under a mask, copies the whole cache at every layer.
    """
    batch_size, num_heads, num_nodes, _ = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    if id(mask) not in layout.group_masks:
        layout.group_masks[id(mask)] = _additive(mask, query.dtype).repeat(1, 1, group, 1)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch_size, num_kv_heads, group * num_nodes, query.shape[-1]),
        key, value, attn_mask=layout.group_masks[id(mask)], scale=scale,
    )  # fmt: skip
    output = output.view(batch_size, num_heads, num_nodes, value.shape[-1])
    return output.transpose(1, 2).contiguous()


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask as what is added to the scores; torch would convert a bool mask anew at every layer."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


class PrefixMask:
    """Full-attention masks of one row's trees without work that grows with the context.

    The prefix is visible to every node, so one buffer of "visible" is kept and only the tree's own block is written.
    """

    def __init__(self, visible: torch.Tensor, hidden: torch.Tensor) -> None:
        self._visible, self._hidden = (visible, hidden)  # scalars: True / False, or 0 / lowest float
        self._buffer = visible.new_empty((0, 0))
        self._width = 0  # of the newest mask

    def cut(self, ancestors: torch.Tensor, length: int, width: int) -> torch.Tensor:
        """Mask [1, 1, num_nodes, width] of a tree with bool `ancestors` [num_nodes, num_nodes] behind `length` tokens.

        What lies behind the tree is hidden.
        """
        nodes = ancestors.shape[0]
        rows, columns = self._buffer.shape
        if nodes > rows or width > columns:
            shape = (max(nodes, rows), max(width + width // 2 + 256, columns))
            self._buffer = self._visible.expand(shape).clone()
        mask = self._buffer[:nodes, :width]
        mask[:, length : length + nodes] = torch.where(ancestors, self._visible, self._hidden)
        mask[:, length + nodes :] = self._hidden
        self._width = width
        return mask[None, None]

    def clear(self, length: int, nodes: int) -> None:
        """Make the tree's block visible again, as it will be once tokens are committed over it, and what lay behind."""
        self._buffer[:nodes, length : self._width] = self._visible
