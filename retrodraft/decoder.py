"""`RetroDraft`: HF `generate`, with every target forward verifying a tree of drafted tokens.

`_step` is the straight line from context to committed tokens; everything it calls is a leaf.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from retrodraft.arguments import (
    check_filled,
    check_ids,
    check_prompt,
    check_tokenizer,
    checked_bytes,
    checked_count,
    checked_flag,
    checked_model,
    embedding_rows,
    opened_corpora,
    opened_dense,
)
from retrodraft.batch import Batch
from retrodraft.budget import MAX_NODES
from retrodraft.cache import fresh_cache
from retrodraft.capabilities import Capabilities
from retrodraft.compat import cache_of_caller, decoding_methods, streamer_of_caller
from retrodraft.delegation import reason_to_delegate
from retrodraft.enabling import generating_with
from retrodraft.hidden_states import HeadStates
from retrodraft.hot_start import hot_rows
from retrodraft.index.memory import Memory
from retrodraft.positions import check_context, depth_limit, node_limit
from retrodraft.retro import RetroStrategy
from retrodraft.sessions.table import SessionTable
from retrodraft.setups import Setup, Setups
from retrodraft.stats import DecodingStats
from retrodraft.strategies import make_strategy
from retrodraft.strategy import StrategyRow
from retrodraft.target import (
    HARVEST_LIMIT,
    PromptHarvest,
    top_logits,
    tree_hooks,
    weights_state,
)
from retrodraft.tree import DraftTree

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from retrodraft.harvest import Harvest
    from retrodraft.index.corpus import CorpusIndex
    from retrodraft.sessions.session import Session

REPRODUCIBLE_NODES = 15  # draft nodes of every forward when the shape must not vary and no budget is given


class RetroDraft:
    """Makes a Hugging Face causal language model generate in fewer forwards, with the same output.

    Args:
        model: any causal LM with `generate`; nothing in it is changed.
        tokenizer: used for `stop_strings` where a call does not pass one.
        strategy: "retro", or a published method in the same engine: "goose", "token_recycling", "suffix",
            "prompt_lookup".
        budget: draft nodes of a forward; "auto" prices them by the measured cost curve (`retrodraft.budget`).
        max_depth: longest draft in tokens; None leaves it to the strategy.
        corpora: indexes to draft from, opened or as folders that `retrodraft index build` made.
        dense: where no text matches well, also draft from what followed similar states of the model in the corpora, of
            which at least one needs keys for it (`retrodraft index dense build`, or `harvest`). Needs FAISS.
        max_kv_bytes: of the keys and values that all sessions keep between calls; the least recently used go first.
        hot_start: begin with what the model says after each single token: measured at a model's first use, for up to 20
            seconds, and kept on disk; `retrodraft profile` measures all tokens.
        reproducible: verify chains in one constant shape, so that in low precision the output does not depend on what
            was drafted, as far as the kernels allow. Needless in float32, where it is so anyway.

    Raises:
        UnsupportedModelError: `model` is not a causal language model.
        ValueError: an argument is out of range, or the tokenizer has more tokens than the model has rows.
        IndexFormatError: a corpus is damaged, or was built with another tokenizer, or its keys with another model.
        ImportError: `dense` is asked for, and FAISS is not installed.

    What is learned (adjacency rows, hit rates, the token rate) stays from call to call until `reset()`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        strategy: str = "retro",
        budget: int | str = "auto",
        max_depth: int | None = None,
        reproducible: bool = False,
        corpora: Sequence[CorpusIndex | Path | str] = (),
        dense: bool = False,
        max_kv_bytes: int = 4 << 30,
        hot_start: bool = True,
    ) -> None:
        self.model = checked_model(model)
        self.tokenizer = tokenizer
        self.vocab_size = embedding_rows(model)
        check_tokenizer(tokenizer, self.vocab_size)
        self._max_depth = checked_count("max_depth", max_depth, 1)
        fixed = None if budget == "auto" else checked_count("budget", budget, 0)
        if reproducible and fixed is None:
            fixed = REPRODUCIBLE_NODES
        self._reproducible = checked_flag("reproducible", reproducible)
        self._min_nodes = 1 + fixed if reproducible and fixed is not None else 1
        opened = opened_corpora(corpora, tokenizer, self.vocab_size)
        self._dense = opened_dense(opened, model) if dense else None
        self.strategy = make_strategy(strategy, self.vocab_size, opened, self._dense)
        self._setups = Setups(model)
        if (
            checked_flag("hot_start", hot_start)
            and isinstance(self.strategy, RetroStrategy)
            and self.capabilities.mode == "tree"
        ):
            self.strategy.adjacency.start_from(*hot_rows(model, tokenizer))
        self._fixed_budget = fixed
        self.model_state: Any = None  # the kind and the weights, as the last call found them
        self._view = _drafting_view(self)
        self._lock = threading.Lock()  # the learned state is shared by threads
        self._active = threading.local()  # .session whose call this thread is in, .stats of its last call
        self._sessions = SessionTable(checked_bytes("max_kv_bytes", max_kv_bytes))
        self._warned: set[str] = set()
        self.stats = DecodingStats()
        self.total_stats = DecodingStats()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`model.generate` with the same arguments, return value and output, in fewer target forwards.

        What cannot be drafted (beam search, a quantized cache, ...) runs as plain `generate`, with one warning.

        Raises:
            ValueError: as `model.generate`, where the prompt is no tensor of token ids, and where it is longer than the
                model's context window.
        """
        if self.tokenizer is not None and kwargs.get("tokenizer") is None:
            kwargs["tokenizer"] = self.tokenizer
        check_prompt(args[0] if args else kwargs.get("inputs", kwargs.get("input_ids")))
        return type(self.model).generate(self._view, *args, **kwargs)

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """The decoding loop in the form of HF's `custom_generate` callables: `generate(..., custom_generate=rd)`."""
        if model is not self.model and model is not self._view:
            raise ValueError("this RetroDraft was made for another model: wrap the one that generates")
        setup = self.follow_model()
        embedded = model_kwargs.get("inputs_embeds") is not None
        if not embedded:
            check_filled(input_ids)
        check_context(self.model.config.get_text_config(decoder=True), input_ids.shape[1])
        streamer = streamer if streamer is not None else streamer_of_caller()
        asked = generation_config.get_generation_mode()
        mode = decoding_methods().get(asked)
        if mode is None:  # plain `generate` refuses these as well
            raise ValueError(
                f"transformers has moved {asked.value} to custom_generate code: call model.generate with that"
            )
        if mode == "_sample":
            reason = reason_to_delegate(
                setup.capabilities, self.model, input_ids, generation_config, logits_processor,
                stopping_criteria, synced_gpus, streamer, model_kwargs,
            )  # fmt: skip
        else:
            reason = f"{mode.strip('_')} keeps several hypotheses or has a drafter of its own"
        if reason is None:
            if not embedded:
                check_ids(self.model, input_ids)
            return self._decode(
                setup, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
            )
        self._leave_to_plain(reason)
        self.stats = self._active.stats = DecodingStats()  # nothing was drafted
        fresh_cache(self.model, model_kwargs)
        plain = getattr(type(self.model), mode)
        return plain(
            self.model, input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
            generation_config=generation_config, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs,
        )  # fmt: skip

    @contextlib.contextmanager
    def enabled(self) -> Iterator[RetroDraft]:
        """Inside, plain `model.generate` drafts, and so does everything built on it (`pipeline`, agents)."""
        with generating_with(self.model, self.generate):
            yield self

    @property
    def capabilities(self) -> Capabilities:
        """The probe's verdict on the model, as it was at the last call."""
        return self._setups.newest.capabilities

    def follow_model(self) -> Setup:
        """Notice what was changed in the model since the last call: how it can be verified is probed again."""
        if embedding_rows(self.model) < self.vocab_size:
            raise ValueError("the model has fewer tokens than when it was wrapped: wrap it again, RetroDraft(model)")
        setup = self._setups.follow()
        self.model_state = setup.kind, weights_state(self.model)
        return setup

    def reset(self) -> None:
        """Forget everything learned from earlier calls, the cumulative statistics included."""
        with self._lock:
            self.strategy.reset()
            self._setups.reset()
            self.total_stats = DecodingStats()

    def session(self, name: str, namespace: str = "default", store: Path | str | None = None) -> Session:
        """A named session: its calls reuse the keys and values of earlier ones and draft from all that it saw.

        The same name in the same namespace gives the same session; see `retrodraft.sessions.session.Session`.

        Args:
            namespace: sessions of one namespace draft from each other's texts; namespaces share nothing.
            store: folder that sessions are saved in; what it holds of this namespace is loaded.

        Raises:
            ValueError: there is no tokenizer, the strategy is not "retro", or a name is empty or too long.
            IndexFormatError: the saved session is of another model or tokenizer, or damaged.
        """
        return self._sessions.session(self, name, namespace, store)

    def harvest(self, index: CorpusIndex | Path | str) -> AbstractContextManager[Harvest]:
        """Collect this thread's answers, and the model's states along them, for later drafting.

        Used as `with rd.harvest("answers.index"):` around calls of `generate`. At the block's end, and whenever 16,384
        states wait, the answers are added to the corpus in the folder `index` and to its dense index, which are made if
        need be; no forward is added. If the block raises, the answers that had finished are kept. To draft from them:
        `RetroDraft(model, tokenizer, corpora=["answers.index"], dense=True)`.

        Raises:
            ValueError: the folder can't be written, the model can't verify drafts, a harvest is running already; inside
                the block, a call that is left to plain `generate`; at its end, the folder holds another model's keys by
                then (the answers are kept).
            IndexFormatError: the corpus is damaged, or of another tokenizer or model.
            ImportError: FAISS is not installed.
        """
        from retrodraft.harvest import harvesting

        return harvesting(self, index)

    def _new_rows(self, batch_size: int) -> list[StrategyRow]:
        """A strategy's state for each new sequence of this thread's call."""
        session: Session | None = getattr(self._active, "session", None)
        if session is not None:
            return session.new_rows(batch_size)
        if batch_size > 1 and isinstance(self.strategy, RetroStrategy):
            memory = Memory()  # the rows draft from each other
            memory.readers = batch_size
            return [self.strategy.row(memory) for _ in range(batch_size)]
        return [self.strategy.row() for _ in range(batch_size)]

    def _decode(
        self,
        setup: Setup,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any,
        model_kwargs: dict[str, Any],
    ) -> Any:
        """Prefill, steps until every row has finished, output."""
        with self._lock:
            budget = setup.prepare_budget(self._fixed_budget)
        batch = Batch(
            setup.target, setup.capabilities.mode, budget, self._new_rows(input_ids.shape[0]), input_ids,
            logits_processor, stopping_criteria, generation_config, streamer, model_kwargs,
        )  # fmt: skip
        harvest: Harvest | None = getattr(self._active, "harvest", None)
        if harvest is not None or self._dense is not None:
            batch.states = HeadStates(self.model, len(batch.rows), keep=harvest is not None)
        listening = contextlib.nullcontext() if batch.states is None else batch.states.listening()
        with tree_hooks(), listening, self.model._optimize_model_for_decode():
            self._prefill(batch)
            while batch.unfinished:
                self._step(batch)
            if len(batch.rows) > 1 and (generation_config.return_dict_in_generate or cache_of_caller() is not None):
                batch.feed_ended_rows()
        if harvest is not None:
            harvest.add(batch)
        batch.stats.num_calls = 1
        with self._lock:
            self.stats = self._active.stats = batch.stats
            self.total_stats = self.total_stats + batch.stats
        return batch.output()

    def _prefill(self, batch: Batch) -> None:
        """Feed the prompt, harvest what the target says along it, and take the first token."""
        start = time.perf_counter()
        harvest = PromptHarvest(self.model)
        with harvest.listening() if self.strategy.top_k else contextlib.nullcontext():
            output = batch.prefill()
        for index, row in enumerate(batch.rows):
            count = harvest.worthwhile(row.remaining) if isinstance(self.strategy, RetroStrategy) else HARVEST_LIMIT
            top = harvest.read(index, min(len(row.prompt), count), self.strategy.top_k)
            root, acceptance = batch.walk_prefill(index, output)
            batch.take_states(index, [-1])
            with self._lock:
                row.drafts.begin(row.prompt, top)
                row.drafts.commit(root, acceptance.path, np.array(acceptance.token_ids, np.int32), None)
        batch.stats.num_target_forwards += 1
        batch.stats.num_row_forwards += len(batch.rows)
        batch.stats.num_new_tokens += len(batch.rows)
        batch.stats.prefill_seconds += time.perf_counter() - start

    def _step(self, batch: Batch) -> None:
        """One target forward: context -> candidates -> tree -> verify -> accept -> commit."""
        started = time.perf_counter()
        # 1. draft: each unfinished row proposes a tree below its newest token
        trees = [self._draft(row, batch) for row in batch.rows]
        drafted = time.perf_counter()
        # 2. verify: the target says what follows every node, in one forward
        output = batch.verify(trees, max(self._min_nodes, self._forward_size(batch, trees)), self._reproducible)
        top = [self._top(batch.logits(i, output), tree) for i, tree in enumerate(trees)]
        verified = time.perf_counter()
        # 3. accept: walk each tree as far as the target agrees; one more token comes with it
        acceptances = [batch.walk(i, tree, output, top[i]) for i, tree in enumerate(trees)]
        # 4. commit: keep the visited nodes' keys and values, forget the others
        batch.commit(acceptances)
        # 5. learn: stores, hit rates and the token rate take the outcome
        walked = time.perf_counter()
        for i, row in enumerate(batch.rows):
            if acceptances[i].token_ids:
                self._learn(row, trees[i], acceptances[i], top[i], batch)
                batch.take_states(i, acceptances[i].path)
        done = time.perf_counter()
        if self._dense is not None:
            with self._lock:
                queries, seconds = self._dense.end_step(done - started)
            batch.stats.num_dense_queries += queries
            batch.stats.dense_seconds += seconds
        batch.stats.num_target_forwards += 1
        batch.stats.draft_seconds += drafted - started
        batch.stats.verify_seconds += verified - drafted
        batch.stats.commit_seconds += done - verified
        batch.stats.draft_us.append(1e6 * (drafted - started + done - walked))

    def _draft(self, row: Any, batch: Batch) -> DraftTree:
        """The row's next tree, no larger than its budget, its remaining tokens and the model's positions allow."""
        if row.finished:
            return DraftTree.root_only(0)
        config = self.model.config.get_text_config(decoder=True)
        depth = min(row.remaining - 1, depth_limit(config, row.length), self._max_depth or MAX_NODES)
        room = min(node_limit(config, row.length), MAX_NODES if self._fixed_budget is None else self._fixed_budget)
        with self._lock:
            prices = batch.budget.prices(row.length, room)
            if depth < 1 or len(prices) < 2:
                return DraftTree.root_only(row.root)
            return row.drafts.draft(prices, depth, batch.mode != "tree" or self._reproducible)

    def _forward_size(self, batch: Batch, trees: list[DraftTree]) -> int:
        """Tokens a row in the forward over these trees; more than they have where that is measured to be faster."""
        size = max(len(tree) for tree in trees)
        if len(trees) > 1 or batch.mode != "tree":
            return size  # the cost curve is one of single rows
        room = node_limit(self.model.config.get_text_config(decoder=True), batch.rows[0].length)
        return min(batch.budget.forward_size(batch.rows[0].length, size), max(size, room))

    def _learn(self, row: Any, tree: DraftTree, acceptance: Any, top: Any, batch: Batch) -> None:
        """Tell the strategy and the budget what came of a tree, and count it."""
        with self._lock:
            row.drafts.commit(tree, acceptance.path, np.array(acceptance.token_ids, np.int32), top)
            batch.budget.learn(row.length, len(tree) - 1, len(acceptance.token_ids))
        batch.count(tree, acceptance, self.strategy.proposers)

    def _top(self, logits: torch.Tensor, tree: DraftTree) -> Any:
        return top_logits(logits[: len(tree)], self.strategy.top_k) if self.strategy.top_k else None

    def _leave_to_plain(self, reason: str) -> None:
        """Warn once of each reason; raise ValueError inside a harvest."""
        if getattr(self._active, "harvest", None) is not None:
            raise ValueError(f"a harvest can't take a call that is left to plain generate: {reason}")
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"retrodraft leaves this call to plain generate: {reason}", stacklevel=4)


def _drafting_view(rd: RetroDraft) -> Any:
    """The same model object seen through a subclass whose sampling loop is ours.

    `generate` looks its loop up on the class and hands it everything, streamer and tokenizer included, which it keeps
    from a `custom_generate` callable. The view shares the model's attributes; the model itself stays as it is.
    """
    base = type(rd.model)

    def _sample(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return rd(rd.model, input_ids, **kwargs)

    def leave(name: str) -> Any:
        def delegate(self: Any, *args: Any, **kwargs: Any) -> Any:
            rd._leave_to_plain(f"{name.strip('_')} keeps several hypotheses or has a drafter of its own")
            fresh_cache(rd.model, kwargs)
            return getattr(base, name)(rd.model, *args, **kwargs)

        return delegate

    others = {name: leave(name) for name in set(decoding_methods().values()) - {"_sample"}}
    view_class = type(base.__name__, (base,), {"_sample": _sample, **others, "__module__": base.__module__})
    view: Any = object.__new__(view_class)
    view.__dict__ = rd.model.__dict__
    return view
