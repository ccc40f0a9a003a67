"""The dense store against exact search in NumPy, and the corner cases of FAISS."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from retrodraft.index import IndexFormatError, dense
from retrodraft.index.dense import DenseBuilder, DenseIndex, Projection

Float32 = npt.NDArray[np.float32]


def states(rows: int, hidden: int = 96, seed: int = 0) -> Float32:
    """States around a few centres, with features of very different sizes."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(9).normal(size=(50, hidden))
    noise = rng.normal(size=(rows, hidden)) * 0.3
    return ((centres[rng.integers(0, 50, rows)] + noise) * np.geomspace(0.01, 100, hidden) + 5).astype(np.float32)


def filled(rows: int, dim: int = 16) -> tuple[DenseIndex, Float32]:
    data = states(rows)
    index = DenseIndex(Projection.fit(data[:2000], dim))
    for start in range(0, rows, 1000):
        block = data[start : start + 1000]
        index.add(block, np.arange(start, start + len(block)) + 10**10)
    return index, data


def exact(index: DenseIndex, data: Float32, query: Float32, k: int) -> list[set[int]]:
    keys, _ = index.projection.apply(data)
    wanted, _ = index.projection.apply(query)
    return [set((np.argsort(-(keys @ key))[:k] + 10**10).tolist()) for key in wanted]


def recall(index: DenseIndex, data: Float32, k: int = 10) -> float:
    query = states(40, seed=1)
    pairs = zip(index.search(query, k), exact(index, data, query, k), strict=True)
    return float(np.mean([len(set(found.tolist()) & wanted) / k for (found, _), wanted in pairs]))


def test_projection_whitens_and_keeps_the_largest_components() -> None:
    data = states(3000)
    projection = Projection.fit(data, 16)
    keys, usable = projection.apply(data)
    assert keys.shape == (3000, 16) and usable.all() and np.allclose(np.linalg.norm(keys, axis=1), 1, atol=1e-5)
    raw = (data - projection.mean) @ projection.components
    variances = raw.var(0)
    assert np.all(variances[:-1] >= variances[1:] * 0.999)
    assert np.allclose(np.corrcoef(raw.T), np.eye(16), atol=0.02)
    assert Projection.fit(data[:, :8], 64).components.shape == (8, 8)


@pytest.mark.parametrize("kind", ["flat", "lists", "codes"])
def test_search_and_persistence(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact, by inverted lists and by codes; what is opened answers as what was saved."""
    if kind != "flat":
        monkeypatch.setattr(dense, "FLAT_ROWS", 1000)
    if kind == "codes":
        monkeypatch.setattr(dense, "CODED_ROWS", 2000)
    index, data = filled(6000)
    assert recall(index, data) >= {"flat": 0.97, "lists": 0.85, "codes": 0.6}[kind]
    index.save(tmp_path / "d", {"model": "m"})
    loaded = DenseIndex.open(tmp_path / "d", check=True)
    query = states(20, seed=2)
    for (one, first), (two, second) in zip(index.search(query), loaded.search(query), strict=True):
        assert one.tolist() == two.tolist() and np.allclose(first, second, atol=1e-5)
        assert np.all(np.diff(first) <= 0)
    loaded.add(np.full((1, 96), np.nan, np.float32), np.zeros(1, np.int64))
    loaded.add(states(500, seed=3), np.arange(500))  # an opened index goes on growing
    assert len(loaded) == 6500 and len(loaded.search(query, 5)[0][0]) == 5
    loaded.save(tmp_path / "d")
    assert len(DenseIndex.open(tmp_path / "d")) == 6500


def test_growing_between_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are added later are found, below and beyond the size where lists begin."""
    monkeypatch.setattr(dense, "FLAT_ROWS", 1000)
    data = states(4000)
    index = DenseIndex(Projection.fit(data, 16))
    for start in range(0, 4000, 250):
        index.add(data[start : start + 250], np.arange(start, start + 250))
        found = index.search(data[[0, start, start + 249]], 1)
        assert [int(positions[0]) for positions, _ in found] == [0, start, start + 249]


def test_few_rows_and_none() -> None:
    """O21: an empty index answers nothing; k beyond the rows gives them all, and never -1 as the last row."""
    index = DenseIndex(Projection.fit(states(100), 8))
    assert all(len(found) == 0 for found, _ in index.search(states(64, seed=1)))
    index.add(states(10), np.arange(10))
    found, cosines = index.search(states(1, seed=1), 50)[0]
    assert sorted(found.tolist()) == list(range(10)) and len(cosines) == 10


def test_a_builder_fits_on_what_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first FIT_ROWS at once, or, where it waits, at the end, for a projection that is given then."""
    monkeypatch.setattr(dense, "FIT_ROWS", 500)
    data, positions = states(2000), np.arange(2000)
    early, late, given = DenseBuilder(), DenseBuilder(waits=True), DenseBuilder(waits=True)
    for builder in (early, late, given):
        for start in range(0, 2000, 250):
            assert builder.is_ready == (start >= 500)
            builder.add(data[start : start + 250], positions[start : start + 250])
    fitted = Projection.fit(data[:500])
    other = Projection.fit(states(300, seed=4))
    for builder, projection in ((early, fitted), (late, fitted), (given, other)):
        index = builder.finish(other if builder is given else None)
        assert len(index) == 2000 and index.positions.tolist() == positions.tolist()
        assert np.array_equal(index.projection.components, projection.components)
        assert [int(found[0]) for found, _ in index.search(data[::400], 1)] == [0, 400, 800, 1200, 1600]
    with pytest.raises(ValueError, match="no states"):
        DenseBuilder().finish()


def test_rows_that_are_no_numbers() -> None:
    """O21: NaN, infinite and mean states are skipped with a count, and match nothing as queries."""
    data = states(200)
    index = DenseIndex(Projection.fit(np.concatenate([data, np.full((1, 96), np.nan, np.float32)]), 8))
    bad = np.stack([np.full(96, np.nan), np.full(96, np.inf), index.projection.mean, np.full(96, 3e38)]).astype(
        np.float32
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        index.add(np.concatenate([data, bad]), np.arange(204))
        results = index.search(np.concatenate([bad[:3], data[:1]]), 3)
    assert len(index) + index.num_skipped == 204 and index.num_skipped >= 3
    assert [len(found) for found, _ in results] == [0, 0, 0, 3]
    assert results[3][0][0] == 0


def test_shapes_that_do_not_fit() -> None:
    """O21: both sizes are named."""
    index = DenseIndex(Projection.fit(states(100), 8))
    with pytest.raises(ValueError, match=r"16 features.*96"):
        index.add(np.zeros((2, 16), np.float32), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match=r"16 features.*96"):
        index.search(np.zeros((1, 16), np.float32))
    with pytest.raises(ValueError, match="positions"):
        index.add(states(3), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="at least 2"):
        Projection.fit(states(1))
    with pytest.raises(ValueError, match="matrix"):
        Projection.fit(np.zeros(5, np.float32))
    with pytest.raises(ValueError, match="k must"):
        index.search(states(1), 0)


def test_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "FLAT_ROWS", 1000)
    index, _ = filled(2000)
    index._build()
    index._lists = index._lists.copy()
    index._lists[0] = 10**6
    index.save(tmp_path / "d")
    with pytest.raises(IndexFormatError, match="lists"):
        DenseIndex.open(tmp_path / "d")
    index._lists[0] = 0
    index.save(tmp_path / "d")
    manifest = tmp_path / "d" / "manifest.json"
    text = json.loads(manifest.read_text())
    text["files"]["centroids"]["dtype"] = "<i4"
    manifest.write_text(json.dumps(text))
    with pytest.raises(IndexFormatError, match="of another type"):
        DenseIndex.open(tmp_path / "d")
    index._positions = index._positions[:-1]
    index.save(tmp_path / "d")
    with pytest.raises(IndexFormatError, match="shapes"):
        DenseIndex.open(tmp_path / "d")


def test_search_after_fork() -> None:
    """O24: a forked child searches too, and the caller's thread setting is left as it was."""
    import faiss

    before = faiss.omp_get_max_threads()
    index, data = filled(3000)
    index.search(data[:5])
    assert faiss.omp_get_max_threads() == before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside other threads
        child = os.fork()
    if child == 0:
        os._exit(0 if len(index.search(data[:5])) == 5 else 3)
    assert os.waitpid(child, 0)[1] == 0
