"""What a look means, given the looks before it: the decision of the sidecar, as a pure function.

Readiness asks whether a request sent now would be answered. Liveness asks whether only a restart can help: slow, busy,
starting and draining engines live.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from ddtree_appliance.health.history import History, advance
from ddtree_appliance.health.observation import Observation

_LOG_HINT = "the engine's journal says why"
_KILL_HINT = "podman's health check kills it; if not, restart the engine"


class State(str, Enum):
    """Where the engine is; the values stand in /readyz, in the log and in ddtree_engine_state."""

    STARTING = "starting"  # no answer yet
    LOADING = "loading"  # answers, but its warm-up request has not
    READY = "ready"
    BUSY = "busy"  # ready; one batch takes long
    DEGRADED = "degraded"  # ready; the drafter does not help
    DRAINING = "draining"  # finishes its requests and takes no new ones
    RESTARTING = "restarting"  # was ready, does not answer, and has not been gone for long
    BLIND = "blind"  # answers, but its metrics cannot be read
    STUCK = "stuck"  # the scheduler's loop stands still
    STALLED = "stalled"  # the loop turns, but no batch finishes
    DEAD = "dead"  # gone for too long, or never came


@dataclass(frozen=True)
class Limits:
    """When a state is reached; seconds, except for the accept length's floor and its smallest window."""

    heartbeat_limit_s: float
    progress_limit_s: float
    busy_after_s: float
    unreachable_limit_s: float
    start_limit_s: float
    accept_length_floor: float
    accept_length_min_steps: int


@dataclass(frozen=True)
class Verdict:
    """The engine's state, what follows for liveness and readiness, and one sentence for a human."""

    state: State
    live: bool
    ready: bool
    reason: str


def judge(history: History, observation: Observation, now: float, limits: Limits) -> tuple[Verdict, History]:
    """Judge a look made at `now` (monotonic seconds) after `history`; return the verdict and the new history."""
    history = advance(
        history,
        observation,
        now,
        start_limit_s=limits.start_limit_s,
        window_min_steps=limits.accept_length_min_steps,
    )
    verdict = _judge(history, observation, now, limits)
    sick = verdict.state in (State.STUCK, State.STALLED) or (verdict.state is State.BLIND and history.sick)
    return verdict, replace(history, ready=verdict.ready, sick=sick)


def _judge(history: History, observation: Observation, now: float, limits: Limits) -> Verdict:
    if not observation.reachable:
        return _judge_silence(history, observation, now, limits)
    if not history.was_up:
        return _judge_start(history, State.LOADING, "it answers, but is not warmed up (/health 503)", now, limits)
    is_draining = observation.health == 503
    if observation.numbers is None:
        return _judge_blind(history, observation, is_draining, now, limits)

    age, unfinished = history.heartbeat_age_s, observation.numbers.unfinished
    if age > limits.heartbeat_limit_s:
        reason = f"the scheduler's loop has not turned for {age:.1f} s (limit {limits.heartbeat_limit_s:g} s)"
        return Verdict(State.STUCK, False, False, f"{reason}; {_KILL_HINT}")
    if unfinished and history.progress_age_s > limits.progress_limit_s:
        reason = (
            f"{_requests(unfinished)} unfinished, but no batch has finished for {history.progress_age_s:.1f} s"
            f" (limit {limits.progress_limit_s:g} s) while the loop turns"
        )
        return Verdict(State.STALLED, False, False, f"{reason}; {_KILL_HINT}")
    if is_draining:
        return Verdict(State.DRAINING, True, False, f"shutting down, {_requests(unfinished)} unfinished")
    return _judge_service(history, unfinished, limits)


def _judge_service(history: History, unfinished: int, limits: Limits) -> Verdict:
    # A batch may hold up the loop itself, and then the request in it came after the last heartbeat.
    waited = max(history.heartbeat_age_s, history.progress_age_s if unfinished else 0.0)
    is_busy = waited > limits.busy_after_s
    work = f"{_requests(unfinished)} unfinished, heartbeat {history.heartbeat_age_s:.1f} s old"
    if is_busy:
        work = f"{work}, no batch has finished for {waited:.1f} s: a long prefill, or a kernel is being compiled"
    length = history.accept_length
    if length is not None and length < limits.accept_length_floor:
        reason = (
            f"accept length {length:.3f} over the last {history.accept_window_steps:g} verify steps is below"
            f" {limits.accept_length_floor:g}: the drafter does not help; was it trained for this model, is it"
            f" quantised? ({work})"
        )
        return Verdict(State.DEGRADED, True, True, reason)
    return Verdict(State.BUSY if is_busy else State.READY, True, True, work)


def _judge_silence(history: History, observation: Observation, now: float, limits: Limits) -> Verdict:
    if history.answered_at is None:
        return _judge_start(history, State.STARTING, f"no answer yet: {observation.detail}", now, limits)
    gone = now - history.answered_at
    what = f"no answer for {gone:.1f} s: {observation.detail}"
    if gone > limits.unreachable_limit_s:
        reason = f"{what} (limit {limits.unreachable_limit_s:g} s); stopped, crashed or loading again; {_LOG_HINT}"
        return Verdict(State.DEAD, False, False, reason)
    if history.was_up:
        reason = f"{what}; it is expected back, and given up after {limits.unreachable_limit_s:g} s"
        return Verdict(State.RESTARTING, True, False, reason)
    return _judge_start(history, State.STARTING, f"{what}, and it had not become ready before", now, limits)


def _judge_start(history: History, state: State, what: str, now: float, limits: Limits) -> Verdict:
    waited = 0.0 if history.waiting_since is None else now - history.waiting_since
    reason = f"{what}; waiting for {waited:.1f} s (limit {limits.start_limit_s:g} s)"
    if waited > limits.start_limit_s:
        return Verdict(State.DEAD, False, False, f"{reason}; {_LOG_HINT}")
    return Verdict(state, True, False, reason)


def _judge_blind(history: History, observation: Observation, is_draining: bool, now: float, limits: Limits) -> Verdict:
    blind_for = 0.0 if history.blind_since is None else now - history.blind_since
    is_patient = blind_for <= limits.unreachable_limit_s
    if is_draining and is_patient and not history.sick:
        return Verdict(State.DRAINING, True, False, f"shutting down; its metrics are gone: {observation.detail}")
    reason = (
        f"metrics unreachable for {blind_for:.1f} s: {observation.detail}; the engine answers, but whether its"
        f" scheduler works is unknown (not ready after {limits.unreachable_limit_s:g} s); is it the patched SGLang,"
        " with --enable-metrics?"
    )
    return Verdict(State.BLIND, not history.sick, history.ready and is_patient, reason)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"
