"""Linear layers over few rows, on a CPU: forms of `x @ weight.T` that read the weight as it lies.

Before they multiply, oneDNN and MKL bring the right-hand matrix into a layout of their own. In `x @ weight.T` that is
the whole weight, at every call: for the rows of a draft tree it takes up to as long as the product. `by_tiles` is a
kernel of our own, in which nothing is rearranged (`tile_product.py`). `by_columns` computes `(weight @ x.T).T`, where
the small matrix is the one that is. The same sums, added in another order.

Which one is fastest depends on dtype, processor and sizes: `retrodraft.fastest_linear` measures it.
"""

from collections.abc import Callable

import torch

from retrodraft.kernels.openmp import has_threads
from retrodraft.kernels.tile_product import LANES, STEP, TAKES_BFLOAT16, TILE_ROWS, run_product

Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def forms_for(weight: torch.Tensor) -> dict[str, Form]:
    """The forms that this weight can be multiplied by here, by name: a matrix of float32 or bfloat16 in memory."""
    forms: dict[str, Form] = {}
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return forms
    out_features, in_features = weight.shape
    if LANES and weight.is_contiguous() and out_features >= TILE_ROWS and in_features % STEP == 0:
        forms["tiles"] = by_tiles
    if torch.backends.mkldnn.is_available():
        if weight.dtype is torch.bfloat16 or hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            forms["columns"] = by_columns
    return forms


def by_tiles(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias` for `x` [..., in_features] of few rows and a weight of `forms_for`; without a gradient."""
    out_features, in_features = weight.shape
    in_bfloat16 = weight.dtype is torch.bfloat16
    rows = x.resolve_neg().reshape(-1, in_features).contiguous()
    if in_bfloat16 and not TAKES_BFLOAT16:
        rows = rows.float()
    count = rows.shape[0]
    output = torch.empty(count, out_features, dtype=torch.float32, device="cpu")
    run_product(
        weight.data_ptr(), in_bfloat16, rows.data_ptr(), output.data_ptr(),
        count, in_features, out_features, torch.get_num_threads() if has_threads() else 1,
    )  # fmt: skip
    if bias is not None:
        output += bias
    return output.to(x.dtype).view(*x.shape[:-1], out_features)


def by_columns(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same, by oneDNN."""
    if x.dtype == torch.float32:
        output = torch.ops.mkldnn._linear_pointwise(weight, x.reshape(-1, x.shape[-1]), None, "none", [], "").t()
        if bias is not None:
            output = output + bias
        return output.contiguous().view(*x.shape[:-1], weight.shape[0])
    # Batched, since `mm` takes a slower way for a single row; torch tells a transposed batch by all three strides.
    columns = x.reshape(1, -1, x.shape[-1]).transpose(1, 2)
    if bias is None:
        output = torch.bmm(weight[None], columns)
    else:
        output = torch.baddbmm(bias[None, :, None], weight[None], columns)
    return output.transpose(1, 2).contiguous().view(*x.shape[:-1], weight.shape[0])
