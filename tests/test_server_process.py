"""`retrodraft serve` as a process: options, shutdown, a kill, and load."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from command import retrodraft
from serving import client, metric, wait_until

TEXT = "abcabcabc" * 4


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
        return self.process.wait(60)


@contextmanager
def serve(*arguments: str) -> Iterator[Served]:
    """Run `retrodraft serve` on a free port until the block is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "retrodraft", "serve", "--port", "0", "--served-model-name", "m", *arguments],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
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


@pytest.mark.slow
def test_sessions_outlive_a_stop_and_a_kill(tiny_folder: Path, tmp_path: Path) -> None:
    """O22: SIGTERM ends what runs, saves, exits 0; after kill -9 what was saved is there, and the server starts."""
    store = str(tmp_path / "store")
    options = ("--model", str(tiny_folder), "--store", store, "--grace-seconds", "1")
    with serve(*options) as first:
        answer = first.complete()
        assert answer.status_code == 200 and answer.headers["x-session-id"] == "s1"
        body = {"model": "m", "prompt": TEXT, "max_tokens": 2000, "temperature": 1, "stream": True}
        with httpx.stream("POST", f"{first.url}/v1/completions", json=body, timeout=60) as running:
            lines = running.iter_lines()
            assert next(lines).startswith("data: ")
            assert first.stop() == 0
    with serve(*options) as second:
        listed = httpx.get(f"{second.url}/v1/sessions").json()["data"]
        assert "s1" in {record["id"] for record in listed if not record["in_memory"]}
        again = second.complete()
        assert again.json()["choices"] == answer.json()["choices"]
        second.complete(session="s2")
        wait_until(lambda: any("s2" in str(r) for r in httpx.get(f"{second.url}/v1/sessions").json()["data"]))
        second.stop(signal.SIGKILL)
    with serve(*options) as third:
        ids = {record["id"] for record in httpx.get(f"{third.url}/v1/sessions").json()["data"]}
        assert "s1" in ids and third.complete().json()["choices"] == answer.json()["choices"]
        assert third.stop(signal.SIGINT) == 0


def test_workspace_files_are_drafted_and_read_again(tiny_folder: Path, tmp_path: Path) -> None:
    """--workspace: .gitignore holds, a changed file counts at the next request."""
    (tmp_path / ".gitignore").write_text("secret.txt\n")
    (tmp_path / "secret.txt").write_text("hidden " * 50)
    notes = tmp_path / "notes.md"
    notes.write_text("nothing that helps\n")
    with serve("--model", str(tiny_folder), "--workspace", str(tmp_path)) as server:
        text = server.complete(max_tokens=40, session="first").json()["choices"][0]["text"]
        assert metric(server.url, "vllm:generation_tokens_total") == 40
        notes.write_text(text)
        again = server.complete(max_tokens=40, session="first").json()["choices"][0]["text"]
        assert again == text


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("--workspace", "/no/such"), "workspace '/no/such' is not a folder"),
        (("--api-key-file", "/no/such"), "api-key-file '/no/such' can't be read"),
        (("--api-key", " "), "an API key must be ASCII text and not empty"),
        (("--chat-template", "/no/such"), "chat-template '/no/such' can't be read"),
        (("--log-level", "loud"), "log-level must be one of critical"),
        (("--port", "70000"), "Invalid value for '--port'"),
        (("--host", "203.0.113.1", "--model", "{tiny}"), "203.0.113.1:8000 can't be listened on"),
        (("--max-context", "1000000", "--model", "{tiny}"), "max-context must be at most"),
    ],
)
def test_bad_options_are_one_line(arguments: tuple[str, ...], message: str, tiny_folder: Path) -> None:
    done = retrodraft("serve", *[argument.format(tiny=tiny_folder) for argument in arguments])
    assert done.returncode == 2
    assert done.stderr.startswith("retrodraft: " + message) and len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.slow
def test_sixteen_clients_that_come_and_go() -> None:
    """O16, O24: a minute of load with random disconnects: right answers, nothing queued after it, memory flat."""
    keys = [f"key{i}" for i in range(4)]
    options = [part for key in keys for part in ("--api-key", key)]
    with serve("--max-sessions", "16", "--max-queue", "100", *options) as server:
        question: Any = [{"role": "user", "content": "Name a colour."}]
        settings: Any = dict(model="m", temperature=0, max_tokens=6)
        expected = client(server.url, "key0").chat.completions.create(messages=question, **settings)
        wrong: list[str] = []
        end = time.monotonic() + float(os.environ.get("RETRODRAFT_LOAD_SECONDS", "60"))

        def work(number: int) -> None:
            chooser, caller, turns = random.Random(number), client(server.url, keys[number % 4]), 0
            while time.monotonic() < end:
                turns += 1
                if chooser.random() < 0.4:  # goes away in the middle
                    chat: Any = [{"role": "user", "content": f"Tell client {number} a story, number {turns}."}]
                    stream = caller.chat.completions.create(
                        model="m", messages=chat, max_tokens=200, temperature=1, stream=True
                    )
                    for _ in zip(range(chooser.randint(1, 4)), stream, strict=False):
                        pass
                    stream.close()
                else:
                    got = caller.chat.completions.create(messages=question, **settings)
                    if got.choices[0].message.content != expected.choices[0].message.content:
                        wrong.append(got.choices[0].message.content)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        sizes = []
        while time.monotonic() < end:
            time.sleep(2)
            sizes.append(_resident_mb(server.process.pid))
        for thread in threads:
            thread.join()
        assert not wrong
        wait_until(lambda: metric(server.url, "vllm:num_requests_running") == 0)
        assert metric(server.url, "vllm:num_requests_waiting") == 0
        assert metric(server.url, "retrodraft:num_sessions") <= 16
        third = len(sizes) // 3
        print("resident MB:", sizes, "answers:", metric(server.url, "vllm:request_success_total"))
        assert max(sizes[-third:]) < 1.1 * max(sizes[third:-third]), sizes
        assert server.stop() == 0


def _resident_mb(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) // 1024  # type: ignore[index]
