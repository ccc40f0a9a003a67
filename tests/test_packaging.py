"""The layout holds: who may import whom, what is installed, and that examples and documents are true."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "kernels": {
        "retrodraft.kernels", "numba", "llvmlite", "numpy", "torch", *(sys.stdlib_module_names - {"marshal", "shelve"}),
    },
    "index": {
        "retrodraft.kernels", "retrodraft.index", "numpy", "sortedcontainers", "pathspec", "filelock",
        "faiss", "pyarrow", "dask", "distributed", *(sys.stdlib_module_names - {"pickle", "marshal", "shelve"}),
    },
}  # fmt: skip
WITH_TRANSFORMERS = {
    "arguments", "batch", "bench", "budget", "cache", "capabilities", "cli", "compat", "delegation", "hot_start",
    "models", "server/engine", "server/generation", "sessions/prefix", "sessions/session", "snapshot", "target",
    "verify",
}  # fmt: skip


def imports(path: Path) -> set[str]:
    """Modules named by import statements, at any depth of the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module or "")
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path}: relative import")
    return found


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_arrows_point_one_way(room: str) -> None:
    for path in (ROOT / room).glob("*.py"):
        for name in imports(path):
            allowed = any(name == prefix or name.startswith(prefix + ".") for prefix in MAY_IMPORT[room])
            assert allowed, f"{path.name} imports {name}"
            assert "torch" not in name or path.name in ("few_rows.py", "tree_attention.py")


def modules(room: str) -> list[Path]:
    """The modules of a room and of the folders in it, but not those behind the links."""
    folders = [ROOT / room, *(path for path in (ROOT / room).iterdir() if path.is_dir() and not path.is_symlink())]
    return [path for folder in folders for path in sorted(folder.glob("*.py"))]


def test_transformers_stays_in_its_rooms() -> None:
    found = set()
    for path in modules("retrodraft"):
        if any(name.split(".")[0] == "transformers" for name in imports(path)):
            found.add(path.relative_to(ROOT / "retrodraft").with_suffix("").as_posix())
    assert found == WITH_TRANSFORMERS


def test_folders_are_listed_and_linked() -> None:
    """kernels/ stays without __init__.py; every folder with modules is a listed package; the links are in place."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (ROOT / "retrodraft" / "index").resolve() == ROOT / "index"
    assert (ROOT / "retrodraft" / "kernels").resolve() == ROOT / "kernels"
    for folder in ("retrodraft", "index", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).parent.parts
            package = ".".join(parts if parts[0] == "retrodraft" else ("retrodraft", *parts))
            assert f'"{package}"' in text, package


def test_no_file_under_two_names() -> None:
    """Importing everything leaves no global `index` or `kernels`."""
    names = [f"retrodraft.{path.stem}" for path in (ROOT / "retrodraft").glob("*.py") if path.stem[0] != "_"]
    names += [f"retrodraft.{room}.{path.stem}" for room in MAY_IMPORT for path in (ROOT / room).glob("[a-z]*.py")]
    code = f"import sys, importlib\nfor name in {names}: importlib.import_module(name)\n"
    code += "assert 'index' not in sys.modules and 'kernels' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(example: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The first one in a process of its own; the others here, where torch is loaded already."""
    assert len(example.read_text(encoding="utf-8").splitlines()) < 50
    if example.stem == "quickstart":
        subprocess.run([sys.executable, str(example)], check=True, timeout=600)
    else:
        runpy.run_path(str(example), run_name="__main__")
    shown = capfd.readouterr().out
    assert "tokens per forward" in shown
    if example.stem == "quickstart":
        assert "same as plain generate: True" in shown


def test_documents_name_files_that_exist() -> None:
    """ARCHITECTURE.md's table of rooms lists every module."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for folder in ("retrodraft", "index", "kernels"):
        for path in modules(folder):
            if not path.stem.startswith("__"):
                assert f"`{path.name}`" in text, f"{path.relative_to(ROOT)} is not in ARCHITECTURE.md"
                assert path.parent == ROOT / folder or f"`{path.relative_to(ROOT).parent.as_posix()}/`" in text
