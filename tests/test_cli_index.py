"""`retrodraft index`, run as a user runs it, with a byte tokenizer in a folder."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command import retrodraft, retrodraft_here
from indexing import result_of, save_tokenizer

from retrodraft.index import CorpusIndex
from retrodraft.index.corpus import MAX_SHARDS

ASCII = {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small tree with a binary, a BOM, CRLF, odd names, a chat log, and an end-of-turn marker in a text."""
    root = tmp_path_factory.mktemp("sources")
    (root / "a.py").write_text("for i in range(10):\n    print(i)\n")
    (root / "b with space.py").write_bytes(b"\xef\xbb\xbffor i in range(10):\r\n    total += i\r\n")
    (root / "\N{SNOWMAN}.txt").write_text("stop <|im_end|> here", encoding="utf-8")
    (root / "image.png").write_bytes(b"\x89PNG\0\0")
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "the answer is 42"}]
    (root / "log.jsonl").write_text("\n".join([json.dumps({"messages": messages}), "", "{broken"]))
    return root


@pytest.fixture
def built(tokenizer: Path, sources: Path, tmp_path: Path) -> Path:
    done = retrodraft_here("index", "build", sources, "-o", tmp_path / "my.index", "--tokenizer", tokenizer)
    assert done.returncode == 0, done.stderr
    assert "image.png" in done.stderr and "log.jsonl:3" in done.stderr and "skipped 2 in all" in done.stderr
    return tmp_path / "my.index"


def test_help_is_quick_and_needs_no_torch() -> None:
    code = "import sys; sys.argv = ['retrodraft', 'index', '--help']\nfrom retrodraft.cli import main\n"
    code += "try: main()\nexcept SystemExit: pass\nassert not {'torch', 'transformers', 'numba'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in ("build", "add", "merge", "compact", "info", "query", "verify", "eval"):
        assert command in done.stdout
        shown = retrodraft_here("index", command, "--help").stdout
        assert "Usage" in shown and "Example: retrodraft index" in " ".join(shown.split())


def test_build_info_and_query(built: Path) -> None:
    facts = result_of("info", built)
    assert facts["num_documents"] == 5 and facts["num_shards"] == 1 and facts["tokenizer"]["vocab_size"] == 257
    assert "5 documents" in retrodraft_here("index", "info", built).stdout
    found = result_of("query", built, "x = 1\nfor i in range(10):\n", "--k", "3")
    assert found["matched"].endswith("for i in range(10):\n") and found["occurrences"] == 2
    assert found["continuations"][0] == {"token": 220, "text": " ", "count": 2, "share": 1.0}
    assert {Path(item["name"]).name for item in found["documents"]} == {"a.py", "b with space.py"}
    assert "occurrences 2:" in retrodraft_here("index", "query", built, "-", stdin="range(10):\n").stdout
    assert result_of("query", built, "stop <|im_end|>")["match_length"] == 15  # spelled out, not the control token
    assert result_of("query", built, "\x01")["continuations"] == []
    found = result_of("query", built, "")
    assert found["match_length"] == found["occurrences"] == 0 and found["documents"] == []


def test_chat_roles_fields_and_standard_input(tokenizer: Path, sources: Path, tmp_path: Path) -> None:
    out, common = tmp_path / "out", ("--tokenizer", tokenizer)
    facts = result_of("build", sources / "log.jsonl", "-o", out, "--role", "assistant", *common)
    assert facts["num_documents"] == 1 and facts["num_tokens"] == len("the answer is 42")
    assert facts["skipped"] == [{"name": f"{sources / 'log.jsonl'}:3", "reason": "not JSON"}]
    facts = result_of("build", "-", "-o", out, *common, stdin='{"text": "abc"}')
    assert facts["num_tokens"] == 15  # plain text
    facts = result_of("build", "-", "-o", out, "--field", "text", *common, stdin='{"text": "abc"}')
    assert facts["num_tokens"] == 3 and facts["options"]["field"] == "text"
    facts = result_of("build", sources, "-o", out, "--include", "*.py", "--exclude", "a*", *common)
    assert facts["num_documents"] == 1
    done = retrodraft_here("index", "build", sources / "log.jsonl", "-o", tmp_path / "no", "--role", "bot", *common)
    assert done.returncode == 2 and "no text of role 'bot' was found" in done.stderr


def test_add_merge_compact_verify(built: Path, sources: Path, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("for i in range(10):\n    more()\n" * 3)
    facts = result_of("add", built, tmp_path / "more.txt", "--dedup")
    assert facts["num_shards"] == 1  # small ones are written anew together
    added = {"paths": [str(tmp_path / "more.txt")], "gitignore": True, "dedup": True}
    assert facts["options"]["paths"] == [str(sources)] and facts["options"]["added"] == [added]
    assert result_of("query", built, "for i in range(10):\n")["occurrences"] == 5
    merged = result_of("merge", built, built, "-o", tmp_path / "merged")
    assert merged["num_shards"] == 2 and merged["num_documents"] == 12
    compacted = result_of("compact", tmp_path / "merged")
    assert compacted["num_shards"] == 1 and compacted["num_tokens"] == merged["num_tokens"]
    assert result_of("query", tmp_path / "merged", "for i in range(10):\n")["occurrences"] == 10
    assert result_of("verify", tmp_path / "merged")["ok"]
    path = next((tmp_path / "merged").glob("order*"))
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    done = retrodraft_here("index", "verify", tmp_path / "merged")
    assert done.returncode == 1 and "checksum" in done.stdout and "order-0" in done.stdout


def test_eval(built: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "zzz"}, {"role": "assistant", "content": "the answer is 42"}]
    (tmp_path / "w.jsonl").write_text(json.dumps({"id": 1, "messages": messages}))
    result = result_of("eval", built, "--workload", tmp_path / "w.jsonl", "--role", "")
    assert result["num_documents"] == 2
    result = result_of("eval", built, "--workload", tmp_path / "w.jsonl")
    assert result["num_documents"] == 1 and result["num_positions"] == 15 and result["tokens_per_forward"] > 2
    assert "tokens per forward" in retrodraft_here("index", "eval", built, "--workload", tmp_path / "w.jsonl").stdout
    text = (tmp_path / "w.jsonl").read_text()
    assert result_of("eval", built, "--workload", "-", stdin=text)["num_positions"] == 15
    result = result_of("eval", built, "--workload", "-", "--role", "", stdin=text)
    assert result["num_documents"] == 1 and result["num_positions"] == len(text) - 1  # as text
    done = retrodraft_here("index", "eval", built, "--workload", "-", "--role", "", stdin="ab")
    assert done.stdout.startswith("1 document, 1 token: ")
    assert "or text under --role ''" in " ".join(retrodraft_here("index", "eval", "--help").stdout.split())


def test_strict_writes_nothing(built: Path, tokenizer: Path, sources: Path) -> None:
    before = result_of("info", built)
    done = retrodraft_here("index", "build", sources, "-o", built, "--tokenizer", tokenizer, "--strict")
    assert done.returncode == 1 and "image.png" in done.stderr
    assert retrodraft_here("index", "add", built, sources, "--strict").returncode == 1
    assert result_of("info", built) == before and result_of("verify", built)["ok"]
    for command in (["build", sources, "-o", built, "--tokenizer", tokenizer], ["add", built, sources]):
        done = retrodraft_here("index", *command, "--strict", "--json")
        shown = json.loads(done.stdout)
        assert done.returncode == 1 and not shown["ok"] and shown["problem"] == "2 files or records skipped"
        assert shown["skipped"][0] == {"name": str(sources / "image.png"), "reason": "binary"}
    done = retrodraft_here("index", "add", built, sources / "a.py", "--strict")
    assert done.returncode == 0, done.stderr


def test_nothing_to_index(tokenizer: Path, tmp_path: Path) -> None:
    """O20: a message and exit code 2, and no index where there was none."""
    (tmp_path / "in").mkdir()
    for _ in range(2):
        done = retrodraft_here("index", "build", tmp_path / "in", "-o", tmp_path / "out", "--tokenizer", tokenizer)
        assert done.returncode == 2 and "nothing to index" in done.stderr and "Traceback" not in done.stderr
        done = retrodraft_here("index", "build", "-", "-o", tmp_path / "out", "--tokenizer", tokenizer, stdin="")
        assert done.returncode == 2 and "nothing to index in standard input: no text" in done.stderr
        assert not (tmp_path / "out").exists()
        (tmp_path / "in" / "empty.txt").touch()
    (tmp_path / "in" / "one.txt").write_text("x")
    assert result_of("build", tmp_path / "in", "-o", tmp_path / "out", "--tokenizer", tokenizer)["num_tokens"] == 1


def test_repeats(tokenizer: Path, tmp_path: Path) -> None:
    """O20: a thousand copies count once under --dedup."""
    (tmp_path / "in").mkdir()
    for number in range(1000):
        (tmp_path / "in" / f"{number}.txt").write_text("the same text")
    common = ("--tokenizer", tokenizer, "-o", tmp_path / "out")
    facts = result_of("build", tmp_path / "in", "--dedup", *common)
    assert facts["num_documents"] == 1 and facts["num_duplicates"] == 999
    assert result_of("build", tmp_path / "in", *common)["num_documents"] == 1000
    found = result_of("query", tmp_path / "out", "the same")
    assert found["sampled"] and found["occurrences"] == 1000 and found["continuations"][0]["count"] == 1000
    assert (
        "occurrences 1000, continuations counted in samples"
        in retrodraft_here("index", "query", tmp_path / "out", "the same").stdout
    )
    (tmp_path / "two.jsonl").write_text('{"text": "once"}\n' * 2)
    done = retrodraft_here("index", "build", tmp_path / "two.jsonl", "--dedup", *common)
    assert "left out 1 repeated document\n" in done.stderr


def test_shards_under_a_memory_limit(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "big.txt").write_text("0123456789 " * 20_000)
    common = ("--tokenizer", tokenizer, "-o", tmp_path / "out", "--max-memory", "1M")
    facts = result_of("build", tmp_path / "big.txt", *common)
    assert facts["num_tokens"] == 220_000 and facts["num_shards"] == 3
    assert result_of("query", tmp_path / "out", "x4567")["match_length"] == 4
    assert facts["advice"] is None
    facts = result_of("compact", tmp_path / "out", "--max-memory", "1M")
    assert facts["num_shards"] == 3
    assert result_of("compact", tmp_path / "out")["num_shards"] == 1
    assert result_of("compact", tmp_path / "out", "--max-memory", "1M")["num_shards"] == 1  # not more than there were


def test_more_shards_than_drafts_are_taken_from(
    built: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command that makes them says so, with what joins them; the memory too, where the machine's own is short."""
    (tmp_path / "big.txt").write_text("0123456789 " * 120_000)
    out, common = tmp_path / "out", ("--tokenizer", tokenizer, "--max-memory", "1M")
    wanted = f"18 shards are more than the {MAX_SHARDS} that can be drafted from: "
    wanted += f"join them with `retrodraft index compact {out}`"
    commands = (
        ["build", tmp_path / "big.txt", "-o", out, *common], ["info", out],
        ["add", out, tmp_path / "big.txt", *common], ["merge", *[built] * 18, "-o", out],
    )  # fmt: skip
    for command in commands:
        done = retrodraft_here("index", *command)
        said = wanted.replace("18 shards", "36 shards") if command[0] == "add" else wanted
        assert done.returncode == 0 and done.stderr == f"{said}\n", command
        assert result_of("info", out)["advice"] == said
    retrodraft_here("index", *commands[0])
    with monkeypatch.context() as patch:
        patch.setattr("retrodraft.commands.index._shard_tokens", lambda max_memory: 1000)
        advice = result_of("info", out)["advice"]
    assert advice.startswith(f"{wanted} --max-memory ")
    assert result_of("compact", out, "--max-memory", advice.split()[-1])["advice"] is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["build", "{root}/nothing", "-o", "{root}/o"], ["info", "{root}/nothing"], ["info", "{root}"],
        ["build", "{root}", "-o", "{root}"], ["build", "{root}", "-o", "{root}/file"],
        ["build", "{root}", "-o", "{root}/o", "--max-memory", "lots"],
        ["build", "{root}", "-o", "{root}/o", "--max-memory", "-1"],
        ["build", "{root}", "-o", "{root}/o", "--workers", "-1"], ["build", "{root}"], ["build"],
        ["build", "{root}", "-o", "{root}/o", "--tokenizer", "{root}/file"], ["merge", "{root}/a", "-o", "{root}/o"],
        ["query", "{root}/nothing", "x"], ["eval", "{root}/nothing", "--workload", "{root}/file"],
        ["compact", "{root}/nothing"], ["verify", "{root}/nothing"], ["build", "", "-o", "{root}/o"],
        ["build", "{root}", "-o", "{root}/link"], ["build", "{root}/file", "-o", "{root}/o", "--include", "!"],
        ["add", "{root}/nothing", "{root}/file"],
        ["build", "{root}/file", "-o", "/proc/x/y"], ["build", "{root}/file", "-o", "{root}/o", "--role", ""],
        ["build", "{root}/file", "-o", "{root}/o", "--field", " "],
        ["build", "{root}/file", "-o", "{root}/s/dense"], ["build", "{root}/file", "-o", "{root}/s/a/b"],
        ["merge", "{root}/s", "-o", "{root}/s/dense"],
    ],
    ids=range(26),
)  # fmt: skip
def test_bad_input(arguments: list[str], tokenizer: Path, tmp_path: Path) -> None:
    """One line on standard error, exit code 2, no traceback, nothing written."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("nowhere")
    CorpusIndex.build([[1]], tmp_path / "s")
    names = sorted(os.listdir(tmp_path / "s"))
    given = [argument.replace("{root}", str(tmp_path)) for argument in arguments]
    if given[0] == "build" and "--tokenizer" not in given and len(given) > 1:
        given += ["--tokenizer", str(tokenizer)]
    done = retrodraft_here("index", *given)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "o").exists() and sorted(os.listdir(tmp_path / "s")) == names


def test_stores_are_no_sources(tokenizer: Path, tmp_path: Path) -> None:
    """An index inside the folder that it indexes, and what a killed build left there, are not read."""
    (tmp_path / "a.txt").write_text("text")
    common = (tmp_path, "-o", tmp_path / "my.index", "--tokenizer", tokenizer)
    assert result_of("build", *common) == result_of("build", *common)
    (tmp_path / "killed").mkdir()
    for name in (".lock", "names-0.058a3316bc8d734382d69b3a57b1b52f.bin"):
        (tmp_path / "killed" / name).write_text("text")
    facts = result_of("build", *common)
    assert facts["num_documents"] == 1 and facts["skipped"] == []
    assert result_of("add", tmp_path / "my.index", tmp_path)["num_documents"] == 2


def test_odd_standard_input_and_arguments(built: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Bytes that are no UTF-8, nothing to read from, and names that only bytes can spell: a line each, no traceback."""
    for arguments, stdin, message in [
        (["query", built, "-"], b"for i\xff", "the text to look up is not UTF-8"),
        (["query", built, "for i\udcff"], b"", "the text to look up is not UTF-8"),
        (["query", built, "-"], None, "standard input is closed"),
        (["build", "-", "-o", tmp_path / "o", "--tokenizer", tokenizer], None, "standard input is closed"),
    ]:
        done = retrodraft_here("index", *arguments, stdin=stdin)
        assert done.returncode == 2 and done.stderr == f"retrodraft: {message}\n"
    (tmp_path / "bad\udcff name").write_text("\N{SNOWMAN} for", encoding="utf-8")
    assert result_of("build", tmp_path / "bad\udcff name", "-o", tmp_path / "o", "--tokenizer", tokenizer)
    assert result_of("query", tmp_path / "o", "\N{SNOWMAN} f")["match_length"] == 5
    for end in ("", "\n", "\r\n"):  # one line end of standard input, which echo puts there, is not looked up
        assert result_of("query", built, "-", stdin=f"range(10):{end}")["match_length"] == len("range(10):")
    assert result_of("query", built, "-", stdin="range(10):\n\n")["matched"] == "range(10):\n"
    assert result_of("query", built, "range(10):\r\n")["matched"] == "range(10):\n"


@pytest.mark.parametrize("key", ["name", "fingerprint", "vocab_size", "options", "shards", "num_positions"])
@pytest.mark.parametrize("value", [None, 5, "\x1b[31m", [], {}], ids=repr)
def test_damaged_facts(key: str, value: Any, built: Path) -> None:
    """Whatever a manifest says, commands end with one line, and no control code of its reaches the terminal."""
    manifest = json.loads((built / "manifest.json").read_text())
    info = manifest["info"]
    places = {"options": info, "shards": info, "num_positions": info["shards"][0]}
    places.get(key, info["tokenizer"])[key] = value
    (built / "manifest.json").write_text(json.dumps(manifest))
    for command in (["info", built], ["verify", built], ["merge", built, "-o", built.parent / "m"]):
        done = retrodraft_here("index", *command)
        assert done.returncode in (0, 1, 2) and "Traceback" not in done.stderr, done.stderr
        assert "\x1b" not in done.stdout + done.stderr


def test_a_full_disk(built: Path, tokenizer: Path, tmp_path: Path) -> None:
    """O22: no room for a file ends the build with one line; the index that was there stays, and nothing is left over.

    A limit on the size of files stands for the disk: it fails in the middle of a write, too.
    """
    (tmp_path / "big.txt").write_text("0123456789 " * 50_000)
    before, names = result_of("info", built), sorted(os.listdir(built))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        done = [
            retrodraft_here("index", "build", tmp_path / "big.txt", "-o", built, "--tokenizer", tokenizer),
            retrodraft_here("index", "add", built, tmp_path / "big.txt"),
        ]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    for each in done:
        assert each.returncode == 2 and each.stderr == f"retrodraft: {built}: File too large\n"
    assert result_of("info", built) == before and sorted(os.listdir(built)) == names
    assert result_of("verify", built)["ok"]


@pytest.mark.slow
def test_two_writers(built: Path, tmp_path: Path) -> None:
    """O22: writers wait for each other, and none of their additions is lost."""
    (tmp_path / "more.txt").write_text("more")
    command = [sys.executable, "-m", "retrodraft", "index", "add", str(built), str(tmp_path / "more.txt")]
    children = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(2)]
    for child in children:
        _, errors = child.communicate(timeout=300)
        assert child.returncode == 0, errors
    assert result_of("info", built)["num_documents"] == 7 and result_of("verify", built)["ok"]


def test_the_locale_does_not_matter(built: Path, tokenizer: Path, sources: Path, tmp_path: Path) -> None:
    """O18: the same index under an ASCII locale."""
    done = retrodraft(
        "index", "build", str(sources), "-o", str(tmp_path / "ascii"), "--tokenizer", str(tokenizer), **ASCII
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for part in ("tokens-0", "order-0", "names-0"):
        first, second = (next(folder.glob(f"{part}.*")).read_bytes()[64:] for folder in (built, tmp_path / "ascii"))
        assert first == second


@pytest.mark.slow
def test_killed_builds(built: Path, tokenizer: Path, tmp_path: Path) -> None:
    """O22: a build that is killed leaves the index that was there; a first one leaves none; the next one tidies up."""
    (tmp_path / "big.txt").write_text("0123456789 " * 200_000)
    before = result_of("info", built)
    command = [
        sys.executable,
        "-m",
        "retrodraft",
        "index",
        "build",
        str(tmp_path / "big.txt"),
        "--tokenizer",
        str(tokenizer),
    ]
    for number in range(12):
        out = (built, tmp_path / "new")[number % 2]
        child = subprocess.Popen([*command, "-o", str(out), "--max-memory", "1M"])
        time.sleep(1.5 + 0.25 * number)
        child.send_signal(signal.SIGKILL)
        child.wait()
        facts = json.loads(retrodraft_here("index", "info", built, "--json").stdout)
        assert facts == before or facts["num_tokens"] == 2_200_000
        assert retrodraft_here("index", "verify", built).returncode == 0
    assert result_of("build", tmp_path / "big.txt", "--tokenizer", tokenizer, "-o", built)["num_shards"] == 1
    assert len(list(built.iterdir())) == 8
    shutil.rmtree(tmp_path / "new", ignore_errors=True)
