"""Hot start: what the model says after each single token, measured once, so that no token begins without a row.

Token Recycling (2408.08696) may begin with the rows of an earlier run; here they come from the model itself, so they
suit it and need no text. The tokens are verified as siblings at the place where an answer begins, some hundreds in a
forward. Rows are kept in the cache folder by configuration and weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from retrodraft.arguments import embedding_rows
from retrodraft.cache import DraftCache
from retrodraft.compat import cache_arg
from retrodraft.folders import cache_folder, keep
from retrodraft.kernels.adjacency import WIDTH
from retrodraft.models import model_id
from retrodraft.target import TargetModel, evaluating, top_logits, tree_hooks
from retrodraft.tree import DraftTree, Int32
from retrodraft.workloads import render_prompt

SIBLINGS = 256  # tokens in one forward
SECONDS = 20.0  # that a first use may take; tokens of low id, the frequent ones, come first
MAX_PREFIX = 64  # tokens of the prompt's end that are kept
SAMPLED_ROWS = 64  # of the embedding, that tell weights apart

Rows = tuple[Int32, npt.NDArray[np.float32]]  # ids and probabilities [num_tokens, WIDTH], for token ids 0, 1 …


def hot_rows(
    model: Any, tokenizer: Any = None, seconds: float = SECONDS, progress: Callable[[int, int], None] | None = None
) -> Rows:
    """The model's rows: the stored ones, else measured now, for as many tokens as `seconds` allow, and stored.

    Needs a model that verifies trees. O(vocabulary) forwarded tokens, once.

    Args:
        tokenizer: its chat template says how an answer begins.
        seconds: inf measures all that is missing, also where some rows are stored.
        progress: called with the number of tokens done and of all.
    """
    prefix = _answer_begin(model, tokenizer)
    path = cache_folder() / f"rows-{_key(model, prefix)}.npz"
    vocab_size = embedding_rows(model)
    rows = _stored(path, vocab_size)
    if rows is None or (math.isinf(seconds) and len(rows[0]) < vocab_size):
        rows = _measured(model, prefix, rows, vocab_size, seconds, progress)
        content = io.BytesIO()
        np.savez(content, ids=rows[0], probs=rows[1])
        keep(path, content.getvalue())
    return rows


def _answer_begin(model: Any, tokenizer: Any) -> list[int]:
    """Tokens before the first one of an answer, at least two."""
    if getattr(tokenizer, "chat_template", None):
        with contextlib.suppress(ValueError):
            prompt = render_prompt(tokenizer, [{"role": "user", "content": ""}])[-MAX_PREFIX:]
            if len(prompt) > 1:
                return prompt
    begin = model.config.get_text_config(decoder=True).bos_token_id
    return [begin if isinstance(begin, int) else 0] * 2


def _measured(
    model: Any,
    prefix: list[int],
    known: Rows | None,
    vocab_size: int,
    seconds: float,
    progress: Callable[[int, int], None] | None,
) -> Rows:
    """`known` and the rows of the tokens after them."""
    target = TargetModel(model)
    ids, probs = ([known[0]], [known[1]]) if known is not None else ([], [])
    first = len(known[0]) if known is not None else 0
    started = time.perf_counter()
    with evaluating(model), torch.inference_mode(), tree_hooks():
        cache = DraftCache(DynamicCache(config=model.config.get_text_config(decoder=True)), 1)
        begin = torch.tensor([prefix[:-1]], device=model.device)
        model(input_ids=begin, use_cache=True, **{cache_arg(model): cache})
        while first < vocab_size and (not ids or time.perf_counter() - started < seconds):
            count = min(SIBLINGS, vocab_size - first)
            tree = DraftTree.from_nodes(prefix[-1], range(first, first + count), [0] * count)
            top = top_logits(target.verify([tree], cache).logits[0, 1:], WIDTH)
            ids.append(top.token_ids)
            probs.append(top.probs)
            first += count
            if progress is not None:
                progress(first, vocab_size)
    return np.concatenate(ids), np.concatenate(probs)


def _stored(path: Path, vocab_size: int) -> Rows | None:
    """What lies there, or None where it is absent, damaged or of another version: it is measured anew."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            ids, probs = np.asarray(stored["ids"]), np.asarray(stored["probs"])
    except Exception:  # damage in a zip file comes as one of a dozen errors
        return None
    if ids.dtype != np.int32 or probs.dtype != np.float32 or ids.shape[1:] != (WIDTH,) or probs.shape != ids.shape:
        return None
    sound = 0 < len(ids) <= vocab_size and 0 <= ids.min() <= ids.max() < vocab_size and np.isfinite(probs).all()
    return (ids, probs) if sound else None


def _key(model: Any, prefix: list[int]) -> str:
    """Architecture, prefix and a sample of the weights, as a short hash; the same in every dtype."""
    embedding = model.get_input_embeddings().weight.detach()
    sample = embedding[:: max(len(embedding) // SAMPLED_ROWS, 1)].to("cpu", torch.bfloat16).float().numpy()
    return hashlib.sha256(repr((model_id(model), prefix, WIDTH)).encode() + sample.tobytes()).hexdigest()[:16]
