"""The `ddtree-appliance` command: dispatch to `commands/`, and errors turned into messages and exit codes."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from ddtree_appliance import __version__
from ddtree_appliance.commands import bench, config, engine, health, patches, smoke, units
from ddtree_appliance.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, ApplianceError, UsageError, report

if TYPE_CHECKING:
    from ddtree_appliance.commands import Commands


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line as every other error is reported."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see `{self.prog} --help`")


# In the order in which an operator meets them.
_COMMANDS: tuple[Callable[[Commands], None], ...] = (
    config.add,
    units.add,
    smoke.add,
    engine.add,
    health.add,
    patches.add,
    bench.add,
)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code (see errors.py). Expected failures never raise."""
    try:
        args = _build_parser().parse_args(argv)
    except SystemExit as stop:  # argparse leaves this way after --help and --version
        return EXIT_OK if stop.code is None else int(stop.code)
    except UsageError as error:
        return _report(error)
    try:
        handler: Callable[[argparse.Namespace], int] = args.handler
        return handler(args)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (ApplianceError, OSError) as error:
        if args.debug:
            traceback.print_exc()
        return _report(error)


def _build_parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="ddtree-appliance", description="Serve one LLM with DDTree speculative decoding on SGLang."
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--debug", action="store_true", help="show a traceback with an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add_command in _COMMANDS:
        add_command(commands)
    return parser


def _report(error: Exception) -> int:
    if isinstance(error, ApplianceError):
        return report(error)
    print(f"error: {error}", file=sys.stderr)
    return EXIT_FAILED
