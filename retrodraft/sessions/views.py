"""Emission views: the forms in which an agent writes out a file that it has read.

A model that edits `x.py` through a tool call writes its lines JSON-escaped; in a patch every line has a sign before it.
Such text gives other tokens than the file does, so drafts from the file alone break off at every line. A view is a
function from a file's text to one such form, which is then tokenised and drafted from like any text. Views are only
guesses: one that never matches costs time, never a wrong token.

    >>> [name for name, _ in views("if x:\\n    y()\\n")][:4]
    ['raw', 'json', 'search_replace', 'diff_context']
    >>> dict(views("if x:\\n    y()\\n"))["json_diff_added"]
    '+if x:\\\\n+    y()\\\\n'
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

View = Callable[[str], str | None]  # None: the text has no such form

UNIT = "    "  # one step of indentation
# All that is known ahead of a search/replace block: its text is that of the raw view, and where it ends is not known.
SEARCH_REPLACE = "```\n<<<<<<< SEARCH\n\n=======\n\n>>>>>>> REPLACE\n```\n\n"


def views(text: str) -> Iterator[tuple[str, str]]:
    """`(name, form)` of a text, in the order of `registered_views`; empty forms and repeats of earlier ones are left
    out.

    Raises:
        ValueError: a registered function failed, or gave neither valid text nor None; names the view.
    """
    seen: set[str] = set()
    for name, view in registered_views():
        form = apply_view(name, view, text)
        if form and form not in seen:
            seen.add(form)
            yield name, form


def apply_view(name: str, view: View, text: str) -> str | None:
    """What a view makes of a text; raises ValueError as `views` does."""
    try:
        form = view(text)
    except Exception as error:
        raise ValueError(f"view {name!r} failed: {type(error).__name__}: {error}") from error
    if form is not None and not isinstance(form, str):
        raise ValueError(f"view {name!r} must give text or None, got {type(form).__name__}")
    try:
        (form or "").encode()
    except UnicodeEncodeError:
        raise ValueError(f"view {name!r} gave half of a surrogate pair, which can't be tokenised") from None
    return form


def registered_views() -> tuple[tuple[str, View], ...]:
    """All views, the likeliest to match first; those of `register_view` come last."""
    return tuple(_views.items())


def register_view(name: str, function: View) -> None:
    """Add a form of this process's agents: `function` maps a file's text to it, or to None where there is none.

    Raises:
        ValueError: the name is taken or empty, or `function` can't be called.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"a view needs a name, got {name!r}")
    if not callable(function):
        raise ValueError(f"view {name!r} must be a function from text to text, got {type(function).__name__}")
    if name in _views:
        raise ValueError(f"view {name!r} is registered already; take it away with unregister_view first")
    _views[name] = function


def unregister_view(name: str) -> View:
    """Take a view away, also one of the built-in ones, and return its function; raises ValueError for unknown names."""
    if name not in _views:
        raise ValueError(f"no view is named {name!r}; there are {', '.join(_views)}")
    return _views.pop(name)


def _raw(text: str) -> str:
    return text


def _lf(text: str) -> str:
    """Models write LF, whatever the file has; every form but the raw one is made from this."""
    return text.replace("\r\n", "\n")


def _json(text: str) -> str:
    """As inside a JSON string, ASCII only: what most tool-call formats and templates write."""
    return json.dumps(_lf(text))[1:-1]


def _json_unicode(text: str) -> str:
    return json.dumps(_lf(text), ensure_ascii=False)[1:-1]


def _search_replace(text: str) -> str:
    return SEARCH_REPLACE


def _each_line(text: str, change: Callable[[int, str], str]) -> str:
    """Change every line, given its number from 1; a final line end stays the end."""
    lines = _lf(text).split("\n")
    last = lines.pop()
    changed = [change(number, line) for number, line in enumerate(lines, 1)]
    changed.append(change(len(lines) + 1, last) if last else "")
    return "\n".join(changed)


def _prefixed(sign: str) -> View:
    """Lines of a unified diff."""
    return lambda text: _each_line(text, lambda _, line: sign + line)


def _indented(text: str) -> str:
    unit = _unit(text)
    return _each_line(text, lambda _, line: unit + line if line else line)


def _dedented(text: str) -> str:
    unit = _unit(text)
    return _each_line(text, lambda _, line: line.removeprefix(unit))


def _unit(text: str) -> str:
    """What this file indents by."""
    return "\t" if text.count("\n\t") > text.count("\n" + UNIT) else UNIT


def _tabs(text: str) -> str:
    def change(_: int, line: str) -> str:
        body = line.lstrip(" ")
        blanks = len(line) - len(body)
        return "\t" * (blanks // len(UNIT)) + line[len(line) - len(body) - blanks % len(UNIT) :]

    return _each_line(text, change)


def _spaces(text: str) -> str:
    def change(_: int, line: str) -> str:
        body = line.lstrip("\t")
        return UNIT * (len(line) - len(body)) + body

    return _each_line(text, change)


def _numbered_tab(text: str) -> str:
    """As `cat -n` prints it."""
    return _each_line(text, lambda number, line: f"{number:6}\t{line}")


def _numbered_bar(text: str) -> str:
    return _each_line(text, lambda number, line: f"{number}|{line}")


def _after_json(view: View) -> View:
    """A form inside a JSON string, as a patch is in a tool call."""
    return lambda text: _json(view(text) or "")


_views: dict[str, View] = {
    "raw": _raw,
    "lf": _lf,
    "json": _json,
    "json_unicode": _json_unicode,
    "search_replace": _search_replace,
    "diff_context": _prefixed(" "),
    "diff_added": _prefixed("+"),
    "diff_removed": _prefixed("-"),
    "indented": _indented,
    "dedented": _dedented,
    "tabs": _tabs,
    "spaces": _spaces,
    "json_diff_context": _after_json(_prefixed(" ")),
    "json_diff_added": _after_json(_prefixed("+")),
    "json_diff_removed": _after_json(_prefixed("-")),
    "numbered_tab": _numbered_tab,
    "numbered_bar": _numbered_bar,
}
