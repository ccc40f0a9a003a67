"""What a generation did: counters, stage times and the rates derived from them.

Field names are vLLM's where it has them (`num_drafts`, `num_draft_tokens`, `num_accepted_tokens`,
`mean_acceptance_length`, `draft_acceptance_rate`). This module knows nothing of models and does no I/O.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class DecodingStats:
    """Counters of one `generate` call; add two with `+` for a cumulative record."""

    num_calls: int = 0
    num_prompt_tokens: int = 0  # tokens of the prompts, cached ones included
    num_cached_tokens: int = 0  # prompt tokens whose keys and values came from a passed-in cache
    num_new_tokens: int = 0  # tokens emitted, all rows
    num_target_forwards: int = 0  # prefill and verify forwards of the target, each once for the whole batch
    num_row_forwards: int = 0  # the same, counted once for each unfinished row
    num_drafts: int = 0  # verify steps of a row whose draft tree had at least one node
    num_draft_tokens: int = 0  # nodes verified, roots not counted
    num_accepted_tokens: int = 0  # draft tokens that the target agreed with
    acceptance_histogram: Counter[int] = field(default_factory=Counter)  # accepted draft tokens of a draft -> drafts
    num_draft_tokens_by_proposer: Counter[str] = field(default_factory=Counter)
    num_accepted_tokens_by_proposer: Counter[str] = field(default_factory=Counter)
    num_dense_queries: int = 0  # look-ups by hidden state; where a text matches well there is none
    dense_seconds: float = 0.0  # of these, within draft_seconds
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0  # candidates and tree building
    verify_seconds: float = 0.0  # target forwards over a tree (or over the root alone)
    commit_seconds: float = 0.0  # accept walk, KV rows, stores and calibration
    draft_us: list[float] = field(default_factory=list)  # drafting time of each step, microseconds: build + learn

    @property
    def tokens_per_forward(self) -> float:
        """New tokens of a row for each target forward it took part in; plain decoding is 1.0."""
        return self.num_new_tokens / self.num_row_forwards if self.num_row_forwards else 0.0

    @property
    def nodes_per_forward(self) -> float:
        """Draft nodes verified in a row's average target forward; the root is not counted."""
        return self.num_draft_tokens / self.num_row_forwards if self.num_row_forwards else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens gained by a draft, the bonus token included, as vLLM counts it."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of the verified draft nodes that were accepted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def draft_us_quantile(self, q: float) -> float:
        """Quantile `q` (0..1) of the drafting time of a step, in microseconds."""
        ordered = sorted(self.draft_us)
        return ordered[min(int(q * len(ordered)), len(ordered) - 1)] if ordered else 0.0

    def __add__(self, other: DecodingStats) -> DecodingStats:
        """The sum of two records; drafting times keep the latest 10,000 steps."""
        merged = {name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__}
        merged["draft_us"] = merged["draft_us"][-10_000:]
        return DecodingStats(**merged)

    def to_dict(self) -> dict[str, Any]:
        """Counters and rates as JSON-ready values; the list of single drafting times becomes two quantiles."""
        record: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "draft_us"}
        record["acceptance_histogram"] = {str(k): v for k, v in sorted(self.acceptance_histogram.items())}
        for name in ("num_draft_tokens_by_proposer", "num_accepted_tokens_by_proposer"):
            record[name] = dict(record[name])
        for name in ("tokens_per_forward", "nodes_per_forward", "mean_acceptance_length", "draft_acceptance_rate"):
            record[name] = getattr(self, name)
        record["draft_us_p50"], record["draft_us_p99"] = (self.draft_us_quantile(0.5), self.draft_us_quantile(0.99))
        return record

    def __str__(self) -> str:
        return (
            f"{self.num_new_tokens} tokens in {self.num_target_forwards} target forwards, "
            f"{self.tokens_per_forward:.2f} tokens per forward, {self.nodes_per_forward:.1f} draft nodes per forward, "
            f"{self.draft_acceptance_rate:.0%} accepted; prefill {self.prefill_seconds:.2f} s, "
            f"draft {self.draft_seconds:.3f} s, verify {self.verify_seconds:.2f} s, commit {self.commit_seconds:.3f} s"
        )
