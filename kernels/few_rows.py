"""Linear layers over few rows, on a CPU: the form in which the weight is read as it lies.

Before they multiply, oneDNN and MKL bring the right-hand matrix into a layout of their own. In `x @ weight.T` that is
the whole weight, at every call: for the rows of a draft tree it takes up to as long as the product. Computed as
`(weight @ x.T).T` the small matrix is the one that is brought over. The same sums, added in another order.

Whether it pays depends on dtype, processor and size. Measured on a Xeon with AMX, one thread and two, by
`benchmarks/few_rows.py`: bfloat16 takes 0.5 to 0.9 times as long up to 16 rows and gains little beyond, but loses where
AMX is switched off; float32, by oneDNN in place of MKL, takes 0.4 to 0.9 times as long from 6 rows on, but loses where
the weight is small.
"""

from typing import NamedTuple

import torch


class Range(NamedTuple):
    """Where the form pays: rows of a forward, and the least number of weights of a layer."""

    dtype: torch.dtype
    min_rows: int
    max_rows: int
    min_weights: int


def _ranges() -> list[Range]:
    """What pays on this machine."""
    ranges = []
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    if torch.backends.mkldnn.is_available():
        if has_amx():
            ranges.append(Range(torch.bfloat16, 1, 24, 0))
        if torch.backends.cpu.get_cpu_capability() == "AVX512" and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            ranges.append(Range(torch.float32, 6, 64, 1_500_000))
    return ranges


RANGES = _ranges()


def range_for(dtype: torch.dtype, device: torch.device, rows: int) -> Range | None:
    """Where the form pays in a forward over `rows` rows of a model of that dtype; None: nowhere."""
    if device.type != "cpu":
        return None
    return next((span for span in RANGES if span.dtype is dtype and span.min_rows <= rows <= span.max_rows), None)


def few_rows_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias` for `x` [..., in_features] of few rows, `weight` [out_features, in_features].

    Contiguous, and without a gradient.
    """
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
