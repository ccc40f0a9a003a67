"""Sessions: calls that remember. Keys and values of a common prefix are kept; drafts come from all that was seen.

A coding agent calls the model with a history that grows, and most of what it emits repeats files, tool output and
earlier turns. A session keeps the longest common prefix of its cache and the new prompt (the rest is rolled back, also
when the client has edited or cut the history), so a turn feeds its new tokens alone. Where another session of the
namespace holds clearly more of the prompt (agents share a system prompt), it begins with a copy of that one's.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DynamicCache

from retrodraft.cache import DraftCache, cached_length
from retrodraft.compat import CACHE_ARG, CACHE_ARGS
from retrodraft.retro import RetroStrategy
from retrodraft.sessions.messages import checked_ids, checked_messages, checked_path, checked_text
from retrodraft.sessions.namespace import Namespace, joined_texts, load_saved
from retrodraft.sessions.prefix import common_prefix, keeps_cache, rotary_switch
from retrodraft.sessions.saved import SessionRecord, save_session
from retrodraft.stats import DecodingStats
from retrodraft.strategy import StrategyRow
from retrodraft.tree import Int32
from retrodraft.workloads import render_prompt

if TYPE_CHECKING:
    from retrodraft.decoder import RetroDraft
    from retrodraft.sessions.table import SessionTable

OVERLAP = 32  # tokens of a new text's context that are remembered with it
MAX_SAVED_TOKENS = 1 << 20  # newest tokens of a session that are saved
COPIED_FROM = 64  # so many more tokens of a prompt must another session's cache hold, to be copied


class Session:
    """One agent's trajectory on one model; made by `RetroDraft.session`. Calls from several threads take turns.

    with rd.session("fix-issue-17", store="sessions") as session:
        session.add_file("src/app.py")
        output = session.generate(messages, max_new_tokens=512)

    Leaving the `with` block saves the session, if it has a store.
    """

    def __init__(self, rd: RetroDraft, table: SessionTable, namespace: Namespace, name: str, store: Path | str | None):
        if rd.tokenizer is None:
            raise ValueError("a session needs the tokenizer: RetroDraft(model, tokenizer)")
        assert isinstance(rd.strategy, RetroStrategy)  # see `sessions.table`
        self.name, self.namespace, self.store = name, namespace, store
        self.turns = 0
        self.stats = DecodingStats()  # of the last call
        self.total_stats = DecodingStats()
        self.token_ids: Int32 = np.empty(0, np.int32)  # prompt and output of the last call; of its last row
        self.closed = False
        self._rd, self._table, self._strategy = rd, table, rd.strategy
        self._origin = table.origin(rd)
        self._texts: list[Int32] = []  # what this session gave to the namespace's memory, to be saved
        self._num_saved = 0  # tokens of these
        self._num_rows = 0  # sequences of the call that is running
        self._cache: DraftCache | None = None
        self._cached: Int32 = np.empty(0, np.int32)  # the tokens whose keys and values the cache holds
        self._cache_state: Any = None  # of the model that made them
        self._num_lent = 0  # tokens, from the first on, whose keys and values a caller was given and may still hold
        self._copied = 0  # tokens of the running call whose keys and values another session of the namespace had
        self._prediction: Int32 | None = None
        self._lock = threading.RLock()
        if store is not None:
            self._load(store)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens of the last call whose keys and values were there already."""
        return self.stats.num_cached_tokens

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that are kept for the next call."""
        return 0 if self._cache is None else self._cache.nbytes

    def generate(self, messages: Sequence[dict[str, Any]] | None = None, *, tools: Any = None, **kwargs: Any) -> Any:
        """`model.generate`, on this session.

        Args:
            messages: a chat, to which the tokenizer's template is applied; without it, `input_ids` and the like are
                passed as to `model.generate`.
            tools: as the chat template takes them.
            kwargs: of `model.generate`.

        Returns what `model.generate` returns. A returned cache may be gone on with: it shares the memory of the
        session's own, and neither changes what the other holds. (The session copies its keys and values if it has to
        write over what was returned: when the next prompt differs from this call's text before its end.)

        Raises ValueError if neither messages nor `input_ids` are given or are something else, and if a cache is passed:
        a session feeds on its own. Else what `model.generate` raises.
        """
        input_ids = kwargs.get("input_ids")
        if (messages is None) == (input_ids is None):
            raise ValueError("pass either messages (a list of dicts) or input_ids (as the tokenizer returns them)")
        for name in CACHE_ARGS:
            if kwargs.pop(name, None) is not None:  # a None would meet the session's own under another name
                raise ValueError(f"a session keeps the cache itself: leave {name} out, or call RetroDraft.generate")
        if messages is not None:
            if kwargs.get("attention_mask") is not None:
                raise ValueError("attention_mask goes with input_ids: leave it out where messages are passed")
            try:
                token_ids = render_prompt(self._rd.tokenizer, checked_messages(messages), tools)
            except TypeError as error:  # half a surrogate pair
                raise ValueError(f"the messages hold something that is no text: {error}") from error
            kwargs["input_ids"] = torch.tensor([token_ids], device=self._rd.model.device)
            kwargs["attention_mask"] = torch.ones_like(kwargs["input_ids"])
        else:
            checked_ids(input_ids, kwargs.get("attention_mask"))
        with self._lock:
            if self.closed:
                raise ValueError(f"session {self.name!r} is closed: RetroDraft.session gives a new one")
            self.namespace.refresh_files(self._tokenize, self._rd._lock)
            self._copied = 0
            self._rd.follow_model()
            if self._cache_state != self._rd.model_state:  # other weights make other keys and values
                self._cache, self._cached = None, np.empty(0, np.int32)
            cache = self._reusable(kwargs)
            if cache is not None:
                kwargs[CACHE_ARG] = cache
                self._cache = None  # whatever stops the call, half-written states are not kept
            output = self._decode(kwargs)
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            self._remember(sequences.cpu().to(torch.int32).numpy(), kwargs.get("attention_mask"), cache)
            if not isinstance(output, torch.Tensor) and isinstance(output.get(CACHE_ARG), DraftCache):
                output[CACHE_ARG] = self._lend(output[CACHE_ARG])
            return output

    def add_file(self, path: Path | str, text: str | None = None) -> None:
        """Draft from a file, in the forms that an agent writes it; `text` in place of what is on disk.

        A file on disk is read again when it changes. Raises ValueError if it can't be read, is binary or too long.
        """
        name = checked_path(path)
        self.namespace.workspace.add(name, text if text is None else checked_text(text, "the text of a file"))

    def add_folder(self, path: Path | str) -> None:
        """`add_file` for every text file below a folder, as its .gitignore allows."""
        self.namespace.workspace.add_folder(checked_path(path))

    def remove_file(self, path: Path | str) -> None:
        """Stop drafting from a file."""
        self.namespace.workspace.remove(checked_path(path))

    def observe(self, text: str) -> None:
        """Draft from a text from now on, for instance a tool's output that will enter the prompt."""
        with self._lock:
            self._add_text(np.array(self._tokenize(checked_text(text, "what was observed")), np.int32))

    def predict(self, text: str) -> None:
        """Draft the next call from an expected output (OpenAI's predicted outputs); the answer may differ anywhere.

        An empty text takes back what was predicted.
        """
        with self._lock:
            ids = self._tokenize(checked_text(text, "a prediction"))
            self._prediction = np.array(ids, np.int32) if ids else None

    def save(self) -> SessionRecord:
        """Write the session to its store, atomically; keys, values and files stay out. Raises ValueError without one.

        Raises IndexFormatError if the store holds this session of another model or tokenizer.
        """
        if self.store is None:
            raise ValueError("this session has no store: rd.session(name, store=folder)")
        with self._lock:
            calibration = self.namespace.calibration
            with self._rd._lock:
                counts = {"hits": calibration.hits.copy(), "trials": calibration.trials.copy()}
            arrays = {"texts": joined_texts(self._texts), "token_ids": self.token_ids, **counts}
            info = {
                "model_id": self._origin.model_id, "tokenizer_fingerprint": self._origin.fingerprint,
                "turns": self.turns,
            }  # fmt: skip
            record = save_session(self.store, self.namespace.name, self.name, arrays, info)
            self.namespace.saved(self.store, self.name)
            return record

    def release(self) -> None:
        """Drop the kept keys and values; the next call feeds its whole prompt. Nothing while a call is running."""
        if self._lock.acquire(blocking=False):
            try:
                self._cache, self._cached = None, np.empty(0, np.int32)
            finally:
                self._lock.release()

    def copied_cache(self, prompt: Int32) -> DraftCache | None:
        """A copy of the keys and values of the tokens that a prompt begins with, for another session of the namespace.

        None while a call is running, and where a sliding window has passed the place.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            kept = min(common_prefix(self._cached, prompt), len(prompt) - 1)
            if self._cache is None or kept < 1 or self._cache_state != self._rd.model_state:
                return None
            native = DynamicCache(config=self._rd.model.config.get_text_config(decoder=True))
            self._cache.export(native, [0], len(self._cached))
            if not any(native.is_sliding):  # a window's states end where the text does, and are copied whole
                for layer in (each for each in native.layers if each.is_initialized):
                    layer.keys, layer.values = layer.keys[:, :, :kept], layer.values[:, :, :kept]
            copied = DraftCache(native, 1)
            return copied if copied.rollback(kept) else None
        finally:
            self._lock.release()

    def close(self) -> None:
        """Save, if there is a store, and leave: the texts stay in the namespace, keys and values go."""
        with self._lock:
            if self.closed:
                return
            try:
                if self.store is not None:
                    self.save()
            finally:
                self.closed = True
                self._table.forget(self)
                self.release()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.close()
        except (OSError, ValueError) as failure:
            if error is None:
                raise
            warnings.warn(f"session {self.name!r} could not be saved: {failure}", stacklevel=2)  # not in error's place

    def new_rows(self, batch_size: int) -> list[StrategyRow]:
        """Drafting state for the sequences of a call; the decoder asks for it."""
        space = self.namespace
        with self._rd._lock:
            space.memory.readers += batch_size
            self._num_rows += batch_size
        return [
            self._strategy.row(space.memory, space.calibration, self._prediction, space.adjacency)
            for _ in range(batch_size)
        ]

    def attach(self, store: Path | str) -> None:
        """Give a session that has no store one, and the texts that were saved there. Raises ValueError if it has."""
        if self.store is None:
            with self._lock:
                self._load(store)
                self.store = store
        elif Path(self.store).expanduser().resolve() != Path(store).expanduser().resolve():
            raise ValueError(f"session {self.name!r} is open already, with the store {str(self.store)!r}")

    def _decode(self, kwargs: dict[str, Any]) -> Any:
        """`RetroDraft.generate` on this session's stores."""
        active = self._rd._active
        before = getattr(active, "session", None)  # a stopping criterion may have asked another session
        active.session, active.stats = self, DecodingStats()
        try:
            output = self._rd.generate(**kwargs)
            self.stats = active.stats
            return output
        finally:
            with self._rd._lock:
                self.namespace.memory.readers -= self._num_rows
                self._num_rows = 0
            active.session = before
            self._prediction = None

    def _reusable(self, kwargs: dict[str, Any]) -> DraftCache | None:
        """The cache, rolled back to what it shares with the prompt, or a copy of another session's that shares more.

        An empty one where nothing is shared; None for a call that can't use one.
        """
        if not keeps_cache(self._rd, kwargs):
            return None
        prompt = kwargs["input_ids"][0].cpu().to(torch.int32).numpy()
        kept = min(common_prefix(self._cached, prompt), len(prompt) - 1)  # the last token is fed, for its logits
        shared = {each: common_prefix(each._cached, prompt) for each in self._table.neighbours(self)}
        for other in sorted(shared, key=shared.__getitem__, reverse=True):
            if shared[other] < kept + COPIED_FROM:
                break
            if (copied := other.copied_cache(prompt)) is not None:
                self._copied, self._num_lent = copied.lengths[0], 0
                return copied
        if self._cache is not None and kept > 0:
            if kept < self._num_lent:
                _leave_buffers(self._cache)
                self._num_lent = 0
            if self._cache.rollback(kept):
                return self._cache
        self._num_lent = 0
        return DraftCache(DynamicCache(config=self._rd.model.config.get_text_config(decoder=True)), 1)

    def _lend(self, cache: DraftCache) -> DynamicCache:
        """What a call gives back of its cache: the same memory, which the session does not write over from now on."""
        lent = LentCache(config=self._rd.model.config.get_text_config(decoder=True))
        cache.export(lent, [0], cache.lengths[0])
        self._num_lent = max(self._num_lent, cache.lengths[0])
        return lent

    def _remember(self, sequences: Int32, mask: torch.Tensor | None, cache: DraftCache | None) -> None:
        """Take what a call brought: keys and values, the texts (each but what was known of it), the counts."""
        for index, row in enumerate(sequences):
            if len(sequences) > 1:
                row = _unpadded(row, None if mask is None else mask[index * len(mask) // len(sequences)])
            known = max(common_prefix(self.token_ids, row), self._copied)
            self._add_text(row[max(known - OVERLAP, 0) :])
            self.token_ids = row.copy()
        if cache is not None and cached_length(cache):
            held = cache.lengths[0]
            text_config = self._rd.model.config.get_text_config(decoder=True)
            # One less than the text where we decoded; else nothing was fed into it, and it still holds the prefix.
            if held < min(len(self.token_ids), rotary_switch(text_config)):
                self._cache, self._cached = cache, self.token_ids[:held]
                self._cache_state = self._rd.model_state
        self.total_stats = self.total_stats + self.stats
        self.turns += 1
        self._table.used(self)

    def _add_text(self, token_ids: Int32) -> None:
        """Give a text to the namespace's memory, and keep a copy to be saved."""
        if not len(token_ids):
            return
        with self._rd._lock:
            self.namespace.memory.add_text(token_ids)
        self._texts.append(token_ids[-MAX_SAVED_TOKENS:].copy())
        self._num_saved += len(self._texts[-1])
        while self._num_saved > MAX_SAVED_TOKENS:
            self._num_saved -= len(self._texts.pop(0))

    def _tokenize(self, text: str) -> list[int]:
        try:
            return list(self._rd.tokenizer(text, add_special_tokens=False).input_ids)
        except TypeError as error:  # the tokenizer's own words for half a surrogate pair
            raise ValueError(f"this is no text that can be tokenised: {text!r:.80}") from error

    def _load(self, store: Path | str) -> None:
        """Take what was saved, by this session and by others of the namespace."""
        saved = load_saved(store, self.namespace.name, self.name, self._origin)
        self.namespace.load(store, self.name, self._origin, self._rd._lock)
        if saved is not None:
            self._texts = saved.texts + self._texts
            if not self.turns:
                self.token_ids = saved.token_ids
            self.turns += saved.turns
            self._num_saved = sum(map(len, self._texts))


class LentCache(DynamicCache):
    """A cache over a session's memory. Whatever is done to it makes new tensors; but `reset` would write zeros."""

    def reset(self) -> None:
        """Empty the cache, in memory of its own."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        super().reset()


def _leave_buffers(cache: DraftCache) -> None:
    """Move a cache to memory of its own."""
    with torch.inference_mode(False):  # as ordinary tensors, which are written to outside of it as well
        for layer in cache.draft_layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()


def _unpadded(row: Int32, mask: torch.Tensor | None) -> Int32:
    """A row of several without its padding: that before the prompt, and what the rows are filled up with at the end."""
    start = 0 if mask is None or mask.dim() != 1 else int((mask == 0).sum())
    end = len(row)
    while end - start > 1 and row[end - 1] == row[end - 2]:
        end -= 1
    return row[start:end]
