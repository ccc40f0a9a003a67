"""All sessions of one `RetroDraft`: by namespace and name, with a byte budget of their keys and values."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from retrodraft.index.adjacency import AdjacencyRows
from retrodraft.index.fingerprint import tokenizer_fingerprint
from retrodraft.models import model_id
from retrodraft.retro import RetroStrategy
from retrodraft.sessions.namespace import Namespace, Origin
from retrodraft.sessions.saved import MAX_NAME
from retrodraft.sessions.session import Session

if TYPE_CHECKING:
    from retrodraft.decoder import RetroDraft

MAX_NAMESPACE_BYTES = 2 << 30  # of all texts and rows; open sessions keep theirs


class SessionTable:
    """The sessions of one `RetroDraft`, and the byte budget of their keys and values."""

    def __init__(self, max_kv_bytes: int) -> None:
        if max_kv_bytes < 0:
            raise ValueError(f"max_kv_bytes must not be negative, got {max_kv_bytes}")
        self._max_kv_bytes = max_kv_bytes
        self._origin: Origin | None = None
        self._lock = threading.Lock()
        self._namespaces: OrderedDict[str, Namespace] = OrderedDict()  # least recently used first
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()  # least recently used first

    def session(self, rd: RetroDraft, name: str, namespace: str, store: Path | str | None) -> Session:
        """The session of this name, made if there is none."""
        for what, text in (("session", name), ("namespace", namespace)):
            if not isinstance(text, str) or not 0 < len(text) <= MAX_NAME:
                raise ValueError(f"a {what}'s name has 1 to {MAX_NAME} characters, got {text!r}"[:300])
        if not isinstance(store, str | Path | None) or store == "":
            raise ValueError(f"store must be a folder, got {store!r}")
        if store is not None and Path(store).expanduser().exists() and not Path(store).expanduser().is_dir():
            raise ValueError(f"store {str(store)!r} must be a folder, and is a file")
        with self._lock:
            session = self._sessions.get((namespace, name))
            if session is None:
                space = self._namespaces.get(namespace) or Namespace(namespace, _fresh_rows(rd))
                session = Session(rd, self, space, name, store)
                self._namespaces[namespace] = space
                self._sessions[namespace, name] = session
                return session
        if store is not None:
            session.attach(store)
        return session

    def origin(self, rd: RetroDraft) -> Origin:
        """What saved sessions have to fit; computed once, since a large vocabulary takes a while."""
        if self._origin is None:
            self._origin = Origin(model_id(rd.model), tokenizer_fingerprint(rd.tokenizer), rd.vocab_size)
        return self._origin

    def neighbours(self, session: Session) -> list[Session]:
        """The other open sessions of a session's namespace."""
        with self._lock:
            sessions = list(self._sessions.values())
        return [each for each in sessions if each is not session and each.namespace is session.namespace]

    def used(self, session: Session) -> None:
        """Note that a session's call ended; keys and values beyond the budget are dropped, oldest sessions first."""
        with self._lock:
            if not session.closed:
                self._sessions.move_to_end((session.namespace.name, session.name))
                self._namespaces.move_to_end(session.namespace.name)
            sessions = list(self._sessions.values())
            self._drop_namespaces()
        total = sum(each.kv_bytes for each in sessions)
        for each in sessions:
            if total <= self._max_kv_bytes:
                break
            total -= each.kv_bytes
            each.release()

    def _drop_namespaces(self) -> None:
        """Forget the least recently used namespaces without open sessions beyond MAX_NAMESPACE_BYTES."""
        total = sum(space.nbytes for space in self._namespaces.values())
        used = {namespace for namespace, _ in self._sessions}
        for name in [name for name in self._namespaces if name not in used]:
            if total <= MAX_NAMESPACE_BYTES:
                break
            total -= self._namespaces.pop(name).nbytes

    def forget(self, session: Session) -> None:
        """Take a closed session out; its texts stay in the namespace."""
        with self._lock:
            self._sessions.pop((session.namespace.name, session.name), None)


def _fresh_rows(rd: RetroDraft) -> AdjacencyRows:
    if not isinstance(rd.strategy, RetroStrategy):
        raise ValueError("sessions draft with strategy='retro'")
    return rd.strategy.adjacency.fresh()
