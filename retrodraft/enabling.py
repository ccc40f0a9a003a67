"""Putting a drafting `generate` in the place of a model's own, and taking it away again in any order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

_lock = threading.Lock()
_in_force: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # model -> what it had, then what was put over it
_NOTHING = object()


@contextlib.contextmanager
def generating_with(model: Any, generate: Callable[..., Any]) -> Iterator[None]:
    """Inside, `model.generate` is `generate`; where several are in force, the one that began last."""
    with _lock:
        stack = _in_force.setdefault(model, [vars(model).get("generate", _NOTHING)])
        stack.append(generate)
        model.generate = generate
    try:
        yield
    finally:
        with _lock:
            stack.reverse()
            stack.remove(generate)  # the one that was put there last
            stack.reverse()
            if stack[-1] is _NOTHING:
                vars(model).pop("generate", None)
            else:
                model.generate = stack[-1]
            if len(stack) == 1:
                del _in_force[model]
