"""Real servers on free ports, in a thread or as a process, for tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import uvicorn

TEXT = "abcabcabc" * 4  # a prompt for tiny models


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


def metric(url: str, name: str, **labels: str) -> float:
    """Sum of a metric's samples that carry these labels."""
    lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.split("{")[0] == name]
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(pair in line for pair in wanted))


class Served:
    """A server process and its address."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def complete(self, prompt: str = TEXT, **body: Any) -> httpx.Response:
        headers = {"X-Session-Id": body.pop("session", "s1")}
        record = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, **body}
        return httpx.post(f"{self.url}/v1/completions", json=record, headers=headers, timeout=120)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(300)  # it may be saving


@contextlib.contextmanager
def serve(*arguments: str, port: int = 0) -> Iterator[Served]:
    """Run `retrodraft serve`, on a free port unless one is named, until the block is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "retrodraft", "serve", "--port", str(port), "--served-model-name", "m", *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stderr is not None
        lines = []
        url = None
        while url is None:
            line = process.stderr.readline()
            assert line, "".join(lines)
            lines.append(line)
            found = re.search(r"retrodraft: m at (http://\S+)/v1", line)
            url = found[1] if found else None
        threading.Thread(target=process.stderr.read, daemon=True).start()  # so that its log never blocks it
        wait_until(lambda: _answers(url))
        yield Served(process, url)
    finally:
        process.kill()
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
