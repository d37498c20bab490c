"""What looks leave behind: which engine process this is, how old its signs of life are, and the accept length.

Ages are measured by this process's monotonic clock, from the look that saw a timestamp change; the engine's wall clock
only refines that. So neither clock may jump enough to make a healthy engine look stuck, or a stuck one healthy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ddtree_appliance.health.observation import Failure, Numbers, Observation


@dataclass(frozen=True)
class History:
    """The state between looks; a new one is what a sidecar starts with. Times are monotonic unless named unix."""

    looked_at: float | None = None
    waiting_since: float | None = None  # when the present wait for readiness began
    answered_at: float | None = None  # last time that /health was 200 or 503
    was_up: bool = False  # /health of this engine process has been 200

    numbers: Numbers | None = None  # the last ones of this engine process
    numbers_at: float = -math.inf
    heartbeat_at: float = -math.inf
    progress_at: float = -math.inf
    blind_since: float | None = None  # no numbers could be read since then, although it answered

    accept_length: float | None = None  # of the last full window
    accept_window_steps: float = 0.0
    window_tokens: float = 0.0  # the counters at the beginning of the present window
    window_steps: float = 0.0

    accept_tokens_total: float = 0.0  # since the first look, across engine processes
    verify_steps_total: float = 0.0
    restarts: int = 0
    process_seen_unix: float | None = None

    # Of the last verdict, for looks that cannot tell; set by `judge`.
    ready: bool = False
    sick: bool = False

    @property
    def heartbeat_age_s(self) -> float:
        """At the last look that read the numbers."""
        return self.numbers_at - self.heartbeat_at

    @property
    def progress_age_s(self) -> float:
        """At the last look that read the numbers."""
        return self.numbers_at - self.progress_at


def advance(
    history: History, observation: Observation, now: float, *, start_limit_s: float, window_min_steps: int
) -> History:
    """Return `history` after `observation`, made at `now` (monotonic seconds)."""
    waiting_since = now if history.waiting_since is None else history.waiting_since
    if not observation.reachable:
        return replace(history, looked_at=now, waiting_since=waiting_since)

    is_new = is_new_process(history, observation)
    silent_since = waiting_since if history.answered_at is None else history.answered_at
    # Whoever starts an engine that was given up has the whole limit again.
    if (is_new and history.was_up) or now - silent_since > start_limit_s:
        waiting_since = now
    if is_new:
        history = _begin_process(history)
    history = replace(
        history,
        looked_at=now,
        answered_at=now,
        waiting_since=waiting_since,
        was_up=history.was_up or observation.health == 200,
        process_seen_unix=observation.at if history.process_seen_unix is None else history.process_seen_unix,
    )
    if observation.numbers is None:
        return replace(history, blind_since=now if history.blind_since is None else history.blind_since)
    history = _read_ages(history, observation.numbers, observation.at, now)
    history = _read_counters(history, observation.numbers, window_min_steps)
    return replace(history, numbers=observation.numbers, numbers_at=now, blind_since=None)


def is_new_process(history: History, observation: Observation) -> bool:
    """Whether an answer comes from another engine process than the one remembered."""
    old, new = history.numbers, observation.numbers
    if old is not None and new is not None:
        if old.startup_s is not None and new.startup_s is not None:
            return new.startup_s != old.startup_s
        return new.iterations < old.iterations
    if history.was_up and new is None and observation.health == 503:
        # The old process would be draining; but its series do not go away, and it answers as long as it drains.
        was_silent = history.answered_at != history.looked_at
        return was_silent or (old is not None and observation.failure is Failure.METRICS_INCOMPLETE)
    return False


def _begin_process(history: History) -> History:
    return History(
        accept_tokens_total=history.accept_tokens_total,
        verify_steps_total=history.verify_steps_total,
        restarts=history.restarts + 1,
    )


def _read_ages(history: History, numbers: Numbers, at_unix: float, now: float) -> History:
    old = history.numbers

    def changed_at(old_time: float | None, new_time: float, old_changed_at: float) -> float:
        if new_time == old_time:
            return old_changed_at
        age = max(at_unix - new_time, 0.0)
        # It changed after it was last read, whatever the wall clock says.
        return now - (age if old_time is None else min(age, max(now - history.numbers_at, 0.0)))

    return replace(
        history,
        heartbeat_at=changed_at(old.heartbeat_time if old else None, numbers.heartbeat_time, history.heartbeat_at),
        progress_at=changed_at(old.progress_time if old else None, numbers.progress_time, history.progress_at),
    )


def _read_counters(history: History, numbers: Numbers, window_min_steps: int) -> History:
    tokens, steps = numbers.accept_tokens, numbers.verify_steps
    if history.numbers is not None:
        old_tokens, old_steps = history.numbers.accept_tokens, history.numbers.verify_steps
    else:
        # A process that began under our eyes counts from zero; of one that ran before, nothing is ours.
        old_tokens, old_steps = (0.0, 0.0) if history.restarts else (tokens, steps)
        history = replace(history, window_tokens=old_tokens, window_steps=old_steps)
    history = replace(
        history,
        accept_tokens_total=history.accept_tokens_total + max(tokens - old_tokens, 0.0),
        verify_steps_total=history.verify_steps_total + max(steps - old_steps, 0.0),
    )
    window = steps - history.window_steps
    if window < window_min_steps or window <= 0:
        return history
    return replace(
        history,
        accept_length=(tokens - history.window_tokens) / window,
        accept_window_steps=window,
        window_tokens=tokens,
        window_steps=steps,
    )
