"""What the sessions of one namespace share: earlier texts, opened files, and hit rates."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from retrodraft.index.adjacency import AdjacencyRows
from retrodraft.index.memory import BORDER, Memory
from retrodraft.index.storage import IndexFormatError
from retrodraft.retro import Calibration
from retrodraft.sessions.saved import inspect_session, list_sessions, load_session
from retrodraft.sessions.workspace import Workspace
from retrodraft.tree import Int32

MAX_FILE_TOKENS = 2_000_000  # of all views of the workspace's files, about 160 MB


class Namespace:
    """Memory, workspace, rows and calibration under one name; sessions of other namespaces never see them."""

    def __init__(self, name: str, adjacency: AdjacencyRows) -> None:
        self.name, self.adjacency = name, adjacency
        self.memory = Memory()
        self.workspace = Workspace()
        self.calibration = Calibration()
        self._lock = threading.Lock()  # of what follows
        self._files_version = 0  # of the workspace, when the memory took its texts
        self._paths: frozenset[str] = frozenset()
        self._stores: set[str] = set()  # that were loaded
        self._known: set[tuple[str, str]] = set()  # store and name of saved sessions whose texts the memory has

    @property
    def nbytes(self) -> int:
        """Bytes of the texts and rows."""
        return self.memory.nbytes + self.adjacency.nbytes

    def refresh_files(self, tokenize: Callable[[str], list[int]], drafting: threading.Lock) -> None:
        """Read changed files again and bring the memory's texts up to date, under the lock `drafting`.

        Nothing where nothing changed. A removed file is forgotten at once; what a file said before a change is too,
        unless there are very many files (`Memory.set_files`).
        """
        with self._lock:
            self.workspace.refresh()
            version, paths = self.workspace.version, frozenset(self.workspace.paths)
            if version != self._files_version:
                texts = self.workspace.token_streams(tokenize, MAX_FILE_TOKENS)
                with drafting:
                    self.memory.set_files(texts, exact=not self._paths <= paths)
                self._files_version, self._paths = version, paths

    def load(self, store: Path | str, name: str, origin: Origin, drafting: threading.Lock) -> None:
        """Take in what a store holds of this namespace, oldest first: all sessions once, later the one of this name.

        No more than the memory can hold, newest first. Other models' sessions and damaged ones are passed over; whoever
        asks for one of them is told. The hit rates of the newest are taken if there are none yet.
        """
        place = _place(store)
        with self._lock:
            fresh = not self._stores and not self._known
            names = [name] if place in self._stores else self._newest(store, origin)
            self._stores.add(place)
            for each in names:
                if (place, each) in self._known:
                    continue
                with suppress(IndexFormatError):
                    saved = load_saved(store, self.name, each, origin)
                    if saved is None:
                        continue
                    with drafting:
                        for text in saved.texts:
                            self.memory.add_text(text)
                        if fresh:
                            self.calibration.restore(saved.hits, saved.trials)
                    self._known.add((place, each))

    def _newest(self, store: Path | str, origin: Origin) -> list[str]:
        """Names of the saved sessions that the memory has room for, oldest first."""
        names: list[str] = []
        room = self.memory.max_tokens
        for record in list_sessions(store, self.name):
            if room > 0 and not record.problem and record.model == origin.model_id:
                with suppress(IndexFormatError):
                    found = inspect_session(store, self.name, record.name)
                    if found is not None and "texts" in found[1].arrays:
                        names.append(record.name)
                        room -= len(found[1].arrays["texts"])
        return names[::-1]

    def saved(self, store: Path | str, name: str) -> None:
        """Note that the memory has the texts of a session that was saved just now."""
        with self._lock:
            self._known.add((_place(store), name))


@dataclass(frozen=True)
class Origin:
    """What a saved session has to fit: the model's name, the tokenizer's fingerprint and the number of token ids."""

    model_id: str
    fingerprint: str
    vocab_size: int


@dataclass(frozen=True)
class Saved:
    """What was saved of a session."""

    texts: list[Int32]
    token_ids: Int32
    hits: npt.NDArray[np.float32]
    trials: npt.NDArray[np.float32]
    turns: int


def load_saved(store: Path | str, namespace: str, name: str, origin: Origin) -> Saved | None:
    """A saved session; None if there is none. Raises IndexFormatError if it is of another model, or damaged."""
    found = load_session(store, namespace, name, origin.fingerprint, origin.model_id)
    if found is None:
        return None
    arrays, info = found
    texts, token_ids = (_ids(arrays.get(key), name, origin) for key in ("texts", "token_ids"))
    hits, trials = (arrays.get(key, np.empty(0, np.float32)) for key in ("hits", "trials"))
    turns = info.get("turns")
    return Saved(_split(texts), token_ids.copy(), hits, trials, turns if type(turns) is int else 0)


def _ids(array: Any, name: str, origin: Origin) -> Int32:
    """The array as it is, if it holds token ids and borders."""
    sound = array is not None and array.dtype == np.int32 and array.ndim == 1
    if not sound or (len(array) and not -1 <= array.min() <= array.max() < origin.vocab_size):
        raise IndexFormatError(f"session {name!r} holds no token ids of {origin.model_id!r}; remove it")
    ids: Int32 = array
    return ids


def joined_texts(texts: list[Int32]) -> Int32:
    """The texts as one array, a border behind each; `load_saved` takes them apart."""
    return np.concatenate([BORDER[:0], *(part for text in texts for part in (text, BORDER))])


def _split(joined: Int32) -> list[Int32]:
    ends = np.flatnonzero(joined == BORDER[0]).tolist()
    starts = [0, *(end + 1 for end in ends)]
    return [joined[start:end].copy() for start, end in zip(starts, ends, strict=False) if end > start]


def _place(store: Path | str) -> str:
    return str(Path(store).expanduser().resolve())
