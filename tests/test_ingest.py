"""From files to documents: odd bytes, odd names, odd file systems, records, and special tokens inside texts."""

from __future__ import annotations

import io
import itertools
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from retrodraft.index.files import Skipped, find_files
from retrodraft.index.ingest import IngestReport, Text, read_jsonl, read_text, read_texts, tokenize


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and a special token in the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return tokenizer


def names(root: Path, **options: Any) -> list[str]:
    return [file.path.relative_to(root).as_posix() for file in find_files([root], [], **options)]


def texts_of(paths: list[Path], report: IngestReport | None = None, **options: Any) -> dict[str, str]:
    report = report or IngestReport()
    found = list(read_texts(find_files(paths, report.skipped), report, **options))
    return {Path(text.name).name: text.text for text in found}


def write(root: Path, **files: str | bytes) -> None:
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def test_bytes_of_all_kinds(tmp_path: Path) -> None:
    """O18: what is text is read, the rest is named with its reason; BOM and CR are no text."""
    files = {
        "good.py": b"x = 1\n", "latin.txt": "caf\xe9".encode("latin-1"), "utf16.txt": "hello".encode("utf-16"),
        "bom.txt": b"\xef\xbb\xbfhello\n", "image.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "empty.txt": b"",
        "crlf.txt": b"a\r\nb\r\n", "lf.txt": b"a\nb\n", "only-bom.txt": b"\xef\xbb\xbf", "nul.bin": b"\0" * 5_000_000,
        "late.txt": b"x" * 20_000 + b"\xff", "cut.txt": "caf\xe9".encode()[:-1],
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for name in ("with space.txt", "\N{GRINNING FACE}.txt", "line\nend.txt"):
        (tmp_path / name).write_text(name)
    report = IngestReport()
    found = texts_of([tmp_path], report)
    assert report.num_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())  # skipped or not: for progress
    assert found["good.py"] == "x = 1\n" and found["bom.txt"] == "hello\n"
    assert found["crlf.txt"] == found["lf.txt"] == "a\nb\n"
    assert {"with space.txt", "\N{GRINNING FACE}.txt", "line\nend.txt"} <= set(found)
    assert "empty.txt" not in found and "only-bom.txt" not in found
    reasons = {Path(item.name).name: item.reason for item in report.skipped}
    assert set(reasons) == {"latin.txt", "utf16.txt", "image.png", "nul.bin", "late.txt", "cut.txt"}
    assert reasons["image.png"] == reasons["nul.bin"] == "binary" and "UTF-16" in reasons["utf16.txt"]
    assert reasons["latin.txt"] == "not UTF-8 (near byte 3)" and "20000" in reasons["late.txt"]


def test_what_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and folders without permission are named; so is nothing above the folder, which may be closed too."""
    write(tmp_path, a="x", b="y", folder__c="z")
    (tmp_path / "a").chmod(0)
    (tmp_path / "folder").chmod(0)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    report = IngestReport()
    user = os.geteuid()
    if user == 0:  # a superuser may read everything
        os.seteuid(65534)
    try:
        assert set(texts_of([Path(".")], report)) == {"b"}
    finally:
        os.seteuid(user)
        (tmp_path / "folder").chmod(0o755)
    assert {item.name: item.reason for item in report.skipped} == dict.fromkeys(("a", "folder"), "Permission denied")


def test_a_file_that_vanishes(tmp_path: Path) -> None:
    write(tmp_path, a="x", b="y")
    report = IngestReport()
    files = find_files([tmp_path], report.skipped)
    (tmp_path / "a").unlink()
    assert [text.text for text in read_texts(files, report)] == ["y"]
    assert len(report.skipped) == 1


def test_links_pipes_and_sockets(tmp_path: Path) -> None:
    """O19: loops end, each real file is read once, what can block is not opened, nothing outside is read."""
    root = tmp_path / "root"
    write(root, a__one="1", b__two="2")
    (tmp_path / "outside").write_text("secret")
    (root / "a" / "loop").symlink_to(".")
    (root / "a" / "up").symlink_to("..")
    (root / "a" / "other").symlink_to("../b")
    (root / "b" / "other").symlink_to("../a")
    (root / "dangling").symlink_to("nowhere")
    (root / "self").symlink_to("self")
    (root / "out").symlink_to(tmp_path / "outside")
    (root / "inner").symlink_to("a/one")
    os.link(root / "a" / "one", root / "a" / "hard")
    os.mkfifo(root / "pipe")
    server = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(root)  # socket names are short
    server.bind("sock")
    os.chdir(here)
    start = time.monotonic()
    report = IngestReport()
    found = texts_of([root], report)
    server.close()
    assert time.monotonic() - start < 5
    assert sorted(found.values()) == ["1", "2"]
    reasons = {Path(item.name).name: item.reason for item in report.skipped}
    assert set(reasons) == {"dangling", "self", "out", "pipe", "sock"}
    assert reasons["dangling"] == reasons["self"] == "link to nothing" and "out of the folder" in reasons["out"]
    assert texts_of([root / "out"]) == {"out": "secret"}  # unless it is named
    assert texts_of([root / "pipe"], report) == {}
    with pytest.raises(ValueError, match="nothing-here"):
        find_files([tmp_path / "nothing-here"], [])


def test_deep_trees_need_no_recursion(tmp_path: Path) -> None:
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        for _ in range(400):
            os.mkdir("d")
            os.chdir("d")
        Path("leaf").write_text("x")
    finally:
        os.chdir(here)
    assert len(find_files([tmp_path], [])) == 1


def test_gitignore_and_patterns(tmp_path: Path) -> None:
    write(
        tmp_path, _dot_git__config="", _dot_gitignore="*.log\nbuild/\n/top.txt\n", a_dot_py="1", b_dot_log="2",
        build__c_dot_py="3", top_dot_txt="4", src__top_dot_txt="5", src___dot_gitignore="!keep.log\n*.tmp\n",
        src__keep_dot_log="6", src__d_dot_tmp="7", src__deep__e_dot_tmp="8", src__deep__f_dot_py="9",
    )  # fmt: skip
    kept = [".gitignore", "a.py", "src/.gitignore", "src/keep.log", "src/top.txt", "src/deep/f.py"]
    assert names(tmp_path) == kept
    assert names(tmp_path / "src") == [".gitignore", "keep.log", "top.txt", "deep/f.py"]  # rules above hold
    assert names(tmp_path / "build") == ["c.py"]  # but not against a folder that is named itself
    for folder in (".hg", ".svn", "CVS", "__pycache__"):
        (tmp_path / "src" / folder).mkdir()
        (tmp_path / "src" / folder / "x.py").write_text("10")
    assert not [name for name in names(tmp_path, gitignore=False) if name.endswith("x.py")]
    assert "build/c.py" in names(tmp_path, gitignore=False) and ".git/config" not in names(tmp_path, gitignore=False)
    assert names(tmp_path, include=["*.py"]) == ["a.py", "src/deep/f.py"]
    assert names(tmp_path, include=["*.py"], exclude=["deep/"]) == ["a.py"]
    assert len(find_files([tmp_path / "b.log"], [])) == 1  # named itself
    assert len(find_files([tmp_path, tmp_path / "a.py", tmp_path / "src"], [])) == len(kept)  # each file once
    (tmp_path / ".gitignore").write_bytes(b"\xff\xfe[\n*.py\n")
    assert "a.py" not in names(tmp_path)


def test_rules_of_a_linked_worktree(tmp_path: Path) -> None:
    """Its .git is a file."""
    write(tmp_path, _dot_gitignore="*.log\n", _dot_git="gitdir: elsewhere\n", src__a_dot_py="1", src__b_dot_log="2")
    assert names(tmp_path / "src") == ["a.py"]


def test_jsonl_lines_that_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a line is skipped to its end, however long, and counts as one."""
    monkeypatch.setattr("retrodraft.index.ingest.MAX_LINE_BYTES", 20)
    for length in (20, 21, 39, 40, 41, 500):
        lines = [b'{"text": "one"}', b'{"text": "' + b"x" * (length - 12) + b'"}', b'{"text": "two"}']
        report = IngestReport()
        found = list(read_jsonl(io.BytesIO(b"\n".join(lines)), "f", report))
        assert [text.text for text in found] == ["one", "two"] and found[1].name == "f:3"
        assert [item.name for item in report.skipped] == ["f:2"]


def test_long_texts_are_cut_behind_line_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that most tokens are those of the whole text: a piece ends with its line, or before a blank."""
    monkeypatch.setattr("retrodraft.index.ingest.PIECE_CHARS", 50)
    seen: list[str] = []

    def tokenizer(text: str, **options: Any) -> dict[str, list[int]]:
        seen.append(text)
        return {"input_ids": [1]}

    for text in ("a line\n" * 40, "some words " * 20):
        seen.clear()
        list(tokenize([Text("f", text)], tokenizer, IngestReport()))
        assert "".join(seen) == text and len(seen) > 4
        assert all(piece.endswith("\n") or following.startswith(" ") for piece, following in itertools.pairwise(seen))


def test_jsonl_with_everything_wrong() -> None:
    lines = [
        b'\xef\xbb\xbf{"text": "first"}', b"", b'{"text": "second\\r\\nline"}\r', b'{"other": 1}', b'{"text": 5}',
        b"{broken", b"[1]", b'{"text": "\xff"}', b'"text"', b"[" * 100_000, b'{"text": "\\ud800 lone"}',
        b'{"text": ""}', b'{"text": "last"}',
    ]  # fmt: skip
    report = IngestReport()
    found = list(read_jsonl(io.BytesIO(b"\n".join(lines)), "f", report))
    assert [text.text for text in found if text.text] == ["first", "second\nline", "? lone", "last"]
    assert found[0].name == "f:1"
    assert [item.name for item in report.skipped] == [f"f:{number}" for number in range(4, 11)]


def test_chats_and_fields() -> None:
    chat = [
        {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"},
        {"role": "assistant", "content": [{"type": "text", "text": "parts"}, {"type": "image"}]},
        {"role": "assistant", "content": None, "tool_calls": []}, {"role": "assistant"}, "broken",
    ]  # fmt: skip
    lines = [{"messages": chat, "text": "beside"}, {"text": "plain", "code": "c"}]
    stream = "\n".join(map(json.dumps, lines)).encode()

    def read(**options: Any) -> list[str]:
        return [text.text for text in read_jsonl(io.BytesIO(stream), "f", IngestReport(), **options)]

    assert read() == ["question", "answer", "parts", "plain"]
    assert read(role="assistant") == ["answer", "parts", "plain"]
    assert read(text_field="text") == ["beside", "plain"]
    assert read(text_field="code") == ["c"]


def test_chats_without_any_text() -> None:
    """They are named, unlike those in which only the wanted role says nothing, and broken messages name themselves."""
    question = {"role": "user", "content": "question"}
    chats: list[list[Any]] = [
        [],
        [{"role": "assistant", "content": None}],
        [question],
        ["broken"],
        [question, "broken"],
    ]
    stream = "\n".join(json.dumps({"messages": chat, "text": "beside"}) for chat in chats).encode()
    report = IngestReport()
    assert list(read_jsonl(io.BytesIO(stream), "f", report, role="assistant")) == []
    assert [(item.name, item.reason) for item in report.skipped] == [
        ("f:1", "no text in its messages"), ("f:2", "no text in its messages"), ("f:4", "message 0 has no text"),
        ("f:5", "message 1 has no text"),
    ]  # fmt: skip


def test_parquet(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], None]
    parquet.write_table(pa.table({"text": ["one", None, "two\r\n"]}), tmp_path / "t.parquet")
    parquet.write_table(pa.table({"messages": messages, "body": ["b1", "b2"]}), tmp_path / "m.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")

    def read(name: str, **options: Any) -> tuple[list[str], list[Skipped]]:
        report = IngestReport()
        files = find_files([tmp_path / name], [])
        return [text.text for text in read_texts(files, report, **options)], report.skipped

    found, skipped = read("t.parquet")
    assert found == ["one", "two\n"] and len(skipped) == 1
    assert read("m.parquet", role="assistant")[0] == ["a"]
    assert read("m.parquet", text_field="body")[0] == ["b1", "b2"]
    assert "no column 'code'" in read("m.parquet", text_field="code")[1][0].reason
    found, skipped = read("broken.parquet")
    assert found == [] and "broken parquet" in skipped[0].reason


def test_large_texts_become_several_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks end behind line ends, characters and CRLFs stay whole, and nothing is lost."""
    monkeypatch.setattr("retrodraft.index.ingest.BLOCK_BYTES", 64)
    for text in (
        "caf\xe9 \N{SNOWMAN}\r\n" * 50,
        "x" * 1000,
        "\N{SNOWMAN}" * 100,
        "a\r\n" * 100,
        "y" * 63 + "\r\n" + "z",
    ):
        for shift in range(4):
            whole = "-" * shift + text
            found = list(read_text(io.BytesIO(whole.encode()), "f", IngestReport()))
            assert "".join(part.text for part in found) == whole.replace("\r\n", "\n")
            assert len(found) == len({part.name for part in found}) > 1 and found[0].name == "f"


def test_special_tokens_inside_texts_stay_text() -> None:
    """O18, O23: a literal end-of-turn marker in a source file is no control id; the tokenizer is not changed."""
    from transformers import PreTrainedTokenizerFast

    text = "a <|im_end|> b"
    backend = byte_tokenizer()
    control = backend.token_to_id("<|im_end|>")
    for tokenizer in (backend, PreTrainedTokenizerFast(tokenizer_object=backend)):
        (document,) = tokenize([Text("f", text)], tokenizer, IngestReport())
        assert control not in document.token_ids and len(document.token_ids) == len(text)
    assert control in backend.encode(text).ids


def test_truncation_and_padding_of_the_tokenizer_do_not_count() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding()
    documents = list(tokenize([Text("a", "12345"), Text("b", "1")], tokenizer, IngestReport()))
    assert [len(document.token_ids) for document in documents] == [5, 1]


def test_a_tokenizer_without_a_fast_backend() -> None:
    class Slow:
        def __call__(self, text: str, add_special_tokens: bool, split_special_tokens: bool, verbose: bool) -> Any:
            assert split_special_tokens and not add_special_tokens
            return {"input_ids": [ord(char) for char in text]}

    (document,) = tokenize([Text("f", "ab")], Slow(), IngestReport())
    assert list(document.token_ids) == [97, 98]


def test_repeats_and_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """O20: --dedup leaves exact repeats out, also across batches; empty texts are no documents."""
    monkeypatch.setattr("retrodraft.index.ingest.BATCH_CHARS", 10)
    texts = [Text(str(i), f"text {i % 7}" if i % 5 else "") for i in range(50)]
    report = IngestReport()
    kept = list(tokenize(texts, byte_tokenizer(), report, dedup=True))
    assert len(kept) == report.num_documents == 7 and report.num_duplicates == 42
    every = list(tokenize(texts, byte_tokenizer(), IngestReport()))
    assert [document.name for document in every] == [str(i) for i in range(50) if i % 5]


@pytest.mark.parametrize("unit", ["a", "ab", "x = {'k': [1,2,3]}, ", "word\n"])
def test_giant_lines_are_linear(unit: str) -> None:
    """O17: twice a minified file takes about twice as long, and its tokens are all there."""
    seconds = []
    for size in (500_000, 1_000_000):
        text = unit * (size // len(unit))
        start = time.perf_counter()
        (document,) = tokenize([Text("f", text)], byte_tokenizer(), IngestReport())
        seconds.append(time.perf_counter() - start)
        assert len(document.token_ids) == len(text)
    assert seconds[1] < 2 * 2.5 * seconds[0] + 0.2
