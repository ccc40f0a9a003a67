"""The command line, run as a user runs it, on the embedded model or on a tiny one in a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from retrodraft.workloads import read_workload, render_prompt


def retrodraft(*arguments: str, stdin: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "retrodraft", *arguments],
        capture_output=True, text=True, input=stdin, env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=600,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte tokenizer, saved as a user would have it."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(0, vocab_size=256, initializer_range=0.05, pad_token_id=None).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """Four short prompts in two categories, with a BOM, CRLF, a blank line and an answer to be dropped."""
    lines = []
    for i in range(4):
        messages = [{"role": "user", "content": f"count {i} " * 6}, {"role": "assistant", "content": "one"}]
        lines.append(json.dumps({"id": f"p{i}", "category": "even" if i % 2 == 0 else "odd", "messages": messages}))
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines[:2], "", *lines[2:]]).encode() + b"\r\n")
    return path


def test_help_is_quick_and_needs_no_torch() -> None:
    code = "import sys; sys.argv = ['retrodraft', '--help']\nfrom retrodraft.cli import main\ntry:\n    main()\n"
    code += "except SystemExit:\n    pass\nassert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in ("generate", "bench", "profile", "demo"):
        assert command in done.stdout
        assert "Usage" in retrodraft(command, "--help").stdout


def test_index_needs_no_torch() -> None:
    code = (
        "import sys, retrodraft, retrodraft.index, retrodraft.index.suffix_automaton\nassert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_generate_streams_the_answer(tiny_folder: Path) -> None:
    """The same text as from Python, from an argument and from standard input, and the statistics on standard error."""
    common = ("--model", str(tiny_folder), "--raw", "--max-new-tokens", "30", "--budget", "8")
    done = retrodraft("generate", "abcabcabc", *common)
    assert done.returncode == 0, done.stderr
    assert "30 tokens in" in done.stderr and "tokens per forward" in done.stderr
    piped = retrodraft("generate", "-", *common, stdin="abcabcabc")
    assert piped.stdout == done.stdout and len(done.stdout) > 10


def test_demo_on_the_embedded_model() -> None:
    """The engine of `make demo`: identical texts, fewer forwards."""
    done = retrodraft("demo", "--max-new-tokens", "40")
    assert done.returncode == 0, done.stderr
    assert "The texts are identical." in done.stdout and "find_maximum" in done.stdout


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("generate", "x", "--budget", "-3"), "budget must be auto or a whole number"),
        (("generate", "x", "--strategy", "magic"), "strategy must be retro, goose"),
        (("generate", "x", "--dtype", "int3"), "dtype must be one of float32"),
        (("generate", "x", "--model", "/no/such/folder"), "model '/no/such/folder' can't be loaded"),
        (("generate", "x", "--device", "abacus"), "device 'abacus' can't be used"),
        (("generate", " "), "the prompt is empty"),
        (("bench", "--workload", "/no/such.jsonl", "-o", "{tmp}"), "workload '/no/such.jsonl' can't be read"),
        (("bench", "--workload", "{bad}", "-o", "{tmp}"), "bad.jsonl line 2: not JSON"),
        (("bench", "--workload", "{bad}", "--systems", "plain,zip", "-o", "{tmp}"), "systems: 'zip' is none of plain"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": 1, "messages": [{"role": "user", "content": "x"}]}\n{"id": \n')
    filled = [argument.format(tmp=tmp_path, bad=bad) for argument in arguments]
    done = retrodraft(*filled)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_unknown_option_exits_with_2() -> None:
    done = retrodraft("generate", "x", "--max-new-tokens", "0")
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_profile_writes_the_curve(tiny_folder: Path, tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    done = retrodraft("profile", "--model", str(tiny_folder), "-o", str(picture), RETRODRAFT_CACHE=str(tmp_path / "c"))
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG") and "64" in done.stdout
    assert len(list((tmp_path / "c").glob("cost-*.json"))) == 1


def bench(folder: Path, workload: Path, tiny_folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """A small benchmark of every system."""
    return retrodraft(
        "bench", "--workload", str(workload), "-o", str(folder), "--model", str(tiny_folder), "--max-new-tokens", "24",
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


@pytest.mark.parametrize(
    "line,message",
    [
        ("[1]", "expected an object"),
        ('{"id": 1}', "needs 'messages'"),
        ('{"messages": []}', "'id' is missing"),
        ('{"id": 1, "messages": "x"}', "'messages' must be a list"),
        ('{"id": 1, "messages": [{"content": "x"}]}', "message 0 needs a 'role'"),
        ('{"id": 1, "messages": [{"role": "user", "content": 3}]}', "'content' must be text"),
        ('{"id": 1, "messages": [{"role": "assistant", "content": "x"}]}', "no message before the answer"),
        ('{"question_id": 1, "turns": []}', "'turns' must be a list"),
    ],
)
def test_broken_workload_lines_are_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"id": 0, "messages": [{"role": "user", "content": "x"}]}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=f"w.jsonl line 3: .*{message}"):
        read_workload(path)


def test_workload_forms(workload: Path, tmp_path: Path, embedded: tuple[Any, Any]) -> None:
    """Both formats; answers dropped; an empty file refused; the chat template applied."""
    items = read_workload(workload)
    assert [item.id for item in items] == ["p0", "p1", "p2", "p3"] and len(items[0].messages) == 1
    spec = tmp_path / "spec.jsonl"
    spec.write_text('{"question_id": 81, "category": "writing", "turns": ["first", "second"]}\n')
    assert read_workload(spec)[0].messages == [{"role": "user", "content": "first"}]
    spec.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_workload(spec)
    _, tokenizer = embedded
    prompt = tokenizer.decode(render_prompt(tokenizer, [{"role": "tool", "content": "hello"}]))
    assert prompt.endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
