"""Emission views: what each makes of a text, and the registry."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrodraft.sessions.views import SEARCH_REPLACE, register_view, registered_views, unregister_view, views

CODE = 'def f(x):\n    if x > 1:\n        return "a\\n"\n\n    return {"k": x}\n'


@pytest.fixture
def registry() -> Iterator[None]:
    """Put the views back as they were, in their order."""
    before = registered_views()
    yield
    for name, _ in registered_views():
        unregister_view(name)
    for name, view in before:
        register_view(name, view)


def forms(text: str) -> dict[str, str]:
    return dict(views(text))


def test_json_forms_are_what_tool_calls_hold() -> None:
    """The arguments of a tool call, encoded by json itself, contain the views literally."""
    text = "print(\"naïve → 😀\")\n\tx = '\\d+'\n"
    made = forms(text)
    assert made["json"] in json.dumps({"path": "x.py", "content": text})
    assert made["json_unicode"] in json.dumps({"content": text}, ensure_ascii=False)
    assert "\\ud83d" in made["json"] and "😀" in made["json_unicode"]
    assert "json_unicode" not in forms(CODE)  # equal to json where all is ASCII
    patch = "".join(f"+{line}\n" for line in text.splitlines())
    assert made["json_diff_added"] in json.dumps({"patch": patch})


def test_diff_forms_are_what_difflib_writes() -> None:
    lines = CODE.splitlines(keepends=True)
    made = forms(CODE)
    new = "".join(list(difflib.unified_diff([], lines))[3:])
    old = "".join(list(difflib.unified_diff(lines, []))[3:])
    around = "".join(list(difflib.unified_diff(lines, [*lines, "end\n"], n=99))[3:-1])
    assert (made["diff_added"], made["diff_removed"], made["diff_context"]) == (new, old, around)


def test_numbered_forms() -> None:
    made = forms("a\n\n  b")
    assert made["numbered_tab"] == "     1\ta\n     2\t\n     3\t  b"  # as `cat -n`
    assert made["numbered_bar"] == "1|a\n2|\n3|  b"
    long = dict(registered_views())["numbered_tab"]("x\n" * 1_000_000)
    assert long and long.endswith("999999\tx\n1000000\tx\n")


def test_search_replace_is_only_the_markers() -> None:
    """One form for all texts: what stands between the markers is the raw view's."""
    assert forms(CODE)["search_replace"] == forms("other\n")["search_replace"] == SEARCH_REPLACE
    assert [line for line in SEARCH_REPLACE.split("\n") if line] == [
        "```", "<<<<<<< SEARCH", "=======", ">>>>>>> REPLACE", "```",
    ]  # fmt: skip


def test_indentation() -> None:
    made = forms("a:\n    b:\n      c\n\n        d\n")
    assert made["indented"] == "    a:\n        b:\n          c\n\n            d\n"
    assert made["dedented"] == "a:\nb:\n  c\n\n    d\n"
    assert made["tabs"] == "a:\n\tb:\n\t  c\n\n\t\td\n"
    assert "spaces" not in made
    tabbed = forms("a:\n\tb:\n\t\tc = 'x\ty'\n")
    assert tabbed["spaces"] == "a:\n    b:\n        c = 'x\ty'\n"
    assert tabbed["indented"] == "\ta:\n\t\tb:\n\t\t\tc = 'x\ty'\n"
    assert tabbed["dedented"] == "a:\nb:\n\tc = 'x\ty'\n"
    assert "tabs" not in tabbed


def test_crlf_is_kept_in_the_raw_form_only() -> None:
    """O18: models write LF."""
    made = forms("a\r\n    b\r\n")
    assert made["raw"] == "a\r\n    b\r\n" and made["lf"] == "a\n    b\n"
    assert not any("\r" in form or "\\r" in form for name, form in made.items() if name != "raw")
    assert "\r" in forms("a\rb\n")["diff_added"]  # a lone CR is no line end
    assert "lf" not in forms("a\n    b\n")


@pytest.mark.parametrize("text", ["", "\n", "x", "x\n", "\n\n", "\ufeff", " " * 5, "\t", "a\u2028b\x0cc\x85d\n"])
def test_odd_texts(text: str) -> None:
    made = forms(text)
    assert set(made) <= {name for name, _ in registered_views()}
    assert made.get("raw", "") == text
    if text.strip("\n"):
        assert made["diff_added"].count("+") == 1  # other separators of Unicode are no line ends
    assert all(made.values())


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
def test_no_form_twice_and_all_can_be_undone(text: str) -> None:
    made = list(views(text))
    assert len({form for _, form in made}) == len(made)
    by_name = dict(made)
    lf = text.replace("\r\n", "\n")
    for name in ("json", "json_unicode"):
        if name in by_name:
            assert json.loads(f'"{by_name[name]}"') == lf
    if "diff_added" in by_name:
        lines = by_name["diff_added"].split("\n")
        assert "\n".join(line[1:] for line in lines) == lf


@pytest.mark.usefixtures("registry")
def test_own_views() -> None:
    register_view("quoted", lambda text: text.replace("\n", "\n> ") if "\n" in text else None)
    register_view("twin", lambda text: text)
    assert forms("a\nb")["quoted"] == "a\n> b"
    assert "quoted" not in forms("a") and "twin" not in forms("a\nb")
    assert list(forms("a\nb"))[-1] == "quoted"
    with pytest.raises(ValueError, match="'quoted' is registered already"):
        register_view("quoted", lambda text: text)
    unregister_view("quoted")("a\nb")
    unregister_view("raw")
    assert forms("a\r\nb")["twin"] == "a\r\nb"  # no longer a repeat
    with pytest.raises(ValueError, match="no view is named 'quoted'; there are lf, json"):
        unregister_view("quoted")


@pytest.mark.usefixtures("registry")
def test_views_that_fail_are_named() -> None:
    register_view("broken", lambda text: str(1 / 0))
    with pytest.raises(ValueError, match="'broken' failed: ZeroDivisionError"):
        forms("a")
    unregister_view("broken")
    register_view("bytes", lambda text: text.encode())  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="'bytes' must give text or None, got bytes"):
        forms("a")
    unregister_view("bytes")
    register_view("half", lambda text: text + "\ud83d")
    with pytest.raises(ValueError, match="'half' gave half of a surrogate pair"):
        forms("a")
    for name, function in (("", len), (None, len), ("x", "y")):
        with pytest.raises(ValueError, match="view"):
            register_view(name, function)  # type: ignore[arg-type]
