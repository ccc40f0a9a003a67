"""A real server on a free port, for tests."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import uvicorn


@contextlib.contextmanager
def running(rd: Any, **options: Any) -> Iterator[str]:
    """The server of `rd` in a thread; gives its address."""
    from retrodraft.server.run import ServeOptions, build_app

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    app = build_app(rd, ServeOptions(**options))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        wait_until(lambda: server.started)
        yield url
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
        assert not thread.is_alive()


def client(url: str, key: str = "none") -> openai.OpenAI:
    """OpenAI's own client; it does not try again."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    """Wait until `condition()` holds; AssertionError after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def metric(url: str, name: str) -> float:
    """Sum of a metric's samples."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == name)
