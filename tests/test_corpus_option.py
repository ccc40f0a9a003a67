"""`--corpus` of the commands that generate."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import retrodraft_here

from retrodraft.index import CorpusIndex


@pytest.mark.parametrize(
    "command", [["generate", "hi"], ["bench", "--workload", "{root}/w.jsonl", "-o", "{root}/o"], ["serve"]]
)
def test_what_is_no_corpus(command: list[str], tmp_path: Path) -> None:
    """Told in one line, before a model is loaded."""
    (tmp_path / "w.jsonl").write_text('{"id": 1, "messages": [{"role": "user", "content": "hi"}]}\n')
    CorpusIndex.build([[1, 2, 3]], tmp_path / "c")
    given = [argument.replace("{root}", str(tmp_path)) for argument in command]
    done = retrodraft_here(*given, "--corpus", tmp_path / "nothing")
    assert done.returncode == 2 and done.stderr.startswith(f"retrodraft: {tmp_path / 'nothing'} is not a folder")
    if command == ["serve"]:
        return  # it has one strategy
    other = ["--strategy", "suffix"] if command[0] == "generate" else ["--systems", "plain,suffix"]
    done = retrodraft_here(*given, *other, "--corpus", tmp_path / "c")
    assert done.returncode == 2 and done.stderr == "retrodraft: only strategy retro drafts from a corpus\n"


def test_dense_needs_a_corpus_with_a_dense_index(tmp_path: Path) -> None:
    done = retrodraft_here("generate", "hi", "--dense")
    assert done.returncode == 2 and done.stderr.startswith("retrodraft: --dense drafts from a corpus")
    CorpusIndex.build([[1, 2, 3]], tmp_path / "c")
    done = retrodraft_here("generate", "hi", "--dense", "--corpus", tmp_path / "c")
    assert done.returncode == 2 and "has no dense index: run `retrodraft index dense build" in done.stderr


def test_a_corpus_is_drafted_from(tmp_path: Path) -> None:
    """The answer is the same; an index of the answer itself takes fewer forwards."""
    options = ("Count from one to ten in words.", "--max-new-tokens", "40", "--budget", "16")
    plain = retrodraft_here("generate", *options)
    (tmp_path / "answer.txt").write_text(plain.stdout)
    assert retrodraft_here("index", "build", tmp_path / "answer.txt", "-o", tmp_path / "c").returncode == 0
    helped = retrodraft_here("generate", *options, "--corpus", tmp_path / "c")
    assert helped.stdout == plain.stdout

    def forwards(text: str) -> int:
        return int(text.split(" target forwards")[0].split()[-1])

    assert forwards(helped.stderr) < forwards(plain.stderr)
