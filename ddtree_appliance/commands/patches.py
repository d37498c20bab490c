"""`patches list|apply|verify`: the changes to SGLang, and whether an installed engine carries exactly them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_appliance.commands import format_table, leaf_options, print_json
from ddtree_appliance.errors import EXIT_OK, PatchError, UsageError

if TYPE_CHECKING:
    from ddtree_appliance.commands import Commands
    from ddtree_appliance.patch_series import PatchSeries

_CHECKOUT_PATCHES = Path(__file__).resolve().parent.parent.parent / "patches" / "sglang-0.5.17"


def add(commands: Commands) -> None:
    parser = commands.add_parser("patches", help="apply the patch series to SGLang, or verify an installed engine")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    leaf = leaf_options()
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
        print_json({**facts, "patches": patches})
        return EXIT_OK
    print(format_table([("PATCH", "SUBJECT"), *((patch.name, patch.subject) for patch in series.patches)]))
    print(f"{len(series.patches)} patches, revision {series.revision}, series sha256 {series.sha256}")
    return EXIT_OK


def _patches_apply(args: argparse.Namespace) -> int:
    from ddtree_appliance.patching import build_wheel

    series = _load_series(args.patches)
    built = build_wheel(args.wheel, series, args.out)
    if args.json:
        print_json({"wheel": str(built), "patches": len(series.patches), "series_sha256": series.sha256})
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
        print_json(
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
