"""From a request's messages to token ids, through the model's chat template."""

from __future__ import annotations

import copy
import json
import threading
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from retrodraft.server.protocol import ApiError, checked_text
from retrodraft.tree import Int32

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
# For templates that know no tools; the form that most open models were taught.
TOOLS_TEXT = f"""# Tools

You may call one or more functions. Their signatures:
<tools>
{{tools}}
</tools>
For each call return a JSON object with the function's name and arguments within {CALL_OPEN}{CALL_CLOSE} tags:
{CALL_OPEN}
{{{{"name": <function-name>, "arguments": <args-json-object>}}}}
{CALL_CLOSE}"""

# What a template raises on messages, or variables, that it was not made for.
REFUSALS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
    SyntaxError,  # more loops in one another than Python takes
)  # fmt: skip


class Prompts:
    """A tokenizer of the server's own; safe to use from several threads."""

    def __init__(self, tokenizer: Any, chat_template: str | None = None) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)  # the generating thread has the other one
        if chat_template is not None:
            self.tokenizer.chat_template = chat_template
        self._lock = threading.Lock()

    def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, template_kwargs: dict[str, Any]
    ) -> Int32:
        """Token ids of the messages up to where the answer begins. Raises ApiError where the template refuses them."""
        rendered = self.render(messages, tools, template_kwargs)
        return self._ids(checked_text(rendered, "messages"), special=False, param="messages")

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, template_kwargs: dict[str, Any]
    ) -> str:
        """The messages as one text. Tools reach templates that know none as a system text."""
        template = self.tokenizer.chat_template
        if template is None:
            raise ApiError(
                400, "the model has no chat template: use /v1/completions, or serve it with --chat-template",
                param="messages", code="no_chat_template",
            )  # fmt: skip
        knows_tools = "tools" in (template if isinstance(template, str) else json.dumps(template))
        messages = _with_tool_names([_with_parsed_arguments(message) for message in messages])
        if not knows_tools:
            messages = _tools_as_text(messages, tools)
        arguments: dict[str, Any] = {**template_kwargs, "tokenize": False, "add_generation_prompt": True}
        if knows_tools and tools:
            arguments["tools"] = tools
        try:
            return self._render(messages, arguments)
        except REFUSALS as error:
            first = error
        arguments.pop("tools", None)
        try:  # some templates take no system message, want user and assistant in turn, or one call in a message
            return self._render(_in_turn(_tools_as_text(messages, tools if knows_tools else None)), arguments)
        except REFUSALS:
            reason = str(first).splitlines()[0] if str(first) else type(first).__name__
            message = f"the model's chat template refuses the messages: {reason}"
            raise ApiError(400, message, param="messages") from first

    def completion(self, prompt: str | list[int], vocab_size: int) -> Int32:
        """Token ids of a plain prompt."""
        if isinstance(prompt, str):
            return self._ids(checked_text(prompt, "prompt"), special=True, param="prompt")
        if max(prompt) >= vocab_size:
            raise ApiError(400, f"token {max(prompt)} is not among the model's {vocab_size}", param="prompt")
        return np.array(prompt, np.int32)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        with self._lock:
            return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def _render(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        return str(self.tokenizer.apply_chat_template(messages, **arguments))

    def _ids(self, text: str, special: bool, param: str) -> Int32:
        with self._lock:
            ids = np.array(self.tokenizer(text, add_special_tokens=special, verbose=False).input_ids, np.int32)
        if not len(ids):
            raise ApiError(400, "the prompt is empty: send some text", param=param)
        return ids


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments of tool calls as objects, which templates expect; clients send them as JSON text."""
    if not message.get("tool_calls"):
        return {key: value for key, value in message.items() if key != "tool_calls"}  # an empty list is none
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, "a tool call in the messages needs function.name", param="messages")
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                pass  # a model's broken JSON is history all the same
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _with_tool_names(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool results with their function's name, which some templates show; clients send the call's id alone."""
    names = {str(call.get("id")): call["function"]["name"] for m in messages for call in m.get("tool_calls") or ()}
    return [
        {"name": names[str(m.get("tool_call_id"))], **m}
        if m["role"] == "tool" and str(m.get("tool_call_id")) in names
        else m
        for m in messages
    ]


def _tools_as_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Tools in the system message, calls in the assistant's text, results as the user's messages."""
    shown = []
    for message in messages:
        text = message["content"]
        for call in message.get("tool_calls") or ():
            record = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            text += ("\n" if text else "") + f"{CALL_OPEN}\n{json.dumps(record, ensure_ascii=False)}\n{CALL_CLOSE}"
        if message["role"] == "tool":
            shown.append({"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"})
        else:
            shown.append({"role": message["role"], "content": text})
    if tools:
        listed = TOOLS_TEXT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if shown[0]["role"] == "system":
            shown[0] = {"role": "system", "content": f"{shown[0]['content']}\n\n{listed}"}
        else:
            shown.insert(0, {"role": "system", "content": listed})
    return shown


def _in_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same texts as user and assistant in turn; system texts lead the user's, neighbours of one role are joined."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        if merged and merged[-1]["role"] == role:
            merged[-1] = {"role": role, "content": f"{merged[-1]['content']}\n\n{message['content']}"}
        else:
            merged.append({"role": role, "content": message["content"]})
    return merged
