"""What tests of the replay share: messages, logs, sentences."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = random.Random(0).sample([f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst"], 140)


def said(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def write(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return path


def sentence(seed: int, words: int = 12) -> str:
    return " ".join(random.Random(seed).sample(WORDS, words))
