"""What serving costs: the same chats over HTTP and by `session.generate` in this process, interleaved.

    python benchmarks/server_overhead.py WORKLOAD [--limit 40] [--max-new-tokens 64] [--dtype bfloat16]

The server runs as a process of its own with the same model, settings and draft budget, asked by OpenAI's client, whole
and streamed. Each of the three ways has a namespace of its own and sees every prompt once, in the same order, so all do
the same work: tokens and forwards are compared too. Prints the median of the paired ratios with a 95 % bootstrap
interval: a request's time over HTTP to that of `session.generate` (template, tokenizer and detokenizer included), and
the first streamed text to the first token that a streamer gets.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import openai
import torch

from retrodraft import RetroDraft
from retrodraft.models import load_model
from retrodraft.workloads import read_workload

WAYS = ("local", "whole", "stream")
Run = tuple[float, float, str]  # seconds, seconds to the first text, text


class FirstToken:
    """A streamer that notes when the first token of the answer comes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._puts = 0

    def put(self, token_ids: Any) -> None:
        """The prompt comes first."""
        self._puts += 1
        if self._puts == 2:
            self.seconds = time.perf_counter()

    def end(self) -> None:
        """Nothing to do."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workload", help="a .jsonl of prompts, as `retrodraft bench` takes it")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-prompt-chars", type=int, default=4000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--budget", type=int, default=8, help="fixed, so that all ways draft the same trees")
    options = parser.parse_args()
    items = [
        item.messages
        for item in read_workload(options.workload)
        if sum(len(message["content"]) for message in item.messages) <= options.max_prompt_chars
    ][: options.limit]
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model, dtype=options.dtype)
    rd = RetroDraft(model, tokenizer, budget=options.budget)
    with subprocess.Popen(
        [sys.executable, "-m", "retrodraft", "serve", "--port", "0", "--served-model-name", "m", "--model",
         options.model, "--dtype", options.dtype, "--budget", str(options.budget), "--threads", "1", "--max-sessions",
         "1000", "--log-level", "error", "--api-key", "whole", "--api-key", "stream"],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as server:  # fmt: skip
        try:
            clients = _clients(server)
            runs = measure(rd, clients, items, options.max_new_tokens)
            _report(runs, rd, clients["whole"])
        finally:
            server.terminate()


def measure(
    rd: RetroDraft, clients: dict[str, openai.OpenAI], items: list[Any], max_new_tokens: int
) -> dict[str, list[Run]]:
    """Runs of every prompt by way, the ways in changing order; the first two prompts warm up and are left out."""
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    chooser = random.Random(0)
    for number, messages in enumerate(items):
        for way in chooser.sample(WAYS, len(WAYS)):
            name = f"chat-{number}"
            run = _local(rd, name, messages, max_new_tokens) if way == "local" else _remote(
                clients[way], name, messages, max_new_tokens, way == "stream"
            )  # fmt: skip
            if number >= 2:
                runs[way].append(run)
    return runs


def _local(rd: RetroDraft, name: str, messages: Any, max_new_tokens: int) -> Run:
    session, streamer = rd.session(name, namespace="local"), FirstToken()
    start = time.perf_counter()
    output = session.generate(messages, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer)
    assert rd.tokenizer is not None
    text = rd.tokenizer.decode(output[0, session.stats.num_prompt_tokens :], skip_special_tokens=True)
    return time.perf_counter() - start, streamer.seconds - start, str(text)


def _remote(caller: openai.OpenAI, name: str, messages: Any, max_new_tokens: int, stream: bool) -> Run:
    first, text = 0.0, ""
    start = time.perf_counter()
    answer: Any = caller.chat.completions.create(
        model="m", messages=messages, max_tokens=max_new_tokens, temperature=0, stream=stream,
        extra_headers={"X-Session-Id": name},
    )  # fmt: skip
    if not stream:
        return time.perf_counter() - start, 0.0, answer.choices[0].message.content
    for chunk in answer:
        piece = chunk.choices[0].delta.content or ""
        if piece and not text:
            first = time.perf_counter() - start
        text += piece
    return time.perf_counter() - start, first, text


def _clients(server: subprocess.Popen[str]) -> dict[str, openai.OpenAI]:
    """Clients of the server, once it listens; what else it says is dropped."""
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"at (http://\S+/v1)", line):
            threading.Thread(target=server.stderr.read, daemon=True).start()
            return {way: openai.OpenAI(base_url=found[1], api_key=way, max_retries=5) for way in WAYS[1:]}
    raise RuntimeError("the server did not start")


def _report(runs: dict[str, list[Run]], rd: RetroDraft, caller: openai.OpenAI) -> None:
    local = runs["local"]
    print(f"{len(local)} chats, {statistics.median(run[0] for run in local):.3f} s by session.generate (median)")
    for way in WAYS[1:]:
        same = sum(ours[2] == theirs[2] for ours, theirs in zip(local, runs[way], strict=True))
        ratios = [theirs[0] / ours[0] for ours, theirs in zip(local, runs[way], strict=True)]
        print(f"{way}: {same} of {len(local)} texts equal; time over HTTP / session.generate {_interval(ratios)}")
    pairs = [(ours[1], theirs[1]) for ours, theirs in zip(local, runs["stream"], strict=True) if theirs[1]]
    print(f"first text: over HTTP / first token in process {_interval([b / a for a, b in pairs])}, "
          f"{1e3 * statistics.median(b - a for a, b in pairs):+.1f} ms (median)")  # fmt: skip
    lines = str(caller.with_options(base_url=str(caller.base_url).removesuffix("v1/")).get(
        "/metrics", cast_to=str)).splitlines()  # fmt: skip
    served = sum(float(line.split()[-1]) for line in lines if line.startswith("retrodraft:target_forwards_total"))
    print(f"forwards, warm-up included: {served / 2:.0f} a way over HTTP, {rd.total_stats.num_target_forwards} here")


def _interval(ratios: list[float]) -> str:
    chooser = random.Random(0)
    medians = sorted(statistics.median(chooser.choices(ratios, k=len(ratios))) for _ in range(2000))
    return f"{statistics.median(ratios):.4f} [{medians[50]:.4f}, {medians[1949]:.4f}]"


if __name__ == "__main__":
    main()
