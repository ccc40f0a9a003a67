"""From token ids to deltas: whole characters, stop texts, tool calls.

Streamed and whole answers come from the same deltas, so they are equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from retrodraft.server.calls import MARKS, CallSplitter, overlap

BROKEN = "\ufffd"  # what half a character decodes to
MOST_PENDING = 16  # a character has at most 4 tokens: after more, the bytes are no text at all


@dataclass(frozen=True)
class TokenLogprob:
    """A token and what the target said of it: log-probability, and its likeliest tokens."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Delta:
    """What one or more tokens add to an answer."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.calls or self.logprobs)

    def extend(self, other: Delta) -> None:
        """Append a later delta."""
        self.text += other.text
        self.calls += other.calls
        self.logprobs += other.logprobs


class TokenText:
    """Text of a growing list of tokens; half a character waits for its other half, and is dropped if none comes.

    Special tokens have no text, but for those in `shown`, a map from their ids.
    """

    def __init__(self, tokenizer: Any, shown: Mapping[int, str] | None = None) -> None:
        self._tokenizer, self._special = tokenizer, shown or {}
        self._ids: list[int] = []
        # Text of ids[shown:] minus text of ids[shown:read] is new: some tokenizers treat a text's first token apart.
        self._shown = self._read = 0

    def push(self, token: int) -> str:
        """Text that is complete with this token."""
        if token in self._special:
            return self.flush() + self._special[token]
        self._ids.append(token)
        before = self._decode(self._ids[self._shown : self._read])
        text = self._decode(self._ids[self._shown :])
        pending = len(self._ids) - self._read
        if pending < MOST_PENDING and (len(text) <= len(before) or text.endswith(BROKEN)):
            return ""
        self._shown, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def flush(self) -> str:
        """The whole characters before half a character that nothing followed."""
        before = self._decode(self._ids[self._shown : self._read])
        text = self._decode(self._ids[self._shown :]).rstrip(BROKEN)
        self._shown = self._read = len(self._ids)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class StopText:
    """Passes text on as soon as it can't be the beginning of a stop text; `stopped` once one was found."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = list(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text to pass on; what a stop text begins, and all after it, is not."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            return self._cut(min(found))
        return self._cut(len(self._held) - max((overlap(self._held, stop) for stop in self._stops), default=0))

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        return "" if self.stopped else self._cut(len(self._held))

    def _cut(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


class AnswerStream:
    """One answer: tokens in, deltas out."""

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str],
        eos_token_ids: set[int],
        tool_names: set[str] | None,
        parallel_calls: bool = True,
    ) -> None:
        self._text = TokenText(tokenizer, _call_marks(tokenizer) if tool_names is not None else None)
        self._stop = StopText(stops)
        self._calls = CallSplitter(tool_names, parallel_calls) if tool_names is not None else None
        self._eos = eos_token_ids
        self._waiting: list[tuple[int, TokenLogprob]] = []  # where the token's text begins
        self._decoded = self._passed = 0  # characters
        self.num_tokens = 0
        self.ended = False  # by an EOS token

    @property
    def stopped(self) -> bool:
        """Whether a stop text was met."""
        return self._stop.stopped

    def push(self, token: int, logprob: TokenLogprob | None = None) -> Delta:
        """What the answer gains by a token."""
        self.num_tokens += 1
        if token in self._eos:
            self.ended = True
            return Delta()
        if logprob is not None:
            self._waiting.append((self._decoded, logprob))
        text = self._text.push(token)
        self._decoded += len(text)
        return self._passed_on(self._stop.push(text))

    def flush(self) -> Delta:
        """The rest of the answer, after its last token."""
        delta = self._passed_on(self._stop.push(self._text.flush()))
        delta.extend(self._passed_on(self._stop.flush()))
        if not self.stopped:
            delta.logprobs += [logprob for _, logprob in self._waiting]
        if self._calls is not None:
            delta.extend(Delta(*self._calls.flush()))
        return delta

    def finish_reason(self) -> str:
        """OpenAI's word for why the answer ended."""
        if self._calls is not None and self._calls.num_calls:
            return "tool_calls"
        return "stop" if self.stopped or self.ended else "length"

    def _passed_on(self, text: str) -> Delta:
        self._passed += len(text)
        ready = [logprob for begin, logprob in self._waiting if begin < self._passed]
        self._waiting = self._waiting[len(ready) :]
        delta = Delta(*self._calls.push(text)) if self._calls is not None else Delta(text)
        delta.logprobs = ready
        return delta


def logprob_record(tokenizer: Any, entry: TokenLogprob) -> dict[str, Any]:
    """A token's entry in OpenAI's `logprobs.content`."""
    return {
        **_token_record(tokenizer, entry.token_id, entry.logprob),
        "top_logprobs": [_token_record(tokenizer, token, value) for token, value in entry.top],
    }


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes that a token adds to a text, half characters included."""
    piece = tokenizer.convert_ids_to_tokens(token)
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    if BROKEN in text and piece is not None:
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        table = _byte_alphabet()
        if all(char in table for char in piece):
            return bytes(table[char] for char in piece)
    return text.encode("utf-8", "replace")


def _call_marks(tokenizer: Any) -> dict[int, str]:
    """The tokens that this model's tool calls begin and end with."""
    return {token_id: token for token, token_id in tokenizer.get_added_vocab().items() if token in MARKS}


def _token_record(tokenizer: Any, token: int, logprob: float) -> dict[str, Any]:
    data = token_bytes(tokenizer, token)
    value = logprob if math.isfinite(logprob) else -9999.0  # JSON has no infinity; OpenAI sends this number too
    return {"token": data.decode("utf-8", "replace"), "logprob": value, "bytes": list(data)}


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level tokenizers spell bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
