"""The queue, fair over namespaces, and the one thread that generates.

The thread takes one answer at a time, from each namespace in turn; a request for several answers takes several turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from retrodraft.server.generation import LastScores, Options, Watch, eos_token_ids
from retrodraft.server.metrics import Metrics
from retrodraft.server.protocol import ApiError
from retrodraft.server.sessions import Entry, Sessions
from retrodraft.server.streaming import AnswerStream, Delta
from retrodraft.stats import DecodingStats
from retrodraft.tree import Int32

PREDICTION = "prediction"  # the proposer that drafts from predicted outputs
SAVE_SECONDS = 30.0  # a busy session is saved about so often
IDLE_SECONDS = 2.0  # without requests for so long, changed sessions are saved

log = logging.getLogger("retrodraft.server")


@dataclass(frozen=True)
class Finished:
    """The end of an answer, and what it took."""

    reason: str
    session: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_new_tokens: int
    num_predicted_accepted: int
    num_predicted_rejected: int


Event = tuple[int, Delta | Finished | ApiError]  # index of the answer


class Mailbox:
    """Events from the generating thread to the request's coroutine."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._events: deque[Event] = deque()
        self._signalled = False

    def put(self, index: int, event: Delta | Finished | ApiError) -> None:
        """Send an event. Any thread."""
        self._events.append((index, event))
        if not self._signalled:
            self._signalled = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(self._ready.set)

    async def take(self) -> list[Event]:
        """All events since the last call; waits for one."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            self._signalled = False
            events = [self._events.popleft() for _ in range(len(self._events))]
            if events:
                return events


@dataclass(eq=False)
class Job:
    """A request: `n` answers to each of its prompts; answer `i` is to prompt `i // n`. Made inside the event loop."""

    namespace: str
    session: str | None  # its name; None to find it by prefix
    prompts: list[Int32]
    n: int
    options: Options
    mailbox: Mailbox = field(default_factory=Mailbox)
    cancelled: threading.Event = field(default_factory=threading.Event)
    created: float = field(default_factory=time.perf_counter)
    first_token: float | None = None  # seconds after `created`
    next: int = 0  # the answer to generate next
    owners: dict[int, str] = field(default_factory=dict)  # sessions by prompt

    @property
    def num_answers(self) -> int:
        """Answers in all."""
        return len(self.prompts) * self.n


class Engine:
    """Runs jobs on a RetroDraft, one answer at a time.

    Args:
        rd: the wrapped model.
        max_context: tokens of a prompt and its answer.
        max_queue: requests of one namespace that may wait.
    """

    def __init__(self, rd: Any, sessions: Sessions, metrics: Metrics, max_context: int, max_queue: int) -> None:
        self.rd, self.sessions, self.metrics, self.max_context = rd, sessions, metrics, max_context
        self._max_queue = max_queue
        self._queues: OrderedDict[str, deque[Job]] = OrderedDict()  # the namespace whose turn it is comes first
        self._running: Job | None = None
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="retrodraft-generate", daemon=True)

    def start(self) -> None:
        """Begin to generate."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Raises ApiError if a prompt is too long, the queue is full or the server stops."""
        for prompt in job.prompts:
            if len(prompt) >= self.max_context:
                raise ApiError(
                    400, f"the prompt has {len(prompt)} tokens, and the context of {self.max_context} must hold the "
                    "answer too: shorten the prompt", param="messages", code="context_length_exceeded",
                )  # fmt: skip
        with self._changed:
            if self._closing or not self._thread.is_alive():
                raise ApiError(503, "the server is shutting down", kind="server_error")
            queue = self._queues.setdefault(job.namespace, deque())
            if len(queue) >= self._max_queue:
                raise ApiError(
                    429, f"{len(queue)} requests wait already: try again later", kind="rate_limit_error",
                    code="queue_full",
                )  # fmt: skip
            queue.append(job)
            self._count_waiting()
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Stop a job at its next token, or take it out of the queue."""
        job.cancelled.set()
        with self._changed:
            queue = self._queues.get(job.namespace)
            if queue is not None and job in queue:
                queue.remove(job)
            self._count_waiting()

    @property
    def alive(self) -> bool:
        """Whether the generating thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop what runs at its next token, then save and close the sessions; returns when that is done."""
        with self._changed:
            self._closing = True
            jobs = [job for queue in self._queues.values() for job in queue]
            if self._running is not None:
                jobs.append(self._running)
            self._queues.clear()
            for job in jobs:
                job.cancelled.set()
                job.mailbox.put(0, ApiError(503, "the server is shutting down", kind="server_error"))
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if not job.cancelled.is_set():
                try:
                    self._answer(job)
                except ApiError as error:
                    job.cancelled.set()
                    job.mailbox.put(job.next, error)
                except Exception:  # whatever went wrong with one request must not end the server
                    log.exception("a generation failed")
                    job.cancelled.set()
                    job.mailbox.put(
                        job.next, ApiError(500, "the generation failed; see the server's log", kind="server_error")
                    )
            self._finish_turn(job)
            self.sessions.save_changed(older_than=SAVE_SECONDS)
        self.sessions.close()

    def _next(self) -> Job | None:
        """The next job, from each namespace in turn; saves while there is none. None when the server stops."""
        while True:
            with self._changed:
                if not self._closing and not any(self._queues.values()):
                    self._changed.wait(IDLE_SECONDS)
                if self._closing:
                    return None
                for namespace, queue in list(self._queues.items()):
                    if queue:
                        self._running = queue.popleft()
                        self._count_waiting()
                        return self._running
                    del self._queues[namespace]
            self.sessions.save_changed()

    def _finish_turn(self, job: Job) -> None:
        job.next += 1
        with self._changed:
            self._running = None
            if job.next < job.num_answers and not job.cancelled.is_set() and not self._closing:
                self._queues.setdefault(job.namespace, deque()).appendleft(job)
            if job.namespace in self._queues:  # only now: who came during the turn is served before it
                self._queues.move_to_end(job.namespace)
            self._count_waiting()

    def _answer(self, job: Job) -> None:
        """Generate the job's next answer."""
        index, options, prompt = job.next, job.options, job.prompts[job.next // job.n]
        entry = self.sessions.acquire(job.namespace, job.session or job.owners.get(index // job.n), prompt)
        job.owners[index // job.n] = entry.name
        self.metrics.sessions.set(len(self.sessions))
        answer = AnswerStream(
            self.rd.tokenizer, options.stops, eos_token_ids(self.rd.model.generation_config), options.tool_names,
            options.parallel_calls,
        )  # fmt: skip

        def send(delta: Delta) -> None:
            if job.first_token is None:
                job.first_token = time.perf_counter() - job.created
            job.mailbox.put(index, delta)

        try:
            stats = self._generate(job, entry, prompt, answer, send)
        finally:
            self.sessions.release(entry)
        if rest := answer.flush():
            send(rest)
        finished = Finished(
            answer.finish_reason(), entry.name, len(prompt), stats.num_cached_tokens, answer.num_tokens,
            stats.num_accepted_tokens_by_proposer[PREDICTION],
            stats.num_draft_tokens_by_proposer[PREDICTION] - stats.num_accepted_tokens_by_proposer[PREDICTION],
        )  # fmt: skip
        reason = "abort" if job.cancelled.is_set() else finished.reason
        self.metrics.count(stats, len(prompt), stats.num_cached_tokens, answer.num_tokens, reason)
        if index == job.num_answers - 1:
            self.metrics.time(job.first_token, time.perf_counter() - job.created)
        job.mailbox.put(index, finished)

    def _generate(self, job: Job, entry: Entry, prompt: Any, answer: AnswerStream, send: Any) -> DecodingStats:
        options = job.options
        if options.seed is None:
            torch.seed()  # else an unseeded request would follow from an earlier one's seed
        else:
            torch.manual_seed(options.seed + job.next % job.n)
        if options.prediction:
            entry.session.predict(options.prediction)
        scores = LastScores() if options.num_top_logprobs is not None else None
        watch = Watch(answer, job.cancelled, send, scores, options.num_top_logprobs or 0)
        room = self.max_context - len(prompt)
        arguments: dict[str, Any] = dict(options.sampling)
        if scores is not None:
            arguments["logits_processor"] = LogitsProcessorList([scores])
        input_ids = torch.from_numpy(prompt.astype(np.int64))[None].to(self.rd.model.device)
        entry.session.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=min(room, options.token_limit or room),
            stopping_criteria=StoppingCriteriaList([watch]),
            **arguments,
        )
        stats: DecodingStats = entry.session.stats
        return stats

    def _count_waiting(self) -> None:
        self.metrics.waiting.set(sum(len(queue) for queue in self._queues.values()))
        self.metrics.running.set(int(self._running is not None))
