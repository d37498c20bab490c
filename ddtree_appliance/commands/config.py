"""`validate` and `render`: what a configuration means, without touching the host."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_appliance.commands import leaf_options, print_json
from ddtree_appliance.errors import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from ddtree_appliance.commands import Commands


def add(commands: Commands) -> None:
    """Add the parsers."""
    validate = commands.add_parser(
        "validate", parents=[leaf_options()], help="check a configuration; needs no GPU, no SGLang and no root"
    )
    validate.add_argument("config", type=Path, metavar="CONFIG")
    validate.set_defaults(handler=_validate)

    render = commands.add_parser("render", parents=[leaf_options()], help="write the systemd units of a configuration")
    render.add_argument("config", type=Path, metavar="CONFIG")
    render.add_argument("--out", type=Path, metavar="DIR", required=True, help="where the units are written")
    render.add_argument("--diff", action="store_true", help="only show how they differ from DIR; 1 if they do")
    render.set_defaults(handler=_render)


def _validate(args: argparse.Namespace) -> int:
    from ddtree_appliance.config_source import ConfigError, load_config
    from ddtree_appliance.engine_args import sglang_arguments
    from ddtree_appliance.render import config_digest

    try:
        config = load_config(args.config)
    except ConfigError as error:
        if args.json:
            print_json({"ok": False, "problems": error.as_json()})
        raise
    if args.json:
        arguments = sglang_arguments(config)
        print_json({"ok": True, "problems": [], "config_sha256": config_digest(config), "sglang_arguments": arguments})
    else:
        print(f"{args.config}: valid, {config_digest(config)[:12]}")
    return EXIT_OK


def _render(args: argparse.Namespace) -> int:
    from ddtree_appliance.config_source import load_config
    from ddtree_appliance.render import diff_units, render_units, write_units

    units = render_units(load_config(args.config))
    if args.diff:
        difference = diff_units(units, args.out)
        if args.json:
            print_json({"differs": bool(difference), "diff": difference})
        else:
            print(difference, end="")
        return EXIT_FAILED if difference else EXIT_OK
    written = [str(path) for path in write_units(units, args.out)]
    if args.json:
        print_json({"written": written})
    else:
        print("\n".join(written))
    return EXIT_OK
