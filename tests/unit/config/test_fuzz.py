"""Whatever a file holds: a configuration that SGLang can be started with, or problems at lines that exist."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from ddtree_appliance.config import Config
from ddtree_appliance.config_source import ConfigError, config_from
from ddtree_appliance.engine_args import sglang_arguments
from ddtree_appliance.flag_table import flag_table
from tests.unit.config.generators import as_yaml, fuzz, json_values, sound_extra_args, with_extra_args

SAMPLE = (Path(__file__).parents[3] / "config/appliance.yaml").read_text()
# Comments only slow PyYAML down.
LINES = [line for line in SAMPLE.splitlines() if line.strip() and not line.lstrip().startswith("#")]
SECTIONS = {name: list(info.annotation.model_fields) for name, info in Config.model_fields.items() if name != "gpus"}  # type: ignore[union-attr]
KEYS = sorted({*Config.model_fields, *(key for keys in SECTIONS.values() for key in keys)})
ODD = [
    *("no", "010", "0:1", "12:30:45", "0x1F", "1_000", "2024-01-01", ".inf", "1e999", "9" * 25, "<<", "=", "~", ""),
    *("null", "true", "-1", "0", "1.5", "1e-05", '"0"', "'", '"', "[]", "{}", "[", "{", "- a", "&a", "*a", "!a", "%a"),
    *(
        '"\\ud800"',
        '"\\0"',
        '"\\UFFFFFFFF"',
        '"\\x85"',
        "|",
        ">",
        "? a",
        "a: b",
        "\t",
        "--",
        "-x",
        "/srv/models",
        "[::]",
    ),
    *(
        "bundled:target",
        "org/name",
        "latest",
        "localhost",
        "cuda",
        "cpu",
        "auto",
        "float16",
        "a\tb",
        "#",
        "[0]",
        "[a, a]",
    ),
]
PYTHON = ("None", "True", "False", "dict", "tuple", "str ", "<class", "Value error")
scalars = st.sampled_from(ODD) | st.text(string.printable, max_size=8) | json_values.map(json.dumps)


def outcome(raw: bytes) -> Config | None:
    """The configuration in `raw`, proved usable, or None for a refusal, proved readable."""
    try:
        config = config_from(raw, "appliance.yaml")
    except ConfigError as error:
        assert error.problems
        text = raw.decode("utf-8", "replace")
        line_count = text.rstrip("\n").count("\n") + 1
        for problem in error.problems:
            assert 1 <= problem.mark.line <= line_count and problem.mark.column >= 1, problem
        lines = error.message.split("\n")
        assert all(line.isprintable() and line.startswith(("appliance.yaml:", "  hint: ")) for line in lines), lines
        assert len(lines) == len(error.problems) + sum(problem.hint is not None for problem in error.problems)
        assert [word for word in PYTHON if word in error.message and word not in text] == []
        json.dumps(error.as_json()).encode()
        return None
    arguments = sglang_arguments(config)
    assert all(isinstance(word, str) and word and "\0" not in word for word in arguments)
    "\0".join(arguments).encode()  # as the kernel wants them
    return config


@fuzz(300)
@given(st.binary(max_size=200) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
@example(b"")
@example(b"\xef\xbb\xbfengine: {model: org/a, drafter: org/b}")
@example(b'engine: "\\UFFFFFFFF"')
@example(b"%YAML " + b"9" * 5000 + b".1\n---\na: 1")
@example("a: 1 # \u2028\nb: no".encode())
def test_no_bytes_are_answered_by_another_exception(raw: bytes) -> None:
    outcome(raw)


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """The sample with lines deleted, doubled, moved, re-indented, or with another key or value."""
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        key, _, _ = lines[at].partition(":")
        changes = {
            "delete": [],
            "double": [lines[at], lines[at]],
            "value": [f"{key}: {draw(scalars)}"],
            "key": [lines[at].replace(key.strip(), draw(st.sampled_from(KEYS) | st.sampled_from(ODD)), 1)],
            "move": [lines[at], draw(st.sampled_from(LINES))],
            "indent": [" " * draw(st.integers(0, 4)) + lines[at].lstrip()],
            "nest": [lines[at], f"    {draw(st.sampled_from(KEYS))}: {draw(scalars)}"],
        }
        lines[at : at + 1] = changes[draw(st.sampled_from(sorted(changes)))]
        if not lines:
            break
    return draw(st.sampled_from(["\n", "\r\n"])).join(lines).encode("utf-8", "surrogatepass")


@fuzz(300)
@given(mutations())
def test_a_mutated_sample_is_accepted_or_refused_at_its_lines(raw: bytes) -> None:
    outcome(raw)


values: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, False, 0, 1, -1, 1.5, 70000, "", "auto", "/srv/models/a", [], {}, ["0"], [0, "x"]]
)
trees = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.dictionaries(st.sampled_from(keys), values) | values for name, keys in SECTIONS.items()},
        "gpus": values | st.lists(values),
        "other": values,
    },
)


@fuzz(300)
@given(trees)
def test_known_keys_with_any_values_are_accepted_or_refused(tree: dict[str, Any]) -> None:
    outcome(as_yaml(tree).encode())


names = st.sampled_from(sorted(flag_table())) | st.text(st.characters(codec="utf-8"), max_size=12)


@fuzz(300)
@given(st.dictionaries(names, json_values | values, min_size=1, max_size=5))
@example({"dllm-algorithm": "\x1f"})
@example({"lora-paths": ["x" * 200]})
def test_any_extra_arguments_are_accepted_or_refused(extra_args: dict[str, Any]) -> None:
    outcome(with_extra_args(extra_args))


@fuzz(200)
@given(sound_extra_args())
def test_sound_extra_arguments_are_accepted(extra_args: dict[str, Any]) -> None:
    assert outcome(with_extra_args(extra_args)) is not None
