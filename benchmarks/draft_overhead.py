"""Time of one whole drafting step without a model: candidates, a 60-node tree, its mask, and learning the outcome.

    python benchmarks/draft_overhead.py [TEXT_FILE] [--tokenizer embedded]

The text (default: this interpreter's `argparse` and `typing` sources) is followed token by token as if the target
had said it; the target's logits are stood in for by random ones that contain the right token. Prints a line for each
context length, and the automaton's bulk append.
"""

from __future__ import annotations

import argparse
import time
import typing
from pathlib import Path

import numpy as np

from retrodraft.index.suffix_automaton import SuffixAutomaton
from retrodraft.models import load_tokenizer
from retrodraft.retro import RetroStrategy
from retrodraft.strategy import TopLogits

NODES = 60
STEPS = 500


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("text", nargs="?", type=Path)
    parser.add_argument("--tokenizer", default="embedded")
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer)
    files = [options.text] if options.text else [Path(argparse.__file__), Path(typing.__file__)]
    tokens = np.array(tokenizer("\n".join(path.read_text(encoding="utf-8") for path in files)).input_ids, np.int32)
    rng = np.random.default_rng(0)
    for context in (1000, 8000, 32_000):
        if len(tokens) < context + 4 * STEPS:
            print(f"{context} tokens: the text has only {len(tokens)}")
            continue
        draft, learn = measure(tokens, context, len(tokenizer), rng)
        total = draft + learn
        print(
            f"{context} tokens of context: draft {np.median(draft):.0f} us, learn {np.median(learn):.0f} us, "
            f"whole step median {np.median(total):.0f} us, p99 {np.quantile(total, 0.99):.0f} us"
        )
    SuffixAutomaton(tokens[:100])
    start = time.perf_counter()
    automaton = SuffixAutomaton(tokens)
    seconds = time.perf_counter() - start
    print(f"automaton: {1e6 * seconds / len(tokens):.2f} us and {automaton.nbytes / len(tokens):.0f} bytes a token")


def measure(
    tokens: np.ndarray, context: int, vocab_size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds of drafting (with the mask) and of learning, for each of STEPS steps behind `context` tokens."""
    row = RetroStrategy(vocab_size).row()
    ids = rng.integers(0, vocab_size, (context, 8)).astype(np.int32)
    ids[:-1, 0] = tokens[1:context]
    probs = np.tile(np.geomspace(0.5, 0.004, 8).astype(np.float32), (context, 1))
    row.begin(tokens[:context], TopLogits(ids, probs))
    position, draft, learn = context - 1, [], []
    for step in range(STEPS + 20):
        start = time.perf_counter()
        tree = row.draft(np.zeros(NODES + 1), 64, False)
        tree.ancestor_mask()
        drafted = time.perf_counter()
        path, node = [0], 0
        while (node := tree.child(node, int(tokens[position + len(path)]))) >= 0:
            path.append(node)
        emitted = tokens[position + 1 : position + 1 + len(path)]
        said = rng.integers(0, vocab_size, (len(tree), 8)).astype(np.int32)
        said[path, 0] = emitted
        top = TopLogits(said, np.tile(probs[0], (len(tree), 1)))
        walked = time.perf_counter()
        row.commit(tree, path, emitted, top)
        if step >= 20:  # the first ones warm up
            draft.append(1e6 * (drafted - start))
            learn.append(1e6 * (time.perf_counter() - walked))
        position += len(path)
        if position + 80 > len(tokens):
            break
    return np.array(draft), np.array(learn)


if __name__ == "__main__":
    main()
