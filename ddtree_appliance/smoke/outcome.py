"""What a check came to, and the report of all: a table to read, the same as JSON, and the exit code."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ddtree_appliance.errors import EXIT_FAILED, EXIT_OK, ApplianceError


class Status(str, Enum):
    """How a check ended. `REPORTED` informs and never fails the run."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    REPORTED = "reported"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Outcome:
    """A check's result; detail is one line for the operator: the value seen, or why not."""

    status: Status
    detail: str
    hint: str | None = None


class CheckFailed(ApplianceError):
    """A check saw a defect. With stops_run the checks after it could only repeat it, and are not run."""

    def __init__(self, message: str, hint: str | None = None, stops_run: bool = False) -> None:
        super().__init__(message, hint)
        self.stops_run = stops_run


def passed(detail: str) -> Outcome:
    """The check saw what it wanted."""
    return Outcome(Status.PASSED, detail)


def skipped(reason: str) -> Outcome:
    """The check has nothing to look at here."""
    return Outcome(Status.SKIPPED, reason)


def reported(detail: str) -> Outcome:
    """The operator should know, and judges."""
    return Outcome(Status.REPORTED, detail)


@dataclass(frozen=True)
class CheckResult:
    """One row of the report. elapsed_s is the check's own time, 0 if it was not run."""

    name: str
    proves: str
    outcome: Outcome
    elapsed_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The row as JSON; hint is null unless the check failed."""
        return {
            "name": self.name,
            "proves": self.proves,
            "status": self.outcome.status.value,
            "detail": self.outcome.detail,
            "hint": self.outcome.hint,
            "elapsed_s": round(self.elapsed_s, 3),
        }


@dataclass(frozen=True)
class SmokeReport:
    """Every check of one run, in order. elapsed_s is the whole run's, on the wall."""

    engine_url: str
    checks: tuple[CheckResult, ...]
    elapsed_s: float

    @property
    def ok(self) -> bool:
        """Whether every check was run or skipped for a reason, and none failed."""
        return not any(check.outcome.status in (Status.FAILED, Status.NOT_RUN) for check in self.checks)

    @property
    def exit_code(self) -> int:
        """0 if `ok`, else 1."""
        return EXIT_OK if self.ok else EXIT_FAILED

    @property
    def summary(self) -> str:
        """One line: how many checks ended how, and the time."""
        counts = Counter(check.outcome.status for check in self.checks)
        ended = ", ".join(f"{counts[status]} {status.value}" for status in Status if counts[status])
        return f"{'ok' if self.ok else 'FAILED'}: {ended} in {self.elapsed_s:.1f} s ({self.engine_url})"

    def to_json(self) -> dict[str, Any]:
        """The same facts as the table, with what each check proves."""
        counts = Counter(check.outcome.status for check in self.checks)
        return {
            "ok": self.ok,
            "engine_url": self.engine_url,
            "elapsed_s": round(self.elapsed_s, 3),
            "counts": {status.value.replace(" ", "_"): counts[status] for status in Status},
            "checks": [check.to_json() for check in self.checks],
        }

    def to_text(self) -> str:
        """The table (CHECK, RESULT, DETAIL), a failed check's hint below its row, and the summary as the last line."""
        name_width = max(len("CHECK"), *(len(check.name) for check in self.checks))
        result_width = max(len("RESULT"), *(len(check.outcome.status.value) for check in self.checks))
        lines = [f"{'CHECK':<{name_width}}  {'RESULT':<{result_width}}  DETAIL"]
        for check in self.checks:
            outcome = check.outcome
            row = f"{check.name:<{name_width}}  {outcome.status.value:<{result_width}}  {outcome.detail}"
            lines.append(row.rstrip())
            if outcome.hint is not None:
                lines.append(f"{'':<{name_width + result_width + 4}}hint: {outcome.hint}")
        return "\n".join([*lines, self.summary])
