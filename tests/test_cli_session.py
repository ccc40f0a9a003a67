"""`retrodraft session`, run as a user runs it."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from chats import drafting
from serving import TEXT, running, serve
from tiny import tiny_llama

from retrodraft import RetroDraft
from retrodraft.commands.session_files import SESSION_ID
from retrodraft.index.storage import MANIFEST
from retrodraft.models import load_model
from retrodraft.sessions.saved import load_session, save_session

# Mounts the commands where the command line does not do so itself.
RUN = """
from retrodraft.cli import app, main
from retrodraft.commands.session import app as session
if not any(group.name == "session" for group in app.registered_groups):
    app.add_typer(session, name="session")
main()
"""


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def session(*arguments: object) -> Done:
    """Run a command in this process, where everything is imported already."""
    with pytest.MonkeyPatch.context() as patch, io.StringIO() as out, io.StringIO() as err:
        patch.setattr(sys, "argv", ["retrodraft", "session", *map(str, arguments)])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        code: Any = 0
        try:
            exec(RUN, {})
        except SystemExit as error:
            code = error.code
        return Done(code or 0, out.getvalue(), err.getvalue())


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three sessions, used 0, 1 and 2 days ago, in two namespaces."""
    root = tmp_path / "sessions"
    for days, (name, namespace) in enumerate(
        (("fix-17", "default"), ("red\x1b[31m\nname", "other"), ("old", "default"))
    ):
        arrays = {"tokens": np.arange(10 * (days + 1), dtype=np.int32)}
        info = {"model_id": f"model-{days}", "tokenizer_fingerprint": "f", "turns": days, "policy": [1, 2]}
        folder = save_session(root, namespace, name, arrays, info).path
        moment = time.time() - days * 86_400
        os.utime(folder / MANIFEST, (moment, moment))
    return root


def names(store: Path, *arguments: object) -> list[str]:
    done = session("list", "--json", "--store", store, *arguments)
    assert done.returncode == 0, done.stderr
    return [record["name"] for record in json.loads(done.stdout)]


def test_list(store: Path) -> None:
    assert names(store) == ["fix-17", "red\x1b[31m\nname", "old"]
    assert names(store, "--namespace", "default") == ["fix-17", "old"]
    done = session("list", "--store", store)
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and "'fix-17' of 'default'" in lines[0] and "'model-0'" in lines[0]
    assert "\x1b" not in done.stdout and r"'red\x1b[31m\nname'" in lines[1]
    record = json.loads(session("list", "--json", "--store", store).stdout)[2]
    assert record["turns"] == 2 and record["model"] == "model-2" and record["bytes"] > 120
    assert sorted(record) == ["bytes", "last_used", "model", "name", "namespace", "path", "problem", "turns"]


def test_default_store(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRODRAFT_CACHE", str(store.parent))
    assert len(session("list").stdout.splitlines()) == 3
    monkeypatch.setenv("RETRODRAFT_CACHE", str(store / "none"))
    done = session("list")
    assert done.returncode == 0 and "No sessions in" in done.stdout


def test_a_store_that_is_not_there(store: Path) -> None:
    """It has no sessions yet; whoever wants one of them, or to tidy up, has mistyped it. A file is no store."""
    new = store / "none"
    done = session("list", "--store", new)
    assert (done.returncode, done.stdout) == (0, f"No sessions in {new}, which is not there yet.\n")
    assert session("list", "--store", new, "--namespace", "x").stdout.startswith(
        f"No sessions of namespace 'x' in {new}"
    )
    assert session("list", "--store", new, "--json").stdout == "[]\n" and not new.exists()
    file = store / "file"
    file.write_text("")
    for arguments in (("list",), ("show", "x"), ("remove", "x"), ("prune", "--max-size", "1M")):
        for wrong in (file, "~nobody-here/x", "x" * 300, *([] if arguments == ("list",) else [new])):
            done = session(*arguments, "--store", wrong)
            assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr
            assert "is not a folder of sessions" in done.stderr or wrong not in (file, new)


def test_show(store: Path) -> None:
    done = session("show", "fix-17", "--store", store)
    assert done.returncode == 0, done.stderr
    for text in (
        "'fix-17' of namespace 'default'",
        "model 'model-0'",
        "policy: [1, 2]",
        "tokens: int32 [10], 40 bytes",
    ):
        assert text in done.stdout
    shown = json.loads(session("show", "old", "--store", store, "--json").stdout)
    assert shown["arrays"] == {"tokens": {"dtype": "int32", "shape": [30], "bytes": 120}}
    assert shown["info"]["policy"] == [1, 2]
    assert names(store)[0] == "fix-17"  # to look is no use
    done = session("show", "old", "--namespace", "other", "--store", store)
    assert done.returncode == 2 and "there is no session 'old' in namespace 'other'" in done.stderr


def test_prune_and_remove(store: Path) -> None:
    done = session("prune", "--store", store)
    assert done.returncode == 2 and "--max-size" in done.stderr
    for size in ("x", "-5", "1Q"):
        assert "max-size" in session("prune", f"--max-size={size}", "--store", store).stderr
    assert session("prune", "--max-age-days", "nan", "--store", store).returncode == 2
    done = session("prune", "--max-age-days", "1.5", "--store", store)
    assert done.returncode == 0 and "'old'" in done.stdout and "removed 1 session, " in done.stdout
    assert names(store) == ["fix-17", "red\x1b[31m\nname"]
    assert session("prune", "--max-size", "1M", "--store", store, "--json").stdout.strip() == "[]"
    assert session("prune", "--max-size", "9" * 400, "--store", store).stdout == "removed 0 sessions, 0 bytes\n"

    done = session("remove", "red\x1b[31m\nname", "--store", store)
    assert done.returncode == 2 and "there is no session" in done.stderr  # of another namespace
    done = session("remove", "fix-17", "--store", store)
    assert done.returncode == 0 and done.stdout.strip() == "removed 'fix-17'"
    assert load_session(store, "default", "fix-17", "f", "model-0") is None
    [record] = json.loads(session("prune", "--max-size", "0K", "--store", store, "--json").stdout)
    assert record["namespace"] == "other" and names(store) == []


def test_damage(store: Path) -> None:
    """Listed, refused in one line, and removable."""
    record = json.loads(session("list", "--json", "--store", store).stdout)[0]
    (Path(record["path"]) / MANIFEST).write_text("{")
    assert "damaged: " in session("list", "--store", store).stdout
    done = session("show", "fix-17", "--store", store)
    assert done.returncode == 2 and "not the manifest" in done.stderr and len(done.stderr.splitlines()) == 1
    assert session("remove", "fix-17", "--store", store).returncode == 0
    assert len(names(store)) == 2


def test_help_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", RUN, "session", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and all(
        word in done.stdout for word in ("list", "show", "prune", "remove", "add", "files", "drop")
    )
    code = "import sys, retrodraft.commands.session, retrodraft.sessions.saved, retrodraft.sessions.workspace; "
    code += "print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stderr


# Files for a running server


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[str]:
    """Address of a server with two keys, each a namespace of its own."""
    rd = RetroDraft(*load_model(str(tiny_folder)), budget=12)
    with running(rd, model="m", api_keys=("first", "second"), max_body_bytes=300_000) as url:
        yield url


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with text, and what is none."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "one.py").write_text("x = 1\n")
    (tmp_path / "src" / "\N{SNOWMAN} two.md").write_bytes(b"\xef\xbb\xbfwinter\r\n")
    (tmp_path / "src" / "image.bin").write_bytes(b"a\0b")
    (tmp_path / "src" / "ignored.log").write_text("x")
    (tmp_path / "src" / ".gitignore").write_text("*.log\n")
    (tmp_path / "src" / "old.txt").write_bytes(b"caf\xe9")
    monkeypatch.chdir(tmp_path)
    return tmp_path


TEXTS = ["src/.gitignore", "src/one.py", "src/\N{SNOWMAN} two.md"]


def answer(server: str, key: str, name: str = "files") -> str:
    """Of a session, in characters of one byte, so that it can be sent back as a text."""
    body = {"model": "m", "prompt": TEXT, "max_tokens": 60, "temperature": 0}
    body["logit_bias"] = {str(token): -100 for token in range(94, 256)}
    headers = {"Authorization": f"Bearer {key}", "X-Session-Id": name}
    found = httpx.post(f"{server}/v1/completions", json=body, headers=headers, timeout=120).json()
    text: str = found["choices"][0]["text"]
    return text


def drafted(server: str) -> float:
    """Tokens that were drafted from files so far."""
    name = "retrodraft:spec_decode_num_draft_tokens_by_proposer_total"
    lines = [line for line in httpx.get(f"{server}/metrics").text.splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if '"workspace"' in line)


def test_files_are_drafted_from(server: str, folder: Path) -> None:
    """Added, drafted from, and gone when dropped, also from disk; the answer is the same all along."""
    check_drafts_from_a_file(server, folder)


@pytest.mark.slow
def test_files_of_a_server_process(tiny_folder: Path, folder: Path) -> None:
    with serve("--model", str(tiny_folder), "--api-key", "first", "--api-key", "second") as served:
        check_drafts_from_a_file(served.url, folder)


def check_drafts_from_a_file(server: str, folder: Path) -> None:
    to_server = ("--server", f"{server}/v1", "--api-key", "second")
    said = answer(server, "first")
    assert len(said) == 60
    note = folder / "note.txt"
    note.write_text(said)
    done = session("add", "files", "note.txt", *to_server)
    assert (done.returncode, done.stdout, done.stderr) == (0, "added 1 file to session 'files'\n", "")
    assert answer(server, "second") == said
    before = drafted(server)
    assert before > 20
    note.unlink()
    done = session("drop", "files", "./note.txt", *to_server)
    assert (done.returncode, done.stdout, done.stderr) == (0, "removed 1 file from session 'files'\n", "")
    assert answer(server, "second") == said
    assert drafted(server) == before


def test_paths_and_texts_that_are_sent(folder: Path) -> None:
    """Relative below the current folder; folders as `--workspace` walks them; each file once."""
    rd = drafting(tiny_llama())
    with running(rd) as url:
        to_server = ("--server", url, "--json")
        found = json.loads(session("add", "s", "src", folder / "src" / "one.py", "./src/../src", *to_server).stdout)
        assert found["id"] == "s" and found["added"] == TEXTS
        skipped = {item["name"]: item["reason"] for item in found["skipped"]}
        assert skipped == {"src/image.bin": "is binary (a NUL at byte 1)", "src/old.txt": "is not UTF-8 (byte 3)"}
        done = session("add", "s", "src", "--server", url)
        assert done.stdout == "added 3 files to session 's'\n" and "skipped 2 in all" in done.stderr
        outside = str(Path(__file__).parent / "command.py")
        assert json.loads(session("add", "s", outside, *to_server).stdout)["added"] == [outside]
        httpx.post(f"{url}/v1/completions", json={"model": "embedded", "prompt": "ab", "max_tokens": 1, "user": "s"},
                   headers={"X-Session-Id": "s"}, timeout=60).raise_for_status()  # fmt: skip
        workspace = rd.session("s", namespace="default").namespace.workspace
        assert sorted(workspace.paths) == sorted([*TEXTS, outside])
        assert workspace._files[TEXTS[2]].text == "winter\r\n"
        dropped = json.loads(session("drop", "s", "src", "src/gone.txt", *to_server).stdout)
        assert sorted(dropped["removed"]) == TEXTS and dropped["not_found"] == ["src/gone.txt"]
        assert workspace.paths == (outside,)


def test_files_are_listed_and_dropped(server: str, folder: Path) -> None:
    """Before the first request as after it; what the session does not have is told, and is an error where it is all."""
    to_server = ("--server", server, "--api-key", "first")
    done = session("files", "listed", *to_server)
    assert (done.returncode, done.stdout, done.stderr) == (0, "session 'listed' has no files\n", "")
    (folder / "src" / "a\nb.txt").write_text("word " * 600)
    assert session("add", "listed", "src", *to_server).returncode == 0
    other = {"path": "./elsewhere.txt", "text": "x"}  # as another client may write it
    headers = {"Authorization": "Bearer first"}
    httpx.post(f"{server}/v1/sessions/listed/files", json=other, headers=headers).raise_for_status()
    for asked in (False, True):
        if asked:
            answer(server, "first", "listed")
        found = json.loads(session("files", "listed", "--json", *to_server).stdout)
        sizes = {file["path"]: file["tokens"] for file in found["files"]}
        assert found["id"] == "listed" and list(sizes) == sorted([*TEXTS, "src/a\nb.txt", "./elsewhere.txt"])
        assert sizes["src/one.py"] == 6 and sizes["src/a\nb.txt"] == 3000  # a byte a token
    lines = session("files", "listed", *to_server).stdout.splitlines()
    assert len(lines) == 5 and "      3,000 tokens  'src/a\\nb.txt'" in lines

    shutil.rmtree(folder / "src")  # what is gone can be dropped all the same
    done = session("drop", "listed", "nothing.txt", "src", "elsewhere.txt", "sr", *to_server)
    assert (done.returncode, done.stdout) == (0, "removed 5 files from session 'listed'\n")
    assert done.stderr.splitlines() == [f"session 'listed' has no file {path!r}" for path in ("nothing.txt", "sr")]
    for as_json in ((), ("--json",)):
        done = session("drop", "listed", "src", "x", *as_json, *to_server)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "retrodraft: session 'listed' has no file 'src' or 'x'; `retrodraft session files listed` lists what it "
            "has\n"
        )


def test_many_files_go_in_requests_that_the_server_takes(server: str, folder: Path) -> None:
    """Together they are larger than a request may be; a file that is larger itself is named."""
    for number in range(30):
        (folder / "src" / f"{number}.txt").write_text(f"{number} " * 20_000)
    to_server = ("--server", server, "--api-key", "first")
    assert session("add", "many", "src", *to_server).stdout == "added 33 files to session 'many'\n"
    (folder / "src" / "5.txt").write_text("x" * 400_000)
    done = session("add", "many", "src", *to_server)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"retrodraft: {server} answered 413, at 'src/5.txt': the request body is larger than 300000 bytes: send "
        "less, or raise --max-body-bytes"
    )


def test_the_key(server: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None, a wrong one, and one from the environment."""
    for key in ((), ("--api-key", "third")):
        for command in (("add", "s", "src/one.py"), ("drop", "s", "src/one.py"), ("files", "s")):
            done = session(*command, "--server", server, *key)
            assert done.returncode == 2 and done.stderr == (
                f"retrodraft: {server} asks for an API key that it knows: --api-key, or RETRODRAFT_API_KEY\n"
            )
    monkeypatch.setenv("RETRODRAFT_API_KEY", "first")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a server nearby is reached directly
    assert session("add", "s", "src/one.py", "--server", server).returncode == 0


def test_session_ids_are_the_servers() -> None:
    from retrodraft.server.sessions import NAME

    assert SESSION_ID.pattern == NAME.pattern


@pytest.mark.parametrize(
    "arguments,message",
    [
        (("add", "s", "none.py"), "'none.py' can't be read: No such file"),
        (("add", "s", "src/image.bin", "src/one.py"), "'src/image.bin' is binary (a NUL at byte 1)"),
        (("add", "s", "src/old.txt"), "'src/old.txt' is not UTF-8 (byte 3)"),
        (("add", "s", "pipe", "src/one.py"), "'pipe' can't be added: not a regular file"),
        (("add", "s", "huge.txt"), "'huge.txt' is longer than 2,000,000 bytes"),
        (("add", "s", "many"), "17 files of 33,983,000 bytes: sessions have room for 33,554,432"),
        (("add", "s", "empty"), "there is no text file in 'empty'"),
        (("add", "s", os.fsdecode(b"\xff.txt")), r"'\udcff.txt' can't be sent: its name is not UTF-8"),
        (("add", "s", ""), "a path is empty"),
        (("add", "s"), "Missing argument 'FILE'"),
        (("add", "a/b", "src"), "a session id has 1 to 128 letters"),
        (("add", "", "src"), "a session id has 1 to 128 letters"),
        (("add", "x" * 129, "src"), "a session id has 1 to 128 letters"),
        (("add", "s\n", "src"), "a session id has 1 to 128 letters"),
        (("add", "s", "src", "--api-key", ""), "an API key must be ASCII text"),
        (("add", "s", "src", "--api-key", "a\nb"), "an API key must be ASCII text"),
        (("add", "s", "src", "--server", "127.0.0.1:8000"), "server must be an address such as http://127"),
        (("add", "s", "src", "--server", "http://127.0.0.1:x"), "server must be an address such as http://127"),
        (("add", "s", "src", "--server", "http://[::1"), "server must be an address such as http://127"),
        (("add", "s", "src", "--server", f"http://{'a' * 70}"), f"no server answers at http://{'a' * 70}"),
        (("add", "s", "src", "--server", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9 (Connection"),
        (("drop", "s", ""), "a path is empty"),
        (("drop", "s", os.fsdecode(b"\xff.txt")), r"'\udcff.txt' can't be sent: its name is not UTF-8"),
        (("files", "a/b"), "a session id has 1 to 128 letters"),
        (("files", "s", "--server", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9 (Connection"),
        (("drop", "s", "x", "--server", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9 (Connection"),
    ],
)
def test_what_cannot_be_sent(arguments: tuple[str, ...], message: str, folder: Path) -> None:
    """One line and exit code 2; no server is asked where the mistake can be seen without."""
    os.mkfifo("pipe")
    Path("huge.txt").write_text("x" * 2_000_001)
    Path(os.fsdecode(b"\xff.txt")).write_text("x")
    for name in ("empty", "many"):
        Path(name).mkdir()
    if "many" in arguments:
        for number in range(17):
            Path(f"many/{number}").write_text("x" * 1_999_000)
    done = session(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"retrodraft: {message}") and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    "reply,message",
    [
        (b"SSH-2.0-x\r\n", "(SSH-2.0-x): start `retrodraft serve`"),
        (b"", "(Remote end closed connection without response): start"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "answered 200: is it a retrodraft server?"),
        (
            b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n",
            "answered 302: is it a retrodraft server?",
        ),
        (b"HTTP/1.1 404 No\r\n\r\n<html>", "answered 404: is it a retrodraft server?"),
    ],
)
def test_another_kind_of_server(reply: bytes, message: str, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def once() -> None:
            connection, _ = listener.accept()
            with connection:
                heard = b""
                while not heard.endswith(b"]}"):  # what is not read would reset the connection
                    heard += connection.recv(1 << 16)
                connection.sendall(reply)

        thread = threading.Thread(target=once)
        thread.start()
        done = session("add", "s", "src/one.py", "--server", f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(60)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_ctrl_c_while_a_server_is_silent(folder: Path) -> None:
    """A process of its own, which is interrupted when it has connected."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = ["session", "add", "s", "src/one.py", "--server", f"http://127.0.0.1:{port}"]
        with subprocess.Popen(
            [sys.executable, "-m", "retrodraft", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(4).decode() == "POST"
                process.send_signal(signal.SIGINT)
                assert process.communicate(timeout=60) == ("", "") and process.returncode == 130
