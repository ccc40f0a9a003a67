"""The fastest form of a linear layer: measured on the model's own weights, stored, and not believed when damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from retrodraft import fastest_linear
from retrodraft.fastest_linear import ROWS, SAMPLE_BYTES
from retrodraft.folders import keep

SIZES = ((256, 128), (128, 256))


class Layers(torch.nn.Module):
    """Two large sizes, each twice, a small layer, and one in another dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        self.large = torch.nn.ModuleList(torch.nn.Linear(i, o, dtype=dtype) for o, i in SIZES * 2)
        self.small = torch.nn.Linear(8, 8, dtype=dtype)
        self.other = torch.nn.Linear(512, 512, dtype=torch.float64)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing is known, in memory or on disk."""
    monkeypatch.setenv("RETRODRAFT_CACHE", str(tmp_path))
    monkeypatch.setattr(fastest_linear, "_known", {})
    return tmp_path


def use(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> list[str]:
    """Forms that take so long a call, and torch's 2 seconds, by a clock of our own; returns the list of the called."""
    called: list[str] = []
    passed = 0.0

    def form(name: str) -> Any:
        def run(*arguments: Any) -> torch.Tensor:
            nonlocal passed
            called.append(name)
            passed += {"torch": 2.0, **seconds}[name]
            return linear(*arguments)

        return run

    monkeypatch.setattr(fastest_linear, "perf_counter", lambda: passed)
    monkeypatch.setattr(fastest_linear, "linear", form("torch"))
    monkeypatch.setattr(fastest_linear, "forms_for", lambda weight: {name: form(name) for name in seconds})
    return called


@pytest.mark.parametrize("tiles,columns,best", [(1, 3, "tiles"), (1.5, 1, "columns"), (1.95, 3, None)])
def test_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch, tiles: float, columns: float, best: str | None) -> None:
    """For the large layers of the model's dtype, at every number of rows up to the largest measured one."""
    called = use(monkeypatch, {"tiles": tiles, "columns": columns})
    found = fastest_linear.fastest_linear(Layers())
    for rows in (1, 5, 11, ROWS[-1]):
        forms = found.at(rows)
        assert forms.keys() == (set(SIZES) if best else set())
        for size, form in forms.items():
            called.clear()
            form(torch.ones(rows, size[1]), torch.ones(size), None)
            assert called == [best]
    assert found.at(ROWS[-1] + 1) == {}


def test_it_is_measured_once(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    """For this process and the next; another dtype or number of threads is another matter."""
    called = use(monkeypatch, {"tiles": 1.0})
    fastest_linear.fastest_linear(Layers())
    (file,) = fresh.glob("linear-*.json")
    assert sorted(tuple(each[:2]) for each in json.loads(file.read_text())["forms"]) == sorted(SIZES)
    for forget in (False, True):
        called.clear()
        if forget:
            fastest_linear._known.clear()
        assert fastest_linear.fastest_linear(Layers()).at(4) and not called
    assert fastest_linear.fastest_linear(Layers(torch.bfloat16)).at(4) and called
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        called.clear()
        assert fastest_linear.fastest_linear(Layers()).at(4) and called
    finally:
        torch.set_num_threads(threads)
    assert len(list(fresh.glob("linear-*.json"))) == 3


@pytest.mark.parametrize(
    "damaged",
    [
        "", "[]", "{}", "[" * 100_000, '{"forms": 3}', '{"forms": [[256, 128]]}', '{"forms": [[256, 128, ["tiles"]]]}',
        '{"forms": [[256, 128, 5], [128, 256, 5]]}',
        '{"forms": [[[1], 128, []], [128, 256, []]]}',
        json.dumps({"forms": [[*size, [[]] * len(ROWS)] for size in SIZES]}),
    ],
)  # fmt: skip
def test_a_damaged_file_is_measured_anew(monkeypatch: pytest.MonkeyPatch, fresh: Path, damaged: str) -> None:
    called = use(monkeypatch, {"tiles": 1.0})
    fastest_linear.fastest_linear(Layers())
    (file,) = fresh.glob("linear-*.json")
    file.write_text(damaged)
    fastest_linear._known.clear()
    called.clear()
    fastest_linear.fastest_linear(Layers())
    assert called and {len(chosen) for *_, chosen in json.loads(file.read_text())["forms"]} == {len(ROWS)}


def test_another_version_s_names_are_left_to_torch(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    use(monkeypatch, {"tiles": 1.0})
    fastest_linear.fastest_linear(Layers())
    (file,) = fresh.glob("linear-*.json")
    file.write_text(json.dumps({"forms": [[*size, ["rows"] * len(ROWS)] for size in SIZES]}))
    fastest_linear._known.clear()
    assert fastest_linear.fastest_linear(Layers()).at(4) == {}


def test_a_large_layer_is_measured_by_a_part() -> None:
    model = torch.nn.Module()
    model.dtype = torch.float32
    model.layer = torch.nn.Linear(1024, 2 * SAMPLE_BYTES // 4096)
    ((size, (part, *others)),) = fastest_linear._samples(model).items()
    assert size == (2 * SAMPLE_BYTES // 4096, 1024) and part.nbytes == SAMPLE_BYTES and not others


def test_the_user_s_random_numbers_are_untouched() -> None:
    """Sampling under a seed must not depend on whether something had to be measured."""
    model = Layers()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    fastest_linear.fastest_linear(model)
    assert torch.equal(torch.rand(4), expected)


class WithoutWeight(torch.nn.Linear):
    """A layer whose weight is packed, as some quantizers do it."""

    @property
    def weight(self) -> torch.Tensor:
        raise RuntimeError("packed")


def test_weights_that_cannot_be_taken() -> None:
    """Packed, sparse, expanded or transposed ones."""
    model = torch.nn.Module()
    model.dtype, model.packed = torch.float32, torch.nn.Linear(256, 256)
    del model.packed.weight
    model.packed.__class__ = WithoutWeight
    rows = torch.randn(256, 1)
    for i, weight in enumerate(
        [torch.eye(256).to_sparse(), torch.eye(256).to_sparse_csr(), rows.expand(256, 256), torch.eye(256).T]
    ):
        layer = torch.nn.Linear(256, 256)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        setattr(model, f"layer{i}", layer)
    assert not fastest_linear._samples(model)


def test_nothing_is_left_where_a_file_cannot_be_replaced(fresh: Path) -> None:
    (fresh / "file.json").mkdir()
    keep(fresh / "file.json", {"forms": []})
    assert [each.name for each in fresh.iterdir()] == ["file.json"]


def test_kept_files_are_open_to_whom_the_umask_says(fresh: Path) -> None:
    """Several users may share a cache folder."""
    before = os.umask(0o027)
    try:
        keep(fresh / "file.json", {"forms": []})
    finally:
        os.umask(before)
    assert (fresh / "file.json").stat().st_mode & 0o777 == 0o640


def test_an_interrupt_while_a_file_is_kept(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    """It goes on to the caller, also where it comes right after the file took its place."""
    replace = os.replace

    def interrupted(*paths: Any) -> None:
        replace(*paths)
        raise KeyboardInterrupt

    monkeypatch.setattr("retrodraft.folders.os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        keep(fresh / "file.json", {"forms": []})
    assert [each.name for each in fresh.iterdir()] == ["file.json"]


def test_nothing_to_choose_for() -> None:
    """Small layers, and other devices."""
    model = torch.nn.Module()
    model.dtype, model.layer = torch.float32, torch.nn.Linear(8, 8)
    assert fastest_linear.fastest_linear(model).at(1) == {}
    assert fastest_linear.fastest_linear(Layers().to("meta")).at(1) == {}
