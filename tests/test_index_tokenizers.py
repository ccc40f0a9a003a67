"""Which tokenizer `retrodraft index` takes for an index, and what it says where that can't be had."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from command import retrodraft, retrodraft_here
from indexing import result_of, save_tokenizer

from retrodraft.index import CorpusIndex


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def built(tokenizer: Path, tmp_path: Path) -> Path:
    result_of("build", __file__, "-o", tmp_path / "my.index", "--tokenizer", tokenizer)
    return tmp_path / "my.index"


def test_another_tokenizer_is_refused(built: Path, tmp_path: Path) -> None:
    """O12: its ids would mean other tokens."""
    other = save_tokenizer(tmp_path / "other", extra="<|stop|>")
    for command in (["query", built, "x"], ["add", built, other / "tokenizer.json"]):
        done = retrodraft_here("index", *command, "--tokenizer", other)
        assert done.returncode == 2 and "fingerprint" in done.stderr
        assert done.stderr.endswith(": leave --tokenizer out\n")


def test_a_tokenizer_in_a_folder_is_found_from_elsewhere(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is kept absolute; where it is gone or changed, the line names the index and what to do."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "text.txt").write_text("some text")
    shutil.copytree(tokenizer, tmp_path / "a" / "tok")
    monkeypatch.chdir(tmp_path / "a")
    facts = result_of("build", "text.txt", "-o", "my.index", "--tokenizer", "./tok")
    assert facts["tokenizer"]["name"] == str(tmp_path / "a" / "tok")
    monkeypatch.chdir(tmp_path)
    assert result_of("query", "a/my.index", "some t")["match_length"] == 6
    save_tokenizer(tmp_path / "a" / "tok", extra="<|stop|>")
    done = retrodraft_here("index", "query", "a/my.index", "some t")
    assert done.returncode == 2 and done.stderr.endswith(" now: build the index anew\n")
    shutil.rmtree(tmp_path / "a" / "tok")
    done = retrodraft_here("index", "query", "a/my.index", "some t")
    assert done.returncode == 2 and done.stderr.startswith("retrodraft: a/my.index: ")
    assert "give --tokenizer" in done.stderr and done.stderr.count("\n") == 1
    assert result_of("query", "a/my.index", "some t", "--tokenizer", tokenizer)["match_length"] == 6


def test_a_corpus_without_facts_about_its_tokenizer(tmp_path: Path) -> None:
    CorpusIndex.build([[1, 2]], tmp_path / "c")
    shown = retrodraft_here("index", "info", tmp_path / "c").stdout
    assert "\nno tokenizer named\n" in shown and "?" not in shown


def test_the_tokenizer_of_a_strangers_index_runs_no_code(built: Path, tokenizer: Path, tmp_path: Path) -> None:
    """An index names its tokenizer; code that comes with that is not run, and nobody is asked whether it may."""
    shutil.copytree(tokenizer, tmp_path / "strange")
    config = {"tokenizer_class": "StrangeTokenizer", "auto_map": {"AutoTokenizer": [None, "strange.StrangeTokenizer"]}}
    (tmp_path / "strange" / "tokenizer_config.json").write_text(json.dumps(config))
    code = f"from transformers import PreTrainedTokenizerFast\nopen({str(tmp_path / 'ran')!r}, 'w')\n"
    code += "class StrangeTokenizer(PreTrainedTokenizerFast): ...\n"
    (tmp_path / "strange" / "strange.py").write_text(code)
    text = (built / "manifest.json").read_text()
    (built / "manifest.json").write_text(
        text.replace(json.dumps(str(tokenizer)), json.dumps(str(tmp_path / "strange")))
    )
    done = retrodraft_here("index", "query", built, "for i", stdin="y\n")
    assert not (tmp_path / "ran").exists()
    assert "[y/N]" not in done.stdout and "Traceback" not in done.stderr and done.stderr.count("\n") <= 1, done.stderr


def test_a_tokenizer_that_is_out_of_reach(tmp_path: Path) -> None:
    """The hub is asked once, not for two minutes: one line. The address here is one that hangs up."""
    asked = 0

    def hang_up() -> None:
        nonlocal asked
        with suppress(OSError):  # the listener was closed
            while True:
                connection, _ = listener.accept()
                asked += 1
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=hang_up)
        thread.start()
        hub = {"HF_ENDPOINT": f"http://127.0.0.1:{listener.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        hub["HF_HUB_OFFLINE"] = "0"  # whoever runs the tests may have set it
        done = retrodraft("index", "build", __file__, "-o", str(tmp_path / "x"), "--tokenizer", "no/such", **hub)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    assert done.returncode == 2 and 1 <= asked <= 2  # a connection that was lost is opened again
    start = (
        "retrodraft: tokenizer 'no/such' can't be loaded: no folder here has this name, and the hub can't be reached"
    )
    assert done.stderr.startswith(start) and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "x").exists()
