"""The held-out documents that come with the bundled pair: prompts for the quickstart, tests and benchmarks."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ddtree_appliance.rehearsal.server import MODELS

SEPARATOR = 0


def heldout_documents(path: Path = MODELS / "heldout.bin") -> list[list[int]]:
    """The documents as token ids. The file holds little-endian uint16, documents separated by 0."""
    tokens = np.fromfile(path, dtype="<u2").astype(np.int64)
    cuts = np.flatnonzero(tokens == SEPARATOR)
    return [part[part != SEPARATOR].tolist() for part in np.split(tokens, cuts) if (part != SEPARATOR).any()]


def heldout_prompts(count: int, length: int, skip: int = 0) -> list[list[int]]:
    """The first `length` tokens of `count` documents that are long enough, after `skip` of them."""
    long_enough = [document[:length] for document in heldout_documents() if len(document) >= 2 * length]
    if len(long_enough) < skip + count:
        raise ValueError(f"only {len(long_enough)} held-out documents have {2 * length} tokens")
    return long_enough[skip : skip + count]
