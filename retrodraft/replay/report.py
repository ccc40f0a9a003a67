"""What a replay found, for the terminal and as a figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from retrodraft.plots import axes_of_size
from retrodraft.reports import slim_table

COLUMNS = ("system", "tokens/forward", "accepted length", "nodes", "µs p50", "µs p99", "speed-up")
LEGEND = (
    "Tokens per forward count the prompt's forward too; plain decoding is 1. Accepted length: tokens a draft brings, "
    "the target's own included. Nodes: drafted a forward. µs: drafting time of a step."
)
MAX_CATEGORIES = 8  # that get a table; all are in the JSON
LABEL_WIDTH = len("first attempts") + 2
TURN_BOUNDS = (1, 2, 3, 5, 9, 17, 33)  # first turns of the groups in the table


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on standard error, if that is a terminal; yields what `replay_logs` reports to.

    It goes away when the block is left, so that nothing stands above an error's line.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("replay", total=None)
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)


def print_replay(results: dict[str, Any]) -> None:
    """Tables for each file, its largest categories, proposers and turns; then what the figures mean."""
    console = Console()
    for name, file in results["files"].items():
        title = (
            f"{name}: {file['num_trajectories']} trajectories, {file['num_requests']} requests, "
            f"{file['num_prompt_tokens']:,} prompt tokens"
        )
        systems: dict[str, Any] = file["systems"]
        console.print(_table(title, systems))
        sizes = {category: cell["num_tokens"] for category, cell in next(iter(systems.values()))["categories"].items()}
        largest = sorted(sizes, key=lambda category: -sizes[category])[:MAX_CATEGORIES]
        if len(sizes) > 1:
            for category in largest:
                cells = {system: figures["categories"][category] for system, figures in systems.items()}
                console.print(_table(f"{name}, {category}: {sizes[category]:,} tokens", cells))
            if len(sizes) > len(largest):
                console.print(f"{len(sizes) - len(largest)} smaller categories are in the JSON.", highlight=False)
        for fitting in _beside(systems, console.width):
            console.print(_curve_table(name, fitting))
        console.print(_proposer_table(name, systems))
    if len(results["files"]) > 1:
        means = results["geometric_mean_tokens_per_forward"]
        table = slim_table("system", "tokens/forward", title="geometric mean over the files")
        for system, mean in means.items():
            table.add_row(system, f"{mean:.3f}")
        console.print(table)
    for note in (LEGEND, *results["notes"]):
        console.print(f"- {note}", highlight=False, markup=False)


def _table(title: str, systems: dict[str, Any]) -> Table:
    table = slim_table(*COLUMNS, title=title)
    for system, cell in systems.items():
        table.add_row(
            system, f"{cell['tokens_per_forward']:.3f}", f"{cell['mean_acceptance_length']:.2f}",
            f"{cell['nodes_per_forward']:.1f}", f"{cell['draft_us_p50']:.0f}", f"{cell['draft_us_p99']:.0f}",
            f"{cell['predicted_speedup']:.2f}",
        )  # fmt: skip
    return table


def _beside(systems: dict[str, Any], width: int) -> Iterator[dict[str, Any]]:
    """The systems in groups whose names have room beside each other."""
    group: dict[str, Any] = {}
    left = width - LABEL_WIDTH
    for system, figures in systems.items():
        needed = max(len(system), len("1.000")) + 2  # the gap between columns
        if group and needed > left:
            yield group
            group, left = {}, width - LABEL_WIDTH
        group[system] = figures
        left -= needed
    yield group


def _curve_table(name: str, systems: dict[str, Any]) -> Table:
    """Tokens per forward by turn, by place in the file, and of retries."""
    table = slim_table("", *systems, title=f"{name}: tokens per forward")
    points = [figures["by_turn"] for figures in systems.values()]
    last = max(point["turn"] for point in points[0])
    for first, after in zip(TURN_BOUNDS, (*TURN_BOUNDS[1:], last + 1), strict=True):
        if first <= last:
            final = min(after - 1, last)
            label = f"turn {first}" if first == final else f"turns {first}-{final}"
            table.add_row(label, *(_mean([p for p in row if first <= p["turn"] < after]) for row in points))
    table.add_section()
    for point in systems[next(iter(systems))]["by_position"]:
        cells = [
            next(f"{p['tokens_per_forward']:.3f}" for p in figures["by_position"] if p["from"] == point["from"])
            for figures in systems.values()
        ]
        table.add_row(f"file {100 * point['from']:.0f}-{point['to']:.0%}", *cells)
    table.add_section()
    for label, key in (("first attempts", "first_attempts"), ("retries", "retries")):
        cells = [f"{f[key]['tokens_per_forward']:.3f}" if f[key] else "none" for f in systems.values()]
        table.add_row(label, *cells)
    return table


def _mean(points: list[dict[str, Any]]) -> str:
    forwards = sum(point["num_tokens"] / point["tokens_per_forward"] for point in points)
    return f"{sum(point['num_tokens'] for point in points) / forwards:.3f}" if forwards else "none"


def _proposer_table(name: str, systems: dict[str, Any]) -> Table:
    table = slim_table("system", "proposer", "proposed", "accepted", "rate", title=f"{name}: draft nodes by proposer")
    for system, figures in systems.items():
        for proposer, counts in figures["proposers"].items():
            if counts["proposed"]:
                rate = counts["accepted"] / counts["proposed"]
                table.add_row(system, proposer, f"{counts['proposed']:,}", f"{counts['accepted']:,}", f"{rate:.1%}")
    return table


def plot_replay(results: dict[str, Any], path: Path) -> None:
    """Tokens per forward of every file and system as bars; writes a PNG."""
    names = list(results["files"])
    systems = list(results["geometric_mean_tokens_per_forward"])
    figure, axes = axes_of_size(max(6.4, 0.4 * len(systems) * len(names)), 4.2)
    width = 0.8 / len(systems)
    for index, system in enumerate(systems):
        heights = [results["files"][name]["systems"][system]["tokens_per_forward"] for name in names]
        places = [position + (index - (len(systems) - 1) / 2) * width for position in range(len(names))]
        axes.bar(places, heights, width, label=system)
    axes.axhline(1.0, color="black", lw=0.8)
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
    axes.set_ylabel("tokens per forward")
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150, format="png")


def plot_growth(file: dict[str, Any], title: str, path: Path) -> None:
    """Tokens per forward of one file by the trajectory's place in it, a line for each system; writes a PNG."""
    figure, axes = axes_of_size(7.6, 4.0)
    for system, figures in file["systems"].items():
        points = figures["by_position"]
        middles = [50 * (point["from"] + point["to"]) for point in points]
        axes.plot(middles, [point["tokens_per_forward"] for point in points], marker="o", label=system)
    axes.set_xlabel("% of the file's trajectories")
    axes.set_ylabel("tokens per forward")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    figure.legend(frameon=False, fontsize="small", loc="outside right upper")  # nothing hides the lines
    figure.savefig(path, dpi=150, format="png")
