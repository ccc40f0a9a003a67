"""Which session a request belongs to, and what is kept of sessions."""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from retrodraft.server.protocol import ApiError
from retrodraft.sessions.prefix import common_prefix
from retrodraft.sessions.saved import list_sessions
from retrodraft.sessions.workspace import MAX_FILE_BYTES, MAX_TEXT_BYTES, Workspace
from retrodraft.tree import Int32

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

SEARCH_SECONDS = 2.0  # new files of the workspace are looked for no more often; changed ones are seen at once
HEADER_TOKENS = 4  # the beginning of an answer, which some templates write otherwise once it is history

log = logging.getLogger("retrodraft.server")


@dataclass
class Entry:
    """A session and what the server knows of it."""

    namespace: str
    name: str
    session: Any = None  # opened by the generating thread, which alone uses it
    asked: bool = False  # a request has come; without one it is but a name for which files wait
    created: float = field(default_factory=time.time)
    last_used: float = field(default_factory=time.time)
    num_requests: int = 0
    num_tokens: int = 0
    num_prompt: int = 0  # tokens of the last prompt; 0 before the first answer
    changed: bool = False  # since it was saved
    saved: float = field(default_factory=time.monotonic)
    files: dict[str, bytes] = field(default_factory=dict)  # UTF-8 texts by path, to be added before its next request

    def record(self) -> dict[str, Any]:
        """What `GET /v1/sessions` shows."""
        return {
            "id": self.name, "object": "session", "created": int(self.created), "last_used": int(self.last_used),
            "requests": self.num_requests, "tokens": self.num_tokens, "in_memory": True,
        }  # fmt: skip


class Sessions:
    """The sessions in memory; the least recently used one of the largest namespace goes when there are too many.

    Args:
        open_session: gets or creates a session, called with namespace and name.
        store: where sessions are saved; None keeps them in memory only.
        workspace: folder whose files all sessions draft from.
    """

    def __init__(
        self, open_session: Callable[[str, str], Any], store: Path | None, max_sessions: int, workspace: Path | None
    ) -> None:
        self._open, self._store, self._max = open_session, store, max_sessions
        self._workspace = workspace
        self._searched: dict[str, float] = {}  # when each namespace last looked for new files
        self._workspaces: WeakValueDictionary[str, Workspace] = WeakValueDictionary()  # of namespaces that have one
        self._entries: dict[tuple[str, str], Entry] = {}  # least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def records(self, namespace: str) -> list[dict[str, Any]]:
        """What is told of a namespace's sessions, those in memory first. Any thread."""
        with self._lock:
            records = [entry.record() for entry in self._entries.values() if entry.namespace == namespace]
        if self._store is not None:
            held = {record["id"] for record in records}
            saved = [record for record in list_sessions(self._store, namespace) if record.name not in held]
            records += [
                {"id": record.name, "object": "session", "last_used": int(record.last_used), "in_memory": False}
                for record in saved
                if not record.problem
            ]
        return records

    def add_files(self, namespace: str, name: str, files: dict[str, str]) -> None:
        """Texts by path, to be drafted from as of the session's next request. Any thread.

        Raises ApiError for a text that is too long, and where there is no room.
        """
        checked_name(name)
        texts = {path: text.encode() for path, text in files.items()}
        for path, text in texts.items():
            if len(text) > MAX_FILE_BYTES:
                raise ApiError(413, f"{path!r} is longer than {MAX_FILE_BYTES} bytes: leave it out", param="files")
        with self._lock:
            known = self._entries.get((namespace, name))
            entry = known or Entry(namespace, name)
            merged = entry.files | texts
            others = [e for e in self._entries.values() if e.namespace == namespace and e.files and e is not entry]
            workspace = self._workspaces.get(namespace) or Workspace()
            size = workspace.num_bytes_with({path: len(text) for path, text in merged.items()})
            size += sum(len(text) for other in others for text in other.files.values())
            if size > MAX_TEXT_BYTES:
                message = f"the files would take {size:,} bytes, and there is room for {MAX_TEXT_BYTES:,}: remove some"
                raise ApiError(413, message, param="files")
            if known is None and len(self._entries) >= self._max:
                for unopened in [e for e in others if not e.asked][:1]:
                    del self._entries[namespace, unopened.name]
            entry.files = merged
            self._entries[namespace, name] = entry

    def remove_files(self, namespace: str, name: str, paths: Iterable[str]) -> tuple[list[str], list[str]]:
        """Take away what was added; at once, so the session's next request no longer drafts from it. Any thread.

        Returns:
            The paths that were removed, and those that the session did not hold.
        """
        checked_name(name)
        removed, absent = [], []
        with self._lock:
            entry = self._entries.get((namespace, name))
            workspace = self._workspaces.get(namespace)
            waiting = {} if entry is None else entry.files
            given = {} if workspace is None else workspace.given_texts()
            for path in dict.fromkeys(paths):
                if path not in waiting and path not in given:
                    absent.append(path)
                    continue
                removed.append(path)
                waiting.pop(path, None)
                if workspace is not None and path in given:
                    workspace.remove(path)
            if entry is not None and not entry.asked and not waiting:
                del self._entries[namespace, name]
        return removed, absent

    def files(self, namespace: str, name: str, tokenize: Callable[[str], list[int]]) -> list[dict[str, Any]]:
        """Path and number of tokens of the files that a session holds, by path. Any thread.

        These are the texts that were added for it and wait, and those of the namespace; not those of `workspace`, which
        are no client's affair.
        """
        checked_name(name)
        with self._lock:
            entry = self._entries.get((namespace, name))
            waiting = {} if entry is None else entry.files
            workspace = self._workspaces.get(namespace) or Workspace()
            texts = workspace.given_texts() | {path: text.decode() for path, text in waiting.items()}
        return [{"path": path, "tokens": workspace.num_tokens(texts[path], tokenize)} for path in sorted(texts)]

    def acquire(self, namespace: str, name: str | None, prompt: Int32) -> Entry:
        """The request's session, opened and with its files up to date. The generating thread only."""
        with self._lock:
            name = name or self._by_prefix(namespace, prompt) or f"auto-{uuid.uuid4().hex[:12]}"
            entry = self._entry(namespace, name)
            entry.asked, entry.last_used = True, time.time()
        self._evict()
        if entry.session is None:
            try:
                entry.session = self._open(namespace, name)
            except ValueError as error:  # saved with another model, or damaged
                raise ApiError(409, f"session {name!r} can't be used: {error}", param="session_id") from error
        if self._workspace is not None and time.monotonic() - self._searched.get(namespace, -inf) > SEARCH_SECONDS:
            try:
                entry.session.add_folder(self._workspace)
            except (OSError, ValueError) as error:  # it was there when the server started; answers need no files
                log.warning("workspace: %s", error)
            self._searched[namespace] = time.monotonic()
        with self._lock:
            self._workspaces[namespace] = entry.session.namespace.workspace
            for path, text in entry.files.items():
                try:
                    entry.session.add_file(path, text.decode())
                except ValueError as error:  # no room: the folder's files have taken it meanwhile
                    log.warning("session %s: %s", name, error)
            entry.files = {}
        entry.changed = True
        return entry

    def release(self, entry: Entry) -> None:
        """Note what a request left in its session."""
        entry.num_tokens, entry.num_prompt = len(entry.session.token_ids), entry.session.stats.num_prompt_tokens
        entry.num_requests += 1

    def save_changed(self, older_than: float = 0.0) -> None:
        """Save sessions that changed, and were saved more than so many seconds ago. The generating thread only."""
        with self._lock:
            entries = list(self._entries.values())
        for entry in entries:
            if entry.changed and entry.session is not None and time.monotonic() - entry.saved > older_than:
                self._save(entry)

    def close(self) -> None:
        """Save and close all. The generating thread only."""
        with self._lock:
            entries, self._entries = list(self._entries.values()), {}
        for entry in entries:
            self._close(entry)

    def _entry(self, namespace: str, name: str) -> Entry:
        """Get or create, as the most recently used."""
        entry = self._entries.pop((namespace, name), None) or Entry(namespace, name)
        self._entries[namespace, name] = entry
        return entry

    def _by_prefix(self, namespace: str, prompt: Int32) -> str | None:
        """The session that the prompt goes on with: one whose last prompt it repeats, of several the longest.

        The answer may come back in another form (cut at a stop text, without its reasoning), or be asked for again. A
        prompt that shares less, for instance a system prompt with another agent's session, would roll that session
        back; it gets a session of its own, which begins with a copy of the shared keys and values.
        """
        best, longest = None, 0
        for entry in self._entries.values():
            if entry.namespace == namespace and entry.session is not None and entry.num_prompt:
                common = common_prefix(prompt, entry.session.token_ids)
                repeated = common >= entry.num_prompt - min(HEADER_TOKENS, entry.num_prompt // 8)
                if repeated and common >= longest:
                    best, longest = entry.name, common
        return best

    def _evict(self) -> None:
        while True:
            with self._lock:
                if len(self._entries) <= self._max:
                    return
                largest = Counter(entry.namespace for entry in self._entries.values()).most_common(1)[0][0]
                oldest = next(key for key in self._entries if key[0] == largest)
                entry = self._entries.pop(oldest)
            self._close(entry)

    def _save(self, entry: Entry) -> None:
        entry.saved = time.monotonic()  # also if it fails: the next try is not to come with the next token
        if self._store is not None:
            try:
                entry.session.save()
            except (OSError, ValueError) as error:
                log.error("session %s can't be saved: %s", entry.name, error)
                return
        entry.changed = False

    def _close(self, entry: Entry) -> None:
        if entry.session is not None:
            try:
                entry.session.close()  # which saves it
            except (OSError, ValueError) as error:
                log.error("session %s can't be saved: %s", entry.name, error)


def checked_name(name: str) -> str:
    """`name`, if it can name a session; raises ApiError."""
    if not NAME.fullmatch(name):
        raise ApiError(
            400, "a session id has 1 to 128 letters, digits, dots, dashes or underscores, and begins with a letter or "
            "digit", param="session_id",
        )  # fmt: skip
    return name
