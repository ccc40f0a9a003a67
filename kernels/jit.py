"""`njit` for every kernel: compiled code is kept on disk where that is possible, and its loss is never fatal."""

import contextlib
import hashlib
import pickle  # for the name of an error: numba's own cache files are pickles
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core.ccallback import CFunc

# Numba asks a kernel's own file alone whether its compiled code is out of date; but that holds code of the kernels
# that it calls, too: all files count.
SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()


def njit(function: Callable[..., Any], **options: Any) -> Any:
    """`numba.njit(cache=True, nogil=True)` that also works without a writable folder and over a damaged cache."""
    options.setdefault("_nrt", True)  # else it is inherited from a borrowing kernel that compiles this one first
    try:
        compiled = numba.njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:  # no folder can hold the cache: compile anew in each process
        return numba.njit(nogil=True, **options)(function)
    cache = getattr(compiled, "_cache", None)  # None where NUMBA_DISABLE_JIT is set
    if cache is not None:
        _guard(cache)
    return compiled


def borrowing_njit(function: Callable[..., Any]) -> Any:
    """`njit` for a kernel that allocates no array and keeps none: their references are not counted.

    Counting is atomic and would take half of the time of a draft tree, whose kernels pass arrays on all the time.
    """
    return njit(function, _nrt=False)


def reordering_njit(function: Callable[..., Any]) -> Any:
    """`njit` that may reorder sums and maxima of numbers (not NaN), so that they become vector instructions."""
    return njit(function, fastmath={"nnan", "nsz", "reassoc", "contract"}, inline="never")


def callback(signature: Any, function: Callable[..., Any]) -> Any:
    """Code that C can call, by its `address` or through `ctypes`; compiled, or found on disk, at once."""
    compiled: Any = CFunc(function, (signature.args, signature.return_type), {}, {})
    with contextlib.suppress(RuntimeError):  # no folder can hold the cache
        compiled.enable_caching()
        _guard(compiled._cache)
    compiled.compile()
    return compiled


def _guard(cache: Any) -> None:
    """Let a file that can't be read count as absent, one that can't be written as not needed, and an old one as old."""
    file = getattr(cache, "_cache_file", None)
    if file is not None:
        file._source_stamp = (file._source_stamp, SOURCES)
    load, save = cache.load_overload, cache.save_overload

    def load_overload(signature: Any, context: Any) -> Any:
        try:
            return load(signature, context)
        except (EOFError, pickle.UnpicklingError, ValueError, OSError):
            try:
                cache.flush()
            except OSError:
                pass  # stays damaged, and is compiled around each time
            return None

    def save_overload(signature: Any, data: Any) -> None:
        try:
            save(signature, data)
        except (EOFError, pickle.UnpicklingError, OSError):
            pass  # only the next process is slower for it

    cache.load_overload, cache.save_overload = load_overload, save_overload
