"""Which form of a linear layer is the fastest here, for few rows of a model's weights: measured once, and stored.

It depends on the processor, the dtype, the number of threads and the sizes (`kernels/few_rows.py` says why), so nothing
is assumed: every form multiplies by some of the model's own weights.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from time import perf_counter
from typing import Any

import torch
from torch.nn.functional import linear

from retrodraft.folders import cache_folder, keep
from retrodraft.kernels.few_rows import Form, forms_for
from retrodraft.kernels.tile_product import PROCESSOR

VERSION = 1  # of the measurement
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of a forward; others are served by the next one up
LEAST_WEIGHTS = 1 << 15  # of a layer; a smaller one is left to torch
SAMPLE_BYTES = 16 << 20  # of the weights of one size, so that they come from memory as in a forward
REPEATS = 3
GAIN = 0.95  # share of torch's time below which another form is taken

Size = tuple[int, int]  # out_features, in_features
Names = dict[Size, list[str | None]]  # the fastest form for each number of ROWS; None: torch's

_known: dict[str, Names] = {}  # by key


class LinearForms:
    """The fastest form by number of rows and size of the weight."""

    def __init__(self, dtype: torch.dtype, names: Names, forms: dict[Size, dict[str, Form]]) -> None:
        self.dtype = dtype
        self._at: list[dict[Size, Form]] = [
            {size: form for size, chosen in names.items() if (form := forms[size].get(chosen[i] or "")) is not None}
            for i in range(len(ROWS))
        ]

    def at(self, rows: int) -> dict[Size, Form]:
        """The forms to be used in a forward over so many rows; a size that is not in it is left to torch."""
        return next((forms for most, forms in zip(ROWS, self._at, strict=True) if rows <= most), {})


def fastest_linear(model: Any) -> LinearForms:
    """The forms for a model's linear layers: the stored ones, else measured now."""
    samples = _samples(model)
    forms = {size: forms_for(weights[0]) for size, weights in samples.items()}
    samples = {size: weights for size, weights in samples.items() if forms[size]}
    if not samples:
        return LinearForms(model.dtype, {}, {})
    key = _key(model.dtype, samples)
    if key not in _known:
        path = cache_folder() / f"linear-{key}.json"
        names = _stored(path, samples)
        if names is None:
            names = _measured(samples, forms)
            keep(path, {"forms": [[*size, chosen] for size, chosen in names.items()]})
        _known[key] = names
    return LinearForms(model.dtype, _known[key], forms)


def _samples(model: Any) -> dict[Size, list[torch.Tensor]]:
    """Up to SAMPLE_BYTES of the linear layers' weights, by size; rows of them where a single one is larger."""
    samples: dict[Size, list[torch.Tensor]] = {}
    for module in model.modules():
        weight = module._parameters.get("weight") if isinstance(module, torch.nn.Linear) else None
        if type(weight) is not torch.nn.Parameter or weight.layout is not torch.strided or weight.dim() != 2:
            continue
        if weight.dtype is not model.dtype or weight.device.type != "cpu" or not weight.is_contiguous():
            continue
        if weight.numel() >= LEAST_WEIGHTS:
            weights = samples.setdefault((weight.shape[0], weight.shape[1]), [])
            room = SAMPLE_BYTES // max(weight.nbytes // weight.shape[0], 1) - sum(len(each) for each in weights)
            if room > 0:
                weights.append(weight.detach()[:room])
    return samples


def _measured(samples: dict[Size, list[torch.Tensor]], forms: dict[Size, dict[str, Form]]) -> Names:
    """Time every form at every number of rows, all sizes in turn; the medians decide."""
    names: Names = {size: [] for size in samples}
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        for rows in ROWS:
            inputs = {size: weights[0].new_ones(rows, size[1]) for size, weights in samples.items()}
            seconds: dict[tuple[Size, str | None], list[float]] = {}
            for attempt in range(REPEATS + 1):
                for name in (None, "tiles", "columns"):
                    for size, weights in samples.items():
                        form = linear if name is None else forms[size].get(name)
                        if form is None:
                            continue
                        start = perf_counter()
                        for weight in weights:
                            form(inputs[size], weight, None)
                        if attempt:  # the first round warms up
                            seconds.setdefault((size, name), []).append(perf_counter() - start)
            for size, chosen in names.items():
                medians = {name: statistics.median(times) for (of, name), times in seconds.items() if of == size}
                most = GAIN * medians.pop(None)
                best = min(medians, key=medians.__getitem__)
                chosen.append(best if medians[best] < most else None)
    return names


def _stored(path: Any, samples: dict[Size, list[torch.Tensor]]) -> Names | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        names: Names = {(out, in_): chosen for out, in_, chosen in record["forms"]}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None  # absent, or damaged: measured anew
    sound = names.keys() == samples.keys() and all(
        isinstance(chosen, list)
        and len(chosen) == len(ROWS)
        and all(each is None or type(each) is str for each in chosen)
        for chosen in names.values()
    )
    return names if sound else None


def _key(dtype: torch.dtype, samples: dict[Size, list[torch.Tensor]]) -> str:
    """What the times depend on, as a short hash."""
    parts = (VERSION, ROWS, PROCESSOR, torch.get_num_threads(), torch.__version__, str(dtype), sorted(samples))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
