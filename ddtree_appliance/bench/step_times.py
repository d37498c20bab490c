"""Where a step's time goes, as the engine records it with CUDA events (JSON Lines, a line per 64 steps)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ddtree_appliance.errors import ApplianceError

# In the order of a step. "step" is their sum with the gaps between them.
PARTS = ("draft", "build", "verify", "accept", "commit", "gap")


# A line is written when half of the next line's steps have been made.
_LATE_LINES = 2


class StepTimesReader:
    """Reads the lines that a server appends. A line in the middle of being written is left for the next read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._to_skip = 0

    def skip_old(self) -> None:
        """Forget what is there, and of what comes the lines that may hold steps from before this call."""
        self._read()
        self._to_skip = _LATE_LINES

    def read_new(self) -> list[dict[str, Any]]:
        """The records since the last call. Raises ApplianceError for a line that is none."""
        records = self._read()
        skipped = min(self._to_skip, len(records))
        self._to_skip -= skipped
        return records[skipped:]

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return [self._record(line) for line in whole.splitlines() if line.strip()]

    def _record(self, line: bytes) -> dict[str, Any]:
        try:
            record = json.loads(line)
            if record["steps"] > 0 and all(float(value) >= 0 for value in record["ms"].values()):
                return dict(record)
        except (ValueError, LookupError, TypeError, AttributeError):
            pass
        raise ApplianceError(f"{self._path}: not a record of step times: {line[:200]!r}")


def mean_breakdown(records: Iterable[Mapping[str, Any]]) -> dict[str, float] | None:
    """Mean milliseconds per step of each part over all records, each weighted by its steps; `steps` is their number.

    A part counts where it is recorded. None without records.
    """
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    steps = 0
    for record in records:
        steps += record["steps"]
        for part, value in record["ms"].items():
            sums[part] = sums.get(part, 0.0) + record["steps"] * value
            weights[part] = weights.get(part, 0.0) + record["steps"]
    if not steps:
        return None
    return {"steps": steps, **{part: sums[part] / weights[part] for part in sums}}
