"""Building and running a server."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvicorn
from prometheus_client import disable_created_metrics

from retrodraft.server.app import LOOPBACK, Settings, create_app
from retrodraft.server.engine import Engine
from retrodraft.server.metrics import Metrics
from retrodraft.server.prompts import Prompts
from retrodraft.server.sessions import Sessions


@dataclass(frozen=True)
class ServeOptions:
    """How to serve; limits are per server unless said otherwise."""

    model: str = "embedded"  # the name that clients send
    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes a free one
    api_keys: Sequence[str] = ()
    chat_template: str | None = None  # jinja text in place of the tokenizer's own
    workspace: Path | None = None
    store: Path | None = None  # folder of saved sessions; None keeps them in memory only
    max_context: int | None = None  # tokens of a prompt and its answer; None for the model's
    max_body_bytes: int = 8 << 20
    max_queue: int = 64  # waiting requests of a namespace
    max_sessions: int = 64
    grace_seconds: int = 10  # for running requests, when the server is told to stop
    log_level: str = "info"


def build_app(rd: Any, options: ServeOptions) -> Any:
    """The ASGI application for a RetroDraft with a tokenizer. Raises ValueError for options that can't be."""
    if rd.tokenizer is None:
        raise ValueError("a server needs the tokenizer: RetroDraft(model, tokenizer)")
    workspace = options.workspace.resolve() if options.workspace is not None else None
    if workspace is not None and not workspace.is_dir():
        raise ValueError(f"workspace {str(options.workspace)!r} is not a folder")

    def open_session(namespace: str, name: str) -> Any:
        return rd.session(name, namespace=namespace, store=options.store)

    sessions = Sessions(open_session, options.store, options.max_sessions, workspace)
    engine = Engine(rd, sessions, Metrics(options.model), _context(rd.model, options.max_context), options.max_queue)
    settings = Settings(options.model, tuple(options.api_keys), options.max_body_bytes, options.host)
    return create_app(engine, Prompts(rd.tokenizer, options.chat_template), settings)


def warm_up(rd: Any) -> None:
    """Compile and measure what the first call would otherwise wait for; what it learns is forgotten."""
    prompt = torch.tensor([[0, 1, 2, 0, 1]], device=rd.model.device)
    session = rd.session("warm-up", namespace="warm-up")
    session.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
    session.close()
    rd.reset()


@contextlib.contextmanager
def listening(options: ServeOptions) -> Iterator[socket.socket]:
    """A socket that holds the server's address. Raises ValueError if the address can't be had."""
    with socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((options.host, options.port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{options.host}:{options.port} can't be listened on: {reason}") from error
        yield listener


def run_server(rd: Any, options: ServeOptions, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT; then answer what runs, for `grace_seconds` at most, and save the sessions.

    Raises ValueError for options that can't be.
    """
    app = build_app(rd, options)
    if options.host not in LOOPBACK and not options.api_keys:
        print("retrodraft: anybody who reaches this address can use the model: set --api-key", file=sys.stderr)
    warm_up(rd)
    disable_created_metrics()
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(
        f"retrodraft: {options.model} at http://{host}:{listener.getsockname()[1]}/v1", file=sys.stderr, flush=True
    )  # fmt: skip
    config = uvicorn.Config(
        app, log_level=options.log_level, timeout_graceful_shutdown=options.grace_seconds, server_header=False
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises the signal again when all is done; then it ends us not
    uvicorn.Server(config).run(sockets=[listener])


def _context(model: Any, wanted: int | None) -> int:
    config = model.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None)
    most = most if isinstance(most, int) and most > 0 else None
    if wanted is not None and most is not None and wanted > most:
        raise ValueError(f"max-context must be at most {most}, the model's positions; got {wanted}")
    return wanted or most or 1 << 17
