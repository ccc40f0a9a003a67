"""The in-memory session store beside arctic-inference's `SuffixDecodingCache`, on the same token stream.

    pip install -r benchmarks/requirements-suffix_decoding_cache.txt   # built from source: about ten minutes
    python benchmarks/suffix_decoding_cache.py LOG.jsonl [...] --tokens 10000 100000 1000000 2000000 -o results.json

Whole conversations of the logs (as `retrodraft replay` takes them) are stored one after another. Others, held out, are
then followed from their middle: draft up to 16 tokens, accept what the text goes on with, add that and one more token.
Both follow one rule, that a drafted path has a probability of 0.1 or more, first as a chain, then as a tree. Each
system and size has a process of its own, so that the growth of its memory can be told. Where arctic-inference is not
installed its figures are left out.

- `store` is bulk adding, for theirs into the global tree alone. `add` is what the request's stores take for what a step
  emitted, for theirs local and global tree, by token. `commit` is `add` with what else our step learns (hit rates).
- `draft` is one call from Python: `RetroRow.draft` and `SuffixDecodingCache.speculate`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retrodraft.index.memory import Memory
from retrodraft.index.suffix_automaton import SuffixAutomaton
from retrodraft.retro import RetroStrategy
from retrodraft.strategy import StrategyRow

Int32 = npt.NDArray[np.int32]
MAX_DRAFT, MIN_PROB = 16, 0.1
PROMPT, STEPS_OF_ONE = 4000, 300  # most tokens before, and most steps in, one held-out conversation
WARM_UP = 20


def conversations(paths: list[Path], tokenizer_name: str) -> list[Int32]:
    """Tokens of each conversation, its last answer included, in random order."""
    from retrodraft.models import load_tokenizer
    from retrodraft.replay.logs import log_files, read_log
    from retrodraft.replay.tokens import Renderer

    renderer = Renderer(load_tokenizer(tokenizer_name))
    found = []
    for path in log_files(paths).values():
        for turns in map(renderer.turns, read_log(path)):
            if turns:
                found.append(np.concatenate([turns[-1].prompt, turns[-1].answer]))
    np.random.default_rng(0).shuffle(found)  # type: ignore[arg-type]
    return found


def split(documents: list[Int32], num_tokens: int, num_steps: int) -> tuple[list[Int32], list[Int32]]:
    """Conversations of `num_tokens` tokens to store, and others that give at least `num_steps` steps."""
    held: list[Int32] = []
    rest = list(documents)
    while rest and sum(min(len(document) // 8, STEPS_OF_ONE) for document in held) < num_steps:
        held.append(rest.pop())
    kept: list[Int32] = []
    room = num_tokens
    for document in rest:
        kept.append(document[:room])
        room -= len(kept[-1])
        if room == 0:
            return kept, held
    raise SystemExit(f"the logs hold {num_tokens - room:,} tokens besides those held out, not {num_tokens:,}")


class Ours:
    """A namespace's memory, and a row that drafts from it."""

    def __init__(self, vocab_size: int, num_tokens: int) -> None:
        self.memory = Memory(max(1 << 20, 400 * num_tokens))  # one generation holds all
        self.strategy = RetroStrategy(vocab_size)
        self.prices = MIN_PROB * np.arange(MAX_DRAFT + 1)
        self.row: StrategyRow = self.strategy.row(self.memory)
        self.alone = SuffixAutomaton()

    def store(self, tokens: Int32) -> None:
        self.memory.add_text(tokens)

    def nbytes(self) -> int:
        return self.memory.nbytes

    def begin(self, prompt: Int32) -> None:
        self.row = self.strategy.row(self.memory)
        self.row.begin(prompt, None)
        self.alone = SuffixAutomaton(prompt)

    def draft(self, context: Int32, chain: bool) -> Any:
        return self.row.draft(self.prices, MAX_DRAFT, chain)

    def path(self, draft: Any, following: Int32) -> list[int]:
        path = [0]
        while (node := draft.child(path[-1], int(following[len(path) - 1]))) >= 0:
            path.append(node)
        return path

    def add(self, emitted: Int32) -> None:
        self.alone.extend(emitted)

    def commit(self, draft: Any, path: list[int], emitted: Int32) -> None:
        self.row.commit(draft, path, emitted, None)

    def end(self) -> None: ...


class Theirs:
    """A cache with one request at a time."""

    def __init__(self, depth: int) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.cache = SuffixDecodingCache(max_tree_depth=depth)
        self.depth, self.number = depth, 1_000_000

    def store(self, tokens: Int32) -> None:
        self.number += 1
        self.cache._global_tree.extend_ndarray(self.number, tokens)

    def nbytes(self) -> int:
        return int(self.cache._global_tree.estimate_memory())

    def begin(self, prompt: Int32) -> None:
        self.cache.start_request(0, prompt)

    def draft(self, context: Int32, chain: bool) -> Any:
        return self.cache.speculate(
            0, context[-self.depth :], max_spec_tokens=MAX_DRAFT, min_token_prob=MIN_PROB, use_tree_spec=not chain
        )

    def path(self, draft: Any, following: Int32) -> list[int]:
        children = {(parent, token): i for i, (parent, token) in enumerate(zip(draft.parents, draft.token_ids))}  # noqa: B905
        path = [-1]
        while (node := children.get((path[-1], int(following[len(path) - 1])), -1)) >= 0:
            path.append(node)
        return path

    def add(self, emitted: Int32) -> None:
        self.cache.add_active_response(0, emitted)

    def commit(self, draft: Any, path: list[int], emitted: Int32) -> None: ...

    def end(self) -> None:
        self.cache.stop_request(0)
        self.cache.evict_cached_response(0)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Microseconds and result of a call."""
    start = time.perf_counter()
    result = function()
    return 1e6 * (time.perf_counter() - start), result


def follow(system: Ours | Theirs, held: list[Int32], num_steps: int, chain: bool) -> dict[str, float]:
    """Draft and add through held-out conversations; spreads in microseconds, adding by token."""
    times: dict[str, list[float]] = {"draft": [], "add": [], "commit": []}
    tokens = nodes = 0
    for document in held:
        middle = len(document) // 2
        prompt = document[max(middle - PROMPT, 0) : middle].copy()
        system.begin(prompt)
        place = middle
        for _ in range(STEPS_OF_ONE):
            following = document[place : place + MAX_DRAFT + 1].copy()
            if len(following) <= MAX_DRAFT or len(times["draft"]) == num_steps + WARM_UP:
                break
            context = document[max(place - 64, 0) : place].copy()
            draft_us, draft = timed(lambda: system.draft(context, chain))  # noqa: B023
            path = system.path(draft, following)
            emitted = following[: len(path)]
            add_us, _ = timed(lambda: system.add(emitted))  # noqa: B023
            commit_us, _ = timed(lambda: system.commit(draft, path, emitted))  # noqa: B023
            for name, us in (("draft", draft_us), ("add", add_us / len(path)), ("commit", commit_us / len(path))):
                times[name].append(us)
            place += len(path)
            tokens += len(path)
            nodes += len(draft.token_ids) - isinstance(system, Ours)
        system.end()
    found = {"tokens_per_step": tokens / len(times["draft"]), "nodes_per_step": nodes / len(times["draft"])}
    for name, values in times.items():
        found[f"{name}_us_p50"], found[f"{name}_us_p99"] = np.quantile(values[WARM_UP:], [0.5, 0.99]).tolist()
    return found


def measure(name: str, file: Path, num_tokens: int, num_steps: int, depth: int) -> dict[str, Any]:
    """One system at one size; in a process of its own."""
    flat, ends = (np.load(file)[key] for key in ("tokens", "ends"))
    kept, held = split(np.split(flat, ends[:-1]), num_tokens, num_steps)
    kept = [document.copy() for document in kept]
    vocab_size = int(flat.max()) + 1

    def system() -> Ours | Theirs:
        return Ours(vocab_size, num_tokens) if name == "retrodraft" else Theirs(depth)

    warm = system()  # compiles
    warm.store(kept[0][:1000])
    follow(warm, held[:1], 50, True)
    tested = system()
    before = resident()
    store_us = [timed(lambda: tested.store(document))[0] for document in kept]  # noqa: B023
    grown = resident() - before
    by_token = [us / len(document) for us, document in zip(store_us, kept, strict=True) if len(document) >= 100]
    result: dict[str, Any] = {"system": name, "num_tokens": num_tokens, "num_steps": num_steps}
    result["store_us_per_token"] = sum(store_us) / num_tokens
    result["store_us_per_token_p50"], result["store_us_per_token_p99"] = np.quantile(by_token, [0.5, 0.99]).tolist()
    result["bytes_per_token"], result["resident_bytes_per_token"] = tested.nbytes() / num_tokens, grown / num_tokens
    for form in ("chain", "tree"):
        result[form] = follow(tested, held, num_steps, form == "chain")
    return result


def resident() -> int:
    """Bytes of this process in memory (Linux)."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def line(result: dict[str, Any]) -> str:
    """Figures of one system at one size."""
    text = (
        f"{result['num_tokens']:>9,} tokens, {result['system']}: store {result['store_us_per_token']:.2f} us a token "
        f"(texts' p50 {result['store_us_per_token_p50']:.2f}, p99 {result['store_us_per_token_p99']:.2f}), "
        f"{result['bytes_per_token']:.0f} bytes a token ({result['resident_bytes_per_token']:.0f} resident)"
    )
    for form in ("chain", "tree"):
        f = result[form]
        text += (
            f"\n    {form}: draft p50 {f['draft_us_p50']:.1f} us, p99 {f['draft_us_p99']:.1f}; add a token p50 "
            f"{f['add_us_p50']:.2f}, p99 {f['add_us_p99']:.2f} (commit {f['commit_us_p50']:.2f}, "
            f"{f['commit_us_p99']:.2f}); {f['nodes_per_step']:.1f} nodes, {f['tokens_per_step']:.3f} tokens a step"
        )
    return text


def main() -> None:
    """Tokenise once, measure each system at each size, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[10_000, 100_000], help="stored tokens")
    parser.add_argument("--steps", type=int, default=2000, help="drafts of each form")
    parser.add_argument("--depth", type=int, default=64, help="of their trees")
    parser.add_argument("--tokenizer", default="embedded")
    parser.add_argument("-o", "--output", type=Path, help="JSON file of the results")
    options = parser.parse_args()
    documents = conversations(options.logs, options.tokenizer)
    names = ["retrodraft"] + ["arctic-inference"] * (importlib.util.find_spec("arctic_inference") is not None)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokens.npz"
        np.savez(file, tokens=np.concatenate(documents), ends=np.cumsum([len(document) for document in documents]))
        for num_tokens in options.tokens:
            for name in names:
                arguments = [name, str(file), str(num_tokens), str(options.steps), str(options.depth)]
                done = subprocess.run(
                    [sys.executable, __file__, "--one", *arguments], stdout=subprocess.PIPE, text=True
                )
                if done.returncode:
                    raise SystemExit(done.returncode)
                results.append(json.loads(done.stdout))
                print(line(results[-1]), flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))))
    else:
        main()
