"""Shared fixtures. Verdicts and curves go to a folder of the test run, never to the user's."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so begun in the background; what we start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "RETRODRAFT_CACHE" not in os.environ:  # whoever sets it keeps the converted embedded model from run to run
    _FOLDER = tempfile.TemporaryDirectory(prefix="retrodraft-tests-")
    os.environ["RETRODRAFT_CACHE"] = _FOLDER.name


@pytest.fixture(scope="session")
def embedded() -> tuple[Any, Any]:
    """The embedded model in float32 and its tokenizer, with the rows of a few seconds in place of twenty."""
    from retrodraft.hot_start import hot_rows
    from retrodraft.models import load_model

    model, tokenizer = load_model()
    hot_rows(model, tokenizer, seconds=2.0)  # stored, and so used by everything later
    return model, tokenizer


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    """transformers logs advice about tiny configurations; keep test output readable."""
    import transformers

    transformers.logging.set_verbosity_error()
    yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte tokenizer, saved as a user would have it."""
    from tiny import tiny_llama
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    tiny_llama(0, vocab_size=256, initializer_range=0.05, pad_token_id=None).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """Four short prompts in two categories, with a BOM, CRLF, a blank line and an answer to be dropped."""
    lines = []
    for i in range(4):
        messages = [{"role": "user", "content": f"count {i} " * 6}, {"role": "assistant", "content": "one"}]
        lines.append(json.dumps({"id": f"p{i}", "category": "even" if i % 2 == 0 else "odd", "messages": messages}))
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*lines[:2], "", *lines[2:]]).encode() + b"\r\n")
    return path


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("RETRODRAFT_CACHE", str(tmp_path))
    return tmp_path
