"""What only the device itself can show: exact outputs there, and what a drafted step costs beside a plain one.

No hub and no weights are needed: models are random. First, small models of four attention patterns generate in float32
with and without drafts, and the outputs are compared. Then a model of a real size generates under several budgets; the
time of a step over a plain step is the number of tokens per forward from which that budget pays on the device.

    python benchmarks/device.py --device cuda:0 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from retrodraft import RetroDraft

SMALL = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, pad_token_id=0, eos_token_id=None,
)  # fmt: skip
MIXED = dict(head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
PATTERNS = {
    "full": ("llama", "sdpa", {}),
    "full, eager": ("llama", "eager", {}),
    "sliding": ("mistral", "sdpa", dict(sliding_window=8)),
    "sliding and full": ("gemma3_text", "sdpa", MIXED),
}
BUDGETS = (0, 4, 8, 16, 32, 63)
NEW_TOKENS = 64


def model_of(kind: str, attention: str, settings: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
    """A random model, the same at each call."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).eval().to(device)


def timed(model: Any, call: Any, prompt: torch.Tensor, **options: Any) -> tuple[Any, float]:
    """Output and seconds of one generate call."""
    for begin in (True, False):
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        if begin:
            start = time.perf_counter()
            out = call(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, **options)
    return out, time.perf_counter() - start


def check_exactness(device: str) -> dict[str, dict[str, Any]]:
    """Drafted and plain outputs by attention pattern: greedy and sampled, cold and with everything learned."""
    results: dict[str, dict[str, Any]] = {}
    for name, (kind, attention, changes) in PATTERNS.items():
        model = model_of(kind, attention, {**SMALL, **changes}, device, torch.float32)
        rd = RetroDraft(model, budget=16)
        equal = runs = tokens = forwards = 0
        for seed in range(6):
            torch.manual_seed(seed)
            prompt = torch.randint(1, 97, (1, 24), device=device)
            for options in ({"do_sample": False}, {"do_sample": True, "top_k": 0, "temperature": 0.3}):
                torch.manual_seed(seed)
                expected, _ = timed(model, model.generate, prompt, **options)
                for _ in range(2):
                    torch.manual_seed(seed)
                    found, _ = timed(model, rd.generate, prompt, **options)
                    runs, equal = runs + 1, equal + int(torch.equal(found, expected))
                    tokens, forwards = tokens + NEW_TOKENS, forwards + rd.stats.num_target_forwards
        results[name] = {
            "mode": rd.capabilities.mode, "equal": equal, "runs": runs, "tokens_per_forward": tokens / forwards
        }  # fmt: skip
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    return results


def measure_steps(model: Any, repeats: int) -> dict[str, Any]:
    """Milliseconds of a step by budget, and drafting's share of it; medians of `repeats` interleaved rounds."""
    torch.manual_seed(0)
    prompt = torch.randint(1, 1000, (1, 256), device=model.device)
    drafters = {budget: RetroDraft(model, budget=budget, hot_start=False) for budget in BUDGETS}
    plain: list[float] = []
    steps: dict[int, list[tuple[float, float, float]]] = {budget: [] for budget in BUDGETS}
    for attempt in range(repeats + 1):  # the first round compiles and warms up
        _, seconds = timed(model, model.generate, prompt, do_sample=False)
        if attempt:
            plain.append(1e3 * seconds / NEW_TOKENS)
        for budget, rd in drafters.items():
            _, seconds = timed(model, rd.generate, prompt, do_sample=False)
            stats = rd.stats
            row = (1e3 * seconds / stats.num_target_forwards, statistics.median(stats.draft_us) / 1e3)
            if attempt:
                steps[budget].append((*row, stats.num_draft_tokens / stats.num_target_forwards))
    base = statistics.median(plain)
    table = {}
    print(f"plain step {base:.2f} ms")
    for budget, rows in steps.items():
        milliseconds, drafting, nodes = (statistics.median(column) for column in zip(*rows, strict=True))
        table[budget] = {"ms": milliseconds, "over_plain": milliseconds / base, "draft_ms": drafting, "nodes": nodes}
        print(f"budget {budget}: {json.dumps({key: round(value, 3) for key, value in table[budget].items()})}")
    return {"plain_ms": base, "budgets": table}


def main() -> None:
    """Run both parts, print them, and write them to --output."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16", help="of the second part; the first is in float32")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("-o", "--output", default="device.json")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    exact = check_exactness(options.device)
    settings = dict(
        vocab_size=options.vocab, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64,
        num_key_value_heads=max(options.hidden // 256, 1), max_position_embeddings=2048, eos_token_id=None,
    )  # fmt: skip
    model = model_of("llama", "sdpa", settings, options.device, getattr(torch, options.dtype))
    name = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else options.device
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} G parameters in {options.dtype} on {name}")
    result = {
        "device": name,
        "torch": torch.__version__,
        "exact": exact,
        "steps": measure_steps(model, options.repeats),
    }
    with open(options.output, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
    if any(row["equal"] != row["runs"] for row in exact.values()):
        raise SystemExit("outputs differ from plain generate's")


if __name__ == "__main__":
    main()
