"""A small store whose parts agree on a value, for tests of the format on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from retrodraft.index.storage import open_store, writing


def save(folder: Path, value: int, size: int = 1000) -> None:
    """Write it, in place of what is there."""
    with writing(folder) as writer:
        for name in ("a", "b", "c"):
            writer.add(name, np.full(size, value, np.int32))
        writer.commit("test", {"value": value})


def check(folder: Path, full: bool = False) -> int:
    """The value that the whole store agrees on."""
    store = open_store(folder, "test", check=full)
    assert sorted(store.arrays) == ["a", "b", "c"]
    for array in store.arrays.values():
        assert array.min() == array.max() == store.info["value"]
    return int(store.info["value"])
