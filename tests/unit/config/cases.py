"""Reads the tables in `cases/`, whose texts look like a configuration file and like what the command prints about it.

A case begins with `=== NAME`; its text ends at `=>`, behind which stands what is expected: messages without the file's
name, or parts of SGLang's command line. In rules.txt, `=> sound` begins a text that is just not refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ddtree_appliance.config_source import ConfigError, config_from

PAIR = "engine:\n  model: /srv/models/target\n  drafter: /srv/models/drafter\n"
CPU = "gpus: []\nengine:\n  device: cpu\n  model: bundled:target\n  drafter: bundled:drafter\n  kv_tokens: 16384\n"
FOLDER = Path(__file__).parent / "cases"


@dataclass(frozen=True)
class Case:
    """A configuration and what is expected of it, by lines. sound: a similar one that is accepted."""

    name: str
    text: str
    expected: list[str]
    sound: str = ""


def read_cases(name: str) -> list[Case]:
    """The cases of `cases/NAME.txt`."""
    content = (FOLDER / f"{name}.txt").read_text().replace("(pair)\n", PAIR).replace("(cpu)\n", CPU)
    cases = []
    for block in re.split(r"^=== ", content, flags=re.M)[1:]:
        title, _, body = block.partition("\n")
        text, expected, *sound = re.split(r"^=>.*\n", body, flags=re.M)
        cases.append(Case(title, text, expected.split("\n") if expected.strip() else [], "".join(sound)))
        while cases[-1].expected and not cases[-1].expected[-1]:
            cases[-1].expected.pop()
    return cases


def messages(raw: bytes | str, source: str = "appliance.yaml") -> list[str]:
    """What is said about the configuration `raw`, by lines; nothing if it is accepted."""
    try:
        config_from(raw.encode() if isinstance(raw, str) else raw, source)
    except ConfigError as error:
        return error.message.split("\n")
    return []


def with_file(lines: list[str], source: str = "appliance.yaml") -> list[str]:
    """`lines` as in a table, with the file's name before each message."""
    return [line if line.startswith("  hint: ") else f"{source}:{line}" for line in lines]
