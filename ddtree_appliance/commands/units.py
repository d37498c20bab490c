"""`install` and `uninstall`: the units on this host."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_appliance.commands import leaf_options, print_json
from ddtree_appliance.errors import EXIT_OK

if TYPE_CHECKING:
    from ddtree_appliance.commands import Commands


def add(commands: Commands) -> None:
    """Add the parsers."""
    discard = argparse.ArgumentParser(add_help=False)
    discard.add_argument("--discard-edits", action="store_true", help="overwrite or remove units that were edited here")

    install = commands.add_parser(
        "install", parents=[leaf_options(), discard], help="put a configuration and its units on this host"
    )
    install.add_argument("config", type=Path, metavar="CONFIG")
    install.set_defaults(handler=_install)

    uninstall = commands.add_parser(
        "uninstall", parents=[leaf_options(), discard], help="stop the service and take its units away"
    )
    uninstall.set_defaults(handler=_uninstall)


def _install(args: argparse.Namespace) -> int:
    from ddtree_appliance.install import install

    report = install(args.config, discard_edits=args.discard_edits)
    print_json(report.as_json()) if args.json else print(report)
    return EXIT_OK


def _uninstall(args: argparse.Namespace) -> int:
    from ddtree_appliance.install import uninstall

    report = uninstall(discard_edits=args.discard_edits)
    print_json(report.as_json()) if args.json else print(report)
    return EXIT_OK
