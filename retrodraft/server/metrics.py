"""Prometheus metrics, under vLLM's names where it has them, so that its dashboards work."""

from __future__ import annotations

from collections import Counter as Counts

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from retrodraft.stats import DecodingStats

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)


class Metrics:
    """Counters of one served model."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model_name", *labels), registry=self.registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, ("model_name",), registry=self.registry, buckets=SECONDS)

        self._model = model
        self._drafts = counter("vllm:spec_decode_num_drafts", "Verified drafts.")
        self._draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._accepted_at = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted at a depth, 0 the first.", "position"
        )
        self._draft_by = counter(
            "retrodraft:spec_decode_num_draft_tokens_by_proposer", "Draft tokens verified.", "proposer"
        )
        self._accepted_by = counter(
            "retrodraft:spec_decode_num_accepted_tokens_by_proposer", "Draft tokens accepted.", "proposer"
        )
        self._forwards = counter("retrodraft:target_forwards", "Forwards of the target model, prefills included.")
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens, cached ones included.")
        self._cache_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the sessions' caches.")
        self._cache_hits = counter("vllm:prefix_cache_hits", "Prompt tokens whose keys and values were cached.")
        self._new_tokens = counter("vllm:generation_tokens", "Tokens emitted.")
        self._requests = counter("vllm:request_success", "Finished answers.", "finished_reason")
        self._failures = counter("retrodraft:request_failures", "Requests refused or failed.", "status")
        self._first_token = histogram("vllm:time_to_first_token_seconds", "From the request to its first token.")
        self._latency = histogram("vllm:e2e_request_latency_seconds", "From the request to its last token.")
        self.running = Gauge(
            "vllm:num_requests_running", "Requests being answered.", ("model_name",), registry=self.registry
        ).labels(model)
        self.waiting = Gauge(
            "vllm:num_requests_waiting", "Requests in the queue.", ("model_name",), registry=self.registry
        ).labels(model)
        self.sessions = Gauge(
            "retrodraft:num_sessions", "Sessions in memory.", ("model_name",), registry=self.registry
        ).labels(model)
        plain = (
            self._drafts, self._draft_tokens, self._accepted, self._forwards, self._prompt_tokens, self._cache_queries,
            self._cache_hits, self._new_tokens, self._first_token, self._latency,
        )  # fmt: skip
        for metric in plain:
            metric.labels(model)  # shown from the start, at 0

    def count(self, stats: DecodingStats, num_prompt: int, num_cached: int, num_new: int, reason: str) -> None:
        """Add one finished answer."""
        model = self._model
        self._drafts.labels(model).inc(stats.num_drafts)
        self._draft_tokens.labels(model).inc(stats.num_draft_tokens)
        self._accepted.labels(model).inc(stats.num_accepted_tokens)
        self._forwards.labels(model).inc(stats.num_target_forwards)
        for depth, number in accepted_at_depth(stats.acceptance_histogram).items():
            self._accepted_at.labels(model, str(depth)).inc(number)
        for name, number in stats.num_draft_tokens_by_proposer.items():
            self._draft_by.labels(model, name).inc(number)
        for name, number in stats.num_accepted_tokens_by_proposer.items():
            self._accepted_by.labels(model, name).inc(number)
        self._prompt_tokens.labels(model).inc(num_prompt)
        self._cache_queries.labels(model).inc(num_prompt)
        self._cache_hits.labels(model).inc(num_cached)
        self._new_tokens.labels(model).inc(num_new)
        self._requests.labels(model, reason).inc()

    def fail(self, status: int) -> None:
        """Count a request that was refused or failed."""
        self._failures.labels(self._model, str(status)).inc()

    def time(self, first_token: float | None, total: float) -> None:
        """Seconds from the request to its first and its last token."""
        if first_token is not None:
            self._first_token.labels(self._model).observe(first_token)
        self._latency.labels(self._model).observe(total)

    def text(self) -> bytes:
        """The exposition that `/metrics` serves."""
        return generate_latest(self.registry)


def accepted_at_depth(histogram: Counts[int]) -> Counts[int]:
    """Accepted tokens by depth, from how many drafts had how many accepted."""
    depths: Counts[int] = Counts()
    for accepted, drafts in histogram.items():
        for depth in range(accepted):
            depths[depth] += drafts
    return depths
