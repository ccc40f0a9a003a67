"""Replay recorded answers through the strategies, without a model: would drafting help this workload?

The text of the log is taken as what the target said. Every system drafts at each step, the drafts are walked as far as
the text agrees with them, and what a step would have cost is read off a cost curve. Systems keep what they learned from
request to request within one log file, which is one namespace, in the file's order; the next file begins anew.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from retrodraft.baselines.lookup import PromptLookup
from retrodraft.index.memory import MAX_BYTES, Memory
from retrodraft.replay.costs import Costs
from retrodraft.replay.logs import log_files, read_log
from retrodraft.replay.opened import OpenedTexts, Tokenize
from retrodraft.replay.tokens import Renderer, Turn
from retrodraft.retro import RetroStrategy
from retrodraft.sessions.prefix import common_prefix
from retrodraft.sessions.views import registered_views
from retrodraft.strategies import make_strategy
from retrodraft.strategy import TopLogits
from retrodraft.tree import DraftTree, Int32

if TYPE_CHECKING:
    from retrodraft.budget import Budget, CostCurve

BASELINES = ("prompt_lookup", "suffix", "goose", "token_recycling")
ABLATIONS = ("session:outputs", "session:own", "session:others")
VIEWS = ("views", *(f"views:{name}" for name, _ in registered_views()))
SYSTEMS = (*BASELINES, "request", "session", *ABLATIONS, *VIEWS)
HF_NGRAM, HF_TOKENS = 2, 10  # Hugging Face's defaults of prompt lookup
MAX_NODES = 1024
OVERLAP = 32  # tokens of a new text's context that are remembered with it, as sessions do
ROLE_TOKENS = 4  # before an answer, where only answers are remembered: the template's words for whose turn it is
NUM_PARTS = 10  # of a file, for the curve over trajectories
NOTES = {
    "prompt_lookup": f"prompt_lookup has Hugging Face's defaults: n-grams of at most {HF_NGRAM} tokens, "
    f"chains of {HF_TOKENS}. As in every system here, the prompt's forward holds no draft (Hugging Face's does).",
    "suffix": "suffix keeps the earlier answers of the file in its global tree, as its authors do.",
    "goose": "goose drafts its branches from the target's logits, which a replay sees only in logs with top_logprobs.",
    "token_recycling": "token_recycling drafts from the target's logits alone: a replay sees them only in logs with "
    "top_logprobs, and without them reports 1.0.",
    "request": "request is retro on the current request alone (cold): nothing is remembered but hit rates.",
    "session": "session is retro that remembers the file's earlier requests and answers (warm), in file order.",
    "session:outputs": "session:outputs remembers answers only.",
    "session:own": "session:own remembers the earlier requests of the same trajectory only.",
    "session:others": "session:others remembers finished trajectories only.",
    "views": "views is session that also takes the texts a trajectory was shown for opened files, in all their views.",
    **{name: f"{name} does so in this view alone." for name in VIEWS[1:]},
}


@dataclass
class Tally:
    """Counts of one system over some requests."""

    num_requests: int = 0
    num_tokens: int = 0  # emitted
    num_forwards: int = 0  # of the target, the prompt's included
    num_drafts: int = 0  # forwards over a tree with at least one node
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    plain_seconds: float = 0.0  # predicted time of plain decoding
    predicted_seconds: float = 0.0  # predicted time of the forwards, and the drafting as measured
    begin_seconds: float = 0.0  # taking in prompts and remembering requests; not part of `predicted_seconds`
    draft_us: array[float] = field(default_factory=lambda: array("f"))  # of each step: build and learn, CPU time
    proposed: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Add another's counts."""
        for name in self.__dataclass_fields__:
            value = getattr(other, name)
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            elif isinstance(value, array):
                self.draft_us.extend(value)
            else:
                setattr(self, name, getattr(self, name) + value)

    @property
    def tokens_per_forward(self) -> float:
        """Emitted tokens for each forward of the target; plain decoding is 1.0."""
        return self.num_tokens / self.num_forwards if self.num_forwards else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Rates and counts as JSON-ready values."""
        times = np.array(self.draft_us) if self.draft_us else np.zeros(1)
        return {
            "num_requests": self.num_requests, "num_tokens": self.num_tokens, "num_forwards": self.num_forwards,
            "tokens_per_forward": self.tokens_per_forward,
            "mean_acceptance_length": 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0),
            "nodes_per_forward": self.num_draft_tokens / max(self.num_forwards, 1),
            "draft_acceptance_rate": self.num_accepted_tokens / max(self.num_draft_tokens, 1),
            "draft_us_p50": float(np.quantile(times, 0.5)), "draft_us_p99": float(np.quantile(times, 0.99)),
            "begin_ms": 1e3 * self.begin_seconds / max(self.num_requests, 1),
            "predicted_speedup": self.plain_seconds / self.predicted_seconds if self.predicted_seconds else 1.0,
            "proposers": {
                name: {"proposed": count, "accepted": self.accepted[name]} for name, count in self.proposed.items()
            },
        }  # fmt: skip


class System:
    """One system on one log file; `tokenize` gives a text's ids to the systems that make views."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        costs: Costs,
        budget: Budget,
        room: int,
        max_bytes: int,
        tokenize: Tokenize | None = None,
    ) -> None:
        self.name, self._costs, self._budget, self._max_bytes = name, costs, budget, max_bytes
        self._room = room  # the most nodes of a tree
        self.strategy: Any
        if name in BASELINES:
            self.strategy = make_strategy(name, vocab_size)
            if name == "prompt_lookup":
                self.strategy = PromptLookup(vocab_size, max_ngram=HF_NGRAM, max_tokens=HF_TOKENS)
        else:
            self.strategy = RetroStrategy(vocab_size)
        self._memory = Memory(max_bytes) if name.startswith(("session", "views")) else None
        kind, _, part = name.partition(":")
        self._scope = part if kind == "session" else ""  # what of the history is remembered; empty for all
        self._view = part if kind == "views" else None  # what files are seen in; empty for all, None without files
        self._tokenize = tokenize

    def play(self, turns: Sequence[Turn]) -> list[Tally]:
        """Replay a trajectory; a tally for each of its requests."""
        if self._scope == "own":
            self._memory = Memory(self._max_bytes)
        tallies: list[Tally] = []
        held: list[Int32] = []
        last = np.empty(0, np.int32)
        opened = None
        if self._view is not None and self._tokenize is not None:
            opened = OpenedTexts(self._tokenize, self._view)
        for turn in turns:
            tally = Tally(num_requests=1)
            start = time.thread_time()
            if self._memory is not None and opened is not None:
                self._memory.set_files(opened.streams(turn.shown))
            row = self.strategy.row(self._memory) if self._memory is not None else self.strategy.row()
            self._begin(row, turn)
            tally.begin_seconds += time.thread_time() - start
            self._walk(row, turn, tally)
            start = time.thread_time()
            text = np.concatenate([turn.prompt, turn.answer])
            known = common_prefix(last, text)
            last, new = text, text[max(known - OVERLAP, 0) :]
            if self._scope == "outputs":
                new = text[max(len(turn.prompt) - ROLE_TOKENS, 0) :]
            if self._scope == "others":
                held.append(new)
            elif self._memory is not None:
                self._memory.add_text(new)
            tally.begin_seconds += time.thread_time() - start
            tallies.append(tally)
        if self._memory is not None:
            for text in held:
                self._memory.add_text(text)
        return tallies

    def _begin(self, row: Any, turn: Turn) -> None:
        top = self._top([0], np.zeros(1, np.int64), 1, turn)
        row.begin(turn.prompt, top)
        root = DraftTree.root_only(int(turn.prompt[-1]))
        row.commit(root, [0], turn.answer[:1], None)  # the prompt's forward gives the first token

    def _walk(self, row: Any, turn: Turn, tally: Tally) -> None:
        """Steps until the answer's last token."""
        answer = turn.answer
        tokens = answer.tolist()
        done, plain = 1, self._costs.seconds(len(turn.prompt))[0]
        seconds = plain_seconds = plain
        while done < len(answer):
            context_length = len(turn.prompt) + done - 1
            prices = self._budget.prices(context_length, self._room)
            start = time.thread_time()
            # Where the answer ends is not known beforehand, so a tree may reach beyond it.
            if len(prices) > 1:
                tree = row.draft(prices, len(prices) - 1, False)
            else:
                tree = DraftTree.root_only(tokens[done - 1])
            drafted = time.thread_time()
            path = accepted_path(tree, tokens, done)
            top = self._top(path, np.arange(done, done + len(path)), len(tree), turn)
            walked = time.thread_time()
            row.commit(tree, path, answer[done : done + len(path)], top)
            drafting = drafted - start + time.thread_time() - walked
            self._budget.learn(context_length, len(tree) - 1, len(path))
            costs = self._costs.seconds(context_length)
            seconds += costs[len(tree) - 1] + drafting
            plain_seconds += len(path) * costs[0]
            tally.draft_us.append(1e6 * drafting)
            self._count(tally, tree, path)
            done += len(path)
        tally.num_tokens += len(tokens)
        tally.num_forwards += 1  # the prompt's
        tally.predicted_seconds += seconds
        tally.plain_seconds += plain_seconds

    def _count(self, tally: Tally, tree: DraftTree, path: list[int]) -> None:
        tally.num_forwards += 1
        if len(tree) == 1:
            return
        tally.num_drafts += 1
        tally.num_draft_tokens += len(tree) - 1
        tally.num_accepted_tokens += len(path) - 1
        for bit, name in self.strategy.proposers.items():
            proposed = (tree.sources & bit) > 0
            tally.proposed[name] += int(proposed.sum())
            tally.accepted[name] += int(proposed[path[1:]].sum())

    def _top(self, path: list[int], places: npt.NDArray[np.int64], size: int, turn: Turn) -> TopLogits | None:
        """The log's logits at the visited nodes, `size` rows wide as the strategy takes them; None without any."""
        width = self.strategy.top_k
        if turn.top is None or not width:
            return None
        token_ids, probs = np.full((size, width), -1, np.int32), np.zeros((size, width), np.float32)
        shared = min(width, turn.top.token_ids.shape[1])
        token_ids[path, :shared] = turn.top.token_ids[places, :shared]
        probs[path, :shared] = turn.top.probs[places, :shared]
        return TopLogits(token_ids, probs)


def accepted_path(tree: DraftTree, answer: list[int], done: int) -> list[int]:
    """Nodes that the target visits, root first, if it says `answer` and has emitted `done` tokens of it."""
    token_ids, parents = tree.token_ids.tolist(), tree.parents.tolist()
    path = [0]
    for node in range(1, len(token_ids)):  # depth-first, so one pass finds every child of the path's end
        place = done + len(path) - 1
        if place >= len(answer) - 1:
            break  # the last token is emitted at the path's end
        if parents[node] == path[-1] and token_ids[node] == answer[place]:
            path.append(node)
    return path


@dataclass(frozen=True)
class Played:
    """A request as it was replayed, and what the figures are grouped by."""

    category: str
    retry: bool
    turn: int  # from 1, within the trajectory
    part: int  # from 0, of the file's trajectories
    tallies: dict[str, Tally]


def replay_logs(
    paths: Sequence[Path | str],
    tokenizer: Any,
    systems: Sequence[str],
    nodes: int | None,
    curve: CostCurve,
    limit: int = 0,
    max_bytes: int = MAX_BYTES,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> dict[str, Any]:
    """Replay logs and return `{"files": {name: {..., "systems": {system: figures}}}, ...}`; see docs/replay.md.

    Args:
        paths: .jsonl logs, or folders of them; see `logs.read_log` for the lines.
        nodes: draft nodes of a forward; None prices them by the curve, as `budget="auto"` does.
        curve: what forwards cost, for the predicted speed-up.
        limit: trajectories of each file, from its start; 0 takes all.
        max_bytes: of a session's memory.
        progress: is told the file's name, the requests done and their number.

    Raises ValueError for a log that can't be read; all logs are read before any is replayed.
    """
    from retrodraft.budget import Budget  # imports torch

    logs = {name: read_log(path)[: limit or None] for name, path in log_files(paths).items()}
    renderer = Renderer(tokenizer)
    room = curve.tree_sizes[-1] - 1 if nodes is None else nodes
    costs = Costs(curve, room)
    total, done = sum(len(item.requests) for log in logs.values() for item in log), 0

    def make(name: str) -> System:
        return System(name, len(tokenizer), costs, Budget(nodes, curve), room, max_bytes, renderer.ids)

    _warm_up(make, systems)
    results: dict[str, Any] = {}
    for file, log in logs.items():
        players = [make(name) for name in systems]
        played: list[Played] = []
        seen: set[str] = set()
        prompt_tokens = with_logits = 0
        for number, item in enumerate(log):
            progress(file, done, total)
            turns = renderer.turns(item)
            prompt_tokens += sum(len(turn.prompt) for turn in turns)
            with_logits += sum(turn.top is not None for turn in turns)
            columns = {player.name: player.play(turns) for player in players}
            played += [
                Played(
                    item.category, item.task in seen, index + 1, number * NUM_PARTS // len(log),
                    {name: tallies[index] for name, tallies in columns.items()},
                )
                for index in range(len(turns))
            ]  # fmt: skip
            seen.add(item.task)
            done += len(item.requests)
        results[file] = {
            "num_trajectories": len(log),
            "num_requests": len(played),
            "num_prompt_tokens": prompt_tokens,
            "num_requests_with_logits": with_logits,
            "systems": {name: _figures(played, name) for name in systems},
        }
        progress(file, done, total)
    means = {
        name: float(np.exp(np.mean([np.log(item["systems"][name]["tokens_per_forward"]) for item in results.values()])))
        for name in systems
    }
    return {"files": results, "geometric_mean_tokens_per_forward": means, "notes": [NOTES[name] for name in systems]}


def _warm_up(make: Callable[[str], System], systems: Iterable[str]) -> None:
    """Compile what the timings must not hold."""
    text = np.tile(np.arange(40, dtype=np.int32), 4)
    ids = np.tile(np.arange(2, dtype=np.int32), (120, 1))
    top = TopLogits(ids, np.full(ids.shape, 0.5, np.float32))
    for name in systems:
        system = make(name)
        for logits in (top, None):
            system.play([Turn(text, text[:120], logits)] * 2)


def _figures(played: list[Played], system: str) -> dict[str, Any]:
    """Figures of a system: all requests, and grouped."""

    def grouped(key: Callable[[Played], Any]) -> dict[Any, Tally]:
        groups: dict[Any, Tally] = {}
        for item in played:
            groups.setdefault(key(item), Tally()).add(item.tallies[system])
        return groups

    attempts = grouped(lambda item: item.retry)
    return {
        **grouped(lambda item: None)[None].as_dict(),
        "categories": {name: tally.as_dict() for name, tally in grouped(lambda item: item.category).items()},
        "first_attempts": attempts[False].as_dict() if False in attempts else None,
        "retries": attempts[True].as_dict() if True in attempts else None,
        "by_turn": [
            {"turn": turn, **_curve_point(tally)} for turn, tally in sorted(grouped(lambda item: item.turn).items())
        ],
        "by_position": [
            {"from": part / NUM_PARTS, "to": (part + 1) / NUM_PARTS, **_curve_point(tally)}
            for part, tally in sorted(grouped(lambda item: item.part).items())
        ],
    }


def _curve_point(tally: Tally) -> dict[str, Any]:
    return {
        "num_requests": tally.num_requests, "num_tokens": tally.num_tokens,
        "tokens_per_forward": tally.tokens_per_forward,
    }  # fmt: skip
