"""Stores on disk: a folder of flat arrays under one manifest, replaced at once or not at all.

    my.index/
        manifest.json                  what the store is; each array's file, type, shape, size, SHA-256 and build id
        tokens-0.4f1c….bin  …          64 bytes of header (format name, build id), then the array, little-endian
        .lock                          held by the one process that writes

A writer puts new arrays into files of new names, which nothing refers to yet, syncs them, and then renames a new
manifest over the old one: that is the commit. A reader therefore sees the old store or the new one, and a writer that
is killed leaves the old one, with stray files that the next writer removes. Nothing is ever changed in place, so arrays
that a reader has mapped stay as they were.

Names in a manifest are plain file names of the folder; links are not followed, and nothing is unpickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

FORMAT, VERSION = "retrodraft-index", 1
MANIFEST, LOCK = "manifest.json", ".lock"
HEADER_BYTES = 64
SMALL_FILE = 1 << 16  # bytes; no larger array is read instead of mapped, so that many small ones keep no file open
MAX_MANIFEST_BYTES = 64 << 20
MAX_DIMENSIONS = 8  # of an array; NumPy takes 64 at most
LOCK_SECONDS = 120.0  # how long a writer waits for another one
READ_ATTEMPTS = 100  # commits of others that may fall between a reader's manifest and its arrays
DTYPES = ("|u1", "<u2", "<i4", "<i8", "<u8", "<f2", "<f4")
_BUILD_ID = re.compile(r"[0-9a-f]{32}")
_FILE_NAME = re.compile(r"[a-z][a-z0-9_-]*\.[0-9a-f]{32}\.bin")
_STRAY = re.compile(r"[a-z][a-z0-9_-]*\.[0-9a-f]{32}\.(bin|json)|\.filelock-.*")  # the latter for moments, by filelock

Array = npt.NDArray[Any]


class IndexFormatError(ValueError):
    """The folder is not a store of this kind and version, or it is damaged; the text names the part."""


class IndexBusyError(ValueError):
    """Another process has been writing the store for LOCK_SECONDS."""


@dataclass(frozen=True)
class Store:
    """An opened store: its manifest's own facts, and its arrays, mapped read-only."""

    folder: Path
    kind: str
    build_id: str
    info: dict[str, Any]
    arrays: dict[str, Array]
    entries: dict[str, dict[str, Any]] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all array files."""
        return sum(int(entry["bytes"]) for entry in self.entries.values())

    def check(self, names: Iterable[str]) -> None:
        """Compare the checksums of some arrays; raises IndexFormatError."""
        for name in names:
            _map(self.folder, name, self.entries[name], check=True)


def open_store(folder: Path | str, kind: str | None, check: bool = False) -> Store:
    """Map the arrays of a store of this kind (None: any).

    Sizes and build ids are compared at once, checksums too if `check`.

    Raises:
        IndexFormatError: not a store, another kind or version, or a part is missing, cut, foreign or (`check`) changed.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder, kind)
    for _ in range(READ_ATTEMPTS):
        try:
            arrays = {name: _map(folder, name, entry, check) for name, entry in manifest["files"].items()}
        except FileNotFoundError as error:
            again = _read_manifest(folder, kind)
            if again["build_id"] == manifest["build_id"]:
                raise IndexFormatError(f"{folder}: {Path(error.filename).name} is missing") from None
            manifest = again  # a writer has committed in between
            continue
        return Store(folder, manifest["kind"], manifest["build_id"], manifest["info"], arrays, manifest["files"])
    raise IndexBusyError(f"{folder} was replaced {READ_ATTEMPTS} times while it was being opened")


class StoreWriter:
    """New arrays of a store, invisible until `commit`; obtained from `writing`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.build_id = secrets.token_hex(16)
        self.entries: dict[str, dict[str, Any]] = {}

    def keep(self, name: str, entry: dict[str, Any]) -> None:
        """Take an array of the present store over as it is, by its manifest entry."""
        self.entries[name] = entry

    def add(self, name: str, array: Array) -> None:
        """Write one array to its own file and sync it. O(bytes)."""
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        if array.dtype.str not in DTYPES:
            raise ValueError(f"array {name!r} has type {array.dtype}; stores hold {', '.join(DTYPES)}")
        file_name = f"{name}.{self.build_id}.bin"
        header = (FORMAT.encode().ljust(32) + self.build_id.encode()).ljust(HEADER_BYTES)
        body = array.reshape(-1).view(np.uint8).data
        digest = hashlib.sha256(header)
        digest.update(body)
        with open(self.folder / file_name, "xb") as file:
            file.write(header)
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        self.entries[name] = {
            "file": file_name, "dtype": array.dtype.str, "shape": list(array.shape),
            "bytes": HEADER_BYTES + array.nbytes, "sha256": digest.hexdigest(), "build_id": self.build_id,
        }  # fmt: skip

    def commit(self, kind: str, info: dict[str, Any]) -> None:
        """Make exactly the kept and added arrays the store, with `info` (JSON) beside them."""
        manifest = {
            "format": FORMAT, "version": VERSION, "kind": kind, "build_id": self.build_id, "byte_order": "little",
            "info": info, "files": self.entries,
        }  # fmt: skip
        temporary = self.folder / f"manifest.{self.build_id}.json"
        with open(temporary, "x", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.folder / MANIFEST)
        _sync_folder(self.folder)
        _remove_strays(self.folder, {entry["file"] for entry in self.entries.values()})


@contextmanager
def writing(folder: Path | str, *, part: bool = False) -> Iterator[StoreWriter]:
    """Be the only writer of a folder, which is made if need be; without `commit` nothing changes.

    A store that is damaged, or of another version, can be replaced; it stays as it is until then.

    Args:
        part: the store may lie in another one, as the dense index of a corpus does.

    Raises:
        ValueError: the folder holds something that is not a store, or lies in a store.
        IndexBusyError: another process is writing, for LOCK_SECONDS already.
    """
    folder = Path(folder)
    if not part:
        check_outside(folder)
    _check_target(folder)
    is_new = not folder.exists()
    lock = _acquired(folder)
    try:
        _check_target(folder)
        _tidy(folder)
        yield StoreWriter(folder)
    finally:
        _tidy(folder)
        is_store_now = (folder / MANIFEST).exists()
        if not is_store_now:  # a first build has failed: others who wait for the lock make it anew
            with suppress(OSError):
                (folder / LOCK).unlink()
        lock.release()
        if is_new and not is_store_now:
            with suppress(OSError):
                folder.rmdir()


def _acquired(folder: Path) -> FileLock:
    """The folder, made if need be, and its lock, held."""
    for _ in range(READ_ATTEMPTS):
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / LOCK).is_symlink():
            raise IndexFormatError(f"{folder / LOCK} is a link; remove it")
        lock = FileLock(str(folder / LOCK), timeout=LOCK_SECONDS)
        try:
            lock.acquire()
        except Timeout as error:
            raise IndexBusyError(f"{folder}: another process has been writing for {LOCK_SECONDS:.0f} s") from error
        except FileNotFoundError:
            continue  # another writer has failed meanwhile, and has taken its folder away
        return lock
    raise IndexBusyError(f"{folder} was removed {READ_ATTEMPTS} times while its lock was being taken")


def is_store(folder: Path | str) -> bool:
    """Whether a folder is a store, or what a killed build left of one; nothing else is checked."""
    names = os.listdir(folder)
    if MANIFEST in names:
        return _names_format(Path(folder))
    return bool(names) and all(name == LOCK or _STRAY.fullmatch(name) for name in names)


def check_outside(folder: Path | str) -> None:
    """Raise ValueError if a folder, which need not exist, lies in a store, whose writers know nothing of it."""
    for parent in Path(os.path.realpath(folder)).parents:
        if _names_format(parent):
            raise ValueError(f"{folder} lies in the store {parent}; name a folder outside of it")


def _names_format(folder: Path) -> bool:
    """Whether the folder's manifest begins as one of this format, whatever its version and state."""
    with suppress(OSError, IndexFormatError), open(_open(folder, MANIFEST), "rb") as file:
        return f'"{FORMAT}"'.encode() in file.read(100)
    return False


def _check_target(folder: Path) -> None:
    """Refuse to write into a folder of something else."""
    if folder.is_symlink() and not folder.exists():
        raise ValueError(f"{folder} is a link to nothing")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; a store is a folder")
    try:
        names = os.listdir(folder)
    except FileNotFoundError:  # perhaps just now: a first build that fails takes its folder away
        return
    if MANIFEST in names:
        if not _names_format(folder):
            raise ValueError(f"{folder / MANIFEST} is not the manifest of a store; name a new or empty folder for one")
        return
    foreign = [name for name in names if name != LOCK and not _STRAY.fullmatch(name)]
    if foreign:
        raise ValueError(f"{folder} holds other files ({foreign[0]!r}); name a new or empty folder for the store")


def _tidy(folder: Path) -> None:
    """Remove array files that the folder's manifest does not name; none where it can't be read."""
    referenced: set[str] = set()
    if (folder / MANIFEST).exists():
        try:
            referenced = {entry["file"] for entry in _read_manifest(folder, None)["files"].values()}
        except IndexFormatError:
            return
    _remove_strays(folder, referenced)


def _remove_strays(folder: Path, referenced: set[str]) -> None:
    """Remove what killed or replaced builds left; a file that another system still holds open stays for later."""
    for path in folder.iterdir():
        if _STRAY.fullmatch(path.name) and path.name not in referenced:
            with suppress(OSError):
                path.unlink()


def _read_manifest(folder: Path, kind: str | None) -> dict[str, Any]:
    """The manifest, every field that is used later checked; `kind` None takes any."""
    if not folder.is_dir():
        raise IndexFormatError(f"{folder} is not a folder; a store is one, as `retrodraft index build` makes it")
    try:
        with open(_open(folder, MANIFEST), "rb") as file:
            raw = file.read() if os.fstat(file.fileno()).st_size <= MAX_MANIFEST_BYTES else b""
    except FileNotFoundError:
        raise IndexFormatError(f"{folder} has no {MANIFEST}: not a store, or its build was interrupted") from None
    try:
        manifest = json.loads(raw)
    except (ValueError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise IndexFormatError(f"{folder / MANIFEST} is not the manifest of a store")
    if manifest.get("version") != VERSION:
        raise IndexFormatError(
            f"{folder} has format version {manifest.get('version')!r}, this retrodraft reads {VERSION}; build it anew"
        )
    if manifest.get("byte_order") != "little":
        raise IndexFormatError(f"{folder / MANIFEST}: byte order {manifest.get('byte_order')!r}, stores are 'little'")
    if kind is not None and manifest.get("kind") != kind:
        raise IndexFormatError(f"{folder} is a store of kind {manifest.get('kind')!r}, not {kind!r}")
    for key, wanted in (("kind", str), ("build_id", str), ("files", dict), ("info", dict)):
        if not isinstance(manifest.get(key), wanted):
            raise IndexFormatError(f"{folder / MANIFEST} is damaged: {key} is missing")
    for name, entry in manifest["files"].items():
        problem = _entry_problem(entry)
        if problem:
            raise IndexFormatError(f"{folder / MANIFEST}: entry {name!r}: {problem}")
    return manifest


def _entry_problem(entry: Any) -> str:
    """What is wrong with a manifest's entry; empty if nothing."""
    if not isinstance(entry, dict):
        return "not an object"
    file, shape = entry.get("file"), entry.get("shape")
    if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
        return f"file {file!r} is not a name of this folder's arrays"
    if not isinstance(entry.get("build_id"), str) or not _BUILD_ID.fullmatch(entry["build_id"]):
        return f"build_id {entry.get('build_id')!r}"
    if not isinstance(entry.get("sha256"), str):
        return "no sha256"
    if entry.get("dtype") not in DTYPES:
        return f"type {entry.get('dtype')!r}, stores hold {', '.join(DTYPES)}"
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 1 << 48 for size in shape):
        return f"shape {shape!r}"
    if len(shape) > MAX_DIMENSIONS or math.prod(size or 1 for size in shape) >= 1 << 48:  # also where a size is 0
        return f"shape {shape!r} is too large"
    if entry.get("bytes") != HEADER_BYTES + math.prod(shape) * np.dtype(entry["dtype"]).itemsize:
        return f"{entry.get('bytes')!r} bytes do not fit the shape {shape}"
    return ""


def _map(folder: Path, name: str, entry: dict[str, Any], check: bool) -> Array:
    """One array, mapped; raises IndexFormatError unless its file is the one that the entry describes."""
    path = folder / entry["file"]
    with open(_open(folder, entry["file"]), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != entry["bytes"]:
            raise IndexFormatError(f"{path}: {size} bytes, the manifest says {entry['bytes']}: cut or overwritten")
        data = file.read() if size <= SMALL_FILE else _mapped(path, file.fileno())
    header = (FORMAT.encode().ljust(32) + entry["build_id"].encode()).ljust(HEADER_BYTES)
    if data[:HEADER_BYTES] != header:
        raise IndexFormatError(f"{path}: its header is not that of build {entry['build_id']}: from another build?")
    if check and hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise IndexFormatError(f"{path}: the checksum of {name!r} differs: the file was changed")
    return np.frombuffer(data, np.dtype(entry["dtype"]), offset=HEADER_BYTES).reshape(entry["shape"])


def _mapped(path: Path, descriptor: int) -> mmap.mmap:
    """Keeps a descriptor of its own open as long as the array is used."""
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise IndexFormatError(f"{path} can't be mapped: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    many = error.errno in (errno.EMFILE, errno.ENFILE)
    return f"{error.strerror or error}{': compact the index, or raise the limit (ulimit -n)' if many else ''}"


def _open(folder: Path, name: str) -> int:
    """Descriptor of a regular file of the folder; links, pipes and the like raise IndexFormatError."""
    path = folder / name
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        regular = stat.S_ISREG(path.lstat().st_mode)
        descriptor = os.open(path, flags) if regular else -1
    except FileNotFoundError:
        raise
    except OSError as error:
        raise IndexFormatError(f"{path} can't be read: {_reason(error)}") from error
    if not regular:
        raise IndexFormatError(f"{path} is not a regular file")
    return descriptor


def _sync_folder(folder: Path) -> None:
    """Make a rename durable, where folders can be synced."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
