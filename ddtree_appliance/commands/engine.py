"""`serve`, `launch` and `preflight`: start the engine, or find out whether it could start."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_appliance.commands import format_table, leaf_options, print_json
from ddtree_appliance.errors import EXIT_OK

if TYPE_CHECKING:
    from ddtree_appliance.commands import Commands

INSTALLED_CONFIG = Path("/etc/ddtree/appliance.yaml")


def add(commands: Commands) -> None:
    """Add the parsers."""
    serve = commands.add_parser(
        "serve",
        parents=[leaf_options(None)],
        help="check everything, then become SGLang's server (the container's entry point)",
    )
    serve.add_argument("config", type=Path, nargs="?", default=INSTALLED_CONFIG, metavar="CONFIG")
    serve.add_argument("--rendered-for", metavar="DIGEST", help="refuse a configuration other than the units' own")
    serve.set_defaults(handler=_serve)

    preflight = commands.add_parser(
        "preflight", parents=[leaf_options()], help="check host and models as serve does, without starting anything"
    )
    preflight.add_argument("config", type=Path, metavar="CONFIG")
    preflight.set_defaults(handler=_preflight)

    launch = commands.add_parser(
        "launch",
        help="start the patched SGLang with its own arguments, DDTREE registered",
        epilog="Everything after -- goes to SGLang, e.g. ddtree-appliance launch -- --model-path /models/target ...",
    )
    launch.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    launch.add_argument("sglang_arguments", nargs=argparse.REMAINDER, metavar="-- SGLANG_ARGUMENT")
    launch.set_defaults(handler=_launch)


def _serve(args: argparse.Namespace) -> int:
    from ddtree_appliance.launch import end_on_sigterm
    from ddtree_appliance.serve import serve

    end_on_sigterm()
    serve(args.config, args.rendered_for)


def _preflight(args: argparse.Namespace) -> int:
    from ddtree_appliance.config_source import load_config
    from ddtree_appliance.preflight import raise_failed, run_preflight

    findings, facts = run_preflight(load_config(args.config))
    arithmetic = facts.plan.rows() if facts.plan else []
    if args.json:
        rows = [{"check": each.check, "ok": each.error is None, "detail": each.detail} for each in findings]
        print_json({"checks": rows, "memory": dict(arithmetic)})
    else:
        outcome = [(each.check, "failed" if each.error else "ok", each.detail) for each in findings]
        print(format_table([("CHECK", "RESULT", "DETAIL"), *outcome]))
        if arithmetic:
            print("\n" + format_table([("MEMORY PER DEVICE", ""), *arithmetic]))
    raise_failed(findings)
    return EXIT_OK


def _launch(args: argparse.Namespace) -> int:
    from ddtree_appliance.launch import end_on_sigterm, launch

    end_on_sigterm()
    arguments = list(args.sglang_arguments)
    return launch(arguments[1:] if arguments[:1] == ["--"] else arguments)
