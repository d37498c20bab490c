"""The fixed list of prompts that every variant gets, in the same order."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ddtree_appliance.errors import UsageError

Prompt = str | list[int]


def load_prompts(path: Path | None, count: int, tokens: int) -> list[Prompt]:
    """`count` prompts: from a JSON Lines file, or held-out code of the bundled pair, `tokens` tokens each.

    Raises UsageError if there are too few, or with the line that is wrong.
    """
    if path is not None:
        return read_prompts(path, count)
    return heldout_windows(count, tokens)


def heldout_windows(count: int, tokens: int) -> list[Prompt]:
    """`count` prompts of held-out code: the documents' beginnings first, then passages further down, none overlapping.

    As much text as the prompt follows each in its document. Raises UsageError if there are too few.
    """
    # Needs numpy, which the command does without.
    from ddtree_appliance.rehearsal.prompts import heldout_documents

    documents = heldout_documents()
    stride = 2 * tokens
    rounds = max(len(document) for document in documents) // stride
    windows: list[Prompt] = [
        document[start : start + tokens]
        for start in range(0, rounds * stride, stride)
        for document in documents
        if len(document) >= start + stride
    ]
    if len(windows) < count:
        raise UsageError(
            f"{count} prompts are needed, the held-out code gives {len(windows)} of {tokens} tokens",
            "lower --concurrency, --prompts-per-cell or --prompt-tokens, or give --prompts FILE",
        )
    return windows[:count]


def read_prompts(path: Path, count: int) -> list[Prompt]:
    """The first `count` prompts of a file of lines {"prompt": text} or {"input_ids": [...]}. Raises UsageError."""
    prompts: list[Prompt] = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if line.strip():
            prompts.append(_prompt(line, f"{path}:{number}"))
    if len(prompts) < count:
        raise UsageError(f"{path} holds {len(prompts)} prompts, {count} are needed", "lower --concurrency, or add some")
    prompts = prompts[:count]
    if len({json.dumps(prompt) for prompt in prompts}) < count:
        # A prompt that was just served may be found in a cache.
        raise UsageError(f"{path}: two of the first {count} prompts are equal", "each prompt is measured once")
    return prompts


def digest_of(path: Path) -> str:
    """SHA-256 of the file, which a continued benchmark must find again. Raises UsageError."""
    return hashlib.sha256(_text(path).encode()).hexdigest()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"--prompts {path}: {reason}") from error


def _prompt(line: str, where: str) -> Prompt:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: not JSON: {error}") from error
    keys = sorted(value) if isinstance(value, dict) else []
    if keys == ["prompt"]:
        text = value["prompt"]
        if isinstance(text, str) and text:
            return text
        raise UsageError(f"{where}: prompt must be text that is not empty")
    if keys == ["input_ids"]:
        ids = value["input_ids"]
        # bool is an int in Python.
        if isinstance(ids, list) and ids and all(type(token) is int and token >= 0 for token in ids):
            return ids
        raise UsageError(f"{where}: input_ids must be a list of token ids that is not empty")
    raise UsageError(f"{where}: one of prompt and input_ids, and nothing else", 'for example {"prompt": "def f("}')
