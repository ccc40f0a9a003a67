"""Tool calls in a model's text, taken out as the text comes. Three families of forms are known:

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>        Hermes, Qwen, SmolLM (also a list within)
    [TOOL_CALLS][{"name": ..., "arguments": {...}}]                 Mistral; newer: [TOOL_CALLS]name[ARGS]{...}
    {"name": ..., "parameters": {...}}                              Llama: the whole answer, or after <|python_tag|>

What does not parse, or names a tool that the client did not send, stays text.
"""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

from retrodraft.server.prompts import CALL_CLOSE, CALL_OPEN

TO_THE_END = ("[TOOL_CALLS]", "<|python_tag|>")  # after these the rest of the answer is calls
OPENERS = (CALL_OPEN, *TO_THE_END)
MARKS = (*OPENERS, CALL_CLOSE, "[ARGS]", "[CALL_ID]")  # often special tokens, which text otherwise lacks
ALONE = re.compile(r"\s*(\{|\[\s*(\{|$)|$)")  # what an answer that is calls alone begins with
NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]+)?\[ARGS\]\s*")
BETWEEN = re.compile(r"(?:\s|[;,]|\[TOOL_CALLS\]|<\|python_tag\|>)*")


def parse_calls(text: str) -> list[dict[str, Any]] | None:
    """Calls with `name` and `arguments` (an object, or whatever JSON the model wrote); None if there is anything else.

    >>> parse_calls('[TOOL_CALLS]look[ARGS]{"path": "a.py"}')
    [{'name': 'look', 'arguments': {'path': 'a.py'}}]
    >>> parse_calls('{"name": "look", "parameters": {}}; and so on') is None
    True
    """
    calls: list[dict[str, Any]] = []
    at = _skipped(text, 0)
    while at < len(text):
        named = NAMED.match(text, at)
        try:
            value, at = json.JSONDecoder().raw_decode(text, named.end() if named else at)
        except (ValueError, RecursionError):
            return None
        records = [{"name": named[1], "arguments": value}] if named else value if isinstance(value, list) else [value]
        for record in records:
            if isinstance(record, dict) and isinstance(record.get("function"), dict):
                record = record["function"]
            if not isinstance(record, dict) or not isinstance(record.get("name"), str):
                return None
            arguments = record.get("arguments", record.get("parameters", {}))
            calls.append({"name": record["name"], "arguments": arguments})
        at = _skipped(text, at)
    return calls or None


class CallSplitter:
    """Splits an answer into text and calls, piece by piece.

    Args:
        names: the client's tools.
        parallel: whether an answer may hold several calls; else those after the first are dropped.
    """

    def __init__(self, names: set[str], parallel: bool) -> None:
        self._names, self._parallel = names, parallel
        self._held = ""
        self._opener = ""  # the mark that `_held` begins with, blanks aside, where it does
        self._started = False  # whether anything has come out
        self.num_calls = 0

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Text that is none of a call, and calls in OpenAI's form, as far as they are complete by now."""
        self._held += text
        said = ""
        calls: list[dict[str, Any]] = []
        while (piece := self._next()) is not None:
            found = self._calls(piece) if piece.lstrip().startswith(OPENERS) else None
            said += piece if found is None else ""
            calls += found or []
        return said, calls

    def flush(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the answer: calls alone, or what looked like the beginning of one."""
        rest, self._held = self._held, ""
        alone = not self._started and ALONE.match(rest) is not None
        found = self._calls(rest) if self._opener or alone else None
        if found is not None:
            return "", found
        return rest if rest.strip() or not self.num_calls else "", []

    def _next(self) -> str | None:
        """Cut a text, or a call with its marks, off the front of what is held; None where more has to come."""
        if self._opener == CALL_OPEN:
            end = self._held.find(CALL_CLOSE)
            if end < 0:
                return None
            self._opener = ""
            return self._cut(end + len(CALL_CLOSE))
        if self._opener or (not self._started and ALONE.match(self._held)):
            return None  # known at the end
        start, opener = min(
            ((self._held.find(opener), opener) for opener in OPENERS if opener in self._held), default=(-1, "")
        )
        if start < 0:
            # Blanks wait too: with a call they are dropped.
            start = len(self._held) - max(overlap(self._held, opener) for opener in OPENERS)
            return self._cut(len(self._held[:start].rstrip()))
        self._opener, self._started = opener, True
        said = self._held[:start].rstrip()
        self._held = self._held[len(said) :]
        return said

    def _cut(self, length: int) -> str | None:
        piece, self._held = self._held[:length], self._held[length:]
        self._started = self._started or length > 0
        return piece or None

    def _calls(self, text: str) -> list[dict[str, Any]] | None:
        """The calls that `text` spells, in OpenAI's form; None if it spells none, or one of an unknown tool."""
        found = parse_calls(text.strip().removeprefix(CALL_OPEN).removesuffix(CALL_CLOSE))
        if found is None or any(call["name"] not in self._names for call in found):
            return None
        room = len(found) if self._parallel else max(0, 1 - self.num_calls)
        self.num_calls += len(found[:room])
        return [_in_openai_form(call) for call in found[:room]]


def overlap(text: str, mark: str) -> int:
    """Length of the longest beginning of `mark`, not all of it, that `text` ends with."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def _skipped(text: str, at: int) -> int:
    """Where the next call would begin."""
    between = BETWEEN.match(text, at)
    return between.end() if between else at


def _in_openai_form(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["arguments"]
    spelled = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    # Mistral's templates take ids of nine letters and digits alone.
    return {
        "id": uuid.uuid4().hex[:9], "type": "function", "function": {"name": call["name"], "arguments": spelled}
    }  # fmt: skip
