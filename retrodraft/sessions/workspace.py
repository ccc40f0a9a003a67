"""The files that an agent works on, as token streams of all their emission views."""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from retrodraft.index.files import Skipped, find_files
from retrodraft.sessions.views import View, apply_view, registered_views, unregister_view

MAX_FILE_BYTES = 2_000_000
MAX_TEXT_BYTES = 32 << 20  # of all files together
PROBE = "def f(x):\n\treturn {'é': x + 12345}\n"  # tells two tokenizers apart by its tokens

Tokens = npt.NDArray[np.int32]
Stamp = tuple[int, int, int]  # of a file on disk: time of its content and of its status in ns, size


@dataclass(frozen=True)
class _File:
    text: str
    digest: bytes
    num_bytes: int
    location: str | None  # absolute, where the text was read; None where it was given
    stamp: Stamp | None


class Workspace:
    """Texts by path, and the token ids of their views, each tokenised once.

    Methods may be called from several threads. What `token_streams` has tokenised is kept by content, also for files
    that were changed or removed since, up to `max_token_bytes`, least recently used first to go.

    Args:
        max_text_bytes: of all files together, in UTF-8.
        max_token_bytes: of the token ids that are kept, 4 bytes each; what does not fit is tokenised at every call.
    """

    def __init__(self, max_text_bytes: int = MAX_TEXT_BYTES, max_token_bytes: int = 128 << 20) -> None:
        self.max_text_bytes = max_text_bytes
        self.max_token_bytes = max_token_bytes
        self.version = 0  # grows with every change of what the files say
        self.num_bytes = 0  # of all texts, in UTF-8
        self._files: dict[str, _File] = {}
        self._forms: dict[tuple[bytes, View], bytes] = {}  # digest of the text and view -> digest of the form
        self._streams: OrderedDict[tuple[tuple[int, ...], bytes], tuple[Tokens, int]] = OrderedDict()
        self._stream_bytes = 0
        self._calls = 0
        self._lock = threading.RLock()

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths as they were given, in the order of their first `add`."""
        with self._lock:
            return tuple(self._files)

    def given_texts(self) -> dict[str, str]:
        """Texts by path of the files whose text was given; those that were read from disk are not among them."""
        with self._lock:
            return {name: file.text for name, file in self._files.items() if file.location is None}

    def num_bytes_with(self, sizes: Mapping[str, int]) -> int:
        """Bytes of all texts if files of these sizes, by path, were taken in."""
        with self._lock:
            replaced = sum(self._files[name].num_bytes for name in sizes if name in self._files)
            return self.num_bytes - replaced + sum(sizes.values())

    def num_tokens(self, text: str, tokenize: Callable[[str], list[int]]) -> int:
        """Tokens of a text as it is, tokenised once; `token_streams` goes on with what was made here."""
        tokenizer, form = tuple(tokenize(PROBE)), _digest(text)
        stream = self._kept(tokenizer, form, self._calls)
        if stream is None:
            stream = _stream(text, tokenize)
            self._keep(tokenizer, form, stream, self._calls)
        return len(stream)

    def add(self, path: str | os.PathLike[str], text: str | None = None) -> None:
        """Take a file in, or its new text.

        Args:
            text: what the file holds, whether it exists or not; None reads it: UTF-8, a byte order mark is dropped,
                line ends stay as they are.

        Raises:
            ValueError: the file can't be read, is binary, not UTF-8, longer than MAX_FILE_BYTES, or more than the
                workspace has room for; what was there under this path stays.
        """
        name = os.fspath(path)
        if text is not None:
            self._put(name, text, None, None)
            return
        location = os.path.abspath(name)
        with self._lock:
            known = self._files.get(name)
        if known is None or known.stamp is None or known.location != location or known.stamp != _stamp(location):
            content, stamp = read_text(name)
            self._put(name, content, location, stamp)

    def add_folder(self, folder: str | os.PathLike[str]) -> list[Skipped]:
        """Take in all text files of a folder tree, under its .gitignore; links are not followed.

        Called again, it finds new files, and reads only those that changed.

        Returns:
            What was left out, and why.

        Raises:
            ValueError: there is no such folder.
        """
        if not Path(folder).is_dir():
            raise ValueError(f"{str(folder)!r} is not a folder")
        skipped: list[Skipped] = []
        for file in find_files([Path(folder)], skipped):
            try:
                self.add(file.path)
            except ValueError as error:
                skipped.append(Skipped(str(file.path), str(error)))
        return skipped

    def remove(self, path: str | os.PathLike[str]) -> None:
        """Forget a file; raises ValueError for one that was not added."""
        name = os.fspath(path)
        with self._lock:
            if name not in self._files:
                raise ValueError(f"{name!r} is not in the workspace")
            self._drop(name)

    def refresh(self) -> list[str]:
        """Read again what changed on disk since it was read, and drop what is gone or can't be read any more.

        Files whose text was given are left alone.

        Returns:
            Paths of the files that were dropped or whose text is another now.
        """
        changed = []
        with self._lock:
            known = [(name, file) for name, file in self._files.items() if file.location is not None]
        for name, file in known:
            assert file.location is not None
            if _stamp(file.location) == file.stamp:
                continue
            with self._lock:
                if self._files.get(name) is not file:  # another thread was here
                    continue
                try:
                    content, stamp = read_text(file.location)
                    self._put(name, content, file.location, stamp)
                except ValueError:
                    self._drop(name)
                if name not in self._files or self._files[name].digest != file.digest:
                    changed.append(name)
        return changed

    def token_streams(self, tokenize: Callable[[str], list[int]], max_tokens: int | None = None) -> list[Tokens]:
        """Token ids of every view of every file, without repeats; int32 arrays, read-only.

        The first view of all files comes first, then the second of all, so what is cut off by `max_tokens` is what is
        least likely to match. A form is tokenised as a whole; a text in mid-generation may be cut into tokens another
        way at its very start. The arrays of unchanged files are the same objects at every call, as long as they are
        kept. Another tokenizer is noticed by its tokens.

        Args:
            tokenize: ids of a text, without special tokens.
            max_tokens: of all streams together; no stream is cut, and the first that does not fit is the end.

        A registered view that fails is unregistered with a warning; the others go on.
        """
        with self._lock:
            texts = {file.digest: (path, file.text) for path, file in self._files.items()}
            self._calls += 1
            call = self._calls
            self._forms = {key: form for key, form in self._forms.items() if key[0] in texts}
        tokenizer = tuple(tokenize(PROBE))
        seen: set[bytes] = set()
        found: list[Tokens] = []
        total = 0
        for name, view in registered_views():
            for digest, (path, text) in texts.items():
                form, written = self._forms.get((digest, view)), None
                if form is None:
                    written = _form_of(name, view, path, text)
                    if written is None:
                        break  # with this view, for all files
                    form = self._forms[digest, view] = _digest(written)
                if form in seen:
                    continue
                seen.add(form)
                stream = self._kept(tokenizer, form, call)
                if stream is None:
                    written = _form_of(name, view, path, text) if written is None else written
                    if written is None:
                        break
                    stream = _stream(written, tokenize)
                    self._keep(tokenizer, form, stream, call)
                total += len(stream)
                if max_tokens is not None and total > max_tokens:
                    return found
                if len(stream):
                    found.append(stream)
        return found

    def _kept(self, tokenizer: tuple[int, ...], form: bytes, call: int) -> Tokens | None:
        with self._lock:
            entry = self._streams.get((tokenizer, form))
            if entry is None:
                return None
            self._streams[tokenizer, form] = (entry[0], call)
            self._streams.move_to_end((tokenizer, form))
            return entry[0]

    def _keep(self, tokenizer: tuple[int, ...], form: bytes, stream: Tokens, call: int) -> None:
        """Keep a stream if there is room for it beside those that this call has used."""
        with self._lock:
            while self._streams and self._stream_bytes + stream.nbytes > self.max_token_bytes:
                oldest = next(iter(self._streams))
                if self._streams[oldest][1] == call:
                    return
                self._stream_bytes -= self._streams.pop(oldest)[0].nbytes
            if stream.nbytes <= self.max_token_bytes and (tokenizer, form) not in self._streams:
                self._streams[tokenizer, form] = (stream, call)
                self._stream_bytes += stream.nbytes

    def _put(self, name: str, text: str, location: str | None, stamp: Stamp | None) -> None:
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"{name!r} can't be taken in: the text holds half of a surrogate pair") from None
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"{name!r} has {len(data):,} bytes; a file may have {MAX_FILE_BYTES:,}")
        file = _File(text, hashlib.blake2b(data, digest_size=16).digest(), len(data), location, stamp)
        with self._lock:
            before = self._files.get(name)
            num_bytes = self.num_bytes + file.num_bytes - (before.num_bytes if before else 0)
            if num_bytes > self.max_text_bytes:
                raise ValueError(
                    f"{name!r} would fill the workspace to {num_bytes:,} bytes; it may have {self.max_text_bytes:,}"
                )
            self._files[name] = file
            self.num_bytes = num_bytes
            self.version += before is None or before.digest != file.digest

    def _drop(self, name: str) -> None:
        self.num_bytes -= self._files.pop(name).num_bytes
        self.version += 1


def _form_of(name: str, view: View, path: str, text: str) -> str | None:
    """What a view makes of a file, empty where there is no such form; None if it failed and was unregistered."""
    try:
        return apply_view(name, view, text) or ""
    except ValueError as error:
        if dict(registered_views()).get(name) is view:  # else another thread has told it already
            unregister_view(name)
            warnings.warn(f"{error}, on {path!r}; drafting goes on without this view", stacklevel=2)
        return None


def _stream(text: str, tokenize: Callable[[str], list[int]]) -> Tokens:
    stream = np.array(tokenize(text) if text else [], np.int32)
    stream.setflags(write=False)
    return stream


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).digest()


def _stamp(location: str) -> Stamp | None:
    """None for a file that is not there."""
    try:
        status = os.stat(location)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size


def read_text(name: str) -> tuple[str, Stamp]:
    """Text of a regular UTF-8 file, without its byte order mark; raises ValueError with the reason."""
    try:
        # A pipe would make a plain open wait for its other end.
        with open(name, "rb", opener=lambda path, flags: os.open(path, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{name!r} is not a regular file")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{name!r} can't be read: {error.strerror or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{name!r} is longer than {MAX_FILE_BYTES:,} bytes")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{name!r} is UTF-16; only UTF-8 text can be taken in")
    if b"\0" in data:
        raise ValueError(f"{name!r} is binary (a NUL at byte {data.index(0)})")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name!r} is not UTF-8 (byte {error.start})") from None
    return text, (status.st_mtime_ns, status.st_ctime_ns, status.st_size)
