"""Logs of chats and agents, read into trajectories of requests and the answers that were given."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Message = dict[str, Any]  # role, content (text), and tool_calls where there are any
TASK_KEYS = ("task_id", "instance_id")  # of a record or its `meta`, where it names its task


@dataclass(frozen=True)
class Request:
    """One call of a model: what it was sent and what it answered."""

    messages: list[Message]
    answer: Message
    logprobs: list[Any] | None = None  # OpenAI's `logprobs.content`: an entry for each token of the answer's content


@dataclass
class Trajectory:
    """The requests of one conversation, in order."""

    id: str
    category: str
    task: str  # equal for retries of one task
    where: str  # file and line, for errors
    tools: list[Any] | None = None
    requests: list[Request] = field(default_factory=list)


def log_files(paths: Sequence[Path | str]) -> dict[str, Path]:
    """The .jsonl files named or lying below folders, by the name they get in results; folders are read in name order.

    Raises ValueError if a path is missing or a folder holds none.
    """
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(each for each in path.rglob("*.jsonl") if each.is_file())
            if not inside:
                raise ValueError(f"folder {str(path)!r} holds no .jsonl files")
            found.update(dict.fromkeys(inside))
        elif path.exists():
            found[path] = None
        else:
            raise ValueError(f"there is no log {str(path)!r}")
    stems = [path.stem for path in found]
    return {path.stem if stems.count(path.stem) == 1 else str(path): path for path in found}


def read_log(path: Path) -> list[Trajectory]:
    """Read one log; every line is checked before anything is replayed.

    A line is one of: `{"messages": [...]}`, whose assistant messages are answers; `{"request": {"messages": [...]},
    "response": {"choices": [...]}}` (also with a `prompt`, with `body` around either, or with a text as the response);
    `{"messages": [...], "response": ...}` or `{"prompt": "...", "response" or "completion": "..."}`. A request that
    repeats an earlier request with its answer continues that trajectory.

    Raises ValueError, with file and line, for a broken line, and for a file without answers.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines also cuts at U+2028, which JSON allows
    except OSError as error:
        raise ValueError(f"log {str(path)!r} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"log {str(path)!r} is not UTF-8 text (byte {error.start})") from error
    trajectories: list[Trajectory] = []
    open_ends: dict[str, Trajectory] = {}  # by the messages of the last request and its answer
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path.name} line {number}"
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON ({_reason(error)})") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: expected an object, got {type(record).__name__}")
        if _is_chat(record):
            trajectory = _described(record, where, messages := _messages(record["messages"], where))
            trajectory.requests = list(_answers_in(messages))
            trajectories.append(trajectory)
            continue
        request, response = _pair(record, where)
        messages = _prompt(request, where)
        answers = _answers(response, where)
        found = next((open_ends[key] for key in reversed(_prefixes(messages)) if key in open_ends), None)
        if found is None:
            found = _described({**request, **record}, where, messages)
            trajectories.append(found)
        for answer, logprobs in answers:
            found.requests.append(Request(messages, answer, logprobs))
            open_ends[_prefixes([*messages, answer])[-1]] = found
    if not any(trajectory.requests for trajectory in trajectories):
        raise ValueError(f"log {str(path)!r} holds no answers to replay: it needs assistant messages or responses")
    return [trajectory for trajectory in trajectories if trajectory.requests]


def _reason(error: Exception) -> str:
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else "nested too deeply"


def _is_chat(record: dict[str, Any]) -> bool:
    return "messages" in record and not any(key in record for key in ("request", "response", "choices"))


def _described(record: dict[str, Any], where: str, messages: list[Message]) -> Trajectory:
    """A trajectory without requests; its task is what the record names, else its first user message."""
    meta = record.get("meta") or record.get("metadata")
    sources = [record, meta] if isinstance(meta, dict) else [record]
    named = [str(source[key]) for source in sources for key in TASK_KEYS if source.get(key) is not None]
    spoken = [str(message["content"]) for message in messages if message["role"] == "user"]
    identifier = record.get("id") or record.get("custom_id") or where
    tools = record.get("tools")
    return Trajectory(
        str(identifier), str(record.get("category") or "all"), (named or spoken or [where])[0], where,
        tools if isinstance(tools, list) else None,
    )  # fmt: skip


def _answers_in(messages: list[Message]) -> Iterator[Request]:
    """A request for each assistant message that says something and has a prompt."""
    for position, message in enumerate(messages):
        if position and message["role"] == "assistant" and (message["content"] or message.get("tool_calls")):
            yield Request(messages[:position], message)


def _pair(record: dict[str, Any], where: str) -> tuple[dict[str, Any], Any]:
    """Request and response of a line."""
    request = _body(record.get("request", record))
    response = next((record[key] for key in ("response", "completion") if key in record), None)
    response = record if response is None and "choices" in record else _body(response)
    if not isinstance(request, dict) or not ("messages" in request or "prompt" in request) or response is None:
        raise ValueError(
            f"{where}: needs 'messages', or a 'request' with 'messages' and a 'response' with 'choices'; see "
            "`retrodraft replay --help`"
        )
    return request, response


def _body(value: Any) -> Any:
    return value["body"] if isinstance(value, dict) and isinstance(value.get("body"), dict) else value


def _prompt(request: dict[str, Any], where: str) -> list[Message]:
    if "messages" in request:
        return _messages(request["messages"], where)
    if not isinstance(request["prompt"], str) or not request["prompt"]:
        raise ValueError(f"{where}: 'prompt' must be a text")
    return [{"role": "user", "content": request["prompt"]}]


def _answers(response: Any, where: str) -> list[tuple[Message, list[Any] | None]]:
    """The answers of a response that say something, with their logprobs."""
    if isinstance(response, str):
        response = {"choices": [{"text": response}]}
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ValueError(f"{where}: the response must be a text or hold 'choices'")
    answers = []
    for choice in choices:
        said = choice.get("message", {"content": choice.get("text")})
        (message,) = _messages([{**said, "role": "assistant"}] if isinstance(said, dict) else [said], where)
        logprobs = choice.get("logprobs")
        content = logprobs.get("content") if isinstance(logprobs, dict) else None
        if message["content"] or message.get("tool_calls"):
            answers.append((message, content if isinstance(content, list) else None))
    return answers


def _messages(messages: Any, where: str) -> list[Message]:
    """Checked messages, reduced to role, text and tool calls."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: 'messages' must be a list of messages")
    kept = []
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: message {position} needs a 'role'")
        content = message.get("content")
        if isinstance(content, list):  # OpenAI's content parts; what is no text (images, ...) is left out
            parts = [part.get("text") for part in content if isinstance(part, dict)]
            content = "".join(part for part in parts if isinstance(part, str))
        if content is not None and not isinstance(content, str):
            raise ValueError(f"{where}: message {position}: 'content' must be text, got {type(content).__name__}")
        _check_encodable(content or "", f"{where}: message {position}: 'content'")
        reduced: Message = {"role": message["role"], "content": content or ""}
        calls = message.get("tool_calls")
        if calls:
            reduced["tool_calls"] = _tool_calls(calls, f"{where}: message {position}")
        kept.append(reduced)
    return kept


def _check_encodable(text: str, where: str) -> None:
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError(f"{where} holds half of a surrogate pair")


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls in the form that chat templates take: arguments are an object, not its text."""
    functions = [call.get("function", call) if isinstance(call, dict) else None for call in _listed(calls)]
    kept = []
    for function in functions:
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}: each of 'tool_calls' needs a function with a 'name'")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                pass  # a model's slip is part of the log: the text stands as it is
        _check_encodable(json.dumps([function["name"], arguments], ensure_ascii=False), f"{where}: a tool call")
        kept.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return kept


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else [value]


def _prefixes(messages: list[Message]) -> list[str]:
    """A key for each prefix of the messages."""
    digest = hashlib.sha256()
    keys = []
    for message in messages:
        digest.update(json.dumps(message, sort_keys=True).encode() + b"\n")
        keys.append(digest.hexdigest())
    return keys
