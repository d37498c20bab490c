"""What one look at the engine found, and how the series of several schedulers become one set of numbers.

Standard library only: the one-shot probe imports this at every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

HEARTBEAT = "sglang:scheduler_heartbeat_timestamp_seconds"
PROGRESS = "sglang:scheduler_progress_timestamp_seconds"
UNFINISHED = "sglang:scheduler_unfinished_requests"
ITERATIONS = "sglang:scheduler_iterations_total"
ACCEPT_TOKENS = "sglang:spec_accept_tokens_total"
VERIFY_STEPS = "sglang:spec_verify_steps_total"
STARTUP = "sglang:startup_time_seconds"

# Of several schedulers the slowest decides, and what they count is added up.
_COMBINE: dict[str, Callable[[Iterable[float]], float]] = {
    HEARTBEAT: min,
    PROGRESS: min,
    UNFINISHED: math.fsum,
    ITERATIONS: math.fsum,
    ACCEPT_TOKENS: math.fsum,
    VERIFY_STEPS: math.fsum,
    STARTUP: max,
}
_REQUIRED = tuple(name for name in _COMBINE if name != STARTUP)
SERIES = tuple(_COMBINE)


class Failure(str, Enum):
    """Why a look did not find everything; the values are the `reason` labels of ddtree_probe_failures_total."""

    REFUSED = "refused"
    TIMEOUT = "timeout"
    BROKEN = "broken"  # no such host, no route, reset, not HTTP
    STATUS = "status"  # /health answered neither 200 nor 503
    METRICS_UNREADABLE = "metrics_unreadable"
    METRICS_INCOMPLETE = "metrics_incomplete"  # the page is sound, but the scheduler's series are not on it


@dataclass(frozen=True)
class Numbers:
    """The schedulers' series at one time. The two times are Unix times on the engine's clock.

    `startup_s` is how long this engine process took to start; to the nanosecond, it tells one process from the next.
    """

    heartbeat_time: float
    progress_time: float
    unfinished: int
    iterations: float
    accept_tokens: float
    verify_steps: float
    startup_s: float | None = None


@dataclass(frozen=True)
class Observation:
    """One look. `at` is the Unix time of its end, `took_s` how long it lasted.

    `health` is the HTTP status of /health, None if there was no answer. `numbers` is None if the engine was not
    reachable or its metrics could not be used; `failure` and `detail` (a clause for a human) then say why.
    """

    at: float
    took_s: float
    health: int | None
    numbers: Numbers | None = None
    failure: Failure | None = None
    detail: str = ""

    @property
    def reachable(self) -> bool:
        """Whether the engine's own HTTP server answered: 200, or 503 while it starts or drains."""
        return self.health in (200, 503)


class MissingSeriesError(Exception):
    """The metrics page lacks series that the patched scheduler always exports; the message names them."""


def combine(samples: Iterable[tuple[str, float]]) -> Numbers:
    """One set of numbers from (series name, value) pairs; other series are passed over, as is NaN.

    Raises MissingSeriesError. Before the scheduler's loop runs, that is the normal case.
    """
    values: dict[str, list[float]] = {}
    for name, value in samples:
        if name in _COMBINE and math.isfinite(value):
            values.setdefault(name, []).append(value)
    if missing := [name for name in _REQUIRED if name not in values]:
        shown = missing[0] if len(missing) == 1 else f"{missing[0]} and {len(missing) - 1} more"
        raise MissingSeriesError(f"/metrics has no {shown}")
    combined = {name: _COMBINE[name](found) for name, found in values.items()}
    return Numbers(
        heartbeat_time=combined[HEARTBEAT],
        progress_time=combined[PROGRESS],
        unfinished=max(round(combined[UNFINISHED]), 0),
        iterations=combined[ITERATIONS],
        accept_tokens=combined[ACCEPT_TOKENS],
        verify_steps=combined[VERIFY_STEPS],
        startup_s=combined.get(STARTUP),
    )
