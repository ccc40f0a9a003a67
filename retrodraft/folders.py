"""Where measurements and verdicts are kept between runs."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """RETRODRAFT_CACHE, else the platform's cache folder of this package; it need not exist."""
    override = os.environ.get("RETRODRAFT_CACHE")
    return Path(override) if override else user_cache_path("retrodraft")


def beside(path: Path) -> Path:
    """A new name for what is to replace `path`; unlike what `tempfile` makes, it is open to whom the umask says."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}")


def keep(path: Path, content: dict[str, Any] | bytes) -> None:
    """Replace a file in the cache folder at once; where it can't be written, it is only measured again later."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        written = beside(path)
        try:
            with open(written, "xb") as file:
                file.write(content if isinstance(content, bytes) else json.dumps(content).encode())
            os.replace(written, path)
        except BaseException:
            written.unlink(missing_ok=True)
            raise
