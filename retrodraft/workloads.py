"""Workload files: prompts to measure on, as chat messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

Message = dict[str, str]


@dataclass(frozen=True)
class WorkloadItem:
    """One prompt: the messages up to the answer that is to be generated."""

    id: str
    category: str
    messages: list[Message]


def read_workload(path: Path | str) -> list[WorkloadItem]:
    """Read a jsonl workload: `{id, category, messages}`, or Spec-Bench's `{question_id, category, turns}`.

    Trailing assistant messages are answers and are left out of the prompt. Blank lines, a BOM and CRLF are fine.

    Raises:
        ValueError: the file is missing or empty, or a line is broken or repeats an id; names the file and the line.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines also cuts at U+2028, which JSON allows
    except OSError as error:
        raise ValueError(f"workload {str(path)!r} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"workload {str(path)!r} is not UTF-8 text (byte {error.start})") from error
    items: dict[str, WorkloadItem] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            item = _item(line, f"{path.name} line {number}")
            if item.id in items:
                raise ValueError(f"{path.name} line {number}: id {item.id!r} is used by a line above")
            items[item.id] = item
    if not items:
        raise ValueError(f"workload {str(path)!r} holds no prompts")
    return list(items.values())


def _item(line: str, where: str) -> WorkloadItem:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected an object, got {type(record).__name__}")
    if "messages" in record:
        identifier, messages = record.get("id"), record["messages"]
    elif "turns" in record:
        identifier, turns = record.get("question_id"), record["turns"]
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise ValueError(f"{where}: 'turns' must be a list that begins with a text")
        messages = [{"role": "user", "content": turns[0]}]
    else:
        raise ValueError(f"{where}: needs 'messages' (or Spec-Bench's 'turns')")
    if identifier is None:
        raise ValueError(f"{where}: 'id' is missing")
    return WorkloadItem(str(identifier), str(record.get("category", "all")), _prompt_messages(messages, where))


def _prompt_messages(messages: Any, where: str) -> list[Message]:
    if not isinstance(messages, list):
        raise ValueError(f"{where}: 'messages' must be a list, got {type(messages).__name__}")
    kept: list[Message] = []
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{where}: message {position} needs a 'role'")
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            raise ValueError(f"{where}: message {position}: 'content' must be text, got {type(content).__name__}")
        if any("\ud800" <= char <= "\udfff" for char in content or ""):
            raise ValueError(f"{where}: message {position}: 'content' holds half of a surrogate pair")
        kept.append({"role": message["role"], "content": content or ""})
    while kept and kept[-1]["role"] == "assistant":
        kept.pop()
    if not kept:
        raise ValueError(f"{where}: no message before the answer")
    return kept


def render_prompt(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
    """Token ids of the messages under the tokenizer's chat template, up to where the answer begins.

    `tools` are functions or JSON schemas, as the template takes them; messages then go to it as they are. Else tool
    messages become the user's, since few templates know the role. A template that takes no system message, or
    wants user and assistant in turn, gets the messages merged. Without a template the texts are joined.

    Raises ValueError if the template refuses even that, or nothing is left.
    """
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {position} must be a dict with a 'role', got {message!r:.80}")
    if not messages:
        raise ValueError("there are no messages")
    if tools or any(message.get("tool_calls") for message in messages):
        try:
            text = tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=True
            )  # fmt: skip
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template refuses the messages or tools: {error}") from error
        token_ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    elif tokenizer.chat_template is None:
        token_ids = list(tokenizer("\n\n".join(message["content"] for message in messages)).input_ids)
    else:
        known = [{**message, "role": "user" if message["role"] == "tool" else message["role"]} for message in messages]
        token_ids = list(tokenizer(_templated(tokenizer, known), add_special_tokens=False).input_ids)
    if not token_ids:
        raise ValueError("the prompt is empty: its messages give no tokens")
    return token_ids


def _templated(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError:
        merged = _in_turn(messages)
    try:
        return str(tokenizer.apply_chat_template(merged, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error


def _in_turn(messages: list[dict[str, Any]]) -> list[Message]:
    """The same texts as user and assistant in turn: system texts lead the user's, neighbours of one role are joined."""
    merged: list[Message] = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        if merged and merged[-1]["role"] == role:
            merged[-1] = {"role": role, "content": merged[-1]["content"] + "\n\n" + message["content"]}
        else:
            merged.append({"role": role, "content": message["content"]})
    return merged
