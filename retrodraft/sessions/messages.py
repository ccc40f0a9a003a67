"""What a session is given, checked: texts, paths, chat messages and token ids. Each mistake is told with its remedy."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def checked_text(text: Any, what: str) -> str:
    """`text`, if it is one; raises ValueError that names `what` was given."""
    if not isinstance(text, str):
        remedy = ": decode it first" if isinstance(text, bytes) else ""
        raise ValueError(f"{what} must be a text (str), got {type(text).__name__}{remedy}")
    return text


def checked_path(path: Any) -> str:
    """`path` as text; raises ValueError for what is no path, and for an empty one."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or not isinstance(os.fspath(path), str):
        raise ValueError(f"a path must be a text (str) or a pathlib.Path and not empty, got {path!r:.80}")
    return str(os.fspath(path))


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Chat messages as templates take them: contents are texts, empty where an assistant only calls tools.

    Parts of text, as OpenAI's clients send them, are joined. Raises ValueError for anything else.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        remedy = "; token ids go into input_ids=..." if isinstance(messages, torch.Tensor | Mapping) else ""
        raise ValueError(f"messages must be a list of dicts with 'role' and 'content', got {messages!r:.80}{remedy}")
    checked = []
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {position} must be a dict with a 'role', got {message!r:.80}")
        content = message.get("content")
        if isinstance(content, list):
            content = _joined(content, position)
        if content is None and message["role"] == "assistant":
            content = ""  # a message that only calls tools
        if not isinstance(content, str):
            got = f"got {type(content).__name__}" if "content" in message else "there is none"
            raise ValueError(f"message {position} ({message['role']}) needs a 'content' that is text; {got}")
        checked.append({**message, "content": content})
    return checked


def checked_ids(input_ids: Any, mask: Any) -> None:
    """Raise ValueError unless these are token ids [batch_size, length] and None or a mask of the same shape."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2:
        raise ValueError("input_ids must be a tensor [batch_size, length], as the tokenizer returns it")
    if not input_ids.numel():
        raise ValueError(f"input_ids must hold a token at least, got shape {tuple(input_ids.shape)}")
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids must be whole numbers (int64), got {input_ids.dtype}")
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.shape == input_ids.shape):
        got = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must be a tensor of input_ids' shape {tuple(input_ids.shape)}, got {got}")


def _joined(parts: list[Any], position: int) -> str:
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"message {position} holds a part that is no text: {part!r:.80}; leave it out")
    return "".join(part["text"] for part in parts)
