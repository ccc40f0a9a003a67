"""Training-free tree drafting for Hugging Face causal language models: the same output in fewer forwards.

from retrodraft import RetroDraft
rd = RetroDraft(model, tokenizer)
rd.generate(**inputs, max_new_tokens=256)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from retrodraft.decoder import RetroDraft
    from retrodraft.errors import UnsupportedModelError
    from retrodraft.stats import DecodingStats

__all__ = ["DecodingStats", "RetroDraft", "UnsupportedModelError", "__version__"]

# Where the links index and kernels were lost (unpacked archives, Windows), the folders are found beside the package.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file():
    __path__.append(str(_root))

_HOMES = {"RetroDraft": "decoder", "DecodingStats": "stats", "UnsupportedModelError": "errors"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `retrodraft.index` and the CLI's help need no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'retrodraft' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"retrodraft.{_HOMES[name]}"), name)
