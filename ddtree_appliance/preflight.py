"""Seconds before minutes: what must hold on this host and for these models before a weight is read.

Every check is a row of `CHECKS`; all of them run, so that one start shows everything that is wrong. `serve` runs them
inside the container, `ddtree-appliance preflight` anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddtree_appliance.checks import Facts, Host
from ddtree_appliance.checks import host as host_checks
from ddtree_appliance.checks import models as model_checks
from ddtree_appliance.config import Config
from ddtree_appliance.errors import ApplianceError, HostError, UsageError


@dataclass(frozen=True)
class Finding:
    """The outcome of one check: a detail for people, or the error."""

    check: str
    detail: str
    error: ApplianceError | None = None


@dataclass(frozen=True)
class Check:
    """A named check. `run` returns a detail for people, or raises an ApplianceError."""

    name: str
    run: Callable[[Facts, Host], str]


# In this order: a later check uses what an earlier one found.
CHECKS: tuple[Check, ...] = (
    Check("models", model_checks.models),
    Check("pair", model_checks.pair),
    Check("shape", model_checks.shape),
    Check("environment", host_checks.environment),
    Check("keys", host_checks.keys),
    Check("folders", host_checks.folders),
    Check("shm", host_checks.shm),
    Check("port", host_checks.port),
    Check("gpus", host_checks.gpus),
    Check("memory", model_checks.memory),
)


def run_preflight(config: Config, host: Host | None = None) -> tuple[list[Finding], Facts]:
    """Run every check. Never raises an ApplianceError: each is in its finding."""
    host = host or Host()
    facts = Facts(config)
    findings = []
    for check in CHECKS:
        try:
            findings.append(Finding(check.name, check.run(facts, host)))
        except ApplianceError as error:
            findings.append(Finding(check.name, error.message, error))
        except OSError as error:
            findings.append(Finding(check.name, str(error), HostError(str(error), "see the host's log")))
    return findings, facts


def raise_failed(findings: list[Finding]) -> None:
    """Raise one error for all that failed: a HostError if the host is at fault anywhere, else a UsageError."""
    failed = [(finding, finding.error) for finding in findings if finding.error is not None]
    if not failed:
        return
    kind = HostError if any(isinstance(error, HostError) for _, error in failed) else UsageError
    lines = [f"{finding.check}: {finding.detail}" for finding, _ in failed]
    hints = dict.fromkeys(error.hint for _, error in failed if error.hint)
    raise kind("preflight: " + "\n  ".join(lines), "\n  ".join(hints) or None)
