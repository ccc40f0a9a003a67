"""What a session is given: names, stores, messages, token ids, texts and paths; each mistake is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chats import GREEDY, drafting
from tiny import random_prompt, tiny_llama

from retrodraft import RetroDraft
from retrodraft.compat import CACHE_ARGS


def test_names_and_arguments_are_checked() -> None:
    model = tiny_llama()
    rd = drafting(model)
    for name in ("", "x" * 201, None, 3):
        with pytest.raises(ValueError, match="name has 1 to 200 characters"):
            rd.session(name)  # type: ignore[arg-type]
    for store in (5, "", __file__):
        with pytest.raises(ValueError, match="store .*must be a folder"):
            rd.session("a", store=store)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokenizer"):
        RetroDraft(model, budget=4).session("a")
    with pytest.raises(ValueError, match="retro"):
        drafting(model, strategy="suffix").session("a")
    session = rd.session("a")
    ids = random_prompt(5)
    for arguments in ({}, {"messages": [{"role": "user", "content": "x"}], "input_ids": ids}):
        with pytest.raises(ValueError, match="either messages"):
            session.generate(**arguments)
    for wrong in ([[1, 2]], ids[0], ids.numpy()):
        with pytest.raises(ValueError, match="must be a tensor"):
            session.generate(input_ids=wrong)
    for name in CACHE_ARGS:
        with pytest.raises(ValueError, match=f"keeps the cache itself: leave {name} out"):
            session.generate(input_ids=ids, **{name: object()})
    with pytest.raises(ValueError, match="no messages"):
        session.generate([])
    with pytest.raises(ValueError, match="no text"):
        session.generate([{"role": "user", "content": "half \ud800"}])
    for wrong in ("\ud800", None, 5, b"text", ["a", "b"]):
        with pytest.raises(ValueError, match="no text that can be|must be a text .str., got "):
            session.observe(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no text that can be|must be a text .str., got "):
            session.predict(wrong)  # type: ignore[arg-type]
    for path in (None, 5, b"x.py", ""):
        for method in (session.add_file, session.add_folder, session.remove_file):
            with pytest.raises(ValueError, match="a path must be a text"):
                method(path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="text of a file must be a text .str., got bytes: decode"):
        session.add_file("x.py", b"x")  # type: ignore[arg-type]
    assert session.turns == 0 and rd.session("a") is session
    assert not session.namespace.workspace.paths and session._prediction is None


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"messages": "hello"}, "messages must be a list of dicts .*'hello'"),
        ({"messages": {"role": "user", "content": "x"}}, "messages must be a list of dicts"),
        ({"messages": torch.ones(1, 3)}, "token ids go into input_ids="),
        ({"messages": 5}, "messages must be a list"),
        ({"messages": ["hello"]}, "message 0 must be a dict with a 'role'"),
        ({"messages": [{"role": "user"}]}, "message 0 .user. needs a 'content' that is text; there is none"),
        ({"messages": [{"role": "user", "content": None}]}, "needs a 'content' that is text; got NoneType"),
        ({"messages": [{"role": "user", "content": b"x"}]}, "needs a 'content' that is text; got bytes"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 0 holds a part that is no text"),
        ({"messages": [{"role": "user", "content": "x"}], "attention_mask": torch.ones(1, 3)}, "leave it out"),
        ({"input_ids": torch.ones(1, 0).long()}, "must hold a token at least, got shape .1, 0."),
        ({"input_ids": torch.ones(0, 3).long()}, "must hold a token at least"),
        ({"input_ids": torch.ones(1, 3)}, "must be whole numbers .int64., got torch.float32"),
        ({"input_ids": torch.ones(1, 3).long(), "attention_mask": [[1, 1, 1]]}, "attention_mask must be .*got list"),
        ({"input_ids": torch.ones(1, 3).long(), "attention_mask": torch.ones(1, 2)}, "mask must be .*got .1, 2."),
    ],
)
def test_what_a_call_is_given_is_checked(arguments: dict[str, Any], message: str) -> None:
    session = drafting(tiny_llama(), hot_start=False).session("a")
    with pytest.raises(ValueError, match=message):
        session.generate(**arguments, max_new_tokens=2)
    assert session.turns == 0


def test_contents_of_agents() -> None:
    """An assistant that only calls tools says nothing, and parts of text are a text."""
    session = drafting(tiny_llama()).session("a")
    called = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    ask, result = {"role": "user", "content": "go"}, {"role": "tool", "content": "done"}
    silent = [ask, {"role": "assistant", "content": "", "tool_calls": called}, result]
    expected = session.generate(silent, max_new_tokens=5, **GREEDY)
    for said in ({"content": None}, {}):
        messages = [ask, {"role": "assistant", "tool_calls": called, **said}, result]
        assert torch.equal(session.generate(messages, max_new_tokens=5, **GREEDY), expected)
    parts = [{"role": "user", "content": [{"type": "text", "text": "g"}, {"type": "text", "text": "o"}]}, *silent[1:]]
    assert torch.equal(session.generate(parts, max_new_tokens=5, **GREEDY), expected)
    assert called == [{"type": "function", "function": {"name": "f", "arguments": {}}}] and "content" in parts[0]
