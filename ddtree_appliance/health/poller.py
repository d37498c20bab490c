"""Look at the engine again and again, remember the last report, log changes of state. Serves nobody itself."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ddtree_appliance.health.history import History
from ddtree_appliance.health.judge import Limits, State, Verdict, judge
from ddtree_appliance.health.observation import Failure, Observation

STALE_INTERVALS = 3


@dataclass(frozen=True)
class Report:
    """All that is known after a look; replaced as a whole, so that any thread may read it.

    `observation` is None until the first look has ended. `since_unix` is when the state was entered. `is_stale` means
    that looks have ceased: the verdict then says so, and the rest is what was last known.
    """

    verdict: Verdict
    history: History
    observation: Observation | None
    failures: Mapping[Failure, int]
    reported_at: float
    since_unix: float
    is_stale: bool = False


class Poller:
    """Calls `look` every `interval_s` and judges what it returns.

    `clock` is monotonic, `wall_clock` Unix time, both in seconds; `log` takes one line per change of state.
    """

    def __init__(
        self,
        look: Callable[[], Observation],
        interval_s: float,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._look = look
        self._interval_s = interval_s
        self._limits = limits
        self._clock = clock
        self._wall_clock = wall_clock
        self._log = _print_line if log is None else log
        self._report = Report(
            verdict=Verdict(State.STARTING, True, False, "the sidecar has not looked at the engine yet"),
            history=History(),
            observation=None,
            failures=dict.fromkeys(Failure, 0),
            reported_at=clock(),
            since_unix=wall_clock(),
        )

    def run(self, wait: Callable[[float], bool]) -> None:
        """Look at once and then every interval until `wait`, called with seconds, returns True."""
        while True:
            began = self._clock()
            self.look()
            if wait(max(began + self._interval_s - self._clock(), 0.0)):
                return

    def look(self) -> None:
        """Look once, judge, and publish the report."""
        observation = self._look()
        now, before = self._clock(), self._report
        verdict, history = judge(before.history, observation, now, self._limits)
        failures = dict(before.failures)
        if observation.failure is not None:
            failures[observation.failure] += 1
        is_first = before.observation is None
        is_changed = is_first or verdict.state is not before.verdict.state
        since = self._wall_clock() if is_changed else before.since_unix
        self._report = Report(verdict, history, observation, failures, now, since)
        if is_changed:
            self._log(_format_change(None if is_first else before.verdict.state, verdict))

    def report(self) -> Report:
        """The last report; one that is older than three intervals is marked stale, not live and not ready."""
        report = self._report
        age = self._clock() - report.reported_at
        if age <= STALE_INTERVALS * self._interval_s:
            return report
        reason = (
            f"no look at the engine has ended for {age:.1f} s (interval {self._interval_s:g} s): the sidecar hangs,"
            f" restart it; before that the engine was {report.verdict.state.value}"
        )
        return replace(report, verdict=Verdict(report.verdict.state, False, False, reason), is_stale=True)


def _format_change(before: State | None, verdict: Verdict) -> str:
    came_from = "none" if before is None else before.value
    flags = f"live={str(verdict.live).lower()} ready={str(verdict.ready).lower()}"
    return f"state={verdict.state.value} before={came_from} {flags} reason={json.dumps(verdict.reason)}"


def _print_line(line: str) -> None:
    # A log that nobody reads any more must not end the looks.
    with contextlib.suppress(OSError):
        print(line, flush=True)
