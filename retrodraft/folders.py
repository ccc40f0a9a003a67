"""Where measurements and verdicts are kept between runs."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """RETRODRAFT_CACHE, else the platform's cache folder of this package; it need not exist."""
    override = os.environ.get("RETRODRAFT_CACHE")
    return Path(override) if override else user_cache_path("retrodraft")


def keep(path: Path, record: dict[str, Any]) -> None:
    """Replace a JSON file in the cache folder at once; where it can't be written, it is only measured again later."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(file.name, path)
    except OSError:
        return
