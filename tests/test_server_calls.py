"""Tool calls: the forms that models write them in, templates that know tools or not, and a whole exchange over HTTP."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from serving import client, running
from test_server_text import pieces, together

from retrodraft import RetroDraft
from retrodraft.server.calls import CallSplitter, parse_calls
from retrodraft.server.prompts import Prompts
from retrodraft.server.streaming import AnswerStream

ARGUMENTS = {"path": "ä🙂.py"}
OBJECT = '{"name": "look", "arguments": {"path": "ä🙂.py"}}'
CALL = f"<tool_call>\n{OBJECT}\n</tool_call>"
LLAMA = OBJECT.replace("arguments", "parameters")
TOOLS: Any = [
    {"type": "function", "function": {"name": "look", "description": "Show a file.", "parameters": {"type": "object"}}}
]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "text,content,count",
    [
        (f"I look.\n\n{CALL}", "I look.", 1),
        (f"{CALL}\n{CALL}\n", "", 2),
        (CALL.removesuffix("</tool_call>"), "", 1),
        (f"<tool_call>[{OBJECT}, {OBJECT}]</tool_call>", "", 2),
        (f"[TOOL_CALLS] [{OBJECT}]", "", 1),
        (f"I look.[TOOL_CALLS][{OBJECT}, {OBJECT}]", "I look.", 2),
        ('[TOOL_CALLS]look[ARGS]{"path": "ä🙂.py"}[TOOL_CALLS]look[CALL_ID]a1b2[ARGS]{"path": "ä🙂.py"}', "", 2),
        (f" [{OBJECT}]", "", 1),
        (LLAMA, "", 1),
        (f"{LLAMA}; {LLAMA}", "", 2),
        (f"<|python_tag|>{LLAMA}", "", 1),
        (f'{{"type": "function", "function": {OBJECT}}}', "", 1),
        (CALL.replace("look", "unknown"), CALL.replace("look", "unknown"), 0),
        (f"broken <tool_call>{{nope</tool_call> {CALL} on", "broken <tool_call>{nope</tool_call> on", 1),
        ("no <tool_cal of any kind  ", "no <tool_cal of any kind  ", 0),
        ('{"json": "that is the answer"}', '{"json": "that is the answer"}', 0),
        (f"{LLAMA} and so on", f"{LLAMA} and so on", 0),
        ("[a link](there) and [1, 2]", "[a link](there) and [1, 2]", 0),
        ("[TOOL_CALLS] is what Mistral writes", "[TOOL_CALLS] is what Mistral writes", 0),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", 0),
        ("[" * 5000, "[" * 5000, 0),
    ],
)
def test_calls_in_pieces(text: str, content: str, count: int, seed: int) -> None:
    """Calls come out, everything else stays, however the text is cut."""
    splitter = CallSplitter({"look"}, parallel=True)
    parts = [splitter.push(piece) for piece in pieces(text, seed)] + [splitter.flush()]
    calls = [call for part in parts for call in part[1]]
    assert " ".join("".join(part[0] for part in parts).split()) == " ".join(content.split())
    assert [call["function"]["name"] for call in calls] == ["look"] * count == ["look"] * splitter.num_calls
    assert all(json.loads(call["function"]["arguments"]) == ARGUMENTS for call in calls)
    assert len({call["id"] for call in calls}) == count and all(len(call["id"]) == 9 for call in calls)
    alone = CallSplitter({"look"}, parallel=False)
    first = [alone.push(text), alone.flush()]
    assert sum(len(calls) for _, calls in first) == min(1, count)


def test_text_beside_calls_does_not_wait() -> None:
    """What can't begin a call is passed on at once."""
    splitter = CallSplitter({"look"}, parallel=True)
    assert splitter.push("One [link](x) and") == ("One [link](x) and", [])
    assert splitter.push(" a <") == (" a", [])
    assert splitter.push("b") == (" <b", [])
    text, calls = splitter.push(f" {CALL}")
    assert text == "" and len(calls) == 1
    assert CallSplitter({"look"}, True).push("[1]") == ("[1]", [])


def test_arguments_of_any_kind() -> None:
    assert parse_calls('{"name": "f"}') == [{"name": "f", "arguments": {}}]
    (call,) = CallSplitter({"f"}, True).push('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>')[1]
    assert call["function"]["arguments"] == '{"a": 1}'  # some models write them as a text
    for text in ("", " ", "[]", '"f"', '{"name": 3}', "[1]", "f[ARGS]", "f[ARGS]{", "nul", "[" * 100_000):
        assert parse_calls(text) is None, text[:20]


# How the chat templates of three families spell calls and results, without what they say to the model.
HERMES = (
    "{% for t in tools or [] %}<tools>{{ t | tojson }}</tools>{% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{{ m.content }}{% for c in m.tool_calls %}<tool_call>\n"
    '{ "arguments": {{ c.function.arguments | tojson }}, "name": "{{ c.function.name }}"}\n</tool_call> {% endfor %}'
    "{% elif m.role == 'tool' %}{% if m.name is not defined %}{{ raise_exception('a result needs a name') }}{% endif %}"
    '<tool_response>\n{"name": "{{ m.name }}", "content": {{ m.content | tojson }}}\n</tool_response>'
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{% for t in tools or [] %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{% for m in messages %}"
    "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls') }}"
    "{% endif %}{% set c = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|eot_id|>'
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ {'output': m.content} | tojson }}"
    "<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% if loop.last and tools %}[AVAILABLE_TOOLS] "
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]{% elif m.tool_calls is defined %}"
    "[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}"
    '{% endif %}{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ \', \' if not loop.last }}{% endfor %}]'
    "{{ eos_token }}{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids') }}"
    '{% endif %}[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
MARKS = {
    HERMES: ["<tool_call>", "</tool_call>"],
    LLAMA_3: ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"],
    MISTRAL: ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
}


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize(
    "template,end", [(HERMES, "<|im_end|>"), (LLAMA_3, "<|eot_id|>"), (MISTRAL, "<|im_end|>")],
    ids=["hermes", "llama", "mistral"],
)  # fmt: skip
def test_what_a_template_writes_is_read_back(embedded: Any, template: str, end: str, special: bool) -> None:
    """A call as the template spells it, fed as a model's tokens, comes out as it went in; then its result is taken."""
    tokenizer = copy.deepcopy(embedded[1])
    tokenizer.add_tokens(MARKS[template], special_tokens=special)
    prompts = Prompts(tokenizer, template)
    asked: Any = [{"role": "user", "content": "What is in ä🙂.py?"}]
    before = prompts.render(asked, TOOLS, {})
    assert json.dumps("Show a file.") in before
    function = {"name": "look", "arguments": ARGUMENTS}
    spoken = {"role": "assistant", "content": "", "tool_calls": [{"id": "a1b2c3d4e", "function": function}]}
    whole = prompts.tokenizer.apply_chat_template(
        [*asked, spoken], tools=TOOLS if template is not MISTRAL else None, tokenize=False
    )
    start = whole.rindex("[/INST]") + 7 if template is MISTRAL else len(before)
    ids = tokenizer(whole[start:].rpartition(end)[0], add_special_tokens=False).input_ids
    stream = AnswerStream(tokenizer, [], set(), {"look"})
    answer = together([stream.push(token) for token in ids] + [stream.flush()])
    assert answer.text.strip() == "" and stream.finish_reason() == "tool_calls"
    (call,) = answer.calls
    assert call["function"]["name"] == "look" and json.loads(call["function"]["arguments"]) == ARGUMENTS
    result = {"role": "tool", "tool_call_id": call["id"], "content": "print('here')"}
    history = [*asked, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    history = [{**message, "content": message["content"] or ""} for message in history]
    rendered = prompts.render(history, TOOLS, {})
    assert (
        "print(" in rendered and "ä🙂.py" in rendered.encode().decode("unicode_escape", "ignore") or "ä🙂" in rendered
    )
    results = {HERMES: '<tool_response>\n{"name": "look"', LLAMA_3: "ipython", MISTRAL: f'"call_id": "{call["id"]}"'}
    assert results[template] in rendered


def test_histories_that_a_template_refuses_keep_their_calls(embedded: Any) -> None:
    """Two calls in a message where the template takes one, foreign ids, empty lists of calls: all is shown as text."""
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "look", "arguments": f'{{"path": "{i}.py"}}'}}
        for i in range(2)
    ]
    history: Any = [
        {"role": "user", "content": "Look twice."},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": "zero"},
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
    ]
    for template in (LLAMA_3, MISTRAL):
        text = Prompts(embedded[1], template).render(history, TOOLS, {})
        for part in ('{"name": "look", "arguments": {"path": "1.py"}}', "zero", "one", "Show a file."):
            assert part in text, (template, part)
    plain: Any = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": []}]
    assert (
        Prompts(embedded[1], LLAMA_3)
        .render(plain, None, {})
        .endswith("\n\ny<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")
    )
    odd: Any = [{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": ["?"], "content": "y"}]
    assert "y" in Prompts(embedded[1], HERMES).render(odd, TOOLS, {})


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


@pytest.fixture(scope="module")
def caller(embedded: Any) -> Iterator[openai.OpenAI]:
    with running(RetroDraft(*embedded, budget=8, hot_start=False)) as url:
        yield client(url)


def shown(path: str, number: int, content: str) -> list[dict[str, Any]]:
    """An earlier exchange, from which the small model learns how to call."""
    call = {"name": "look", "arguments": json.dumps({"path": path})}
    calls = [{"id": f"shown{number:04d}", "type": "function", "function": call}]
    return [
        {"role": "user", "content": f"Read {path}"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": content},
        {"role": "assistant", "content": f"It says {content}"},
    ]


def test_a_call_and_its_result_over_http(caller: openai.OpenAI) -> None:
    """The model calls (streamed and not, the same), gets the result, and answers; each turn on the one before."""
    messages: Any = [m for i, name in enumerate("abc") for m in shown(f"{name}.py", i, f"print({i + 1})")]
    messages.append({"role": "user", "content": "Read d.py"})
    options: Any = dict(model="embedded", temperature=0, max_tokens=60, tools=TOOLS)
    whole = caller.chat.completions.create(messages=messages, **options)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "look"
    assert json.loads(call.function.arguments) == {"path": "d.py"}
    chunks = list(caller.chat.completions.create(messages=messages, stream=True, **options))
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert [(p.index, p.function.name, p.function.arguments) for p in parts] == [(0, "look", call.function.arguments)]
    assert not "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    messages.append(choice.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "print(4)"})
    after = caller.chat.completions.create(messages=messages, **options)
    assert after.choices[0].message.content == "It says print(4)" and after.choices[0].finish_reason == "stop"
    # The model's own form of the call is the template's, so its keys and values serve as well.
    assert (
        after.usage.prompt_tokens_details.cached_tokens >= whole.usage.prompt_tokens + whole.usage.completion_tokens - 1
    )
    refused = caller.chat.completions.create(messages=messages[:-2], tool_choice="none", **options)
    assert not refused.choices[0].message.tool_calls
