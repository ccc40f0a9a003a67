"""The threads that torch keeps for its own work: compiled code runs on them.

A second pool of threads would wait for work on the same cores, and each would hold up the other.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch


@cache
def _parallel() -> Any:
    """`GOMP_parallel` of the library that torch has loaded, or None."""
    folder = Path(torch.__file__).parent
    for path in [*folder.glob("lib/libgomp*"), *folder.parent.glob("torch.libs/libgomp*")]:
        try:
            function = ctypes.CDLL(str(path)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    return None


def num_threads() -> int:
    """As many as torch uses; 1 where it keeps them in a library other than GNU's, which its Linux wheels bring."""
    return torch.get_num_threads() if _parallel() is not None else 1


def in_parallel(address: int, data: Any, threads: int) -> None:
    """Call the compiled `void function(void *data)` at `address` on so many threads at once, this one among them."""
    _parallel()(address, data, threads, 0)
