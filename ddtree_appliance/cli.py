"""The `ddtree-appliance` command: argument parsing, dispatch, and errors turned into messages and exit codes.

Each sub-command imports what it needs when it runs, so that `--help` works on a host that has nothing installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ddtree_appliance import __version__
from ddtree_appliance.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, ApplianceError, PatchError, UsageError

if TYPE_CHECKING:
    from ddtree_appliance.patch_series import PatchSeries

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_CHECKOUT_PATCHES = Path(__file__).resolve().parent.parent / "patches" / "sglang-0.5.17"


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line as every other error is reported."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see `{self.prog} --help`")


def _leaf_options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--json", action="store_true", help="print the result as JSON")
    # Suppressed, or the default here would overwrite a --debug given before the sub-command.
    options.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return options


def _add_patches(commands: Commands) -> None:
    parser = commands.add_parser("patches", help="apply the patch series to SGLang, or verify an installed engine")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    leaf = _leaf_options()
    leaf.add_argument("--patches", type=Path, metavar="DIR", help="patch series (default: this checkout's)")

    listing = actions.add_parser("list", parents=[leaf], help="show the patches, their order and their subjects")
    listing.set_defaults(handler=_patches_list)

    apply = actions.add_parser("apply", parents=[leaf], help="build the patched wheel from the pinned one")
    apply.add_argument("--wheel", type=Path, metavar="FILE", required=True, help="the pinned wheel, as on PyPI")
    apply.add_argument("--out", type=Path, metavar="DIR", required=True, help="where the patched wheel is written")
    apply.set_defaults(handler=_patches_apply)

    verify = actions.add_parser("verify", parents=[leaf], help="check the installed SGLang against what was built")
    verify.add_argument("--site", type=Path, metavar="DIR", help="site-packages to look in (default: this Python's)")
    verify.set_defaults(handler=_patches_verify)


def _add_launch(commands: Commands) -> None:
    parser = commands.add_parser(
        "launch",
        help="start the patched SGLang with DDTREE registered",
        epilog="Everything after -- goes to SGLang, e.g. ddtree-appliance launch -- --model-path /models/target ...",
    )
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("sglang_arguments", nargs=argparse.REMAINDER, metavar="-- SGLANG_ARGUMENT")
    parser.set_defaults(handler=_launch)


# The sub-commands: each function adds its parser and sets `handler`, a function from the namespace to an exit code.
_COMMANDS: dict[str, Callable[[Commands], None]] = {
    "patches": _add_patches,
    "launch": _add_launch,
}


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
    for add_command in _COMMANDS.values():
        add_command(commands)
    return parser


def _report(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    if not isinstance(error, ApplianceError):
        return EXIT_FAILED
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return error.exit_code


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _format_table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _load_series(directory: Path | None) -> PatchSeries:
    from ddtree_appliance.patch_series import PatchSeries

    if directory is None and not _CHECKOUT_PATCHES.is_dir():
        raise UsageError(f"there is no patch series at {_CHECKOUT_PATCHES}", "name one with --patches DIR")
    return PatchSeries.load(directory or _CHECKOUT_PATCHES)


def _patches_list(args: argparse.Namespace) -> int:
    series = _load_series(args.patches)
    if args.json:
        patches = [{"name": p.name, "sha256": p.sha256, "subject": p.subject} for p in series.patches]
        facts = {"revision": series.revision, "series_sha256": series.sha256, "wheels": dict(series.wheels)}
        _print_json({**facts, "patches": patches})
        return EXIT_OK
    print(_format_table([("PATCH", "SUBJECT"), *((patch.name, patch.subject) for patch in series.patches)]))
    print(f"{len(series.patches)} patches, revision {series.revision}, series sha256 {series.sha256}")
    return EXIT_OK


def _patches_apply(args: argparse.Namespace) -> int:
    from ddtree_appliance.patching import build_wheel

    series = _load_series(args.patches)
    built = build_wheel(args.wheel, series, args.out)
    if args.json:
        _print_json({"wheel": str(built), "patches": len(series.patches), "series_sha256": series.sha256})
    else:
        print(built)
    return EXIT_OK


def _patches_verify(args: argparse.Namespace) -> int:
    from ddtree_appliance.patching import verify_installed

    # The image holds the patched engine but not the series; then the manifest alone is the measure, and we say so.
    has_series = args.patches is not None or _CHECKOUT_PATCHES.is_dir()
    report = verify_installed(args.site, _load_series(args.patches) if has_series else None)
    compared = "compared with the project's series" if report.series_compared else "not compared with a series"
    if args.json:
        _print_json(
            {
                "ok": report.ok,
                "site": str(report.site),
                "version": report.version,
                "series_sha256": report.series_sha256,
                "series_compared": report.series_compared,
                "patches": list(report.patches),
                "files_checked": report.files_checked,
                "problems": list(report.problems),
            }
        )
    elif report.ok:
        counts = f"{len(report.patches)} patches, {report.files_checked} files verified, {compared}"
        print(f"sglang {report.version} in {report.site}: {counts}")
    else:
        print("\n".join(report.problems))
    if not report.ok:
        count = len(report.problems)
        raise PatchError(
            f"the installed sglang is not what was built ({count} {'problem' if count == 1 else 'problems'})",
            "install the wheel that `ddtree-appliance patches apply` builds",
        )
    return EXIT_OK


def _launch(args: argparse.Namespace) -> int:
    from ddtree_appliance.launch import launch

    arguments = list(args.sglang_arguments)
    return launch(arguments[1:] if arguments[:1] == ["--"] else arguments)
