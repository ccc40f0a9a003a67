"""Tables for the terminal and for Markdown."""

from __future__ import annotations

import textwrap
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

COLUMNS = ("system", "tokens/s", "speedup", "tokens/forward", "nodes/forward", "draft µs p50", "p99", "equal")
HEAD_WIDTH = 10


def slim_table(*heads: str, title: str | None = None) -> Table:
    """A table for narrow terminals: no lines between columns, heads of several lines, a first column that stays whole.

    Heads of more than HEAD_WIDTH characters break at spaces, and behind a stroke. Markup in texts is text.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=None if title is None else escape(title))
    for number, head in enumerate(heads):
        parts = head.replace("/", "/\n").split("\n")
        lines = [textwrap.fill(part, HEAD_WIDTH, break_long_words=False, break_on_hyphens=False) for part in parts]
        table.add_column(escape("\n".join(lines)), no_wrap=number == 0)
    return table


def print_cost_curve(curve: Any) -> None:
    """Milliseconds by tokens in the forward and context length, with the ratio to one token."""
    table = slim_table("tokens", *(f"{length} context: ms (ratio)" for length in curve.context_lengths))
    for index, size in enumerate(curve.tree_sizes):
        cells = [f"{1e3 * row[index]:.1f} ({row[index] / row[0]:.2f})" for row in curve.seconds]
        table.add_row(str(size), *cells)
    Console().print(table)


def result_rows(results: dict[str, Any], category: str | None = None) -> list[list[str]]:
    """A row of texts for each system, in the order of COLUMNS; None is overall."""
    rows = []
    for name, record in results["systems"].items():
        cell = record["overall"] if category is None else record["categories"].get(category)
        if cell is None:
            continue
        speedup = cell["speedup_over_plain"]
        rows.append(
            [
                name, f"{cell['tokens_per_second']:.1f}",
                f"{speedup['median']:.2f} ({speedup['low']:.2f}-{speedup['high']:.2f})",
                f"{cell['tokens_per_forward']:.2f}", f"{cell['nodes_per_forward']:.1f}", f"{cell['draft_us_p50']:.0f}",
                f"{cell['draft_us_p99']:.0f}", f"{cell['equal_outputs']:.0%}",
            ]
        )  # fmt: skip
    return rows


def print_results(results: dict[str, Any]) -> None:
    """A table for the whole workload, then one for each category, without the rarest times: they need the room."""
    console = Console()
    shown = [column for column in range(len(COLUMNS)) if COLUMNS[column] != "p99"]
    for category in (None, *results["categories"]):
        table = slim_table(*(COLUMNS[column] for column in shown), title=category or "all categories")
        for row in result_rows(results, category):
            table.add_row(*(row[column] for column in shown))
        console.print(table)
    console.print(verdict(results), highlight=False)


def verdict(results: dict[str, Any]) -> str:
    """Whether outputs were plain's, in a few sentences."""
    notes = []
    unequal = {
        name: round((1 - record["overall"]["equal_outputs"]) * record["overall"]["num_prompts"])
        for name, record in results["systems"].items()
        if record["overall"]["equal_outputs"] < 1
    }
    if unequal:
        listed = ", ".join(f"{count} of {name}" for name, count in unequal.items())
        notes.append(f"Outputs that differ from plain generate's: {listed}.")
    else:
        notes.append("Every output equals plain generate's, token for token.")
    if results["num_faults"]:
        notes.append(f"Faults among them (float32, and no near tie; please report): {results['num_faults']}.")
    if results["num_left_out"]:
        notes.append(f"Prompts left out because they are too long: {results['num_left_out']}.")
    if results["num_restarts"]:
        notes.append(f"Restarts that lost the warm state: {results['num_restarts']}.")
    return " ".join(notes)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def markdown(results: dict[str, Any]) -> str:
    """The results as a Markdown document."""
    machine = results["machine"]
    threads = f"{machine['cpu_threads']} thread{'s' * (machine['cpu_threads'] != 1)}"
    lines = [
        f"# {results['settings']['workload']}: {results['num_prompts']} prompts", "",
        f"Model {results['settings']['model']}, {results['dtype']}, {threads} on "
        f"{machine['processor']}; torch {machine['torch']}, transformers {machine['transformers']}. "
        "Speedup: median of the per-prompt ratios to plain generate in the same run, with a 95 % bootstrap interval.",
        "", verdict(results),
    ]  # fmt: skip
    for category in (None, *results["categories"]):
        lines += ["", f"## {category or 'All categories'}", "", "| " + " | ".join(COLUMNS) + " |"]
        lines.append("|" + "---|" * len(COLUMNS))
        lines += ["| " + " | ".join(row) + " |" for row in result_rows(results, category)]
    if results["first_differences"]:
        lines += [
            "",
            "## First differences from plain",
            "",
            "Margins are of plain's logits there: between the two tokens that were taken, and between its top two.",
            "",
            "| prompt | system | token | margin | top-2 margin |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {item['id']} | {item['system']} | {item['position']} | {_number(item['margin'])} | "
            f"{_number(item['top2_margin'])} |"
            for item in results["first_differences"]
        ]
    return "\n".join(lines) + "\n"
