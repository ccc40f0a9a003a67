"""What a replayed step would have cost: cost curves from files, and the time of a forward by its draft nodes."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from retrodraft.budget import CostCurve

EXAMPLE_CURVE = "cpu-smollm2-135m-bfloat16"


class Costs:
    """Predicted seconds of a forward by its context and its draft nodes; beyond its end the curve goes on straight."""

    def __init__(self, curve: CostCurve, max_nodes: int) -> None:
        self._curve, self._max_nodes = curve, max_nodes
        self._seconds: dict[int, npt.NDArray[np.float64]] = {}

    def seconds(self, context_length: int) -> npt.NDArray[np.float64]:
        """Of forwards over 0, 1, … `max_nodes` nodes; the context is taken in steps of 128 tokens."""
        from retrodraft.budget import CONTEXT_STEP

        step = context_length // CONTEXT_STEP
        if step not in self._seconds:
            curve = self._curve
            relative = curve.relative(step * CONTEXT_STEP)
            end = relative[-1] + (relative[-1] - relative[-2]) * np.arange(1, self._max_nodes + 2)
            plain = curve.seconds[0][0]
            if len(curve.seconds) > 1:
                low, high = curve.context_lengths[0], curve.context_lengths[-1]
                share = min(max((step * CONTEXT_STEP - low) / (high - low), 0.0), 4.0)  # as `relative` does
                plain = max(plain + share * (curve.seconds[-1][0] - plain), plain)
            self._seconds[step] = plain * np.concatenate([relative, end])
        return self._seconds[step]


def shipped_curves() -> list[str]:
    """Names of the example cost curves."""
    folder = files("retrodraft") / "data" / "curves"
    return sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json"))


def load_curve(name: str) -> tuple[CostCurve, dict[str, Any]]:
    """A cost curve by the name of a shipped example or from a JSON file, and a description of it.

    The file holds `context_lengths`, `tree_sizes` and `seconds`, as `retrodraft profile` keeps them, and may hold a
    `note`. Raises ValueError if it can't be read or is no curve.
    """
    from retrodraft.budget import CostCurve

    example = name in shipped_curves()
    source = files("retrodraft") / "data" / "curves" / f"{name}.json" if example else Path(name)
    try:
        record = json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"profile {name!r} can't be read: give a curve's JSON file, or one of {', '.join(shipped_curves())}"
        ) from error
    except ValueError as error:
        raise ValueError(f"profile {name!r} is not JSON") from error
    try:
        curve = CostCurve(record["context_lengths"], record["tree_sizes"], record["seconds"])
        shape = np.array(curve.seconds, np.float64).shape
        lengths, sizes = np.array(curve.context_lengths), np.array(curve.tree_sizes)
        whole = lengths.dtype.kind == sizes.dtype.kind == "i" and shape == (len(lengths), len(sizes))
        sound = whole and len(lengths) > 0 and len(sizes) > 1 and sizes[0] == 1 and bool(np.all(np.diff(sizes) > 0))
        sound = sound and bool(np.all(np.diff(lengths) > 0)) and bool(np.all(np.array(curve.seconds) > 0))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"profile {name!r} is no cost curve: it needs context_lengths, tree_sizes, seconds") from error
    if not sound:
        raise ValueError(
            f"profile {name!r} is no cost curve: it needs rising context_lengths, rising tree_sizes from 1, and a row "
            "of positive seconds for each context length"
        )
    return curve, {"name": name, "example": example, "note": str(record.get("note", "")), **asdict(curve)}
