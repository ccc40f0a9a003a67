"""What tests of `retrodraft index` share: its JSON output, and a byte tokenizer in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from command import retrodraft_here
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def result_of(*arguments: object, **options: Any) -> dict[str, Any]:
    """The JSON object that a command prints."""
    done = retrodraft_here("index", *arguments, "--json", **options)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def save_tokenizer(folder: Path, extra: str = "<|im_end|>") -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(extra, special=True)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
