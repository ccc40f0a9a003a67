"""Saved sessions: a folder of stores, one a session, by namespace and name.

    sessions/
        3f…9a.lock            held by the one process that changes the namespace; stays
        3f…9a/                a namespace
            b0…17/            a session: a store as `retrodraft.index.storage` writes it, of kind "session"

Folders are named by digests, so that names may be any text; the names themselves are in the manifests, and are compared
when a session is loaded. A manifest's time of change is when the session was last used. What readers have loaded stays
valid when the session is replaced or removed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from retrodraft.folders import cache_folder
from retrodraft.index.storage import (
    LOCK,
    LOCK_SECONDS,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    READ_ATTEMPTS,
    IndexBusyError,
    IndexFormatError,
    Store,
    open_store,
    writing,
)  # fmt: skip

KIND = "session"
DEFAULT_NAMESPACE = "default"
MAX_NAME = 200  # characters
_DIGEST = re.compile(r"[0-9a-f]{40}")
_ARRAY_NAME = re.compile(r"[a-z][a-z0-9_-]{0,99}")
_OWN_FILE = re.compile(r"[a-z][a-z0-9_-]*\.[0-9a-f]{32}\.(bin|json)")

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SessionRecord:
    """What a listing says of a saved session."""

    name: str  # empty where the manifest is damaged
    namespace: str
    model: str
    bytes: int  # on disk
    last_used: float  # saved or loaded, seconds since 1970
    turns: int
    path: Path
    problem: str = ""  # why it can't be loaded

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "path": str(self.path)}


def sessions_folder() -> Path:
    """Where sessions are saved unless a folder is named; it need not exist."""
    return cache_folder() / "sessions"


def save_session(
    root: Path | str, namespace: str, name: str, arrays: dict[str, Array], info: dict[str, Any]
) -> SessionRecord:
    """Save a session, or replace it, at once: a process that is killed leaves the old one.

    Args:
        arrays: by name (a-z, 0-9, _ and -), of the types that stores hold: uint8, uint16, int32, int64, uint64,
            float16, float32. Other threads must not change them meanwhile.
        info: JSON. `model_id` and `tokenizer_fingerprint` have to be there, texts; `turns` is shown in listings.

    Raises:
        ValueError: a name, an array or `info` is not as above.
        IndexFormatError: what is there under this name is of another model or tokenizer, or damaged.
        IndexBusyError: another process has been saving in this namespace for two minutes.
    """
    folder = _folder(root, namespace, name)
    for key in ("model_id", "tokenizer_fingerprint"):
        if not isinstance(info.get(key), str) or not info[key]:
            raise ValueError(f"info of session {name!r} needs {key!r}, a text; got {info.get(key)!r}")
    for array_name in arrays:
        if not _ARRAY_NAME.fullmatch(array_name):
            raise ValueError(f"array {array_name!r}: a name is a-z, 0-9, _ and -, at most 100 characters")
    facts = {"namespace": namespace, "name": name, "info": info}
    try:
        size = len(json.dumps(facts, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"info of session {name!r} is not JSON: {error}") from error
    if size > MAX_MANIFEST_BYTES // 2:
        raise ValueError(f"info of session {name!r} has {size:,} bytes; large data belongs into arrays")
    with _locked(folder.parent):
        if (folder / MANIFEST).exists():
            try:
                present = open_store(folder, KIND)
                _check_names(present, namespace, name)
                _check_origin(present, info["tokenizer_fingerprint"], info["model_id"])
            except IndexFormatError as error:
                raise IndexFormatError(f"session {name!r} can't be replaced, remove it first: {error}") from error
        with writing(folder) as writer:
            for array_name, array in arrays.items():
                writer.add(array_name, np.asarray(array))
            writer.commit(KIND, facts)
        return _record(folder)


def load_session(
    root: Path | str, namespace: str, name: str, tokenizer_fingerprint: str, model_id: str, touch: bool = True
) -> tuple[dict[str, Array], dict[str, Any]] | None:
    """Arrays, mapped read-only, and info of a session, its checksums compared; None if there is none.

    Args:
        touch: whether this counts as a use, for listings and pruning.

    Raises:
        IndexFormatError: the session is of another model or tokenizer (named), or damaged.
    """
    found = _open(_folder(root, namespace, name), check=True)
    if found is None:
        return None
    _check_names(found, namespace, name)
    _check_origin(found, tokenizer_fingerprint, model_id)
    if touch:
        with suppress(OSError):  # a store that can't be written is still read
            os.utime(found.folder / MANIFEST)
    return found.arrays, found.info["info"]


def inspect_session(root: Path | str, namespace: str, name: str) -> tuple[SessionRecord, Store] | None:
    """A session of whatever model, its checksums not compared; does not count as a use. None if there is none.

    Raises:
        IndexFormatError: the session is damaged.
    """
    folder = _folder(root, namespace, name)
    found = _open(folder, check=False)
    if found is None:
        return None
    _check_names(found, namespace, name)
    return _record(folder), found


def list_sessions(root: Path | str, namespace: str | None = None) -> list[SessionRecord]:
    """Sessions of a namespace (None: of all), the one that was used last first; damaged ones have a `problem`."""
    records = []
    for folder in _session_folders(root, namespace):
        with suppress(FileNotFoundError):  # not finished, or removed meanwhile
            records.append(_record(folder))
    return sorted(records, key=lambda record: (-record.last_used, record.name))


def prune_sessions(
    root: Path | str, max_bytes: int | None = None, max_age_days: float | None = None
) -> list[SessionRecord]:
    """Remove what was not used for `max_age_days`, then the least recently used until all take at most `max_bytes`.

    What killed processes left is removed too. A session that is used or saved meanwhile stays.

    Returns:
        The sessions that were removed, in this order.

    Raises:
        ValueError: a limit is negative or not a number.
    """
    for label, limit in (("max_bytes", max_bytes), ("max_age_days", max_age_days)):
        if limit is not None and not (math.isfinite(limit) and limit >= 0):
            raise ValueError(f"{label} must be a number from 0; got {limit!r}")
    for folder in _session_folders(root, None):
        if not (folder / MANIFEST).exists():
            with _locked(folder.parent):
                if not (folder / MANIFEST).exists():
                    _delete(folder)
    records = list_sessions(root)
    total = sum(record.bytes for record in records)
    oldest = time.time() - max_age_days * 86_400 if max_age_days is not None else -math.inf
    removed = []
    for record in reversed(records):
        if record.last_used < oldest or (max_bytes is not None and total > max_bytes):
            with _locked(record.path.parent):
                if _last_used(record.path) == record.last_used:
                    _delete(record.path)
                    removed.append(record)
                    total -= record.bytes
    return removed


def remove_session(root: Path | str, namespace: str, name: str) -> bool:
    """Remove a session, damaged or not; False if there is none."""
    folder = _folder(root, namespace, name)
    if not folder.is_dir():
        return False
    with _locked(folder.parent):
        there = os.path.lexists(folder / MANIFEST)
        _delete(folder)
    return there


def _folder(root: Path | str, namespace: str, name: str) -> Path:
    """Folder of a session; raises ValueError for names that can't be, IndexFormatError for links."""
    parts = []
    for label, text in (("namespace", namespace), ("session name", name)):
        if not isinstance(text, str) or not 0 < len(text) <= MAX_NAME:
            raise ValueError(f"{label} must be a text of 1 to {MAX_NAME} characters, got {text!r}"[:300])
        try:
            parts.append(_digest(text))
        except UnicodeEncodeError:
            raise ValueError(f"{label} {text!r} holds half of a surrogate pair") from None
    folder = Path(root).expanduser() / parts[0] / parts[1]
    for path in (folder.parent, folder):
        if path.is_symlink():
            raise IndexFormatError(f"{path} is a link, sessions are not; remove it")
    return folder


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8"), digest_size=20).hexdigest()


def _session_folders(root: Path | str, namespace: str | None) -> Iterator[Path]:
    """Folders of sessions by their names; links and whatever else lies there are passed over."""
    top = Path(root).expanduser()
    spaces = [top / _digest(namespace)] if namespace is not None else _subfolders(top)
    for space in spaces:
        if not space.is_symlink():
            yield from _subfolders(space)


def _subfolders(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return [folder / name for name in sorted(names) if _DIGEST.fullmatch(name)]
    return []


@contextmanager
def _locked(namespace_folder: Path) -> Iterator[None]:
    """Be the only one that changes a namespace. The lock lies beside the folder, so folders can be removed under it."""
    namespace_folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = namespace_folder.parent / f"{namespace_folder.name}.lock"
    if lock.is_symlink():
        raise IndexFormatError(f"{lock} is a link; remove it")
    try:
        with FileLock(str(lock), timeout=LOCK_SECONDS):
            yield
    except Timeout as error:
        raise IndexBusyError(f"{lock}: another process has held it for {LOCK_SECONDS:.0f} s") from error


def _open(folder: Path, check: bool) -> Store | None:
    """The store of a session; None if there is none. Safe while others replace and remove it."""
    problem = IndexFormatError(f"{folder} changes all the time")
    for _ in range(READ_ATTEMPTS):
        before = _identity(folder)
        if before is None:
            return None
        try:
            return open_store(folder, KIND, check=check)
        except IndexFormatError as error:
            if _identity(folder) == before:
                raise
            problem = error
    raise problem


def _identity(folder: Path) -> tuple[int, int] | None:
    """Changes with each manifest; None if there is none."""
    try:
        status = os.lstat(folder / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_ino, status.st_ctime_ns


def _check_names(store: Store, namespace: str, name: str) -> None:
    """Refuse a session that was moved here from another name or namespace, or has no proper facts."""
    facts = store.info
    if not isinstance(facts.get("info"), dict):
        raise IndexFormatError(f"{store.folder / MANIFEST} is damaged: it says nothing of a session")
    if (facts.get("namespace"), facts.get("name")) != (namespace, name):
        raise IndexFormatError(f"{store.folder} holds another session ({facts.get('name')!r:.220}), not {name!r}")


def _check_origin(store: Store, tokenizer_fingerprint: str, model_id: str) -> None:
    """Refuse a session of another model or tokenizer; names both."""
    saved, label = store.info["info"], f"session {store.info['name']!r}"
    if saved.get("model_id") != model_id:
        raise IndexFormatError(f"{label} was saved with model {saved.get('model_id')!r:.220}, not {model_id!r}")
    if saved.get("tokenizer_fingerprint") != tokenizer_fingerprint:
        raise IndexFormatError(
            f"{label} was saved with another tokenizer (of model {model_id!r}, fingerprint "
            f"{str(saved.get('tokenizer_fingerprint')):.16}), not {tokenizer_fingerprint:.16}"
        )


def _last_used(folder: Path) -> float | None:
    try:
        return os.lstat(folder / MANIFEST).st_mtime
    except OSError:
        return None


def _record(folder: Path) -> SessionRecord:
    """Raises FileNotFoundError if there is no session."""
    last_used = os.lstat(folder / MANIFEST).st_mtime
    with os.scandir(folder) as entries:
        sizes = []
        for entry in entries:
            with suppress(FileNotFoundError):
                sizes.append(entry.stat(follow_symlinks=False).st_size)
    try:
        store = _open(folder, check=False)
        if store is None:
            raise FileNotFoundError(folder)
        name, namespace, info = store.info.get("name"), store.info.get("namespace"), store.info.get("info")
        if not isinstance(info, dict) or not isinstance(name, str) or not isinstance(namespace, str):
            raise IndexFormatError(f"{folder / MANIFEST} is damaged: it says nothing of a session")
        if (folder.parent.name, folder.name) != (_digest(namespace), _digest(name)):
            raise IndexFormatError(f"{folder} was moved here from another session")
    except (IndexFormatError, UnicodeEncodeError) as error:
        return SessionRecord("", "", "", sum(sizes), last_used, 0, folder, str(error))
    turns = info.get("turns")
    return SessionRecord(
        name, namespace, str(info.get("model_id")), sum(sizes), last_used, turns if type(turns) is int else 0, folder
    )  # fmt: skip


def _delete(folder: Path) -> None:
    """Remove a session's own files, the manifest first, and the folder if nothing else is in it; under the lock."""
    with suppress(FileNotFoundError):
        (folder / MANIFEST).unlink()
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        if path.name == LOCK or _OWN_FILE.fullmatch(path.name):
            with suppress(OSError):  # a file that another system still holds open
                path.unlink()
    for empty in (folder, folder.parent):
        with suppress(OSError):
            empty.rmdir()
