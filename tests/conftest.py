"""Shared fixtures. Verdicts and curves go to a folder of the test run, never to the user's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# The converted embedded model is worth keeping between runs, so only a private cache is replaced.
_MODELS = os.environ.get("RETRODRAFT_CACHE")
if _MODELS is None:
    _FOLDER = tempfile.mkdtemp(prefix="retrodraft-tests-")
    os.environ["RETRODRAFT_CACHE"] = _FOLDER


@pytest.fixture(scope="session")
def embedded() -> tuple[Any, Any]:
    """The embedded model in float32 and its tokenizer."""
    from retrodraft.models import load_model

    return load_model()


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    """transformers logs advice about tiny configurations; keep test output readable."""
    import transformers

    transformers.logging.set_verbosity_error()
    yield
