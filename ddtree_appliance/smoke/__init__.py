"""The proof after a deployment: run by URL against a running service, over within its deadline (60 s by default).

It asks as a client would and needs neither the engine's files nor its host. What it proves stands in `checks.CHECKS`.
"""

from ddtree_appliance.smoke.outcome import CheckResult, SmokeReport, Status
from ddtree_appliance.smoke.run import run_smoke
from ddtree_appliance.smoke.target import DEFAULT_DEADLINE_S, SmokeTarget

__all__ = ["DEFAULT_DEADLINE_S", "CheckResult", "SmokeReport", "SmokeTarget", "Status", "run_smoke"]
