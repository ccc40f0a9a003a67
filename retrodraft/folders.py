"""Where measurements and verdicts are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """RETRODRAFT_CACHE, else the platform's cache folder of this package; it need not exist."""
    override = os.environ.get("RETRODRAFT_CACHE")
    return Path(override) if override else user_cache_path("retrodraft")
