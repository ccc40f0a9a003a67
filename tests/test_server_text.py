"""Text deltas from token ids: characters, stop texts, tool calls; prompts of templates that know tools or not."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from test_surface import byte_tokenizer

from retrodraft.server.prompts import Prompts
from retrodraft.server.protocol import ApiError
from retrodraft.server.streaming import AnswerStream, CallSplitter, Delta, StopText, TokenText, token_bytes

CALL = '<tool_call>\n{"name": "look", "arguments": {"path": "ä🙂.py"}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


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


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "text,content,names",
    [
        (f"I look.\n\n{CALL}", "I look.", ["look"]),
        (f"{CALL}\n{CALL}\n", "", ["look", "look"]),
        (CALL.removesuffix("</tool_call>"), "", ["look"]),
        ('{"name": "look", "parameters": {"path": "ä🙂.py"}}', "", ["look"]),
        (CALL.replace("look", "unknown"), CALL.replace("look", "unknown"), []),
        (f"broken <tool_call>{{nope</tool_call> {CALL} on", "broken <tool_call>{nope</tool_call> on", ["look"]),
        ("no <tool_cal of any kind  ", "no <tool_cal of any kind  ", []),
        ('{"json": "that is the answer"}', '{"json": "that is the answer"}', []),
    ],
)
def test_tool_calls_in_pieces(text: str, content: str, names: list[str], seed: int) -> None:
    """Calls come out, everything else stays, however the text is cut."""
    splitter = CallSplitter({"look"}, parallel=True)
    total = together([splitter.push(piece) for piece in pieces(text, seed)] + [splitter.flush()])
    assert " ".join(total.text.split()) == " ".join(content.split())
    assert [call["function"]["name"] for call in total.calls] == names
    assert all(json.loads(call["function"]["arguments"]) == {"path": "ä🙂.py"} for call in total.calls)
    assert len({call["id"] for call in total.calls}) == len(names)
    alone = CallSplitter({"look"}, parallel=False)
    assert len(together([alone.push(text), alone.flush()]).calls) == min(1, len(names))


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


def history() -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"path": "a.py"}'}}
    return [
        {"role": "user", "content": "What is in a.py?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "print(1)"},
    ]


def test_tools_reach_templates_that_know_none(embedded: Any) -> None:
    prompts = Prompts(embedded[1])
    text = prompts.render(history(), TOOLS, {})
    assert text.startswith("<|im_start|>system\n# Tools") and json.dumps(TOOLS[0]) in text
    assert '<tool_call>\n{"name": "look", "arguments": {"path": "a.py"}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\nprint(1)\n</tool_response><|im_end|>" in text
    with_system = prompts.render([{"role": "system", "content": "Be brief."}, *history()], TOOLS, {})
    assert with_system.startswith("<|im_start|>system\nBe brief.\n\n# Tools")


def test_tools_reach_templates_that_know_them(embedded: Any) -> None:
    template = (
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.role }}:"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.path }}{% endfor %};{% endfor %}"
    )
    prompts = Prompts(embedded[1], template)
    assert prompts.render(history(), TOOLS, {}) == "[look]user:What is in a.py?;assistant:a.py;tool:print(1);"
    assert embedded[1].chat_template != template


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
