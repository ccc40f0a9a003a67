"""`retrodraft serve` as a process: options, shutdown, and a kill."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from command import retrodraft_here
from serving import TEXT, metric, serve, wait_until


@pytest.mark.slow
def test_sessions_outlive_a_stop_and_a_kill(tiny_folder: Path, tmp_path: Path) -> None:
    """O22: SIGTERM ends what runs, saves, exits 0; after kill -9 what was saved is there, and the server starts."""
    store = str(tmp_path / "store")
    options = ("--model", str(tiny_folder), "--store", store, "--grace-seconds", "1")
    with serve(*options) as first:
        answer = first.complete()
        assert answer.status_code == 200 and answer.headers["x-session-id"] == "s1"
        body = {"model": "m", "prompt": TEXT, "max_tokens": 2000, "temperature": 1, "stream": True}
        with httpx.stream("POST", f"{first.url}/v1/completions", json=body, timeout=60) as running:
            lines = running.iter_lines()
            assert next(lines).startswith("data: ")
            assert first.stop() == 0
    with serve(*options) as second:
        listed = httpx.get(f"{second.url}/v1/sessions").json()["data"]
        assert "s1" in {record["id"] for record in listed if not record["in_memory"]}
        again = second.complete()
        assert again.json()["choices"] == answer.json()["choices"]
        second.complete(session="s2")
        wait_until(lambda: any("s2" in str(r) for r in httpx.get(f"{second.url}/v1/sessions").json()["data"]))
        second.stop(signal.SIGKILL)
    with serve(*options) as third:
        ids = {record["id"] for record in httpx.get(f"{third.url}/v1/sessions").json()["data"]}
        assert "s1" in ids and third.complete().json()["choices"] == answer.json()["choices"]
        assert third.stop(signal.SIGINT) == 0


@pytest.mark.usefixtures("embedded")
def test_workspace_files_are_drafted_and_read_again(tmp_path: Path) -> None:
    """--workspace: .gitignore holds, a changed file counts at the next request."""
    prompt, accepted = "Count from one to ten.", "retrodraft:spec_decode_num_accepted_tokens_by_proposer_total"
    (tmp_path / ".gitignore").write_text("secret.txt\n")
    secret, notes = tmp_path / "secret.txt", tmp_path / "notes.md"
    for file in (secret, notes):
        file.write_text("nothing that helps\n")
    with serve("--workspace", str(tmp_path), "--budget", "16") as server:
        text = server.complete(prompt, max_tokens=30).json()["choices"][0]["text"]
        assert metric(server.url, "vllm:generation_tokens_total") == 30
        for file, helps in ((secret, False), (notes, True)):
            before = metric(server.url, accepted, proposer="workspace")
            file.write_text(prompt + text)
            assert server.complete(prompt, max_tokens=30).json()["choices"][0]["text"] == text
            assert (metric(server.url, accepted, proposer="workspace") - before > 15) == helps


@pytest.mark.usefixtures("embedded")
def test_a_corpus_is_drafted_from(tmp_path: Path) -> None:
    """--corpus: an index of the answer; the answer is the same, in fewer forwards."""
    forwards, options = "vllm:spec_decode_num_drafts_total", ("--budget", "16")
    prompt = "Count from one to ten in words."
    with serve(*options) as server:
        text = server.complete(prompt, max_tokens=40).json()["choices"][0]["text"]
        without = metric(server.url, forwards)
    (tmp_path / "answer.txt").write_text(prompt + text)
    assert retrodraft_here("index", "build", tmp_path / "answer.txt", "-o", tmp_path / "c").returncode == 0
    with serve(*options, "--corpus", str(tmp_path / "c")) as server:
        assert server.complete(prompt, max_tokens=40).json()["choices"][0]["text"] == text
        assert metric(server.url, forwards) < without
        accepted = "retrodraft:spec_decode_num_accepted_tokens_by_proposer_total"
        assert metric(server.url, accepted, proposer="corpus") > 0


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("--dense",), "--dense drafts from a corpus that has a dense index: name one with --corpus"),
        (("--workspace", "/no/such"), "workspace '/no/such' is not a folder"),
        (("--workspace", "{tiny}/config.json"), "workspace '{tiny}/config.json' is not a folder"),
        (("--store", "{tiny}/config.json"), "store '{tiny}/config.json' must be a folder, and is a file"),
        (("--store", "/proc/retrodraft"), "store '/proc/retrodraft' can't be written"),
        (("--store", "{tiny}/config.json/deep"), "store '{tiny}/config.json/deep' can't be written: Not a directory"),
        (("--model", "/no/such"), "model '/no/such' can't be loaded: there is no such folder"),
        (("--dtype", "int3"), "dtype must be one of"),
        (("--threads", "100000"), "threads must be at most"),
        (("--budget", "some"), "budget must be auto or"),
        (("--api-key-file", "/no/such"), "api-key-file '/no/such' can't be read"),
        (("--api-key", " "), "an API key must be ASCII text on one line and not empty"),
        (("--api-key", "a\nb"), "an API key must be ASCII text on one line and not empty"),
        (("--host", ""), "host must not be empty"),
        (("--served-model-name", " "), "served-model-name must not be empty"),
        (("--api-key-file", "/dev/null"), "api-key-file '/dev/null' holds no key"),
        (("--api-key-file", "/dev/null", "--api-key", "k"), "api-key-file '/dev/null' holds no key"),
        (("--workspace", "~nobody-here/x"), "workspace '~nobody-here/x': nobody here has the home folder"),
        (("--store", "~nobody-here/x"), "store '~nobody-here/x': nobody here has the home folder"),
        (("--workspace", "x" * 300), f"workspace '{'x' * 300}' is not a folder"),
        (("--chat-template", "/no/such"), "chat-template '/no/such' can't be read"),
        (("--chat-template", "/dev/null"), "chat-template '/dev/null' is empty"),
        (("--log-level", "loud"), "log-level must be one of critical"),
        (("--port", "70000"), "Invalid value for '--port'"),
        (("--host", "203.0.113.1"), "203.0.113.1:8000 can't be listened on"),
        (("--max-context", "1000000", "--model", "{tiny}"), "max-context must be at most"),
    ],
)
def test_bad_options_are_one_line(arguments: tuple[str, ...], message: str, tiny_folder: Path) -> None:
    """All but what the model itself decides is told before it is loaded, and most of it before torch is."""
    done = retrodraft_here("serve", *[argument.format(tiny=tiny_folder) for argument in arguments])
    assert done.returncode == 2
    message = message.format(tiny=tiny_folder)
    assert done.stderr.startswith("retrodraft: " + message) and len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_mistakes_are_told_before_a_model_is_loaded(tiny_folder: Path, tmp_path: Path) -> None:
    """An address that is taken too; the model here could not be loaded at all."""
    file = tmp_path / "file"
    file.write_text("x")
    (tmp_path / "model").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        early = [["--store", str(file)], ["--store", f"{file}/deep"], ["--workspace", str(file)], ["--dtype", "int3"]]
        late = [["--port", port]]
        code = "import sys\nfrom retrodraft.cli import main\n"
        code += f"for sys.argv[1:] in {[['serve', '--model', str(tmp_path / 'model'), *each] for each in early]}:\n"
        code += "    try:\n        main()\n    except SystemExit as end:\n"
        code += "        assert end.code == 2 and not {'torch', 'transformers'} & set(sys.modules), sys.argv\n"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and len(done.stderr.splitlines()) == len(early), done.stderr
        for each in late:
            found = retrodraft_here("serve", "--model", str(tmp_path / "model"), *each)
            assert found.returncode == 2
            assert found.stderr == f"retrodraft: 127.0.0.1:{port} can't be listened on: Address already in use\n"


@pytest.mark.parametrize(
    "template,message",
    [
        ("{% for m in messages %}\n{{ m.content }", "chat-template {file!r}, line 2: unexpected '}'"),
        ("{% for m in messages %}\n\n{{ m }}", "chat-template {file!r}, line 3: Unexpected end of template."),
        ("\n{{ messages | shout }}", "chat-template {file!r}, line 2: No filter named 'shout'."),
        ("{% generation %}", "chat-template {file!r}, line 1: Unexpected end of template."),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "chat-template {file!r} can't be used: too many"),
        (
            "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% break %}{% endfor %}",
            "203.0.113.1:8000 can't be listened on",  # the next complaint: the template is sound
        ),
    ],
)  # fmt: skip
def test_a_broken_template_is_told_before_the_model_is_loaded(template: str, message: str, tmp_path: Path) -> None:
    """With file and line; as transformers compiles it, with its own tags and filters."""
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    (tmp_path / "model").mkdir()
    where = ("--host", "203.0.113.1", "--model", str(tmp_path / "model"))
    done = retrodraft_here("serve", "--chat-template", str(file), *where)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("retrodraft: " + message.replace("{file!r}", repr(str(file)))), done.stderr


def test_a_new_store_is_private(tmp_path: Path) -> None:
    """Sessions hold what users said."""
    store = tmp_path / "deep" / "store"
    found = retrodraft_here("serve", "--store", store, "--model", "/no/such")
    assert found.returncode == 2 and "no such folder" in found.stderr
    assert store.stat().st_mode & 0o777 == 0o700 and not list(store.iterdir())
