"""Load: sixteen clients that come and go, a kill -9 in the middle; nothing saved is lost, nothing crosses keys."""

from __future__ import annotations

import math
import os
import random
import re
import socket
import statistics
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from serving import Served, client, metric, serve, wait_until

from retrodraft.sessions.saved import list_sessions

SECONDS = float(os.environ.get("RETRODRAFT_LOAD_SECONDS", "75"))
NUM_CLIENTS, NUM_KEYS, MAX_SESSIONS = 16, 8, 24
KEYS = [f"key-{number}" for number in range(NUM_KEYS)]
MARKERS = [f"{animal}{number}" for number, animal in enumerate(
    "otter heron lynx newt stoat ibis marten egret bison quail tapir dingo okapi raven gecko koala".split()
)]  # fmt: skip
GREEDY: Any = dict(model="m", temperature=0, max_tokens=8)
TEMPLATE_TOKENS = 40  # more than all private prompts share before their marker


def private(number: int) -> list[dict[str, str]]:
    """A chat that only this client knows: its marker comes early, and again and again."""
    marker = MARKERS[number]
    rules = " ".join(f"Rule {i}: {marker} stays with client {marker}." for i in range(6))
    return [{"role": "system", "content": f"{marker}. {rules}"}, {"role": "user", "content": f"Say {marker}."}]


class Load:
    """What the clients do, and what they see that is wrong."""

    def __init__(self, url: str) -> None:
        self.url, self.end = url, 0.0
        self.down = threading.Event()  # the server has been killed, and is not back yet
        self.kills = 0
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.expected: dict[int, str] = {}
        self._lock = threading.Lock()
        self._peeked: set[tuple[int, int]] = set()  # key and the client whose prompt was tried with it

    def work(self, number: int) -> None:
        """One client, until the end."""
        chooser, caller = random.Random(number), client(self.url, KEYS[number % NUM_KEYS])
        actions = (self.ask, self.ask, self.chat, self.leave, self.leave, self.peek)
        while time.monotonic() < self.end:
            action, kills = chooser.choice(actions), self.kills
            try:
                action(number, caller, chooser)
                self.count(action.__name__)
            except (openai.APIConnectionError, httpx.TransportError) as error:
                if not self.down.is_set() and self.kills == kills:
                    self.wrong.append(f"client {number}, {action.__name__}: {error!r}")
                self.count("cut off by the kill")
                time.sleep(0.5)
            except Exception as error:
                self.wrong.append(f"client {number}, {action.__name__}: {error!r}")
                return

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def ask(self, number: int, caller: openai.OpenAI, chooser: random.Random) -> None:
        """The private chat in the client's own session: always the same answer."""
        named = {"X-Session-Id": f"own-{MARKERS[number]}"}
        got = caller.chat.completions.create(messages=private(number), extra_headers=named, **GREEDY)
        self.check(number, got.choices[0].message.content)
        if got.choices[0].message.content != self.expected[number]:
            self.wrong.append(f"client {number} got {got.choices[0].message.content!r}")

    def chat(self, number: int, caller: openai.OpenAI, chooser: random.Random) -> None:
        """Turns without an id, which the server has to find by their prefix."""
        messages: Any = [*private(number), {"role": "user", "content": f"Story {chooser.randrange(1000)}."}]
        for turn in range(3):
            got = caller.chat.completions.create(messages=messages, **GREEDY)
            text = got.choices[0].message.content
            self.check(number, text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"More, {turn}."}]

    def leave(self, number: int, caller: openai.OpenAI, chooser: random.Random) -> None:
        """A stream that is left after a few chunks, or before the first."""
        stream = caller.chat.completions.create(
            model="m",
            messages=private(number),
            max_tokens=200,
            temperature=1,
            stream=True,  # type: ignore[arg-type]
        )
        with stream:
            for _, chunk in zip(range(chooser.randrange(6)), stream, strict=False):
                self.check(number, chunk.choices[0].delta.content or "")

    def peek(self, number: int, caller: openai.OpenAI, chooser: random.Random) -> None:
        """Another key's sessions are not listed, and its prompt is not in any cache that this key can reach."""
        key, other = number % NUM_KEYS, chooser.randrange(NUM_CLIENTS)
        headers = {"Authorization": f"Bearer {KEYS[key]}"}
        for record in httpx.get(f"{self.url}/v1/sessions", headers=headers, timeout=120).json()["data"]:
            owner = record["id"].removeprefix("own-")
            if owner in MARKERS and MARKERS.index(owner) % NUM_KEYS != key:
                self.wrong.append(f"key {key} sees {record['id']}")
        with self._lock:
            if other % NUM_KEYS == key or (key, other) in self._peeked:
                return
            self._peeked.add((key, other))
        named = {"X-Session-Id": f"peek-{number}-{other}"}
        got = caller.chat.completions.create(messages=private(other), extra_headers=named, **GREEDY)
        cached = got.usage.prompt_tokens_details.cached_tokens
        if cached > TEMPLATE_TOKENS:
            self.wrong.append(f"key {key} found {cached} tokens of client {other} in a cache")
        self.count("tried with another key")

    def check(self, number: int, text: str) -> None:
        for other, marker in enumerate(MARKERS):
            if other % NUM_KEYS != number % NUM_KEYS and marker in text:
                self.wrong.append(f"client {number} got the marker of client {other}: {text!r}")


@pytest.mark.slow
def test_sixteen_clients_and_a_kill(tmp_path: Path) -> None:
    """O16, O22, O24: right answers, nothing queued after it, what was saved is there, memory flat.

    RETRODRAFT_LOAD_SECONDS sets how long; the figures are printed (pytest -s).
    """
    store, port = tmp_path / "store", free_port()
    keys = [part for key in KEYS for part in ("--api-key", key)]
    # In float32: in bfloat16 near ties fall either way, by how a prompt is cut into forwards.
    options = ("--max-sessions", str(MAX_SESSIONS), "--store", str(store), "--threads", "1", *keys)
    load = Load(f"http://127.0.0.1:{port}")
    threads = [threading.Thread(target=load.work, args=(number,), daemon=True) for number in range(NUM_CLIENTS)]
    with serve(*options, port=port) as first:
        for number in range(NUM_CLIENTS):
            answer = client(first.url, KEYS[number % NUM_KEYS]).chat.completions.create(
                messages=private(number),
                **GREEDY,  # type: ignore[arg-type]
            )
            load.expected[number] = answer.choices[0].message.content or ""
        load.end = math.inf
        for thread in threads:
            thread.start()
        before = watched(first, time.monotonic() + SECONDS / 2)
        wait_until(lambda: len(saved(store)) >= NUM_CLIENTS, 120)
        kept = saved(store)
        answers = [metric(load.url, "vllm:request_success_total")]
        load.down.set()
        load.kills += 1
        first.process.kill()
        first.process.wait(60)
    with serve(*options, port=port) as second:
        load.down.clear()
        restored = saved(store)
        assert not [record for record in list_sessions(store) if record.problem]
        lost = [where for where, turns in kept.items() if restored.get(where, -1) < turns]
        assert not lost, lost
        listed = {
            record["id"]
            for key in KEYS
            for record in httpx.get(
                f"{load.url}/v1/sessions", headers={"Authorization": f"Bearer {key}"}, timeout=120
            ).json()["data"]
        }
        assert {name for _, name in kept} <= listed
        after = watched(second, time.monotonic() + SECONDS / 2)
        wait_until(lambda: metric(load.url, "vllm:request_success_total") > 2 * NUM_CLIENTS, 300)  # on a slow machine
        load.end = 0
        for thread in threads:
            thread.join(300)
        assert not any(thread.is_alive() for thread in threads)
        wait_until(lambda: metric(load.url, "vllm:num_requests_running") == 0)
        assert metric(load.url, "vllm:num_requests_waiting") == 0
        assert metric(load.url, "retrodraft:num_sessions") <= MAX_SESSIONS
        answers.append(metric(load.url, "vllm:request_success_total"))
        assert second.stop() == 0
    final = saved(store)
    assert not [where for where, turns in restored.items() if final.get(where, -1) < turns]
    half = len(after) // 2
    early, late = after[half // 2 : half], after[half:]  # the first quarter fills the sessions
    print(f"\nanswers before and after the kill: {answers}; actions: {dict(load.counts)}")
    print(f"saved sessions: {len(kept)} at the kill, none lost; {len(final)} at the end")
    print(f"resident MB, median: {statistics.median(before):.0f} before the kill; after it "
          f"{statistics.median(early):.0f} in the second quarter, {statistics.median(late):.0f} in the second half, "
          f"at most {max(after)}")  # fmt: skip
    assert not load.wrong, load.wrong[:10]
    assert min(load.counts[what] for what in ("ask", "chat", "leave", "peek", "tried with another key")) > 0
    assert statistics.median(late) < 1.1 * statistics.median(early), after


def saved(store: Path) -> dict[tuple[str, str], int]:
    """Turns of the sound sessions in the store, by namespace and name."""
    return {(each.namespace, each.name): each.turns for each in list_sessions(store) if not each.problem}


def watched(server: Served, end: float) -> list[int]:
    """Resident megabytes of the server once a second, until then."""
    sizes = []
    while time.monotonic() < end:
        text = Path(f"/proc/{server.process.pid}/status").read_text()
        sizes.append(int(re.search(r"VmRSS:\s+(\d+)", text)[1]) // 1024)  # type: ignore[index]
        time.sleep(1)
    return sizes


def free_port() -> int:
    """A port that the server can be started on twice."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
