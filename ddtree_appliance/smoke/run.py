"""Run the checks in order, within the deadline whatever the service does."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from ddtree_appliance.smoke.checks import CHECKS, Check
from ddtree_appliance.smoke.context import SmokeContext
from ddtree_appliance.smoke.outcome import CheckFailed, CheckResult, Outcome, SmokeReport, Status
from ddtree_appliance.smoke.target import SmokeTarget

DETAIL_LIMIT = 240
# The client ends each wait at the deadline by itself; this is for what no timeout reaches, as a name that does not
# resolve or a body that drips.
GRACE_S = 1.0


def run_smoke(
    target: SmokeTarget,
    *,
    on_result: Callable[[CheckResult], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> SmokeReport:
    """Put the service to the proof; return a report with a row for every check, at most deadline_s + 1 s later.

    on_result is called with each row as soon as it is known. clock and sleep are in seconds. A defect of the service
    never raises; an error in a check itself does.
    """
    begin = clock()
    context = SmokeContext(target, clock, sleep)
    finished: queue.Queue[CheckResult | BaseException | None] = queue.Queue()
    # A daemon: if it hangs, the report is made without it and the process may end.
    threading.Thread(target=_work, args=(context, finished), name="smoke", daemon=True).start()

    results: list[CheckResult] = []

    def add(result: CheckResult) -> None:
        results.append(_presentable(result, target))
        if on_result is not None:
            on_result(results[-1])

    for result in _results(context, finished):
        add(result)
    stopped_by = results[-1].name
    for check in CHECKS[len(results) :]:
        add(CheckResult(check.name, check.proves, Outcome(Status.NOT_RUN, f"stopped by `{stopped_by}`")))
    return SmokeReport(target.engine_url, tuple(results), clock() - begin)


def _work(context: SmokeContext, finished: queue.Queue[CheckResult | BaseException | None]) -> None:
    try:
        for check in CHECKS:
            result, stops_run = _run_check(check, context)
            finished.put(result)
            if stops_run:
                break
        finished.put(None)
    except BaseException as error:
        finished.put(error)


def _run_check(check: Check, context: SmokeContext) -> tuple[CheckResult, bool]:
    begin = context.clock()
    stops_run = False
    try:
        outcome = check.function(context)
    except CheckFailed as failure:
        outcome = Outcome(Status.FAILED, failure.message, failure.hint)
        stops_run = failure.stops_run
    return CheckResult(check.name, check.proves, outcome, context.clock() - begin), stops_run


def _results(context: SmokeContext, finished: queue.Queue[CheckResult | BaseException | None]) -> Iterator[CheckResult]:
    """The rows as they come. Raises what a check raised; ends with a failed row if the deadline passes."""
    for check in CHECKS:
        begin = context.clock()
        try:
            result = finished.get(timeout=context.deadline.remaining_s() + GRACE_S)
        except queue.Empty:
            failure = context.deadline.passed("this check")
            outcome = Outcome(Status.FAILED, failure.message, failure.hint)
            yield CheckResult(check.name, check.proves, outcome, context.clock() - begin)
            return
        if result is None:
            return
        if isinstance(result, BaseException):
            raise result
        yield result


def _presentable(result: CheckResult, target: SmokeTarget) -> CheckResult:
    """The row with its texts fit for a terminal: one line, no control characters, no key."""

    def clean(text: str) -> str:
        printable = "".join(letter if letter.isprintable() else " " for letter in target.redact(text))
        line = " ".join(printable.split())
        return line if len(line) <= DETAIL_LIMIT else line[:DETAIL_LIMIT] + "..."

    outcome = result.outcome
    hint = None if outcome.hint is None else clean(outcome.hint)
    return replace(result, outcome=replace(outcome, detail=clean(outcome.detail), hint=hint))
