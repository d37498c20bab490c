"""The sub-commands of `ddtree-appliance`: each module adds its parsers, each parser sets `handler`.

A handler takes the parsed arguments and returns an exit code; it imports what it needs when it runs, so that `--help`
works on a host that has nothing installed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def leaf_options(json_help: str | None = "print the result as JSON") -> argparse.ArgumentParser:
    """The options of every command that does something; json_help: None for one that reports nothing."""
    options = argparse.ArgumentParser(add_help=False)
    if json_help is not None:
        options.add_argument("--json", action="store_true", help=json_help)
    # Suppressed, or the default here would overwrite a --debug given before the sub-command.
    options.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return options


def print_json(value: Any) -> None:
    """Print `value` for programs."""
    print(json.dumps(value, indent=2))


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equal length as aligned columns, for people."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
