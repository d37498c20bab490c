"""How long each stage of a verify step takes on the device, written to a file for a benchmark.

Off unless the variable names a file. Events are recorded on the stream and read half a ring later, when they are long
past: nothing waits for the device. The marks themselves cost a few microseconds of host time a step.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

VARIABLE = "DDTREE_STEP_TIMES"
STAGES = ("draft", "build", "verify", "accept", "commit")
STEPS_PER_LINE = 64


class _HostClock:
    """Stands in for a CUDA event where there is no GPU."""

    def record(self) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: _HostClock) -> float:
        return (later._at - self._at) * 1e3


class StepTimes:
    """Marks of the steps under way; one line of means per `STEPS_PER_LINE` steps.

    A line: {"steps": n, "batch": mean requests, "ms": {stage: mean, "gap": median, "step": sum}}. "gap" is the time
    from the end of one step to the beginning of the next; its median, because requests may pause.
    """

    def __init__(self, path: Path, device: str) -> None:
        self._path = path
        self._rings = [[self._events(device) for _ in range(STEPS_PER_LINE)] for _ in range(2)]
        self._batches = [[0] * STEPS_PER_LINE for _ in range(2)]
        self._ring, self._step, self._stage = 0, -1, 0
        self._full: int | None = None

    @staticmethod
    def of_environment(device: str, rank: int, environment: Mapping[str, str] = os.environ) -> StepTimes | None:
        """The recorder that the variable asks for; None on other ranks than 0, or when it is not set."""
        path = environment.get(VARIABLE)
        return StepTimes(Path(path), device) if path and rank == 0 else None

    @staticmethod
    def _events(device: str) -> list[Any]:
        count = len(STAGES) + 1
        if device == "cpu":
            return [_HostClock() for _ in range(count)]
        return [torch.cuda.Event(enable_timing=True) for _ in range(count)]  # type: ignore[no-untyped-call]

    def begin(self, batch: int) -> None:
        """A step of `batch` requests begins."""
        self._step += 1
        if self._step == STEPS_PER_LINE:
            self._full, self._ring, self._step = self._ring, 1 - self._ring, 0
        if self._full is not None and self._step == STEPS_PER_LINE // 2:
            self._write(self._full)
            self._full = None
        self._batches[self._ring][self._step] = batch
        self._stage = 0
        self._rings[self._ring][self._step][0].record()

    def end(self, stage: str) -> None:
        """The named stage has been launched; stages end in the order of `STAGES`."""
        self._stage += 1
        assert STAGES[self._stage - 1] == stage, f"{stage} out of order"
        self._rings[self._ring][self._step][self._stage].record()

    def _write(self, ring: int) -> None:
        steps, batches = self._rings[ring], self._batches[ring]
        if not all(step[-1].query() for step in steps):
            return  # a stalled device: these steps say nothing about a running one
        means = {
            stage: sum(step[at].elapsed_time(step[at + 1]) for step in steps) / len(steps)
            for at, stage in enumerate(STAGES)
        }
        gaps = [before[-1].elapsed_time(after[0]) for before, after in pairwise(steps)]
        # The middle one: a pause between requests is no part of a step.
        means["gap"] = sorted(gaps)[len(gaps) // 2]
        means["step"] = sum(means.values())
        line = {"steps": len(steps), "batch": sum(batches) / len(batches), "ms": means}
        with self._path.open("a") as sink:
            sink.write(json.dumps(line) + "\n")
