"""`probe` and `health`: one quiet check for podman, and the sidecar that reports the engine's health."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_appliance.commands import leaf_options
from ddtree_appliance.commands.engine import INSTALLED_CONFIG

if TYPE_CHECKING:
    from ddtree_appliance.commands import Commands
    from ddtree_appliance.config import Config


_GRACE_S = 0.5  # so that the probe's own message, which says what was late, comes first


def add(commands: Commands) -> None:
    """Add the parsers."""
    probe = commands.add_parser(
        "probe",
        parents=[leaf_options(None)],
        help="check the engine once: silent and 0 if it is healthy, else one line and 1 (for HealthCmd)",
    )
    probe.add_argument("--url", default="http://127.0.0.1:30000", help="the engine (default: %(default)s)")
    probe.add_argument("--startup", action="store_true", help="only ask whether it has become ready")
    probe.add_argument("--heartbeat-limit", type=float, default=60.0, metavar="S", help="oldest heartbeat")
    probe.add_argument("--progress-limit", type=float, default=180.0, metavar="S", help="longest time without a batch")
    probe.add_argument("--timeout", type=float, default=9.0, metavar="S", help="give up, as unhealthy, after this long")
    probe.set_defaults(handler=_probe)

    health = commands.add_parser(
        "health", parents=[leaf_options(None)], help="serve /livez, /readyz, /version and /metrics (the sidecar)"
    )
    health.add_argument("config", type=Path, nargs="?", default=INSTALLED_CONFIG, metavar="CONFIG")
    health.add_argument(
        "--engine-url",
        default="http://ddtree-sglang:30000",
        metavar="URL",
        help="the engine as seen from here (default: %(default)s, its name on the container network)",
    )
    health.add_argument("--listen", default="0.0.0.0", metavar="ADDRESS", help="default: %(default)s")
    health.add_argument("--port", type=int, metavar="PORT", help="default: 30001, as the unit publishes it")
    health.set_defaults(handler=_health)


def _probe(args: argparse.Namespace) -> int:
    from ddtree_appliance.health.probe import probe

    def give_up(signum: int, frame: object) -> None:
        # podman does not end a check that is late, and an answer may drip for ever within the socket's time limit.
        print(f"no verdict within {args.timeout:g} s", flush=True)
        os._exit(1)

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, args.timeout + _GRACE_S)
    try:
        return probe(
            args.url,
            heartbeat_limit_s=args.heartbeat_limit,
            progress_limit_s=args.progress_limit,
            timeout_s=args.timeout,
            startup=args.startup,
        )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _health(args: argparse.Namespace) -> int:
    from ddtree_appliance.config_source import load_config
    from ddtree_appliance.engine_args import SIDECAR_PORT
    from ddtree_appliance.health.judge import Limits
    from ddtree_appliance.health.sidecar import serve_health

    config = load_config(args.config)
    health = config.health
    limits = Limits(
        heartbeat_limit_s=health.heartbeat_limit_s,
        progress_limit_s=health.progress_limit_s,
        busy_after_s=health.busy_after_s,
        unreachable_limit_s=health.unreachable_limit_s,
        start_limit_s=config.unit.start_timeout_s,
        accept_length_floor=health.accept_length_floor,
        accept_length_min_steps=health.accept_length_min_steps,
    )
    port = SIDECAR_PORT if args.port is None else args.port
    return serve_health(args.engine_url, args.listen, port, health.interval_s, limits, _version(config))


def _version(config: Config) -> dict[str, Any]:
    from ddtree_appliance import __version__
    from ddtree_appliance.errors import ApplianceError
    from ddtree_appliance.patching import verify_installed
    from ddtree_appliance.render import config_digest

    try:
        report = verify_installed()
    except ApplianceError as error:
        print(f"warning: {error.message}", file=sys.stderr, flush=True)
        sglang, patchset, verified = "none", "none", False
    else:
        sglang, patchset, verified = report.version, report.series_sha256 or "none", report.ok
    return {
        "version": __version__,
        "sglang_version": sglang,
        "patchset_sha256": patchset,
        "patchset_verified": verified,
        "image": os.environ.get("DDTREE_IMAGE", "unknown"),
        "model": config.engine.served_model_name or config.engine.model,
        "drafter": config.engine.drafter,
        "budget": config.ddtree.budget,
        "config_sha256": config_digest(config),
    }
