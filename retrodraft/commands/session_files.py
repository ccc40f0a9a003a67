"""`retrodraft session add`, `files` and `drop`: files that the sessions of a running server draft from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import SplitResult, urlsplit

import typer

from retrodraft.commands.documents import disk_errors, print_skipped

if TYPE_CHECKING:
    from retrodraft.index.files import Skipped

DEFAULT_SERVER = "http://127.0.0.1:8000"
SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # the server's rule; told before anything is read
REQUEST_BYTES = 1 << 20  # of a request with several files; far below what a server takes unless told otherwise
REQUEST_FILES = 1000
ANSWER_SECONDS = 60.0

Session = Annotated[str, typer.Argument(help="Id of the session, which need not exist yet.")]
Server = Annotated[str, typer.Option("--server", help="Address of `retrodraft serve`.")]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="RETRODRAFT_API_KEY", help="For a server with keys.", show_envvar=True)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add(
    name: Session,
    paths: Annotated[list[str], typer.Argument(metavar="FILE", help="Text files, and folders of them.")],
    server: Server = DEFAULT_SERVER,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Send files to a session of a running server.

    The session drafts from them.

    They go by their path below the current folder, as an agent there would name them, and count from the session's
    next request on. Texts are sent, so send a file again when it has changed. Folders are searched as `serve
    --workspace` does: under their .gitignore, without links; what is not text is skipped. Files are no part of a saved
    session: after a restart of the server, send them again.

    Example: retrodraft session add fix-issue-17 src README.md
    """
    address = _address(server, name, api_key)
    with disk_errors("the current folder"):
        texts, skipped = _read_texts(paths)
    records = {
        path: json.dumps({"path": path, "text": text}, ensure_ascii=False).encode() for path, text in texts.items()
    }
    _send(address, api_key, "POST", name, records)
    if as_json:
        facts = {"id": name, "added": list(texts), "skipped": [vars(item) for item in skipped]}
        typer.echo(json.dumps(facts))
    else:
        print_skipped(skipped)
        typer.echo(f"added {_files(len(texts))} to session {name!r}")


def files(name: Session, server: Server = DEFAULT_SERVER, api_key: ApiKey = None, as_json: Json = False) -> None:
    """List the files that a server's session has.

    With their tokens; the session of a running server drafts from them.

    That is what was sent for the session, and for others of the same key once they had a request; files of `serve
    --workspace` are not listed. An id that no request has named yet is no error.

    Example: retrodraft session files fix-issue-17
    """
    held = _held(_address(server, name, api_key), api_key, name)
    if as_json:
        typer.echo(json.dumps({"id": name, "files": [{"path": path, "tokens": size} for path, size in held.items()]}))
        return
    if not held:
        typer.echo(f"session {name!r} has no files")
    for path, size in held.items():
        typer.echo(f"{size:>11,} tokens  {path!r}")


def drop(
    name: Session,
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="As they were added; folders too.")],
    server: Server = DEFAULT_SERVER,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Take files from a session of a running server.

    Of a folder, all that the session has below it. Nothing need exist any more. A path that the session does not have
    is named and passed over; if it has none of them, that is an error.

    Example: retrodraft session drop fix-issue-17 README.md src
    """
    address = _address(server, name, api_key)
    if "" in paths:
        raise ValueError("a path is empty; name a file or a folder")
    with disk_errors("the current folder"):
        wanted = {path: Path(os.path.abspath(_as_written(path))) for path in dict.fromkeys(paths)}
        held = {path: Path(os.path.abspath(path)) for path in _held(address, api_key, name)}
    below = {path: [each for each, place in held.items() if place.is_relative_to(wanted[path])] for path in wanted}
    found = list(dict.fromkeys(each for paths in below.values() for each in paths))
    answers = _send(address, api_key, "DELETE", name, {path: json.dumps(path).encode() for path in found})
    removed = [path for answer in answers for path in answer["removed"]]
    absent = [path for path in wanted if not {*below[path]} & {*removed}]
    if not removed:
        raise ValueError(
            f"session {name!r} has no file {short(' or '.join(map(repr, absent)))}; `retrodraft session files {name}` "
            "lists what it has"
        )
    if as_json:
        typer.echo(json.dumps({"id": name, "removed": removed, "not_found": absent}))
        return
    for path in absent:
        typer.echo(f"session {name!r} has no file {path!r}", err=True)
    typer.echo(f"removed {_files(len(removed))} from session {name!r}")


def _address(server: str, name: str, api_key: str | None) -> SplitResult:
    """Where the server is; raises ValueError for what can be no address, no session id or no key."""
    if not SESSION_ID.fullmatch(name):
        raise ValueError(
            "a session id has 1 to 128 letters, digits, dots, dashes or underscores, and begins with a letter or "
            f"digit; got {short(repr(name))}"
        )
    if api_key is not None and not (api_key.strip() and api_key.isascii() and api_key.isprintable()):
        raise ValueError("an API key must be ASCII text and not empty")
    try:
        address = urlsplit(server)
        sound = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:  # a port that is no number, a bracket that is not closed
        sound = False
    if not sound or address.username is not None or address.query or address.fragment:
        raise ValueError(f"server must be an address such as {DEFAULT_SERVER}; got {short(repr(server))}")
    return address


def _read_texts(paths: Sequence[str]) -> tuple[dict[str, str], list[Skipped]]:
    """Texts by the path that is sent, and what was left out of folders.

    Raises ValueError for a file that is named itself and can't be sent, and where there is nothing to send.
    """
    from retrodraft.index.files import Skipped, find_files
    from retrodraft.sessions.workspace import Workspace, read_text

    skipped: list[Skipped] = []
    files = find_files(paths, skipped)
    named = {str(Path(path)) for path in paths if not os.path.isdir(path)}
    for item in skipped:
        if item.name in named:
            raise ValueError(f"{item.name!r} can't be added: {item.reason}")
    texts: dict[str, str] = {}
    for file in files:
        try:
            path = _as_written(file.path)
            texts[path] = read_text(str(file.path))[0]
        except ValueError as error:
            if str(file.path) in named:
                raise
            skipped.append(Skipped(str(file.path), str(error).removeprefix(f"{str(file.path)!r} ")))
    if not texts:
        print_skipped(skipped)
        raise ValueError(f"there is no text file in {', '.join(map(repr, paths))}")
    size, room = sum(len(text.encode()) for text in texts.values()), Workspace().max_text_bytes
    if size > room:
        raise ValueError(f"{_files(len(texts))} of {size:,} bytes: sessions have room for {room:,}; leave some out")
    return texts, skipped


def _as_written(path: Path | str) -> str:
    """A path as an agent in the current folder writes it, with slashes; raises ValueError where it is not UTF-8."""
    here, absolute = Path.cwd(), Path(os.path.abspath(path))
    tidy = absolute.relative_to(here) if absolute.is_relative_to(here) else Path(os.path.normpath(path))
    try:
        return os.fsencode(tidy.as_posix()).decode("utf-8")  # whatever encoding of names the locale says
    except UnicodeDecodeError:
        raise ValueError(f"{str(path)!r} can't be sent: its name is not UTF-8") from None


def _held(address: SplitResult, api_key: str | None, name: str) -> dict[str, int]:
    """Tokens of a session's files by path; raises ValueError as `_send`."""
    status, answer = _request(address, api_key, "GET", f"/v1/sessions/{name}/files", b"")
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        if status == 200:
            return {str(file["path"]): int(file["tokens"]) for file in json.loads(answer)["files"]}
    raise _refusal(address, status, answer)


def _send(
    address: SplitResult, api_key: str | None, method: str, name: str, records: dict[str, bytes]
) -> list[dict[str, Any]]:
    """Send records by path, several a request, and fewer where that is too much; raises ValueError if it can't be.

    Returns the server's answers.
    """
    field, route = ("files" if method == "POST" else "paths"), f"/v1/sessions/{name}/files"
    waiting, limit, answers = list(records), REQUEST_BYTES, []
    while waiting:
        count, size = 0, 0
        while count < min(len(waiting), REQUEST_FILES) and (count == 0 or size + len(records[waiting[count]]) <= limit):
            size += len(records[waiting[count]])
            count += 1
        body = b'{"%s":[%s]}' % (field.encode(), b",".join(records[path] for path in waiting[:count]))
        status, answer = _request(address, api_key, method, route, body)
        if status == 200 and b'"object":"session"' in answer:
            answers.append(json.loads(answer))
            waiting = waiting[count:]
        elif status == 413 and count > 1:
            limit = size // 2
        else:
            raise _refusal(address, status, answer, waiting[0] if len(records) > 1 and count == 1 else None)
    return answers


def _refusal(address: SplitResult, status: int, answer: bytes, path: str | None = None) -> ValueError:
    """What to tell of an answer that is not what was asked for, at a path where it was about one of several."""
    if status == 401:
        return ValueError(f"{address.geturl()} asks for an API key that it knows: --api-key, or RETRODRAFT_API_KEY")
    which = "" if path is None else f", at {path!r}"
    return ValueError(f"{address.geturl()} answered {status}{which}: {_complaint(answer)}")


def _request(address: SplitResult, api_key: str | None, method: str, route: str, body: bytes) -> tuple[int, bytes]:
    """Status and answer of one request, straight to the server whatever proxies there are; ValueError without one."""
    kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key.strip()}"
    path = address.path.rstrip("/").removesuffix("/v1") + route  # what `serve` prints ends in /v1
    try:
        connection = kind(address.hostname or "", address.port, timeout=ANSWER_SECONDS)
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # a server that refuses a body does not read it
                connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read(16 << 20)
        finally:
            connection.close()
    except TimeoutError:
        raise ValueError(f"{address.geturl()} gave no answer for {ANSWER_SECONDS:.0f} seconds") from None
    except (OSError, HTTPException, UnicodeError) as error:  # the last for host names that can't be
        reason = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
        raise ValueError(
            f"no server answers at {address.geturl()} ({reason}): start `retrodraft serve`, or give --server"
        ) from error


def _complaint(answer: bytes) -> str:
    """What the server says is wrong, on one line."""
    try:
        return short(" ".join(str(json.loads(answer)["error"]["message"]).split()))
    except (ValueError, KeyError, TypeError, RecursionError):
        return "is it a retrodraft server?"


def _files(number: int) -> str:
    return f"{number:,} file{'s' * (number != 1)}"


def short(text: str) -> str:
    """The text, cut to what fits a message."""
    return text if len(text) <= 300 else text[:300] + " ..."
