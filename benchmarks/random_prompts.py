"""Prompts of random tokens, as a workload of which little can be drafted.

python benchmarks/random_prompts.py --count 8 > random.jsonl
retrodraft bench --workload random.jsonl --systems plain,retro --temperature 2 -o results
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from retrodraft.models import load_tokenizer


def main() -> None:
    """Print a line for each prompt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer", default="embedded")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer)
    rng = np.random.default_rng(0)
    for number in range(options.count):
        ids = rng.integers(0, len(tokenizer), options.tokens)
        message = {"role": "user", "content": tokenizer.decode(ids, skip_special_tokens=True)}
        print(json.dumps({"id": f"random/{number}", "category": "random", "messages": [message]}))


if __name__ == "__main__":
    main()
