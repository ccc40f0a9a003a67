"""The state of one `generate` call: its rows, its cache, and what is to be returned."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from retrodraft.budget import Budget
from retrodraft.cache import DraftCache, cached_length
from retrodraft.capabilities import Mode
from retrodraft.compat import CACHE_ARG, CACHE_ARGS, cache_arg, cache_in
from retrodraft.hidden_states import HeadStates
from retrodraft.outputs import Recorder, stacked
from retrodraft.snapshot import SnapshotVerifier
from retrodraft.stats import DecodingStats
from retrodraft.strategy import StrategyRow, TopLogits
from retrodraft.target import TargetModel
from retrodraft.tree import DraftTree, Int32
from retrodraft.verify import Acceptance, Chooser

FED_AT_ONCE = 32  # tokens a row of those that follow an ended row's text


class Row:
    """One sequence: its decisions, its strategy's state and its recorded outputs."""

    def __init__(self, chooser: Chooser, drafts: Any, recorder: Recorder, prompt: Int32, max_length: int) -> None:
        self.chooser, self.drafts, self.recorder, self.prompt = (chooser, drafts, recorder, prompt)
        self.max_length = max_length
        self.length = 0  # committed tokens in the cache, which is the position of the root
        self.root = -1  # the newest token; its keys and values are not in the cache yet
        self.finished = False

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.max_length - self.chooser.length


def _of_row(processors: Any, row: int, batch_size: int) -> Any:
    """The processors as one row needs them: a repetition penalty knows the padding of every row of the batch."""

    def padded(processor: Any) -> bool:
        ignored = getattr(processor, "prompt_ignore_length", None)
        return isinstance(ignored, torch.Tensor) and batch_size > 1 and len(ignored) == batch_size

    if not any(padded(processor) for processor in processors):
        return processors
    own = LogitsProcessorList()
    for processor in processors:
        if padded(processor):
            lengths = processor.prompt_ignore_length
            processor = copy.copy(processor)
            processor.prompt_ignore_length = lengths[row : row + 1]
        own.append(processor)
    return own


class Batch:
    """Rows that share target forwards; a batch of one is the usual case."""

    def __init__(
        self,
        target: TargetModel,
        mode: Mode,
        budget: Budget,
        drafts: list[StrategyRow],
        input_ids: torch.Tensor,  # integers [batch_size, prompt_length], left padded
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any,
        model_kwargs: dict[str, Any],
    ) -> None:
        input_ids = input_ids.long()  # as plain generate's are from the first new token on
        self._target, self._input_ids, self._config = (target, input_ids, generation_config)
        max_length = math.ceil(generation_config.max_length)  # it may be a float, or a tensor
        self.mode, self.budget = mode, budget
        self._streamer, self._model_kwargs = streamer, model_kwargs
        self._native = cache_in(model_kwargs)
        mask = model_kwargs.get("attention_mask")
        batch_size = input_ids.shape[0]
        self._pads: list[int] = [0] * batch_size if mask is None else (mask == 0).sum(-1).tolist()
        # Everything else the caller sent along to the model goes into every forward, as plain generate does it.
        skipped = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "inputs_embeds", "return_dict"}
        skipped |= set(CACHE_ARGS)
        self._forward_kwargs = {k: v for k, v in model_kwargs.items() if k not in skipped and v is not None}
        self._cache: DraftCache | None = None
        self._recurrent: SnapshotVerifier | None = None
        if mode == "snapshot":
            self._recurrent = SnapshotVerifier(target.model, self._native)
        else:
            self._cache = self._native if isinstance(self._native, DraftCache) else DraftCache(self._native, batch_size)
        self._prefix_mask = target.prefix_mask()
        # Inference mode is 3 % faster on small models, but its tensors are of no use to a caller who wants gradients.
        returns_states = generation_config.output_hidden_states or generation_config.output_attentions
        self._forward_mode = contextlib.nullcontext if returns_states else torch.inference_mode
        self._offset = 0  # query of the root in the last forward: behind what a recurrent model was fed again
        self.stats = DecodingStats()
        self.states: HeadStates | None = None  # where dense drafting or a harvest wants hidden states
        self.rows = [
            Row(
                Chooser(
                    input_ids[row : row + 1], _of_row(logits_processor, row, batch_size), stopping_criteria,
                    max_length,
                    generation_config.do_sample,
                    bool(generation_config.return_dict_in_generate and generation_config.output_scores), self._send,
                ),
                drafts[row],
                Recorder(generation_config, [getattr(layer, "sliding_window", None) for layer in self._native.layers]),
                input_ids[row, self._pads[row] if mask is not None and mask.shape == input_ids.shape else 0 :]
                .to("cpu", torch.int32).numpy(),
                max_length,
            )
            for row in range(batch_size)
        ]  # fmt: skip

    @property
    def unfinished(self) -> bool:
        """Whether a row still has tokens to emit."""
        return any(not row.finished for row in self.rows)

    def prefill(self) -> Any:
        """Feed what of the prompt is not cached, as plain generate would; returns the model's output."""
        kwargs = dict(self._model_kwargs)
        cached = cached_length(self._native)
        if self._cache is not None:
            kwargs[cache_arg(self._target.model)] = self._cache
            self._cache.stage(False)
        output = self._target.model._prefill(self._input_ids, self._config, kwargs, is_first_iteration=True)
        if self._cache is not None:
            self._cache.align(self._pads)
        self.stats.num_prompt_tokens = sum(len(row.prompt) for row in self.rows)
        self.stats.num_cached_tokens = cached * len(self.rows)
        for index, row in enumerate(self.rows):
            row.length = self._cache.lengths[index] if self._cache is not None else cached + self._input_ids.shape[1]
        return output

    def verify(self, trees: list[DraftTree], min_nodes: int, aligned: bool) -> Any:
        """One forward over every row's tree; returns the model's output."""
        if self._recurrent is not None:
            self._offset = len(self._recurrent.replay)
            return self._recurrent.forward(trees[0].token_ids.tolist(), **self._forward_kwargs)
        assert self._cache is not None
        with self._forward_mode():
            return self._target.verify(
                trees, self._cache, self._prefix_mask, min_nodes, aligned, **self._forward_kwargs
            )  # fmt: skip

    def logits(self, row: int, output: Any) -> torch.Tensor:
        """Raw logits [num_nodes, vocab_size] of a row's tree."""
        logits: torch.Tensor = output.logits[row, self._offset :]
        return logits

    def walk(self, index: int, tree: DraftTree, output: Any, top: TopLogits | None = None) -> Acceptance:
        """The target's decisions along a row's tree, whose `top_logits` may be known; empty for a finished row."""
        row = self.rows[index]
        if row.finished:
            return Acceptance()
        logits = self.logits(index, output)
        acceptance = row.chooser.walk(tree, logits, None if top is None else top.token_ids[:, 0])
        row.recorder.record(output, index, acceptance.path, self._offset)
        self._take(row, acceptance)
        return acceptance

    def walk_prefill(self, index: int, output: Any) -> tuple[DraftTree, Acceptance]:
        """The first token of a row: a walk over the prompt's last token alone."""
        row = self.rows[index]
        row.recorder.record_prefill(output, index)
        root = DraftTree.root_only(int(row.prompt[-1]) if len(row.prompt) else -1)
        acceptance = row.chooser.walk(root, output.logits[index, -1:])
        self._take(row, acceptance)
        return root, acceptance

    def commit(self, acceptances: list[Acceptance]) -> None:
        """Keep the keys and values of the visited nodes."""
        if self._recurrent is not None:
            self._recurrent.commit(len(acceptances[0].path))
        else:
            assert self._cache is not None
            self._cache.commit([acceptance.path for acceptance in acceptances])
        for row, acceptance in zip(self.rows, acceptances, strict=True):
            row.length += len(acceptance.path)

    def take_states(self, index: int, path: list[int]) -> None:
        """Give a row's dense drafting the state of the last visited node, and keep all of them for a harvest."""
        if self.states is not None:
            newest = self.states.take(index, [self._offset + node for node in path])
            dense = getattr(self.rows[index].drafts, "dense", None)
            if dense is not None:
                dense.state = newest

    def count(self, tree: DraftTree, acceptance: Acceptance, proposers: dict[int, str]) -> None:
        """Add a row's verified tree to the statistics."""
        stats = self.stats
        stats.num_row_forwards += 1
        stats.num_new_tokens += len(acceptance.token_ids)
        if len(tree) == 1:
            return
        accepted = acceptance.path[1:]
        stats.num_drafts += 1
        stats.num_draft_tokens += len(tree) - 1
        stats.num_accepted_tokens += len(accepted)
        stats.acceptance_histogram[len(accepted)] += 1
        for bit, name in proposers.items():
            proposed = (tree.sources & bit) > 0
            stats.num_draft_tokens_by_proposer[name] += int(proposed.sum())
            stats.num_accepted_tokens_by_proposer[name] += int(proposed[accepted].sum())

    def feed_ended_rows(self) -> None:
        """Feed the last token and the padding of rows that ended early, as plain `generate` does.

        Their keys and values are in its cache then, which the caller may go on with.
        """
        assert self._cache is not None
        sequences = self._sequences()
        waiting = [sequences[index, row.chooser.length - 1 : -1].tolist() for index, row in enumerate(self.rows)]
        while any(waiting):
            fed = [tokens[:FED_AT_ONCE] for tokens in waiting]
            waiting = [tokens[FED_AT_ONCE:] for tokens in waiting]
            self.verify([DraftTree.chain(tokens or [0]) for tokens in fed], 1, False)
            self._cache.commit([list(range(len(tokens))) for tokens in fed])
            self.stats.num_target_forwards += 1

    def _sequences(self) -> torch.Tensor:
        """Token ids int64 [batch_size, longest], padded behind."""
        longest = max(row.chooser.length for row in self.rows)
        pad = self._config._pad_token_tensor
        sequences = self._input_ids.new_full((len(self.rows), longest), 0 if pad is None else int(pad))
        for index, row in enumerate(self.rows):
            sequences[index, : row.chooser.length] = row.chooser.ids[0]
        return sequences

    def output(self) -> Any:
        """What `generate` returns: token ids, or an output object with everything that was asked for."""
        if self._streamer is not None:
            self._streamer.end()
        sequences = self._sequences()
        self._restore_cache()
        if not self._config.return_dict_in_generate:
            return sequences
        recorders = [row.recorder for row in self.rows]
        first = recorders[0]
        scores = [row.chooser.scores for row in self.rows if row.chooser.scores is not None]
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=stacked(scores) if scores else None,
            logits=stacked([r.logits for r in recorders if r.logits is not None]) if first.logits is not None else None,
            attentions=tuple(first.attentions) if first.attentions is not None else None,
            hidden_states=tuple(first.hidden_states) if first.hidden_states is not None else None,
            **{CACHE_ARG: self._native},
        )

    def _restore_cache(self) -> None:
        """Leave the caller's cache as plain generate would: every token but the last one."""
        if self._recurrent is not None:
            self._recurrent.flush()
        elif self._cache is not self._native:
            assert self._cache is not None
            total = max(length + pad for length, pad in zip(self._cache.lengths, self._pads, strict=True))
            self._cache.export(self._native, self._pads, total)

    def _take(self, row: Row, acceptance: Acceptance) -> None:
        row.root = acceptance.token_ids[-1]
        row.finished = acceptance.finished

    def _send(self, token: int) -> None:
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token], device="cpu"))
