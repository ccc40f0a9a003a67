"""Import order, forks, read-only and damaged caches: whatever a process may look like."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from retrodraft.kernels import jit

GENERATE = """
import sys; sys.path.insert(0, {tests!r})
from tiny import tiny_llama, copy_prompt
from retrodraft import RetroDraft
model = tiny_llama(0)
rd = RetroDraft(model, budget=8)
prompt = copy_prompt(24)
out = rd.generate(prompt, max_new_tokens=20, do_sample=False)
assert out.tolist() == model.generate(prompt, max_new_tokens=20, do_sample=False).tolist()
assert rd.stats.num_target_forwards < 20
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a fresh process."""
    code = code.replace("{tests!r}", repr(str(Path(__file__).parent)))
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("order", itertools.permutations(["torch", "numba", "retrodraft"]))
def test_import_orders(order: tuple[str, ...]) -> None:
    """O24: any order of the libraries with an OpenMP runtime."""
    done = run("\n".join(f"import {name}" for name in order) + GENERATE)
    assert done.returncode == 0, done.stderr


def test_fork_after_use() -> None:
    """O24: a child forked after the wrapper was used generates too."""
    child = (
        "import os, torch; torch.set_num_threads(1)"
        + GENERATE
        + """
pid = os.fork()
if pid == 0:
    same = rd.generate(prompt, max_new_tokens=20, do_sample=False).tolist() == out.tolist()
    os._exit(0 if same else 3)
assert os.waitpid(pid, 0)[1] == 0
"""
    )
    done = run(child)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_no_folder_can_be_written() -> None:
    """O25: no place for compiled code, verdicts or curves: slower, but it works."""
    closed = "from numba.core import caching; caching.CompileResultCacheImpl._locator_classes = []\n"
    done = run(closed + GENERATE, HOME="/proc/nonexistent", RETRODRAFT_CACHE="/proc/nonexistent")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_without_compilation() -> None:
    """O25: NUMBA_DISABLE_JIT runs the kernels as plain Python, with the same output."""
    done = run(GENERATE, NUMBA_DISABLE_JIT="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 20])
def test_damaged_compilation_cache(tmp_path: Path, size: int) -> None:
    """O25: cut index and object files of the compiler's cache are made anew, not fatal."""
    first = run(GENERATE, NUMBA_CACHE_DIR=str(tmp_path))
    assert first.returncode == 0, first.stderr
    damaged = [path for path in tmp_path.rglob("*") if path.suffix in (".nbi", ".nbc")]
    assert damaged
    for path in damaged:
        path.write_bytes(path.read_bytes()[:size])
    done = run(GENERATE, NUMBA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_damaged_verdict_and_curve(tmp_path: Path) -> None:
    """A cut or foreign file in the cache folder is measured anew."""
    code = GENERATE.replace("budget=8", "budget='auto'").replace("assert rd.stats.num_target_forwards < 20", "")
    assert run(code, RETRODRAFT_CACHE=str(tmp_path)).returncode == 0
    files = list(tmp_path.glob("*.json"))
    assert {path.name.split("-")[0] for path in files} == {"probe", "cost"}
    for path, text in zip(files, ['{"mode": "tree", "rea', "[1, 2]"], strict=True):
        path.write_text(text)
    done = run(code, RETRODRAFT_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert all(path.read_text().startswith('{"') and path.read_text().endswith("}") for path in files)
    assert not list(tmp_path.glob("tmp*"))


def test_a_kernel_is_compiled_anew_when_one_that_it_calls_has_changed(tmp_path: Path) -> None:
    """Numba by itself would go on with code of the old one inside: it looks at the caller's file alone."""
    folder = tmp_path / "kernelroom"
    folder.mkdir()
    shutil.copy(Path(jit.__file__), folder / "jit.py")
    (folder / "callee.py").write_text("from kernelroom.jit import njit\n\n@njit\ndef inner(x):\n    return x + 1\n")
    (folder / "caller.py").write_text(
        "from kernelroom.callee import inner\nfrom kernelroom.jit import njit\n\n@njit\ndef outer(x):\n"
        "    return inner(x)\n\nprint(outer(1), outer.stats.cache_hits[(__import__('numba').int64,)])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def answer() -> str:
        command = [sys.executable, "-c", "import kernelroom.caller"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert [answer(), answer()] == ["2 0", "2 1"]
    (folder / "callee.py").write_text("from kernelroom.jit import njit\n\n@njit\ndef inner(x):\n    return x + 2\n")
    assert answer() == "3 0"
