"""`retrodraft replay`: what drafting would do for recorded chats and agents, without a model."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from retrodraft.commands.shared import make_folder

DEFAULT_SYSTEMS = "prompt_lookup,suffix,request,session"


def replay(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help=".jsonl files, or folders of them.")],
    tokenizer: Annotated[str, typer.Option(help="'embedded', a folder, or a name on the hub.")] = "embedded",
    nodes: Annotated[str, typer.Option(help="Draft nodes of a forward: a number, or auto (priced by the curve).")] = (
        "32"
    ),
    systems: Annotated[
        str,
        typer.Option(
            help="Of prompt_lookup, suffix, goose, token_recycling, request, session, session:outputs, session:own, "
            "session:others, views, views:NAME; comma between."
        ),
    ] = DEFAULT_SYSTEMS,
    limit: Annotated[int, typer.Option(min=0, help="Trajectories of each file, from its start; 0 takes all.")] = 0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder for results.json and figures.")] = None,
    profile: Annotated[
        str | None, typer.Option(help="Cost curve: a file of `retrodraft profile`, or the name of a shipped example.")
    ] = None,
    max_memory_mb: Annotated[int, typer.Option(min=1, help="Of a session's memory, in MiB.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON object.")] = False,
) -> None:
    """Replay logs: would drafting help?

    Plays them through the drafting strategies. Needs a tokenizer, and no model.

    Lines of a log are {"messages": [...]}, or {"request": {"messages": ...}, "response": {"choices": ...}} as OpenAI's
    interface has them. What was answered is taken as what the model says. Each file is one namespace: it is played in
    order, and what a session remembers stays within it.

    request sees the current request alone, session the file's earlier ones too. session:outputs remembers answers only,
    session:own the same trajectory, session:others finished ones. views also drafts from the texts that a trajectory
    was shown as if they were opened files, in every form in which an agent writes them; views:json in that form alone.
    The predicted speed-up is for greedy decoding of one sequence on the machine of the cost curve.

    Example: retrodraft replay agent.jsonl --systems prompt_lookup,request,session -o report
    """
    from retrodraft.replay.costs import EXAMPLE_CURVE, load_curve, shipped_curves
    from retrodraft.replay.logs import log_files
    from retrodraft.replay.run import replay_logs

    names, number = parse_systems(systems), parse_nodes(nodes)
    curve, described = load_curve(profile or EXAMPLE_CURVE)
    log_files(logs)  # a mistyped path is told before a tokenizer is loaded
    if output is not None:
        from retrodraft.plots import require_matplotlib

        require_matplotlib()
        make_folder(output, "output folder")
    from retrodraft.models import load_tokenizer
    from retrodraft.replay.report import print_replay, progress_bar

    for library in ("transformers", "huggingface_hub"):  # texts longer than a model's window are no fault here
        logging.getLogger(library).setLevel(logging.ERROR)
    loaded = load_tokenizer(tokenizer)
    with progress_bar() as progress:
        results = replay_logs(logs, loaded, names, number, curve, limit, max_memory_mb << 20, progress)
    results["settings"] = {
        "tokenizer": tokenizer, "nodes": "auto" if number is None else number, "systems": names, "limit": limit,
        "max_memory_mb": max_memory_mb, "profile": described,
    }  # fmt: skip
    note = f"Predicted speed-up: for the cost curve {described['name']}"
    if described["note"]:
        note += f" ({described['note']})"
    if described["example"]:
        note += f". Examples are {', '.join(shipped_curves())}; `retrodraft profile` measures your own"
    results["notes"].append(note + ".")
    if output is not None:
        _write(results, output)
    if as_json:
        typer.echo(json.dumps(results))
        return
    print_replay(results)
    if output is not None:
        typer.echo(f"wrote {output / 'results.json'} and figures")


def parse_systems(text: str) -> list[str]:
    """Names of systems, each once; raises ValueError for unknown ones and for none."""
    from retrodraft.replay.run import SYSTEMS

    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown or not names:
        raise ValueError(f"systems must be of {', '.join(SYSTEMS)}; got {(unknown or [text])[0]!r}")
    return names


def parse_nodes(text: str) -> int | None:
    """A number of nodes, None for auto; raises ValueError."""
    from retrodraft.replay.run import MAX_NODES

    if text == "auto":
        return None
    if not text.isdecimal() or not 0 <= int(text) <= MAX_NODES:
        raise ValueError(f"nodes must be auto or a whole number from 0 to {MAX_NODES}; got {text!r}")
    return int(text)


def _write(results: dict[str, Any], folder: Path) -> None:
    """Replace the result files, each at once."""
    from retrodraft.replay.report import plot_growth, plot_replay

    (folder / "results.json.partial").write_text(json.dumps(results, indent=1), encoding="utf-8")
    os.replace(folder / "results.json.partial", folder / "results.json")
    plot_replay(results, folder / "replay.png.partial")
    os.replace(folder / "replay.png.partial", folder / "replay.png")
    for number, (name, file) in enumerate(results["files"].items(), 1):
        target = folder / f"growth-{number}-{Path(name).stem}.png"
        plot_growth(file, name, folder / "growth.png.partial")
        os.replace(folder / "growth.png.partial", target)
