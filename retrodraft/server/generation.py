"""One answer: the hooks that `generate` runs at every token, and the settings it is called with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from retrodraft.server.protocol import ApiError, CommonRequest
from retrodraft.server.streaming import AnswerStream, Delta, TokenLogprob

GREEDY_BELOW = 1e-5  # a temperature so low is greedy: dividing by it would overflow


@dataclass(frozen=True)
class Options:
    """What a request asks of each of its answers."""

    token_limit: int | None = None  # new tokens; None for as many as the context takes
    sampling: dict[str, Any] = field(default_factory=dict)  # arguments of generate
    seed: int | None = None
    stops: list[str] = field(default_factory=list)
    num_top_logprobs: int | None = None  # None: no probabilities wanted
    prediction: str = ""
    tool_names: set[str] | None = None  # None: the answer is text alone
    parallel_calls: bool = True


def sampling_arguments(request: CommonRequest, generation_config: Any, vocab_size: int) -> dict[str, Any]:
    """`generate`'s arguments for a request. What the client leaves out is the model's default.

    A request that asks for sampling samples from the whole vocabulary, as OpenAI's do, unless it or the model's
    configuration says otherwise; `generate` by itself would keep the 50 likeliest tokens.
    """
    arguments: dict[str, Any] = {}
    wanted = (request.temperature, request.top_p, request.top_k, request.min_p)
    if request.temperature is not None and request.temperature < GREEDY_BELOW:
        arguments["do_sample"] = False
    elif any(value is not None for value in wanted) or generation_config.do_sample:
        arguments["do_sample"] = True
        arguments["temperature"] = _first(request.temperature, generation_config.temperature, 1.0)
        arguments["top_p"] = _first(request.top_p, generation_config.top_p, 1.0)
        arguments["top_k"] = max(0, _first(request.top_k, generation_config.top_k, 0))
        if request.min_p is not None:
            arguments["min_p"] = request.min_p
    if request.repetition_penalty is not None:
        arguments["repetition_penalty"] = request.repetition_penalty
    if request.logit_bias:
        arguments["sequence_bias"] = [
            [[_token(name, vocab_size)], bias] for name, bias in request.logit_bias.items() if bias
        ]
        if not arguments["sequence_bias"]:
            del arguments["sequence_bias"]
    return arguments


class LastScores(LogitsProcessor):
    """Keeps the target's log-probabilities at the newest position: after penalties, before temperature and top-p."""

    def __init__(self) -> None:
        self._scores: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._scores = scores[0].float().log_softmax(-1)
        return scores

    def of(self, token: int, num_top: int) -> TokenLogprob:
        """The record of the token that was chosen there."""
        assert self._scores is not None
        values, tokens = self._scores.topk(min(num_top, len(self._scores)))
        top = list(zip(tokens.tolist(), values.tolist(), strict=True))
        return TokenLogprob(token, float(self._scores[token]), top)


class Watch(StoppingCriteria):
    """Sees every token as it is emitted: hands its text on, ends at a stop text and when nobody listens any more."""

    def __init__(
        self,
        answer: AnswerStream,
        cancelled: threading.Event,
        send: Callable[[Delta], None],
        scores: LastScores | None,
        num_top: int,
    ) -> None:
        self._answer, self._cancelled, self._send = answer, cancelled, send
        self._scores, self._num_top = scores, num_top

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        token = int(input_ids[0, -1])
        delta = self._answer.push(token, self._scores.of(token, self._num_top) if self._scores is not None else None)
        if delta:
            self._send(delta)
        done = self._answer.stopped or self._cancelled.is_set()
        return torch.full((input_ids.shape[0],), done, device=input_ids.device)


def eos_token_ids(generation_config: Any) -> set[int]:
    """The tokens that end an answer."""
    eos = generation_config.eos_token_id
    if eos is None:
        return set()
    return {int(token) for token in eos} if isinstance(eos, (list, tuple)) else {int(eos)}


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _token(name: str, vocab_size: int) -> int:
    if not name.isdecimal() or int(name) >= vocab_size:
        raise ApiError(400, f"logit_bias: {name!r} is no token id below {vocab_size}", param="logit_bias")
    return int(name)
