"""`retrodraft serve`: the OpenAI-compatible server on the command line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from retrodraft.commands.shared import (
    Attn,
    Budget,
    Corpus,
    Dense,
    Device,
    Dtype,
    Model,
    Threads,
    expanded,
    make_folder,
    wrap,
)
from retrodraft.options import check_corpora, check_model, check_threads, parse_budget

INSTALL = "pip install 'retrodraft[server]'"
LEVELS = ("critical", "error", "warning", "info", "debug")


def serve(
    model: Model = "embedded",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one and prints it.")] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that clients must send; repeatable. Each has its own sessions.")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="Keys, one a line.")] = None,
    store: Annotated[Path | None, typer.Option(help="Folder to keep sessions in; default none, memory only.")] = None,
    workspace: Annotated[
        Path | None, typer.Option(help="Folder whose files every session drafts from; .gitignore is obeyed.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="Jinja file in place of the tokenizer's template.")] = None,
    max_context: Annotated[int | None, typer.Option(min=2, help="Tokens of prompt and answer.")] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Of a request.")] = 8 << 20,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests of one key that may wait; more get 429.")] = 64,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions in memory; the oldest go.")] = 64,
    grace_seconds: Annotated[int, typer.Option(min=0, help="For running requests, when told to stop.")] = 10,
    log_level: Annotated[str, typer.Option(help=f"{', '.join(LEVELS)}.")] = "info",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = 0,
    attn: Attn = None,
    budget: Budget = "auto",
    corpus: Corpus = None,
    dense: Dense = False,
) -> None:
    """Serve the model over OpenAI's API.

    Sessions keep their drafts and KV cache from request to request. A request belongs to the session that its header
    X-Session-Id or its metadata.session_id names, else to the one whose text it goes on with. Keys never share
    sessions.

    Example: retrodraft serve --workspace . --store ~/.cache/my-sessions
    """
    for option, value in (("host", host), ("served-model-name", served_model_name)):
        if value is not None and not value.strip():
            raise ValueError(f"{option} must not be empty")
    if log_level not in LEVELS:
        raise ValueError(f"log-level must be one of {', '.join(LEVELS)}; got {log_level!r}")
    keys = [key.strip() for key in api_key or []]
    if api_key_file is not None:
        in_file = [line.strip() for line in _text(api_key_file, "api-key-file").split("\n") if line.strip()]
        if not in_file:
            raise ValueError(f"api-key-file {str(api_key_file)!r} holds no key")
        keys += in_file
    if not all(key.isascii() and key.isprintable() and key for key in keys):
        raise ValueError("an API key must be ASCII text on one line and not empty")
    template = _text(chat_template, "chat-template") if chat_template is not None else None
    if workspace is not None:
        workspace = expanded(workspace, "workspace")
        if not os.path.isdir(workspace):
            raise ValueError(f"workspace {str(workspace)!r} is not a folder")
    if store is not None:
        store = expanded(store, "store")
        make_folder(store, "store", mode=0o700)
    check_model(model, dtype)
    check_threads(threads)
    parse_budget(budget)
    check_corpora(corpus or [], ["retro"])
    try:
        from retrodraft.models import check_template
        from retrodraft.server.run import ServeOptions, listening, run_server
    except ImportError as error:
        raise ValueError(f"the server needs a package: {error} ({INSTALL})") from error

    if template is not None:
        check_template(template, f"chat-template {str(chat_template)!r}")
    options = ServeOptions(
        model=served_model_name or model, host=host, port=port, api_keys=keys,
        chat_template=template, workspace=workspace, store=store, max_context=max_context,
        max_body_bytes=max_body_bytes, max_queue=max_queue, max_sessions=max_sessions, grace_seconds=grace_seconds,
        log_level=log_level,
    )  # fmt: skip
    with listening(options) as listener:  # before the model is loaded: the address may be taken
        rd, _ = wrap(model, dtype, device, threads, attn, "retro", budget, corpus or [], dense)
        run_server(rd, options, listener)


def _text(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{option} {str(path)!r} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {str(path)!r} is not UTF-8 text") from error
