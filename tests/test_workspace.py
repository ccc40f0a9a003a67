"""Workspaces: what is taken in, what changes are noticed, and that nothing is tokenised twice."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from retrodraft.sessions.views import register_view, registered_views, unregister_view, views
from retrodraft.sessions.workspace import MAX_FILE_BYTES, PROBE, Workspace

CODE = "def f(x):\n    return x\n"


class Words:
    """A tokenizer that counts its work."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift
        self.seen: list[str] = []

    def __call__(self, text: str) -> list[int]:
        if text != PROBE:
            self.seen.append(text)
        return [ord(char) + self.shift for char in text]


def texts(streams: list[np.ndarray], shift: int = 0) -> list[str]:
    return ["".join(chr(int(token) - shift) for token in stream) for stream in streams]


@pytest.fixture
def upper() -> Iterator[None]:
    register_view("upper", str.upper)
    yield
    unregister_view("upper")


def test_streams_are_the_views(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(CODE)
    workspace = Workspace()
    workspace.add(tmp_path / "a.py")
    workspace.add("notes.md", "# títle\n")
    assert workspace.paths == (str(tmp_path / "a.py"), "notes.md")
    streams = workspace.token_streams(Words())
    expected = [form for text in (CODE, "# títle\n") for _, form in views(text)]
    assert sorted(texts(streams)) == sorted(set(expected))
    assert texts(streams)[:2] == [CODE, "# títle\n"]  # the first view of all files comes first
    assert all(stream.dtype == np.int32 and not stream.flags.writeable for stream in streams)
    assert workspace.num_bytes == len(CODE) + 9
    assert Workspace().token_streams(Words()) == []


def test_nothing_is_tokenised_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(CODE)
    workspace, words = Workspace(), Words()
    workspace.add(path)
    workspace.add("b.py", "y = 2\n")
    first = workspace.token_streams(words)
    assert len(set(words.seen)) == len(words.seen) == len(first)
    words.seen.clear()
    again = workspace.token_streams(words)
    assert not words.seen and all(a is b for a, b in zip(again, first, strict=True))

    workspace.add("b.py", "z = 3\n")  # one file changes, the other one keeps its arrays
    changed = workspace.token_streams(words)
    own = [form for name, form in views("z = 3\n") if name != "search_replace"]
    assert sorted(words.seen) == sorted(own)
    assert {id(stream) for stream in changed} & {id(stream) for stream in first}
    words.seen.clear()

    workspace.remove(path)
    assert len(workspace.token_streams(words)) == len(own) + 1
    workspace.add(path)
    workspace.add("copy.py", CODE)  # equal contents are one
    workspace.add("b.py", "y = 2\n")
    assert sorted(texts(workspace.token_streams(words))) == sorted(texts(first)) and not words.seen


def test_another_tokenizer_is_noticed() -> None:
    workspace = Workspace()
    workspace.add("a.py", CODE)
    first, second = workspace.token_streams(Words()), workspace.token_streams(Words(shift=1))
    assert texts(first) == texts(second, 1)
    words = Words()
    workspace.token_streams(words)  # a function of its own, with the same tokens
    assert not words.seen


@pytest.mark.usefixtures("upper")
def test_own_views_come_and_go() -> None:
    workspace, words = Workspace(), Words()
    workspace.add("a.py", CODE)
    assert texts(workspace.token_streams(words))[-1] == CODE.upper()
    unregister_view("upper")
    words.seen.clear()
    assert CODE.upper() not in texts(workspace.token_streams(words))
    register_view("upper", lambda text: text.upper() + "!")
    assert texts(workspace.token_streams(words))[-1] == CODE.upper() + "!"
    assert words.seen == [CODE.upper() + "!"]


def test_a_view_that_fails_is_left_out() -> None:
    """One warning, with the view and the file; the other views and files are there, also of the failing call."""
    calls: list[str] = []

    def broken(text: str) -> str:
        calls.append(text)
        return f"form of {text.index('y')}"  # not every text has one

    register_view("broken", broken)
    workspace, words = Workspace(), Words()
    for path, text in (("a.py", "y = 1\n"), ("b.py", "z = 2\n"), ("c.py", "x = 3\n")):
        workspace.add(path, text)
    with pytest.warns(UserWarning, match="view 'broken' failed: ValueError: substring not found, on 'b.py'") as record:
        streams = texts(workspace.token_streams(words))
    assert len(record) == 1 and len(calls) == 2
    assert streams[:3] == ["y = 1\n", "z = 2\n", "x = 3\n"]
    assert "broken" not in dict(registered_views())
    workspace.add("d.py", "w = 4\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "w = 4\n" in texts(workspace.token_streams(words))
    assert len(calls) == 2


def test_max_tokens_cuts_the_unlikely_views() -> None:
    workspace, words = Workspace(), Words()
    workspace.add("a.py", CODE)
    workspace.add("b.py", "y = 2\n")
    streams = workspace.token_streams(words, max_tokens=len(CODE) + 6 + 3)
    assert texts(streams) == [CODE, "y = 2\n"]
    assert len(words.seen) <= 3  # the rest was not even tokenised
    assert workspace.token_streams(words, max_tokens=5) == []


def test_memory_is_bounded() -> None:
    """O16: tokens of old contents go first; what one call needs is not pushed out by itself."""
    workspace, words = Workspace(max_token_bytes=20_000), Words()
    for i in range(200):
        workspace.add("a.py", f"x = {i}\n" + "pass\n" * 20)
        workspace.token_streams(words)
        assert workspace._stream_bytes <= 20_000
        assert workspace._stream_bytes == sum(stream.nbytes for stream, _ in workspace._streams.values())
        assert len(workspace._forms) <= 40
    words.seen.clear()
    workspace.token_streams(words)
    assert not words.seen
    workspace.add("large.py", "value = 0\n" * 700)  # its views do not fit all
    first = workspace.token_streams(words)
    words.seen.clear()
    assert texts(workspace.token_streams(words)) == texts(first)
    assert 0 < len(words.seen) < len(first)


def test_what_is_not_taken_in(tmp_path: Path) -> None:
    """O18: each with its reason, and what was there before stays."""
    workspace = Workspace()
    path = tmp_path / "a.py"
    workspace.add(path, "kept\n")
    cases = {
        b"a\0b": r"binary \(a NUL at byte 1\)",
        b"caf\xe9\n": r"not UTF-8 \(byte 3\)",
        "x\n".encode("utf-16"): "UTF-16",
        b"x" * (MAX_FILE_BYTES + 1): "longer than 2,000,000 bytes",
    }
    for data, reason in cases.items():
        path.write_bytes(data)
        with pytest.raises(ValueError, match=reason):
            workspace.add(path)
    path.unlink()
    for broken in (path, tmp_path):
        with pytest.raises(ValueError, match="can't be read"):
            workspace.add(broken)
    os.mkfifo(path)
    with pytest.raises(ValueError, match="not a regular file"):
        workspace.add(path)
    with pytest.raises(ValueError, match="2,000,001 bytes"):
        workspace.add("long", "é" * 1_000_000 + "x")
    with pytest.raises(ValueError, match="surrogate"):
        workspace.add("half", "\ud800")
    with pytest.raises(ValueError, match="not in the workspace"):
        workspace.remove("never")
    assert workspace.paths == (str(path),) and workspace.version == 1
    assert texts(workspace.token_streams(Words()))[0] == "kept\n"


def test_room_is_bounded() -> None:
    workspace = Workspace(max_text_bytes=10)
    workspace.add("a", "12345678")
    with pytest.raises(ValueError, match="fill the workspace to 11 bytes; it may have 10"):
        workspace.add("b", "123")
    workspace.add("a", "1234567890")
    workspace.remove("a")
    assert workspace.num_bytes == 0 and workspace.paths == ()


def test_bom_and_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    workspace = Workspace()
    workspace.add(path)
    assert texts(workspace.token_streams(Words()))[0] == "a\r\nb\rc\n"


def test_refresh_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["a.py", "b.py", "c.py"]
    for name in names:
        Path(name).write_text(f"# {name}\n")
    workspace = Workspace()
    for name in names:
        workspace.add(name)
    workspace.add("given.py", "# not on disk\n")
    assert workspace.version == 4 and workspace.refresh() == []
    monkeypatch.chdir("/")  # the files are still found

    (tmp_path / "a.py").write_text("# A.py\n")  # the same size
    (tmp_path / "b.py").unlink()
    os.utime(tmp_path / "c.py", ns=(1, 1))  # touched, not changed
    assert sorted(workspace.refresh()) == ["a.py", "b.py"]
    assert workspace.paths == ("a.py", "c.py", "given.py") and workspace.version == 6
    assert texts(workspace.token_streams(Words()))[0] == "# A.py\n"
    assert workspace.refresh() == [] and workspace.version == 6

    (tmp_path / "a.py").write_bytes(b"\0")
    assert workspace.refresh() == ["a.py"] and "a.py" not in workspace.paths
    workspace.add("given.py", "# not on disk\n")
    assert workspace.version == 7  # the same text is no change
    workspace.add("given.py", "# other\n")
    assert workspace.version == 8


def test_folders(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("secret")
    (tmp_path / ".gitignore").write_text("build/\n*.log\n")
    for name in ("build/x.py", "src/a.py", "src/deep/b.py", "run.log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "src" / "out").symlink_to("/etc/hostname")
    workspace = Workspace()
    skipped = workspace.add_folder(tmp_path)
    names = [str(Path(path).relative_to(tmp_path)) for path in workspace.paths]
    assert sorted(names) == [".gitignore", "src/a.py", "src/deep/b.py"]
    reasons = {Path(item.name).name: item.reason for item in skipped}
    assert sorted(reasons) == ["out", "picture.png"]
    assert "binary" in reasons["picture.png"] and "link" in reasons["out"]

    version = workspace.version
    (tmp_path / "src" / "new.py").write_text("new")
    workspace.add_folder(tmp_path)
    assert workspace.version == version + 1 and len(workspace.paths) == 4
    with pytest.raises(ValueError, match="is not a folder"):
        workspace.add_folder(tmp_path / "src" / "a.py")

    small = Workspace(max_text_bytes=20)
    assert any("fill the workspace" in item.reason for item in small.add_folder(tmp_path / "src"))
    assert 0 < small.num_bytes <= 20


def test_threads(tmp_path: Path) -> None:
    """O24: files are added, changed and removed while others take the streams."""
    workspace = Workspace()
    errors: list[BaseException] = []
    stop = threading.Event()

    def edit(number: int) -> None:
        try:
            path = tmp_path / f"{number}.py"
            for i in range(60):
                path.write_text(f"{number} = {i}\n" * 20)
                workspace.add(path)
                workspace.refresh()
                if i % 7 == 0:
                    workspace.remove(path)
        except BaseException as error:
            errors.append(error)

    def read() -> None:
        try:
            while not stop.is_set():
                for text in texts(workspace.token_streams(Words())):
                    assert text
        except BaseException as error:
            errors.append(error)

    editors = [threading.Thread(target=edit, args=(number,)) for number in range(4)]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in (*editors, *readers):
        thread.start()
    for thread in editors:
        thread.join(60)
    stop.set()
    for thread in readers:
        thread.join(60)
    assert not errors
    assert len(workspace.paths) == 4
    final = texts(workspace.token_streams(Words()))
    assert all(f"{number} = 59\n" * 20 in final for number in range(4))


def test_real_tokenizer() -> None:
    """Views of a re-emitted function match in order where the raw text breaks off at every line."""
    from retrodraft.index.suffix_automaton import SuffixAutomaton
    from retrodraft.models import load_tokenizer

    backend = load_tokenizer().backend_tokenizer
    text = Path(threading.__file__).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)[200:230]
    workspace = Workspace()
    workspace.add("threading.py", text)
    emitted = backend.encode("@@ -201,30 +201,30 @@\n" + "".join(f" {line}" for line in lines)).ids
    emitted = emitted[30:-2]  # at both ends a token may span the border

    def longest(streams: list[np.ndarray]) -> int:
        """Tokens at the end of the emission that one of the streams has in one piece."""
        best = 0
        for stream in streams:
            automaton = SuffixAutomaton([*stream, -1, *emitted])
            best = max(best, automaton.match()[1])
        return best

    streams = workspace.token_streams(lambda text: backend.encode(text, add_special_tokens=False).ids)
    assert longest(streams[:1]) < 30
    assert longest(streams) == len(emitted)


def test_sizes_and_given_texts(tmp_path: Path) -> None:
    """A text is counted once, and what was made of it serves the streams; what was read from disk is not given."""
    (tmp_path / "a.py").write_text(CODE)
    workspace, words = Workspace(), Words()
    workspace.add(tmp_path / "a.py")
    workspace.add("notes.md", "# títle\n")
    assert workspace.given_texts() == {"notes.md": "# títle\n"}
    assert workspace.num_bytes_with({}) == workspace.num_bytes == len(CODE) + 9
    assert workspace.num_bytes_with({"notes.md": 5, "new": 2}) == len(CODE) + 7
    assert [workspace.num_tokens("# títle\n", words) for _ in range(2)] == [8, 8] and words.seen == ["# títle\n"]
    assert workspace.num_tokens("", words) == 0 and workspace.num_tokens("# títle\n", Words(1)) == 8
    assert texts(workspace.token_streams(words))[:2] == [CODE, "# títle\n"]
    assert words.seen.count("# títle\n") == 1
