"""`retrodraft session`: list, show, prune and remove saved sessions; `session_files.py` speaks to a running server."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retrodraft.commands.documents import disk_errors
from retrodraft.commands.session_files import Json, add, drop, files, short
from retrodraft.commands.shared import expanded

if TYPE_CHECKING:
    from retrodraft.sessions.saved import SessionRecord


app = typer.Typer(
    help="Saved sessions, and a running server's.\n\nFiles can be sent to the sessions of a running server.",
    epilog="Exit codes: 0 done; 2 bad input, no such session or no such file in it, a damaged session, a folder that "
    "can't be read or written, no server, or one that refuses.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Store = Annotated[Path | None, typer.Option("--store", help="Folder of the sessions; default in the cache folder.")]
Name = Annotated[str, typer.Argument(help="Name of the session.")]
Namespace = Annotated[str, typer.Option("--namespace", help="Where the session belongs.")]


@app.command(name="list")
def list_command(
    store: Store = None,
    namespace: Annotated[str | None, typer.Option("--namespace", help="Only of this one; default all.")] = None,
    as_json: Json = False,
) -> None:
    """List saved sessions, last used first.

    A store that is not there yet has none.

    Example: retrodraft session list --json
    """
    from retrodraft.sessions.saved import list_sessions

    root = _root(store, may_be_absent=True)
    with disk_errors("the sessions"):
        records = list_sessions(root, namespace)
    if as_json:
        typer.echo(json.dumps([record.as_dict() for record in records]))
        return
    if not records:
        where = f" of namespace {namespace!r}" if namespace is not None else ""
        typer.echo(f"No sessions{where} in {root}" + (", which is not there yet." if not root.exists() else "."))
    _print_table(records)


@app.command()
def show(name: Name, namespace: Namespace = "default", store: Store = None, as_json: Json = False) -> None:
    """Show what a session holds.

    Example: retrodraft session show fix-issue-17
    """
    from retrodraft.sessions.saved import inspect_session

    with disk_errors("the sessions"):
        found = inspect_session(_root(store), namespace, name)
    if found is None:
        raise ValueError(_absent(name, namespace))
    record, saved = found
    arrays = {
        key: {"dtype": str(array.dtype), "shape": list(array.shape), "bytes": array.nbytes}
        for key, array in saved.arrays.items()
    }
    if as_json:
        typer.echo(json.dumps({**record.as_dict(), "info": saved.info["info"], "arrays": arrays}))
        return
    typer.echo(
        f"{record.name!r} of namespace {record.namespace!r}: {record.turns} turns, {record.bytes:,} bytes, last used "
        f"{_when(record.last_used)}\nmodel {record.model!r}\nfolder {record.path}"
    )
    for key, value in saved.info["info"].items():
        if key not in ("model_id", "turns"):
            typer.echo(short(f"{json.dumps(key)[1:-1]}: {json.dumps(value)}"))
    for key, facts in arrays.items():
        typer.echo(f"{key}: {facts['dtype']} {facts['shape']}, {facts['bytes']:,} bytes")


@app.command()
def prune(
    max_size: Annotated[str | None, typer.Option(help="Of all sessions, for instance 500M or 2G.")] = None,
    max_age_days: Annotated[float | None, typer.Option(min=0.0, help="Since a session was last used.")] = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """Remove old sessions.

    Then the least recently used ones, until the rest fits.

    Example: retrodraft session prune --max-size 2G --max-age-days 30
    """
    from retrodraft.sessions.saved import prune_sessions

    if max_size is None and max_age_days is None:
        raise ValueError("say what to keep: --max-size, --max-age-days, or both")
    with disk_errors("the sessions"):
        removed = prune_sessions(_root(store), None if max_size is None else _num_bytes(max_size), max_age_days)
    if as_json:
        typer.echo(json.dumps([record.as_dict() for record in removed]))
        return
    _print_table(removed)
    size = sum(record.bytes for record in removed)
    typer.echo(f"removed {len(removed):,} session{'s' * (len(removed) != 1)}, {size:,} bytes")


@app.command()
def remove(name: Name, namespace: Namespace = "default", store: Store = None, as_json: Json = False) -> None:
    """Remove a session, also a damaged one.

    Example: retrodraft session remove fix-issue-17
    """
    from retrodraft.sessions.saved import remove_session

    with disk_errors("the sessions"):
        if not remove_session(_root(store), namespace, name):
            raise ValueError(_absent(name, namespace))
    typer.echo(json.dumps({"name": name, "namespace": namespace, "removed": True}) if as_json else f"removed {name!r}")


app.command()(add)
app.command()(files)
app.command()(drop)


def _root(store: Path | None, may_be_absent: bool = False) -> Path:
    """The folder of the sessions; raises ValueError for a named one that is none, or is not there and has to be."""
    from retrodraft.sessions.saved import sessions_folder

    if store is None:
        return sessions_folder()
    root = expanded(store, "store")
    with disk_errors("store"):
        if root.is_dir() or (may_be_absent and not root.exists()):
            return root
    raise ValueError(f"{str(root)!r} is not a folder of sessions")


def _absent(name: str, namespace: str) -> str:
    return f"there is no session {name!r} in namespace {namespace!r}; `retrodraft session list` shows all"


def _print_table(records: list[SessionRecord]) -> None:
    """`!r` keeps names with control characters on one line."""
    for record in records:
        label = f"{record.name!r} of {record.namespace!r}" if record.name else record.path.name
        end = f"damaged: {short(record.problem)}" if record.problem else repr(record.model)
        typer.echo(f"{_when(record.last_used)} {record.bytes:>15,} bytes {record.turns:>6} turns  {label}  {end}")


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _num_bytes(size: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)i?B?", size.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"max-size must be a size, for instance 500M or 2G; got {size!r}")
    return int(min(float(match[1]), 2.0**63) * 1024 ** " KMGT".index(match[2].upper() or " "))  # however many digits
