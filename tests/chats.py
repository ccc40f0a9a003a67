"""What tests of sessions share: a tokenizer of letters, turns, and what was drafted in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tiny import VOCAB, looking_on
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from retrodraft import RetroDraft

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}<assistant>"


def letters() -> Any:
    """A tokenizer with an id for each printable character, 2 to 96, which is as many as the tiny models know."""
    vocab = {"?pad": 0, "?bos": 1, **{chr(32 + i): 2 + i for i in range(VOCAB - 2)}}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="?bos"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def drafting(model: Any, **options: Any) -> RetroDraft:
    return RetroDraft(model, letters(), **{"budget": 12, **options})


@contextmanager
def fed(model: Any) -> Iterator[list[int]]:
    """The number of tokens of each forward."""
    lengths: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        lengths.append(kwargs["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(looking_on(note), with_kwargs=True)
    try:
        yield lengths
    finally:
        handle.remove()


def plain(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(7)
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)


def turn(session: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    torch.manual_seed(7)
    return session.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)


GREEDY = dict(do_sample=False)
PRINTABLE = dict(do_sample=False, suppress_tokens=[0, 1])  # the output can be read as text, and tokenised again


def answered(model: Any, ids: torch.Tensor, count: int = 30) -> str:
    """What the model will say, as text."""
    return letters().decode(plain(model, ids, max_new_tokens=count, **PRINTABLE)[0, ids.shape[1] :])


def drafts(session: Any) -> dict[str, tuple[int, int]]:
    """Drafted and accepted tokens of the last call by proposer."""
    stats = session.stats
    names = ("session", "workspace", "prediction")
    return {
        name: (stats.num_draft_tokens_by_proposer[name], stats.num_accepted_tokens_by_proposer[name]) for name in names
    }


def ask(session: Any, ids: torch.Tensor, count: int = 30) -> dict[str, tuple[int, int]]:
    """A call; its output is right, and these are its drafts."""
    assert torch.equal(
        turn(session, ids, max_new_tokens=count, **PRINTABLE),
        plain(session._rd.model, ids, max_new_tokens=count, **PRINTABLE),
    )
    return drafts(session)
