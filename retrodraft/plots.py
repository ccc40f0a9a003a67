"""Figures; the only module that imports matplotlib (`pip install 'retrodraft[plots]'`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def require_matplotlib() -> None:
    """Raise ValueError where figures can't be drawn: to be asked before hours of measuring, not after."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("figures need matplotlib: pip install 'retrodraft[plots]'")


def axes_of_size(width: float, height: float) -> tuple[Any, Any]:
    """An empty figure of so many inches, and its axes."""
    require_matplotlib()
    from matplotlib.figure import Figure  # not pyplot, which would choose a display and keep every figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def plot_cost_curve(curve: Any, path: Path) -> None:
    """Latency of a verify forward by its number of tokens, a line for each context length; writes a PNG."""
    figure, axes = axes_of_size(6.4, 4.0)
    for length, seconds in zip(curve.context_lengths, curve.seconds, strict=True):
        axes.plot(curve.tree_sizes, [1e3 * value for value in seconds], marker="o", label=f"{length} tokens of context")
    axes.set_xlabel("tokens in the forward (root and draft nodes)")
    axes.set_ylabel("milliseconds")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150, format="png")


def plot_speedups(results: dict[str, Any], path: Path) -> None:
    """Median speedup over plain by category and system, with its interval; writes a PNG."""
    systems = [name for name in results["systems"] if name != "plain"]
    categories = ["overall", *results["systems"][systems[0]]["categories"]]
    figure, axes = axes_of_size(max(6.4, 0.32 * len(systems) * len(categories)), 4.2)
    width = 0.8 / len(systems)
    for index, name in enumerate(systems):
        record = results["systems"][name]
        cells = [record["overall"], *(record["categories"][category] for category in categories[1:])]
        speedups = [cell["speedup_over_plain"] for cell in cells]
        middles = [value["median"] for value in speedups]
        spread = [
            [max(value["median"] - value["low"], 0) for value in speedups],
            [max(value["high"] - value["median"], 0) for value in speedups],
        ]
        places = [position + (index - (len(systems) - 1) / 2) * width for position in range(len(categories))]
        axes.bar(places, middles, width, yerr=spread, label=name, error_kw={"lw": 0.8})
    axes.axhline(1.0, color="black", lw=0.8)
    axes.set_xticks(range(len(categories)), categories, rotation=30, ha="right")
    axes.set_ylabel("speedup over plain generate")
    axes.legend(frameon=False, fontsize="small", ncols=3)
    figure.savefig(path, dpi=150, format="png")
