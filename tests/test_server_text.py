"""Text deltas from token ids: characters and stop texts; templates that are particular about messages."""

from __future__ import annotations

import random
from typing import Any

import pytest
from test_surface import byte_tokenizer

from retrodraft.server.prompts import Prompts
from retrodraft.server.protocol import ApiError
from retrodraft.server.streaming import AnswerStream, Delta, StopText, TokenText, token_bytes


def pieces(text: str, seed: int) -> list[str]:
    """`text` cut at random places."""
    chooser, cut = random.Random(seed), []
    while text:
        size = chooser.randint(1, 9)
        cut.append(text[:size])
        text = text[size:]
    return cut


def together(deltas: list[Delta]) -> Delta:
    total = Delta()
    for delta in deltas:
        total.extend(delta)
    return total


@pytest.mark.parametrize("text", ["a🙂b🚀é́ \u200d👩\u200d👧", "plain", "\ufffd is a character", "ж" * 40])
def test_no_delta_has_half_a_character(text: str) -> None:
    """O10: one token a byte; what is cut off within a character is dropped."""
    tokenizer = byte_tokenizer()
    ids = tokenizer(text).input_ids
    for length in range(len(ids) + 1):
        stream = TokenText(tokenizer)
        deltas = [stream.push(token) for token in ids[:length]] + [stream.flush()]
        got = "".join(deltas)
        whole = text.encode()[:length].decode(errors="ignore")
        assert got == whole or got == whole.rstrip("\ufffd")
    assert b"".join(token_bytes(tokenizer, token) for token in ids) == text.encode()


def test_bytes_that_are_no_text_do_not_pile_up() -> None:
    tokenizer = byte_tokenizer()
    letter, broken = tokenizer("a").input_ids[0], tokenizer("🙂").input_ids[0]
    stream = TokenText(tokenizer)
    deltas = [stream.push(token) for token in [letter, *[broken] * 100, letter]]
    assert "".join(deltas) == "a" + "\ufffd" * 100 + "a" and sum(map(bool, deltas)) > 5


def test_texts_of_a_real_tokenizer(embedded: Any) -> None:
    tokenizer = embedded[1]
    text = "def f(x):\n    return {'é': x}  # 漢字 🙂🙂\n\n\tEnd."
    stream = TokenText(tokenizer)
    assert "".join(stream.push(token) for token in tokenizer(text).input_ids) + stream.flush() == text


@pytest.mark.parametrize("seed", range(20))
def test_stop_texts_in_pieces(seed: int) -> None:
    text, stops = "one\n\ntwo \n\nHuman: three", ["\n\nHuman:", "never"]
    stream = StopText(stops)
    got = "".join(stream.push(piece) for piece in pieces(text, seed)) + stream.flush()
    assert got == "one\n\ntwo " and stream.stopped
    stream = StopText(["\n\nHuman: threes"])
    assert "".join(stream.push(piece) for piece in pieces(text, seed)) + stream.flush() == text


def test_an_answers_end() -> None:
    """EOS is no text, and says that the answer is whole."""
    tokenizer = byte_tokenizer()
    ids = tokenizer("ab!").input_ids
    stream = AnswerStream(tokenizer, [], {ids[2]}, None)
    assert together([stream.push(token) for token in ids] + [stream.flush()]).text == "ab"
    assert stream.finish_reason() == "stop" and stream.num_tokens == 3
    stream = AnswerStream(tokenizer, [], {ids[2]}, None)
    stream.push(ids[0])
    assert stream.finish_reason() == "length"


def test_templates_that_are_particular(embedded: Any) -> None:
    """No system role, turns in order: the messages are merged; what is refused even so is the client's error."""
    template = (
        "{% for m in messages %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}"
    )
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "user")]
    assert Prompts(embedded[1], template).render(messages, None, {}) == "user:s\n\nu\n\nu;"
    with pytest.raises(ApiError, match="refuses the messages: roles must alternate"):
        Prompts(embedded[1], template).render([{"role": "assistant", "content": "x"}], None, {})
    with pytest.raises(ApiError, match="has no chat template"):
        Prompts(byte_tokenizer()).render(messages, None, {})


@pytest.mark.parametrize(
    "template",
    ["{{ 1 // (messages | length - 1) }}", "{{ range(999999) }}", "{{ level + 1 }}", "{{ messages[5].a.b }}"],
)
def test_templates_that_fail_are_the_requests_fault(embedded: Any, template: str) -> None:
    """Messages or variables that a template was not made for are refused; nothing of Python's gets out."""
    with pytest.raises(ApiError, match="the model's chat template refuses the messages: ") as caught:
        Prompts(embedded[1], template).chat([{"role": "user", "content": "x"}], None, {"level": "high"})
    assert caught.value.status == 400
