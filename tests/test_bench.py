"""`retrodraft bench`: every system measured and checked, killed runs resumed, faults said aloud."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command import retrodraft_here
from filelock import FileLock

from retrodraft.bench import run_bench
from retrodraft.reports import verdict
from retrodraft.runs import BenchSettings


def bench(folder: Path, workload: Path, tiny_folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """A small benchmark of every system."""
    return retrodraft_here(
        "bench", "--workload", workload, "-o", folder, "--model", tiny_folder, "--max-new-tokens", "24",
        "--budget", "8", *more,
    )  # fmt: skip


def test_bench_compares_every_system(workload: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """Figures of every system and category; float32 outputs all equal plain's; nothing is run again."""
    folder = tmp_path / "out"
    done = bench(folder, workload, tiny_folder)
    assert done.returncode == 0, done.stderr
    results = json.loads((folder / "results.json").read_text())
    systems = results["systems"]
    assert list(systems) == [
        "plain", "hf-prompt-lookup", "prompt_lookup", "token_recycling", "suffix", "goose", "retro"
    ]  # fmt: skip
    for name, record in systems.items():
        assert set(record["categories"]) == {"even", "odd"}
        for cell in (record["overall"], *record["categories"].values()):
            assert cell["equal_outputs"] == 1.0
            low, middle, high = (cell["speedup_over_plain"][key] for key in ("low", "median", "high"))
            assert 0 < low <= middle <= high and cell["tokens_per_second"] > 0
            assert cell["tokens_per_forward"] == 1.0 if name == "plain" else cell["tokens_per_forward"] >= 1.0
            assert cell["nodes_per_forward"] <= 10 and cell["draft_us_p50"] <= cell["draft_us_p99"]
    assert systems["retro"]["overall"]["tokens_per_forward"] > 1.2
    assert systems["retro"]["overall"]["num_tokens"] == 4 * 24
    assert "| retro |" in (folder / "results.md").read_text()
    assert (folder / "results.png").read_bytes().startswith(b"\x89PNG")
    size = (folder / "runs.jsonl").stat().st_size
    assert bench(folder, workload, tiny_folder).returncode == 0
    assert (folder / "runs.jsonl").stat().st_size == size
    other = bench(folder, workload, tiny_folder, "--seed", "3")
    assert other.returncode == 2 and "other settings (seed)" in other.stderr


@pytest.mark.slow
def test_killed_bench_goes_on(workload: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """A kill in the middle, and a line cut in half, cost at most the run that was under way."""
    folder = tmp_path / "out"
    command: list[Any] = [
        sys.executable, "-m", "retrodraft", "bench", "--workload", workload, "-o", folder, "--model", tiny_folder,
        "--max-new-tokens", "24", "--budget", "8", "--systems", "plain,retro",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = folder / "runs.jsonl"
    deadline = time.time() + 300
    while time.time() < deadline and not (log.is_file() and log.read_bytes().count(b"\n") >= 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(line for line in finished if line.endswith(b"\n")) + b'{"id": "p3", "sys')
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    assert sorted((run["id"], run["system"]) for run in runs) == sorted(
        (f"p{i}", system) for i in range(4) for system in ("plain", "retro")
    )


def test_sampling_bench_is_equal_too(workload: Path, tiny_folder: Path, tmp_path: Path) -> None:
    done = bench(tmp_path / "out", workload, tiny_folder, "--temperature", "1.5", "--systems", "retro,goose", "--warm")
    assert done.returncode == 0, done.stderr
    systems = json.loads((tmp_path / "out" / "results.json").read_text())["systems"]
    assert all(record["overall"]["equal_outputs"] == 1.0 for record in systems.values())


def small(workload: Path, tiny_folder: Path, **changes: Any) -> BenchSettings:
    """Settings of a run that takes a second."""
    defaults: dict[str, Any] = dict(
        workload=str(workload), systems=["retro"], model=str(tiny_folder), budget="8", max_new_tokens=12
    )
    return BenchSettings(**{**defaults, **changes})


def log_records(folder: Path) -> list[dict[str, Any]]:
    """The lines of runs.jsonl."""
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


def test_figures_follow_from_the_runs(workload: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """tokens_per_forward, speedup and equality, computed again from runs.jsonl."""
    results = run_bench(small(workload, tiny_folder), tmp_path)
    runs = log_records(tmp_path)[1:]
    mine, plain = ({run["id"]: run for run in runs if run["system"] == name} for name in ("retro", "plain"))
    cell = results["systems"]["retro"]["overall"]
    forwards = sum(run["forwards"] for run in mine.values())
    assert cell["tokens_per_forward"] == sum(len(run["token_ids"]) for run in mine.values()) / forwards
    ratios = sorted(plain[i]["seconds"] / mine[i]["seconds"] for i in mine)
    assert cell["speedup_over_plain"]["median"] == pytest.approx((ratios[1] + ratios[2]) / 2)
    assert all(0 < run["decode_seconds"] < run["seconds"] for run in runs)
    assert all(run["nodes"] == 0 and run["forwards"] == 12 for run in plain.values())
    assert [item["token_ids"] for item in mine.values()] == [plain[i]["token_ids"] for i in mine]
    assert "Every output equals plain generate's" in verdict(results)
    assert "Every output equals plain generate's" in (tmp_path / "results.md").read_text()


def test_drafts_beside_the_prompt_are_counted(workload: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """Hugging Face's lookup verifies its first drafts in the prompt's own forward."""
    results = run_bench(small(workload, tiny_folder, systems=["hf-prompt-lookup"], max_new_tokens=2), tmp_path)
    runs = [run for run in log_records(tmp_path)[1:] if run["system"] == "hf-prompt-lookup"]
    assert (
        any(run["forwards"] == 1 for run in runs)
        or results["systems"]["hf-prompt-lookup"]["overall"]["num_prompts"] == 4
    )
    assert all(run["nodes"] >= 1 for run in runs)


def test_a_wrong_output_is_a_fault(workload: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """A strategy's token that plain would not have taken: place, margins, verdict, exit code 1."""
    settings = small(workload, tiny_folder)
    run_bench(settings, tmp_path)
    header, *runs = log_records(tmp_path)
    wrong = next(run for run in runs if run["system"] == "retro")
    wrong["token_ids"][5] = (wrong["token_ids"][5] + 1) % 256
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [header, *runs]))
    results = run_bench(settings, tmp_path)
    assert results["num_faults"] == 1 and results["systems"]["retro"]["overall"]["equal_outputs"] == 0.75
    (difference,) = results["first_differences"]
    assert difference["id"] == wrong["id"] and difference["position"] == 5
    assert difference["margin"] > 1e-4 and difference["top2_margin"] > 0
    assert "plain generate's: 1 of retro." in verdict(results) and "report): 1." in verdict(results)
    done = retrodraft_here(
        "bench", "--workload", workload, "-o", tmp_path, "--model", tiny_folder,
        "--max-new-tokens", "12", "--budget", "8", "--systems", "retro",
    )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"| {wrong['id']} | retro | 5 |" in (tmp_path / "results.md").read_text()


def test_a_cut_output_is_a_fault(workload: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """An output that ends early has no margin, and results.json stays JSON."""
    settings = small(workload, tiny_folder)
    run_bench(settings, tmp_path)
    header, *runs = log_records(tmp_path)
    next(run for run in runs if run["system"] == "retro")["token_ids"].pop()
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [header, *runs]))
    assert run_bench(settings, tmp_path)["num_faults"] == 1
    text = (tmp_path / "results.json").read_text()
    assert "NaN" not in text and json.loads(text)["first_differences"][0]["margin"] is None


@pytest.mark.parametrize("begun", [b"", b'{"setti', b'{"settings": {"model": "another"}}\n', b'{"settings": {}}\n{"id'])
def test_a_log_without_a_run_is_begun_anew(begun: bytes, workload: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """A kill before the first run, or a mistyped model, does not lock the folder."""
    (tmp_path / "runs.jsonl").write_bytes(begun)
    results = run_bench(small(workload, tiny_folder), tmp_path)
    assert results["num_prompts"] == 4 and len(log_records(tmp_path)) == 9


def test_other_settings_are_named(workload: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """Options, the workload's content, and a damaged line."""
    settings = small(workload, tiny_folder)
    run_bench(settings, tmp_path)
    with pytest.raises(ValueError, match=r"other settings \(max_new_tokens, seed\)"):
        run_bench(small(workload, tiny_folder, max_new_tokens=13, seed=5), tmp_path)
    text = workload.read_bytes()
    workload.write_bytes(text.replace(b"count", b"quote"))
    with pytest.raises(ValueError, match=r"other settings \(workload_sha256\)"):
        run_bench(settings, tmp_path)
    workload.write_bytes(text)
    lines = (tmp_path / "runs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "runs.jsonl").write_text("".join([*lines[:3], "garbage\n", *lines[4:]]))
    with pytest.raises(ValueError, match=r"runs.jsonl line 4 is damaged"):
        run_bench(settings, tmp_path)


def test_warm_restarts_are_told(workload: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """A warm run that goes on has forgotten what it knew, and says so; one with nothing left to do adds no line."""
    settings = small(workload, tiny_folder, warm=True)
    assert run_bench(settings, tmp_path)["num_restarts"] == 0
    lines = (tmp_path / "runs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "runs.jsonl").write_text("".join(lines[:5]))
    results = run_bench(settings, tmp_path)
    assert results["num_restarts"] == 1 and "warm state: 1." in verdict(results) and results["num_prompts"] == 4
    size = (tmp_path / "runs.jsonl").stat().st_size
    assert run_bench(settings, tmp_path)["num_restarts"] == 1
    assert (tmp_path / "runs.jsonl").stat().st_size == size


def test_cold_runs_know_nothing(workload: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """Cold, a prompt costs the same forwards wherever it stands in the file; warm, what came before helps."""
    lines = [line for line in workload.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\r\n") if line]
    again = tmp_path / "again.jsonl"
    again.write_bytes(b"\n".join([lines[0], lines[0].replace(b'"p0"', b'"again"')]))
    forwards = {}
    for warm in (False, True):
        folder = tmp_path / f"warm-{warm}"
        run_bench(small(again, tiny_folder, warm=warm, max_new_tokens=24), folder)
        runs = log_records(folder)[1:]
        forwards[warm] = {run["id"]: run["forwards"] for run in runs if run["system"] == "retro"}
    assert forwards[False]["p0"] == forwards[False]["again"] == forwards[True]["p0"]
    assert forwards[True]["again"] < forwards[True]["p0"]


def test_long_prompts_are_left_out(workload: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """Those that the model's window has no room for, too; none left is an error."""
    long = {"id": "long", "category": "odd", "messages": [{"role": "user", "content": "x" * 510}]}
    with workload.open("a") as file:
        file.write(json.dumps(long) + "\n")
    results = run_bench(small(workload, tiny_folder), tmp_path / "a")
    assert results["num_left_out"] == 1 and results["num_prompts"] == 4 and "too long: 1." in verdict(results)
    with pytest.raises(ValueError, match="every prompt is longer than 3 tokens"):
        run_bench(small(workload, tiny_folder, max_prompt_tokens=3), tmp_path / "b")


def test_one_benchmark_a_folder(workload: Path, tiny_folder: Path, tmp_path: Path) -> None:
    with FileLock(tmp_path / "runs.lock"), pytest.raises(ValueError, match="another benchmark is writing"):
        run_bench(small(workload, tiny_folder), tmp_path)
