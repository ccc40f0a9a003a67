"""Workload files, and prompts under chat templates of many tastes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from retrodraft.workloads import read_workload, render_prompt


@pytest.mark.parametrize(
    "line,message",
    [
        ("[1]", "expected an object"),
        ('{"id": 1}', "needs 'messages'"),
        ('{"messages": []}', "'id' is missing"),
        ('{"id": 1, "messages": "x"}', "'messages' must be a list"),
        ('{"id": 1, "messages": [{"content": "x"}]}', "message 0 needs a 'role'"),
        ('{"id": 1, "messages": [{"role": "user", "content": 3}]}', "'content' must be text"),
        ('{"id": 1, "messages": [{"role": "assistant", "content": "x"}]}', "no message before the answer"),
        ('{"question_id": 1, "turns": []}', "'turns' must be a list"),
        ('{"id": 0, "messages": [{"role": "user", "content": "x"}]}', "id '0' is used by a line above"),
        (r'{"id": 1, "messages": [{"role": "user", "content": "\ud83d"}]}', "half of a surrogate pair"),
    ],
)
def test_broken_workload_lines_are_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"id": 0, "messages": [{"role": "user", "content": "x"}]}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=f"w.jsonl line 3: .*{message}"):
        read_workload(path)


def test_workload_forms(workload: Path, tmp_path: Path, embedded: tuple[Any, Any]) -> None:
    """Both formats; answers dropped; an empty file refused; the chat template applied."""
    items = read_workload(workload)
    assert [item.id for item in items] == ["p0", "p1", "p2", "p3"] and len(items[0].messages) == 1
    spec = tmp_path / "spec.jsonl"
    spec.write_text('{"question_id": 81, "category": "writing", "turns": ["first", "second"]}\n')
    assert read_workload(spec)[0].messages == [{"role": "user", "content": "first"}]
    spec.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_workload(spec)
    _, tokenizer = embedded
    prompt = tokenizer.decode(render_prompt(tokenizer, [{"role": "tool", "content": "hello"}]))
    assert prompt.endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


def test_separators_inside_a_text(tmp_path: Path) -> None:
    """JSON allows characters that some readers of lines cut at."""
    path = tmp_path / "w.jsonl"
    text = "one\u2028two\u0085three"
    path.write_text('{"id": 1, "messages": [{"role": "user", "content": "' + text + '"}]}\n', encoding="utf-8")
    assert read_workload(path)[0].messages[0]["content"] == text


def test_not_text(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_bytes(b'{"id": 1, "messages": [{"role": "user", "content": "\xff"}]}\n')
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_workload(path)


IN_TURN = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('not in turn') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
CONVERSATION = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"},
    {"role": "tool", "content": "t"},
    {"role": "user", "content": "v"},
]


@pytest.mark.parametrize(
    "template,expected",
    [
        (None, "s\n\nu\n\na\n\nt\n\nv"),
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
            "<system>s<user>u<assistant>a<user>t<user>v",
        ),
        (IN_TURN, "<user>s\n\nu<assistant>a<user>t\n\nv<assistant>"),
    ],
)
def test_templates(template: str | None, expected: str, tiny_folder: Path) -> None:
    """None; one that takes what comes; one that knows no system role and wants turns."""
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = template
    assert tokenizer.decode(render_prompt(tokenizer, CONVERSATION)) == expected


def test_refused_prompts(tiny_folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_folder)
    with pytest.raises(ValueError, match="no tokens"):
        render_prompt(tokenizer, [{"role": "user", "content": ""}])
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(ValueError, match="refuses the messages: never"):
        render_prompt(tokenizer, CONVERSATION)
