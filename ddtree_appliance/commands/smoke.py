"""`smoke`: prove a running service from outside."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_appliance.commands import leaf_options, print_json
from ddtree_appliance.commands.engine import INSTALLED_CONFIG
from ddtree_appliance.errors import HostError, UsageError

if TYPE_CHECKING:
    from ddtree_appliance.commands import Commands
    from ddtree_appliance.config import Config
    from ddtree_appliance.smoke import CheckResult


def add(commands: Commands) -> None:
    """Add the parser."""
    smoke = commands.add_parser(
        "smoke",
        parents=[leaf_options()],
        help="prove that a running service generates, speculates, keeps its keys, and is watched",
        epilog="Without --url, addresses and keys are those of the installed configuration on this host.",
    )
    smoke.add_argument("--url", metavar="URL", help="the engine, for example http://HOST:30000")
    smoke.add_argument("--health-url", metavar="URL", help="the sidecar, for example http://HOST:30001")
    smoke.add_argument("--api-key-file", type=Path, metavar="FILE", help="holds the API key")
    smoke.add_argument("--admin-key-file", type=Path, metavar="FILE", help="holds the admin key")
    smoke.add_argument("--config", type=Path, metavar="CONFIG", help=f"default: {INSTALLED_CONFIG}")
    smoke.add_argument("--timeout", type=float, default=60.0, metavar="S", help="for all checks together")
    smoke.set_defaults(handler=_smoke)


def _smoke(args: argparse.Namespace) -> int:
    from ddtree_appliance.smoke import SmokeTarget, run_smoke

    engine_url, health_url = args.url, args.health_url
    api_key, admin_key = _key_in(args.api_key_file), _key_in(args.admin_key_file)
    if engine_url is None:
        config = _installed_config(args.config)
        engine_url = _published(config.server.host, config.server.port)
        health_url = health_url or _published(config.health.host, config.health.port)
        api_key = api_key or _podman_secret(config.server.api_key_secret, "--api-key-file")
        admin_key = admin_key or _podman_secret(config.server.admin_key_secret, "--admin-key-file")
    target = SmokeTarget(engine_url, health_url, api_key, admin_key, args.timeout)
    report = run_smoke(target, on_result=_show_progress if sys.stderr.isatty() else None)
    if args.json:
        print_json(report.to_json())
    else:
        print(report.to_text())
    return report.exit_code


def _show_progress(result: CheckResult) -> None:
    print(f"{result.name}: {result.outcome.status.value}", file=sys.stderr)


def _installed_config(path: Path | None) -> Config:
    from ddtree_appliance.config_source import load_config

    if path is None and not INSTALLED_CONFIG.exists():
        raise UsageError(f"nothing is installed here ({INSTALLED_CONFIG} is missing)", "name the service with --url")
    return load_config(path or INSTALLED_CONFIG)


def _published(host: str, port: int) -> str:
    # What is published on every address is reached on the loopback interface.
    here = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    return f"http://{here.get(host, host)}:{port}"


def _key_in(path: Path | None) -> str | None:
    if path is None:
        return None
    from ddtree_appliance.key_file import read_key

    return read_key(path)


def _podman_secret(name: str | None, option: str) -> str | None:
    if name is None:
        return None
    command = ["podman", "secret", "inspect", "--showsecret", "--format", "{{.SecretData}}", name]
    try:
        # The output is the key: it goes nowhere but into the request.
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except OSError as error:
        raise HostError(f"podman does not run: {error.strerror}", f"give the key with {option}") from error
    if result.returncode != 0:
        reason = " ".join(result.stderr.split())
        raise HostError(f"the podman secret {name} cannot be read: {reason}", f"run as root, or give {option}")
    return result.stdout.strip("\r\n")
