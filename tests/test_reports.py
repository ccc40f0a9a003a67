"""Tables for the terminal: whole heads and figures in 80 columns."""

from __future__ import annotations

from typing import Any

import pytest

from retrodraft.budget import CostCurve
from retrodraft.reports import COLUMNS, markdown, print_cost_curve, print_results

SYSTEMS = ("plain", "hf-prompt-lookup", "prompt_lookup", "token_recycling", "suffix", "goose", "retro")


def results() -> dict[str, Any]:
    """What a benchmark of all systems leaves."""
    cell = {
        "tokens_per_second": 123.4, "speedup_over_plain": {"median": 1.53, "low": 1.41, "high": 1.62},
        "tokens_per_forward": 2.53, "nodes_per_forward": 31.5, "draft_us_p50": 1234.0, "draft_us_p99": 12345.0,
        "equal_outputs": 1.0, "num_prompts": 3,
    }  # fmt: skip
    return {
        "systems": {name: {"overall": cell, "categories": {"[a] b": cell}} for name in SYSTEMS},
        "categories": ["[a] b"], "num_faults": 0, "num_left_out": 0, "num_restarts": 0, "num_prompts": 3,
        "first_differences": [], "dtype": "float32", "settings": {"workload": "w", "model": "m"},
        "machine": {"cpu_threads": 1, "processor": "p", "torch": "t", "transformers": "t"},
    }  # fmt: skip


def test_a_benchmark_has_room_in_80_columns(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_results(results())
    text = capsys.readouterr().out
    assert "…" not in text and max(map(len, text.splitlines())) <= 80 and "[a] b" in text
    assert {"tokens/", "s", "speedup", "forward", "nodes/", "draft", "µs", "p50", "equal"} <= set(text.split())
    for name in SYSTEMS:
        rows = [line.split() for line in text.splitlines() if line.startswith(f" {name} ")]
        assert rows == [[name, "123.4", "1.53", "(1.41-1.62)", "2.53", "31.5", "1234", "100%"]] * 2


def test_markdown_has_every_column() -> None:
    text = markdown(results())
    assert "| " + " | ".join(COLUMNS) + " |" in text and "p99" in COLUMNS
    assert "| retro | 123.4 | 1.53 (1.41-1.62) | 2.53 | 31.5 | 1234 | 12345 | 100% |" in text


def test_a_cost_curve_has_room_in_80_columns(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_cost_curve(CostCurve([256, 2048, 16384, 131072], [1, 2, 1024], [[0.0123, 0.0134, 3.1111]] * 4))
    lines = capsys.readouterr().out.splitlines()
    assert "…" not in "".join(lines) and max(map(len, lines)) <= 80
    assert lines[-2].split() == ["1024", *["3111.1", "(252.93)"] * 4]
    heads = " ".join(lines[:4]).split()
    assert heads.count("context:") == 4 and "131072" in heads and heads.count("(ratio)") == 4
