"""The declared table of checks, in the order in which they run and are shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ddtree_appliance.smoke import generation_checks, service_checks
from ddtree_appliance.smoke.context import SmokeContext
from ddtree_appliance.smoke.outcome import Outcome


@dataclass(frozen=True)
class Check:
    """One row: function returns an Outcome or raises CheckFailed."""

    name: str
    proves: str
    function: Callable[[SmokeContext], Outcome]


CHECKS = (
    # The first two stop the run when they find nobody to talk to.
    Check("engine ready", "the engine answers /health, without a key", service_checks.engine_ready),
    Check(
        "auth enforced", "the key is needed, a wrong one is refused, and probes need none", service_checks.auth_enforced
    ),
    Check("sidecar ready", "the health sidecar calls the service ready", service_checks.sidecar_ready),
    Check("versions", "DDTREE is at work with the budget that the sidecar reports", service_checks.versions),
    Check("greedy", "the native and the OpenAI endpoint write the same text", generation_checks.greedy),
    # Early: with a useless drafter everything is slow, and the time limit would hide why.
    Check("speculation", "a verify step brings more than one token", generation_checks.speculation),
    Check("concurrency", "8 requests at once are answered as one by one", generation_checks.concurrency),
    Check("chat", "a chat is answered", generation_checks.chat),
    Check("streaming", "a streamed answer is the whole answer, on both endpoints", generation_checks.streaming),
    Check("sampling", "a sampled request follows its seed and nothing else", generation_checks.sampling),
    Check("refusal", "what DDTREE cannot serve is refused by name, not ignored", generation_checks.refusal),
    Check("keys absent", "no answer that is meant for operators contains a key", service_checks.keys_absent),
    Check("metrics", "heartbeat and verify steps move; the sidecar sees the engine", service_checks.metrics),
)
