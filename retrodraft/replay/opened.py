"""Texts that an agent was shown, as opened files in their emission views: what each view is worth to a replay.

A log does not say which files were opened, so what tools and users said stands for them; line numbers that a tool
printed before the lines are taken away.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from retrodraft.sessions.namespace import MAX_FILE_TOKENS
from retrodraft.sessions.views import views
from retrodraft.tree import Int32

NUMBER = re.compile(r"^ *\d+(?:\t|\||: ?)", re.MULTILINE)  # as `cat -n`, `nl -ba` and agents' own tools print them
Tokenize = Callable[[str], list[int]]


def without_line_numbers(text: str) -> str:
    """A text as it lies in its file, where at least half of its lines are numbered.

    >>> without_line_numbers("     1\\tif x:\\n     2\\t    y()")
    'if x:\\n    y()'
    """
    if 2 * len(NUMBER.findall(text)) < text.count("\n") + 1:
        return text
    return NUMBER.sub("", text)


class OpenedTexts:
    """Token ids of the views of one trajectory's texts, each tokenised once.

    Args:
        only: the one view to make; empty for all.
    """

    def __init__(self, tokenize: Tokenize, only: str) -> None:
        self._tokenize, self._only = tokenize, only
        self._forms: dict[str, list[Int32]] = {}  # by text
        self._seen: set[str] = set()

    def streams(self, texts: Sequence[str]) -> list[Int32]:
        """Of all texts so far and of these, the same arrays at every call; as many as a workspace may hold."""
        for text in texts:
            if text in self._forms:
                continue
            made = [form for name, form in views(without_line_numbers(text)) if self._only in ("", name)]
            new = [form for form in made if form not in self._seen]
            self._seen.update(new)
            self._forms[text] = [np.array(self._tokenize(form), np.int32) for form in new]
        streams: list[Int32] = []
        total = 0
        for stream in (each for forms in self._forms.values() for each in forms if len(each)):
            total += len(stream)
            if total > MAX_FILE_TOKENS:
                break
            streams.append(stream)
        return streams
