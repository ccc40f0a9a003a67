"""The threads that torch keeps for its own work: compiled code runs on them.

A second pool of threads would wait for work on the same cores, and each would hold up the other.
"""

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@cache
def _parallel() -> Any:
    """`GOMP_parallel` of the library that torch has loaded, or None."""
    origin = getattr(find_spec("torch"), "origin", None)
    folder = Path(origin).parent if origin else Path()
    for path in [*folder.glob("lib/libgomp*"), *folder.parent.glob("torch.libs/libgomp*")]:
        try:
            function = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    return None


def has_threads() -> bool:
    """Whether torch keeps its threads in a library that is understood here (GNU's, as in its Linux wheels)."""
    return _parallel() is not None


def in_parallel(address: int, data: Any, threads: int) -> None:
    """Call the compiled `void function(void *data)` at `address` on so many threads at once, this one among them."""
    _parallel()(address, data, threads, 0)
