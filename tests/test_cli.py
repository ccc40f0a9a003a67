"""The command line, run as a user runs it, on the embedded model or on a tiny one in a folder."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command import retrodraft, retrodraft_here

from retrodraft.replay.costs import load_curve


def test_help_is_quick_and_needs_no_torch() -> None:
    code = "import sys; sys.argv = ['retrodraft', '--help']\nfrom retrodraft.cli import main\ntry:\n    main()\n"
    code += "except SystemExit:\n    pass\nassert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in ("generate", "bench", "profile", "demo"):
        assert command in done.stdout
        assert "Usage" in retrodraft_here(command, "--help").stdout


def test_mistakes_are_told_before_torch_is_loaded(tmp_path: Path) -> None:
    """What can be seen without a model costs no import of the heavy libraries."""
    good = tmp_path / "good.jsonl"
    good.write_text('{"id": 1, "messages": [{"role": "user", "content": "x"}]}\n')
    bench = ["bench", "--workload", str(good), "-o", str(tmp_path / "out")]
    mistakes = [
        *(["generate", "x", *option] for option in (
            ["--strategy", "magic"], ["--budget", "some"], ["--dtype", "int3"], ["--model", "/no/such/folder"],
            ["--threads", "100000"], ["--temperature", "inf"],
        )),
        ["demo", "--dtype", "int3"], ["profile", "-o", "/no/such/folder/x.png"], ["profile", "--model", ""],
        [*bench, "--systems", "zip"], [*bench, "--dtype", "int3"], ["bench", "--workload", "/no/such", "-o", "x"],
    ]  # fmt: skip
    code = "import sys\nfrom retrodraft.cli import main\n"
    code += f"for sys.argv[1:] in {mistakes}:\n    try:\n        main()\n    except SystemExit as end:\n"
    code += "        assert end.code == 2 and not {'torch', 'transformers'} & set(sys.modules), sys.argv"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and len(done.stderr.splitlines()) == len(mistakes), done.stderr


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
    piped = retrodraft_here("generate", "-", *common, stdin="abcabcabc")
    assert piped.stdout == done.stdout and len(done.stdout) > 10


@pytest.mark.slow
def test_demo_on_the_embedded_model() -> None:
    """The engine of `make demo`: identical texts, fewer forwards."""
    done = retrodraft("demo", "--max-new-tokens", "40")
    assert done.returncode == 0, done.stderr
    assert "The texts are identical." in done.stdout and "class Account" in done.stdout


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("generate", "x", "--budget", "-3"), "budget must be auto or a whole number"),
        (("generate", "x", "--strategy", "magic"), "strategy must be retro, goose"),
        (("generate", "x", "--dtype", "int3"), "dtype must be one of float32"),
        (("generate", "x", "--model", "/no/such/folder"), "model '/no/such/folder' can't be loaded"),
        (("generate", "x", "--model", "{good}"), "model '{good}' can't be loaded: it is a file"),
        (("generate", "x", "--model", "~no-such-user/x"), "model '~no-such-user/x' can't be loaded: there is no"),
        (("generate", "x", "--model", "/" + "x" * 300), "model '/xxx"),
        (("generate", "x", "--device", "abacus"), "device 'abacus' can't be used"),
        (("generate", "x", "--threads", "100000"), "threads must be at most"),
        (("generate", "x", "--seed", "-1"), "Invalid value for '--seed'"),
        (("generate", "x", "--max-new-tokens", "0"), "Invalid value for '--max-new-tokens'"),
        (("generate", "x", "--temperature", "inf"), "temperature must be a finite number"),
        (("generate", "x", "--temperature", "nan"), ""),  # refused by newer versions of typer before we see it
        (("generate", "x", "--no-such-option"), "No such option: --no-such-option"),
        (("generate",), "Missing argument"),
        (("fly",), "No such command 'fly'"),
        (("generate", " "), "the prompt is empty"),
        (("profile", "-o", "/no/such/folder/x.png"), "output must be a .png file in a folder that exists"),
        (("profile", "-o", "{tmp}"), "output must be a .png file in a folder that exists"),
        (("profile", "-o", "{tmp}/curve.json"), "output must be a .png file"),
        (("profile", "-o", "/proc/curve.png"), "output '/proc/curve.png' can't be written"),
        (("bench", "--workload", "{good}", "-o", "{good}"), "output folder '{good}' can't be written"),
        (("bench", "--workload", "{good}", "-o", "/proc/no"), "output folder '/proc/no' can't be written"),
        (("bench", "--workload", "/no/such.jsonl", "-o", "{tmp}"), "workload '/no/such.jsonl' can't be read"),
        (("bench", "--workload", "{bad}", "-o", "{tmp}"), "bad.jsonl line 2: not JSON"),
        (("bench", "--workload", "{bad}", "--systems", "plain,zip", "-o", "{tmp}"), "systems: 'zip' is none of plain"),
        (("bench", "--workload", "{good}", "--temperature", "inf", "-o", "{tmp}"), "temperature must be a finite"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": 1, "messages": [{"role": "user", "content": "x"}]}\n{"id": \n')
    good = tmp_path / "good.jsonl"
    good.write_text('{"id": 1, "messages": [{"role": "user", "content": "x"}]}\n')
    filled = [argument.format(tmp=tmp_path, bad=bad, good=good) for argument in arguments]
    done = retrodraft_here(*filled)
    assert done.returncode == 2
    assert done.stderr.startswith("retrodraft: " + message.format(good=good)), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_prompts_that_are_not_text(tiny_folder: Path) -> None:
    """Stray bytes, from standard input and as an argument."""
    for arguments, stdin in ((("-",), b"abc \xff"), ((os.fsdecode(b"abc \xff"),), None)):
        done = retrodraft_here("generate", *arguments, "--model", str(tiny_folder), stdin=stdin)
        assert done.returncode == 2 and done.stderr == "retrodraft: the prompt is not UTF-8 text\n"


def test_standard_input_that_is_closed() -> None:
    done = retrodraft_here("generate", "-", stdin=None)
    assert done.returncode == 2 and done.stderr == "retrodraft: standard input is closed\n"


def test_version_and_bare_command() -> None:
    assert retrodraft("--version").stdout == "retrodraft 0.1.0\n"
    bare = retrodraft_here()
    assert bare.returncode == 0 and "Usage" in bare.stdout


def test_profile_writes_the_curve(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRODRAFT_CACHE", str(tmp_path / "c"))
    picture = tmp_path / "curve.png"
    done = retrodraft_here("profile", "--model", tiny_folder, "-o", picture)
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG") and "64" in done.stdout
    assert len(list((tmp_path / "c").glob("cost-*.json"))) == len(list((tmp_path / "c").glob("rows-*.npz"))) == 1
    assert load_curve(str(picture.with_suffix(".json")))[0].tree_sizes[-1] == 64


@pytest.mark.parametrize("module", ["typer", "retrodraft.commands.session", "retrodraft.sessions.saved", "numpy"])
def test_ctrl_c_while_a_command_starts(module: str) -> None:
    """A real SIGINT at the import of a module: the first are imported with the command line, the last by a command."""
    code = f"""
import os, signal, sys
class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupter())
sys.argv = ["retrodraft", "session", "list"]
from retrodraft.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_that_became_another_error() -> None:
    """As where it comes while a library makes a class: Python raises RuntimeError, with the interrupt as its cause."""
    code = """
import retrodraft.cli as cli
class Part:
    def __set_name__(self, owner, name):
        raise KeyboardInterrupt
@cli.app.command()
def whole():
    type("Whole", (), {"part": Part()})
cli.sys.argv = ["retrodraft", "whole"]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_closed_output() -> None:
    """As with `>&-` in a shell: the error is still one line, and the code 2."""
    command = f"{shlex.quote(sys.executable)} -m retrodraft fly >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "retrodraft: No such command 'fly'.\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_the_output(monkeypatch: pytest.MonkeyPatch, unbuffered: str) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "retrodraft", "session", "list"], stdout=full, stderr=subprocess.PIPE, text=True
        )
        assert (done.returncode, done.stderr) == (2, "retrodraft: standard output: No space left on device\n")
        done = subprocess.run([sys.executable, "-m", "retrodraft", "fly"], stdout=full, stderr=full)
        assert done.returncode == 2
