"""From the trajectories of a log to token ids: each request's prompt under the chat template, and its answer."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from retrodraft.replay.logs import Message, Request, Trajectory
from retrodraft.strategy import TopLogits
from retrodraft.tree import Int32
from retrodraft.workloads import render_prompt

TOP_WIDTH = 20  # OpenAI's most for `top_logprobs`
PROBE = "retrodraft_probe"


@dataclass(frozen=True)
class Turn:
    """One request in tokens."""

    prompt: Int32
    answer: Int32  # ends with the end-of-turn token, where the tokenizer has one
    top: TopLogits | None = None  # top[i] is what the target said where it emitted answer[i]
    shown: tuple[str, ...] = ()  # what tools and users have said so far


class Renderer:
    """Renders requests for one tokenizer, and finds out what its chat template takes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.templated = tokenizer.chat_template is not None
        self.takes_tools = self.templated and PROBE in (self._template(_probe_messages(), None, False) or "")
        self.end = self._end_of_turn()
        self._single: dict[str, int] = {}  # text -> token id where it is exactly one token, else -1

    def turns(self, trajectory: Trajectory) -> list[Turn]:
        """Tokenise a trajectory; a prompt that continues the one before is tokenised from there on.

        Raises ValueError, with file and line, if the chat template refuses a prompt.
        """
        turns: list[Turn] = []
        buffers: list[list[int]] = []  # texts, each longer by a turn; prompts become views into them
        # Buffer, start and end of the answer, logits, what was shown.
        places: list[tuple[int, int, int, TopLogits | None, tuple[str, ...]]] = []
        known, start, before = "", 0, ""  # text of the newest buffer, tokens in it before its last answer, their text
        for request in trajectory.requests:
            try:
                text, answer = self._texts(request, trajectory.tools)
            except ValueError as error:
                raise ValueError(f"{trajectory.where}: {error}") from error
            if text is None:
                buffers.append(self._refused(request, trajectory.where))
            elif known and text.startswith(known):
                buffers[-1].extend(self.ids(text[len(known) :]))
            elif before and text.startswith(before):  # the template alters earlier answers
                buffers.append([*buffers[-1][:start], *self.ids(text[len(before) :])])
            else:
                buffers.append(self.ids(text))
            if not buffers[-1]:
                raise ValueError(f"{trajectory.where}: the prompt of a request gives no tokens")
            start, before = len(buffers[-1]), text or ""
            known = before + answer if text is not None else ""
            answer_ids, top = self._answer(answer, request)
            buffers[-1].extend(answer_ids)
            if answer_ids:
                shown = tuple(str(m["content"]) for m in request.messages if m["role"] in ("tool", "user"))
                places.append((len(buffers) - 1, start, len(buffers[-1]), top, shown))
        arrays = [np.array(buffer, np.int32) for buffer in buffers]
        for index, begin, stop, top, shown in places:
            turns.append(Turn(arrays[index][:begin], arrays[index][begin:stop], top, shown))
        return turns

    def _texts(self, request: Request, tools: Any) -> tuple[str | None, str]:
        """Prompt (None where the template refuses the messages as they are) and answer, end of turn included."""
        messages = [self._known(message) for message in request.messages]
        answer = self._known(request.answer)
        text = self._template(messages, tools if self.takes_tools else None, True)
        said = str(answer["content"]) + self.end
        if answer.get("tool_calls") and text is not None:
            whole = self._template([*messages, answer], tools, False) or ""
            rest = whole[len(text) :] if whole.startswith(text) else ""
            stop = rest.find(self.end) if self.end else len(rest)
            if stop > 0:
                return text, rest[: stop + len(self.end)]
            said = str(_flattened(answer)["content"]) + self.end
        return text, said

    def _known(self, message: Message) -> Message:
        """The message as the template takes it: tool calls as JSON text and tools as users where it knows neither."""
        if self.takes_tools:
            return message
        role = "user" if message["role"] == "tool" else message["role"]
        return {"role": role, "content": _flattened(message)["content"]}

    def _template(self, messages: list[Message], tools: Any, prompt: bool) -> str | None:
        if not self.templated:
            return "".join(f"{message['content']}\n\n" for message in messages)
        options: dict[str, Any] = {"tools": tools} if tools else {}
        try:
            return str(
                self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **options)
            )
        except (TemplateError, TypeError, ValueError):
            return None

    def _refused(self, request: Request, where: str) -> list[int]:
        """The prompt with its messages merged into what the template takes."""
        plain = [_flattened(message) for message in request.messages]
        try:
            return render_prompt(self.tokenizer, plain)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    def _end_of_turn(self) -> str:
        """What the template puts after an answer, else the end-of-sequence token; empty without a template."""
        if not self.templated:
            return ""
        text = self._template([{"role": "user", "content": "hi"}, {"role": "assistant", "content": PROBE}], None, False)
        tail = (text or "").rpartition(PROBE)[2].lstrip() if text and PROBE in text else ""
        tokens = [*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()]
        special = [token for token in tokens if token and tail.startswith(token)]
        return str(max(special, key=len) if special else self.tokenizer.eos_token or "")

    def ids(self, text: str) -> list[int]:
        """Token ids of a text by itself."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _answer(self, text: str, request: Request) -> tuple[list[int], TopLogits | None]:
        """Token ids of an answer, and the log's logits for those of its tokens that begin where a logged one does."""
        content = str(request.answer["content"])
        starts = _starts(request.logprobs, content) if request.logprobs and text.startswith(content) else {}
        if not starts or not self.tokenizer.is_fast:
            return self.ids(text), None
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        token_ids = np.full((len(encoded.input_ids), TOP_WIDTH), -1, np.int32)
        probs = np.zeros(token_ids.shape, np.float32)
        for i, (offset, _) in enumerate(encoded.offset_mapping):
            known: dict[int, float] = {}
            for token, prob in starts.pop(offset, []):  # popped: a character of several tokens begins once
                known.setdefault(self._single_token(token), prob)
            known.pop(-1, None)
            for rank, (token_id, prob) in enumerate(sorted(known.items(), key=lambda item: -item[1])[:TOP_WIDTH]):
                token_ids[i, rank], probs[i, rank] = token_id, prob
        return list(encoded.input_ids), TopLogits(token_ids, probs) if (token_ids[:, 0] >= 0).any() else None

    def _single_token(self, text: str) -> int:
        if text not in self._single:
            ids = self.ids(text)
            self._single[text] = ids[0] if len(ids) == 1 and self.tokenizer.decode(ids) == text else -1
        return self._single[text]


def _flattened(message: Message) -> Message:
    """The message with its tool calls as lines of JSON text."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", [])]
    return {"role": message["role"], "content": "\n".join(part for part in (message["content"], *calls) if part)}


def _probe_messages() -> list[Message]:
    call = {"type": "function", "function": {"name": PROBE, "arguments": {}}}
    return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def _starts(logprobs: list[Any], content: str) -> dict[int, list[tuple[str, float]]]:
    """By character offset, the logged top tokens and probabilities; empty if the log's tokens are not the content."""
    places, size = {0: 0}, 0  # byte offset -> character offset
    for index, char in enumerate(content, 1):
        size += len(char.encode())
        places[size] = index
    found: dict[int, list[tuple[str, float]]] = {}
    said = bytearray()
    for entry in logprobs:
        if not isinstance(entry, dict) or not isinstance(entry.get("token"), str):
            return {}
        top = [
            (str(item["token"]), math.exp(min(float(item["logprob"]), 0.0)))
            for item in entry.get("top_logprobs") or []
            if isinstance(item, dict) and "token" in item and isinstance(item.get("logprob"), (int, float))
        ]
        if top and len(said) in places:
            found[places[len(said)]] = top
        try:
            said += bytes(entry["bytes"]) if entry.get("bytes") else entry["token"].encode()
        except (ValueError, TypeError):  # no bytes, or half of a surrogate pair
            return {}
    text = content.encode()
    return found if said.startswith(text) or text.startswith(said) else {}
