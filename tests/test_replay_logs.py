"""Logs for a replay: reading them, and their requests in tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replayed import said, write
from transformers import AutoTokenizer

from retrodraft.models import load_tokenizer
from retrodraft.replay.logs import log_files, read_log
from retrodraft.replay.tokens import Renderer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The embedded model's."""
    return load_tokenizer()


@pytest.mark.parametrize(
    "line,message",
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ('{"id": 1}', "needs 'messages', or a 'request'"),
        ('{"question_id": 1, "turns": ["x"]}', "needs 'messages', or a 'request'"),
        ('{"messages": []}', "must be a list of messages"),
        ('{"messages": [{"content": "x"}]}', "message 0 needs a 'role'"),
        ('{"messages": [{"role": "user", "content": 3}]}', "'content' must be text"),
        (r'{"messages": [{"role": "user", "content": "\ud83d"}]}', "half of a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": 1}]}]}', "a function with a 'name'"),
        (
            r'{"messages": [{"role": "a", "tool_calls": [{"name": "f", "arguments": {"x": "\ud83d"}}]}]}',
            "a tool call holds",
        ),
        ('{"request": {"messages": [{"role": "user", "content": "x"}]}}', "and a 'response' with 'choices'"),
        ('{"request": {"messages": [{"role": "user", "content": "x"}]}, "response": {}}', "or hold 'choices'"),
        ('{"request": {"prompt": 3}, "response": "x"}', "'prompt' must be a text"),
        ('{"prompt": "x", "response": {"choices": ["y"]}}', "or hold 'choices'"),
    ],
)
def test_broken_lines_are_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=f"log.jsonl line 3: .*{message}"):
        read_log(path)


def test_files_and_folders(tmp_path: Path) -> None:
    """Folders in name order, names told apart, nothing twice; what is missing is named."""
    for name in ("b/one.jsonl", "a/one.jsonl", "a/two.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, {"messages": [said("user", "x"), said("assistant", "y")]})
    (tmp_path / "a" / "notes.txt").write_text("x")
    found = log_files([tmp_path, tmp_path / "b" / "one.jsonl"])
    assert list(found) == [str(tmp_path / "a" / "one.jsonl"), "two", str(tmp_path / "b" / "one.jsonl")]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no .jsonl files"):
        log_files([tmp_path / "empty"])
    with pytest.raises(ValueError, match="there is no log .*absent"):
        log_files([tmp_path / "absent"])
    prompts = write(tmp_path / "prompts.jsonl", {"messages": [said("user", "x")]})
    with pytest.raises(ValueError, match="holds no answers"):
        read_log(prompts)
    prompts.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_log(prompts)


def test_messages_become_requests(tmp_path: Path) -> None:
    """Each assistant message that says something after a prompt is one; the task is what the record names."""
    messages = [
        said("assistant", "before any prompt"), said("user", "hi"), said("assistant", "one"), said("assistant", None),
        said("user", [{"type": "text", "text": "go "}, {"type": "image_url"}, {"type": "text", "text": "on"}]),
        said("assistant", "two"),
    ]  # fmt: skip
    path = tmp_path / "log.jsonl"
    write(path, {"id": 7, "category": "c", "messages": messages, "meta": {"task_id": 3}}, {"messages": messages[1:3]})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    first, second = read_log(path)
    assert (first.id, first.category, first.task, second.task) == ("7", "c", "3", "hi")
    assert [request.answer["content"] for request in first.requests] == ["one", "two"]
    assert len(first.requests[1].messages) == 5 and first.requests[1].messages[-1]["content"] == "go on"


def test_request_and_response_lines(tmp_path: Path) -> None:
    """OpenAI's and plain pairs; a request that repeats an earlier one with its answer continues the trajectory."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    asked = [said("system", "s"), said("user", "hi")]
    further = [
        *asked,
        said("assistant", None, tool_calls=[call], refusal=None),
        said("tool", "seen", tool_call_id="c1"),
    ]
    path = write(
        tmp_path / "log.jsonl",
        {
            "request": {"messages": asked},
            "response": {"choices": [{"message": said("assistant", "", tool_calls=[call])}]},
        },
        {"request": {"messages": [said("user", "other")]}, "response": "something"},
        {
            "request": {"body": {"messages": further}},
            "response": {"body": {"choices": [{"message": {"content": "A"}}]}},
        },
        {"prompt": "complete", "completion": "this"},
        {"messages": further, "choices": [{"text": "B"}, {"text": ""}]},
    )
    logs = read_log(path)
    answers = [[request.answer["content"] for request in item.requests] for item in logs]
    assert answers == [["", "A", "B"], ["something"], ["this"]]
    assert logs[0].requests[0].answer["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": 1}}


def test_a_request_goes_on_with_what_it_repeats_most_of(tmp_path: Path) -> None:
    """A question that was asked twice begins two trajectories; what follows the longer one belongs to it."""
    asked = [said("user", "q"), said("assistant", "a"), said("user", "r"), said("assistant", "b"), said("user", "s")]

    def line(count: int, answer: str) -> Any:
        return {
            "request": {"messages": asked[:count]},
            "response": {"choices": [{"message": said("assistant", answer)}]},
        }

    log = write(tmp_path / "log.jsonl", line(1, "a"), line(3, "b"), line(1, "a"), line(5, "c"))
    assert [[r.answer["content"] for r in each.requests] for each in read_log(log)] == [["a", "b", "c"], ["a"]]


def test_prompts_are_the_template_s(tmp_path: Path, tokenizer: Any) -> None:
    """Prompts grow in place and are what the template gives; answers end their turn; tools speak as users."""
    messages = [said("system", "Be brief."), said("user", "hi  there"), said("assistant", "one\n"), said("tool", "{}")]
    call = {"function": {"name": "look", "arguments": {"at": "é"}}}
    messages += [said("assistant", "I look.", tool_calls=[call]), said("user", "so?"), said("assistant", "fine")]
    (item,) = read_log(write(tmp_path / "log.jsonl", {"messages": messages}))
    turns = Renderer(tokenizer).turns(item)
    said_text = [tokenizer.decode(turn.answer) for turn in turns]
    look = 'I look.\n{"name": "look", "arguments": {"at": "é"}}'
    assert said_text == ["one\n<|im_end|>", look + "<|im_end|>", "fine<|im_end|>"]
    plain = [*messages[:3], said("user", "{}"), said("assistant", look), said("user", "so?")]
    expected = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(turns[-1].prompt) == expected
    assert all(np.shares_memory(turn.prompt, turns[-1].prompt) for turn in turns)  # not a copy for each turn


def test_templates_of_other_tastes(tmp_path: Path, tokenizer: Any, tiny_folder: Path) -> None:
    """One that takes tools, one that alters earlier answers, one that wants roles in turn, and none."""
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    record = {
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "messages": [said("user", "hi"), said("assistant", None, tool_calls=[call]), said("tool", " seen "),
                     said("assistant", "done "), said("user", "thanks"), said("assistant", "ok")],
    }  # fmt: skip
    (item,) = read_log(write(tmp_path / "log.jsonl", record))
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    other.chat_template = (
        "{% if tools %}{{ tools[0].function.name }}|{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}:"
        "{% if m.tool_calls %}CALL {{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments.at }}"
        "{% else %}{{ m.content | trim }}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    turns = Renderer(other).turns(item)
    assert [other.decode(turn.answer) for turn in turns] == ["CALL look 1<|im_end|>", "done <|im_end|>", "ok<|im_end|>"]
    assert other.decode(turns[-1].prompt) == (
        "look|<|im_start|>user:hi<|im_end|><|im_start|>assistant:CALL look 1<|im_end|><|im_start|>tool:seen<|im_end|>"
        "<|im_start|>assistant:done<|im_end|><|im_start|>user:thanks<|im_end|><|im_start|>assistant:"
    )
    other.chat_template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('in turn!') }}"
        "{% endif %}[{{ m.content }}]{% endfor %}"
    )
    (system,) = read_log(
        write(tmp_path / "log.jsonl", {"messages": [said("system", "S"), said("user", "U"), said("assistant", "A")]})
    )
    assert other.decode(Renderer(other).turns(system)[0].prompt) == "[S\n\nU]"
    other.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(ValueError, match="log.jsonl line 1: .*refuses"):
        Renderer(other).turns(system)
    bare = AutoTokenizer.from_pretrained(tiny_folder)
    turns = Renderer(bare).turns(item)
    assert bare.decode(turns[1].prompt) == 'hi\n\n{"name": "look", "arguments": {"at": 1}}\n\n seen \n\n'
    assert bare.decode(turns[1].answer) == "done "


def test_logged_logits_find_their_tokens(tmp_path: Path, tokenizer: Any) -> None:
    """Top tokens go to the positions that begin where they did; what is not one token here is left out."""
    content = "the ünïcode cat"
    ids = tokenizer(content, add_special_tokens=False).input_ids
    entries = []
    for token in ids:
        raw = tokenizer.backend_tokenizer.decoder.decode([tokenizer.convert_ids_to_tokens(token)])
        top = [{"token": " dog", "logprob": math.log(0.3)}, {"token": raw, "logprob": math.log(0.6)}]
        top.append({"token": "no single token, surely", "logprob": math.log(0.7)})
        entries.append({"token": raw, "top_logprobs": top})
    entries[1:-1] = [
        {"token": " ünïcode", "bytes": list(" ünïcode".encode()), "top_logprobs": entries[1]["top_logprobs"]}
    ]
    choice = {"message": said("assistant", content), "logprobs": {"content": entries}}
    record = {"request": {"messages": [said("user", "x")]}, "response": {"choices": [choice]}}
    (item,) = read_log(write(tmp_path / "log.jsonl", record))
    (turn,) = Renderer(tokenizer).turns(item)
    assert turn.top is not None and len(turn.top) == len(turn.answer) == len(ids) + 1
    known = np.flatnonzero(turn.top.token_ids[:, 0] >= 0).tolist()
    assert known == [0, 1, len(ids) - 1]
    dog = tokenizer(" dog", add_special_tokens=False).input_ids
    assert turn.top.token_ids[-2, :3].tolist() == [ids[-1], *dog, -1]
    assert turn.top.probs[-2, :2].tolist() == pytest.approx([0.6, 0.3])
    entries[0]["token"] = "another text"
    (item,) = read_log(write(tmp_path / "log.jsonl", record))
    assert Renderer(tokenizer).turns(item)[0].top is None
