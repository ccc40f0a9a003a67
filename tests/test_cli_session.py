"""`retrodraft session`, run as a user runs it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrodraft.index.storage import MANIFEST
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
    done = session("list", "--store", store / "none")
    assert done.returncode == 2 and "is not a folder of sessions" in done.stderr


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
    assert done.returncode == 0 and "'old'" in done.stdout and "removed 1 sessions" in done.stdout
    assert names(store) == ["fix-17", "red\x1b[31m\nname"]
    assert session("prune", "--max-size", "1M", "--store", store, "--json").stdout.strip() == "[]"

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
    assert done.returncode == 0 and all(word in done.stdout for word in ("list", "show", "prune", "remove"))
    code = "import sys, retrodraft.commands.session, retrodraft.sessions.saved, retrodraft.sessions.workspace; "
    code += "print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False"], done.stderr
