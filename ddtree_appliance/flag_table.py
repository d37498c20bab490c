"""SGLang's flags as data, so that a command line can be checked on a host that has no SGLang.

`sglang_flags.json` is written from the patched SGLang's own parser by `scripts/write-flag-table`; a test keeps them
equal.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ddtree_appliance.yaml_source import shown

_MAX_WORD_BYTES = 131071  # of one argument: the kernel's MAX_ARG_STRLEN, less its terminator


@dataclass(frozen=True)
class Flag:
    """One flag. kind: switch, pair (--x and --no-x), value, list or deprecated; type: str, int, float, size, json.

    replaced_by: what to write instead of a deprecated flag; None if nothing.
    """

    flag: str
    aliases: tuple[str, ...]
    dest: str
    kind: str
    type: str
    choices: tuple[Any, ...] | None
    default: Any
    replaced_by: str | None

    def arguments(self, value: Any) -> list[str]:
        """The command line for `value`, as SGLang's parser accepts it. Raises ValueError saying what is expected."""
        if self.kind == "switch":
            if value is not True:
                raise ValueError(f"is a switch: it can only be true, is {shown(value)}")
            return [f"--{self.flag}"]
        if self.kind == "pair":
            if not isinstance(value, bool):
                raise ValueError(f"must be true or false, is {shown(value)}")
            return [f"--{self.flag}" if value else f"--no-{self.flag}"]
        if self.kind == "list":
            if not isinstance(value, list) or not value:
                raise ValueError(f"must be a list of at least one value, is {shown(value) if value != [] else 'empty'}")
            words = [self._word(item) for item in value]
            for word in words:
                if word.startswith("-"):
                    raise ValueError(f"{shown(word)} begins with a dash: SGLang would take it for a flag")
            return [f"--{self.flag}", *words]
        word = self._word(value)
        return [f"--{self.flag}={word}"] if word.startswith("-") else [f"--{self.flag}", word]

    def _word(self, value: Any) -> str:
        word = self._json(value) if self.type == "json" else self._scalar(value)
        if "\0" in word or word == "--":
            raise ValueError(f"{shown(word)} cannot stand in a command line")
        if len(word.encode()) > _MAX_WORD_BYTES:
            raise ValueError(f"has {len(word.encode())} bytes; an argument can have {_MAX_WORD_BYTES}")
        return word

    def _json(self, value: Any) -> str:
        if not isinstance(value, str):
            return json.dumps(value)
        try:
            json.loads(value, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            raise ValueError(f"must be keys and values, a list, or JSON text, is {shown(value)}") from None
        return value

    def _scalar(self, value: Any) -> str:
        if not _TYPE_CHECKS[self.type](value):
            raise ValueError(f"must be {_TYPE_NAMES[self.type]}, is {shown(value)}")
        if self.choices is not None and value not in self.choices:
            near = difflib.get_close_matches(str(value), map(str, self.choices), n=1)
            raise ValueError(f"{shown(value)} is none of its choices" + (f"; did you mean {near[0]}?" if near else ""))
        return str(value)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")  # Python reads NaN and Infinity, SGLang's parser does not


def _is_size(value: Any) -> bool:
    # As SGLang's human_readable_int: case matters, and decimals go with decimal suffixes only.
    if not isinstance(value, str):
        return type(value) is int
    if re.fullmatch(r"\d+(\.\d+)?[kMGT]", value.strip()):
        return True
    whole = re.fullmatch(r"(\d+)[KMGT]i", value.strip())
    try:
        int(whole[1] if whole else value)
    except ValueError:
        return False
    return True


_TYPE_NAMES = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "size": "a whole number, or text like 64k (64000) or 64Ki (65536)",
}
_TYPE_CHECKS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str) and value != "",
    "int": lambda value: type(value) is int,
    "float": lambda value: type(value) in (int, float),
    "size": _is_size,
}


@functools.cache
def flag_table() -> Mapping[str, Flag]:
    """Every flag of the patched SGLang, by name without dashes; aliases lead to their flag."""
    rows = json.loads(resources.files("ddtree_appliance").joinpath("sglang_flags.json").read_text())
    table: dict[str, Flag] = {}
    for row in rows:
        choices = None if row["choices"] is None else tuple(row["choices"])
        flag = Flag(**{**row, "aliases": tuple(row["aliases"]), "choices": choices})
        for name in (flag.flag, *flag.aliases):
            table[name] = flag
    return table


def nearest(name: str) -> str | None:
    """The known flag whose name is most like `name`."""
    near = difflib.get_close_matches(name, flag_table(), n=1)
    return near[0] if near else None
