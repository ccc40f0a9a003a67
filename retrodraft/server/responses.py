"""Answers in OpenAI's JSON: whole, and in chunks."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from retrodraft.server.engine import Finished
from retrodraft.server.streaming import Delta, logprob_record


@dataclass
class Answer:
    """One collected answer."""

    delta: Delta = field(default_factory=Delta)
    finished: Finished | None = None


class Replies:
    """Builds a request's reply; ids and time are the same in all its parts."""

    def __init__(self, tokenizer: Any, model: str, chat: bool) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self._model = model
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._offsets: dict[int, int] = {}  # characters of each answer so far
        self._num_calls: dict[int, int] = {}

    def whole(self, answers: list[Answer], n: int, with_logprobs: bool) -> dict[str, Any]:
        """The reply to a request that is not streamed."""
        choices = []
        for index, answer in enumerate(answers):
            assert answer.finished is not None
            choice: dict[str, Any] = {"index": index, "finish_reason": answer.finished.reason}
            choice["logprobs"] = self._logprobs(index, answer.delta) if with_logprobs else None
            if self._chat:
                message: dict[str, Any] = {"role": "assistant", "content": answer.delta.text, "refusal": None}
                if answer.delta.calls:
                    message["content"] = answer.delta.text or None
                    message["tool_calls"] = answer.delta.calls
                choice["message"] = message
            else:
                choice["text"] = answer.delta.text
            choices.append(choice)
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage([a.finished for a in answers], n)}

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat answer, which names the role."""
        return self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def chunk(self, index: int, delta: Delta, with_logprobs: bool) -> dict[str, Any]:
        """A chunk of an answer."""
        choice: dict[str, Any] = {"index": index, "finish_reason": None}
        choice["logprobs"] = self._logprobs(index, delta) if with_logprobs else None
        if not self._chat:
            return self._chunk({**choice, "text": delta.text})
        first = self._num_calls.get(index, 0)
        self._num_calls[index] = first + len(delta.calls)
        content: dict[str, Any] = {"content": delta.text} if delta.text or not delta.calls else {}
        if delta.calls:
            content["tool_calls"] = [{"index": first + i, **call} for i, call in enumerate(delta.calls)]
        return self._chunk({**choice, "delta": content})

    def last(self, index: int, finished: Finished) -> dict[str, Any]:
        """The chunk that says why an answer ended."""
        content: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        return self._chunk({"index": index, **content, "logprobs": None, "finish_reason": finished.reason})

    def total(self, finished: list[Finished], n: int) -> dict[str, Any]:
        """The chunk with the usage, which comes after all answers."""
        return {**self._chunk(None), "usage": usage(list(finished), n)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id, "object": kind, "created": self._created, "model": self._model, "system_fingerprint": None
        }  # fmt: skip

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head(kind), "choices": [choice] if choice is not None else []}

    def _logprobs(self, index: int, delta: Delta) -> dict[str, Any]:
        records = [logprob_record(self._tokenizer, entry) for entry in delta.logprobs]
        if self._chat:
            return {"content": records, "refusal": None}
        offsets = []
        for record in records:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(record["token"])
        alternatives = [_alternatives(record) for record in records]
        return {
            "tokens": [record["token"] for record in records],
            "token_logprobs": [record["logprob"] for record in records],
            "top_logprobs": alternatives,
            "text_offset": offsets,
        }


def usage(answers: list[Finished | None], n: int) -> dict[str, Any]:
    """Tokens of a request: each prompt once, all answers; cached are those of each prompt's first answer."""
    done = [answer for answer in answers if answer is not None]
    prompts = done[::n]
    num_prompt, num_new = sum(a.num_prompt_tokens for a in prompts), sum(a.num_new_tokens for a in done)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": sum(a.num_cached_tokens for a in prompts)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(a.num_predicted_accepted for a in done),
            "rejected_prediction_tokens": sum(a.num_predicted_rejected for a in done),
        },
    }


def _alternatives(record: dict[str, Any]) -> dict[str, float]:
    """The old form of alternatives: by text, the chosen token among them."""
    return {other["token"]: other["logprob"] for other in record["top_logprobs"]} | {record["token"]: record["logprob"]}
