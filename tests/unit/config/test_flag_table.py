"""The table of SGLang's flags is SGLang's, and what is rendered with it is parsed to what was meant."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddtree_appliance.config import Config, EngineConfig
from ddtree_appliance.config_source import config_from, load_config
from ddtree_appliance.engine_args import OWNED, REFUSED_FLAGS, argument_problems, sglang_arguments
from ddtree_appliance.flag_table import Flag, flag_table
from tests.unit.config.generators import fuzz, sound_configs, sound_extra_args, with_extra_args
from tests.unit.config.test_sample import PAIR, PROFILES, ROOT, SAMPLE
from tests.unit.engine import import_sglang


@pytest.fixture(scope="module")
def sglang() -> SimpleNamespace:
    """SGLang's parser, which raises instead of exiting; its reader of sizes; and the table as the script writes it."""
    server_args = import_sglang("sglang.srt.server_args")
    path, environment = list(sys.path), dict(os.environ)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            table = runpy.run_path(str(ROOT / "scripts/write-flag-table"), run_name="script")["table"]()
    finally:
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise AssertionError(message)

    parser = Parser()
    server_args.ServerArgs.add_cli_args(parser)
    return SimpleNamespace(parser=parser, read_size=server_args.human_readable_int, table=table)


def meant(flag: Flag, value: Any, read_size: Callable[[str], int]) -> Any:
    """What SGLang's parser should make of `value`, which stands for `flag` in a configuration."""
    if flag.type == "json":
        return json.loads(value) if isinstance(value, str) else value
    if flag.type == "size":
        return read_size(str(value))
    if flag.type == "float":  # a whole number beyond 2**53 is rounded, as every parser of floats does
        return [float(each) for each in value] if isinstance(value, list) else float(value)
    return value


def assert_understood(config: Config, sglang: SimpleNamespace) -> None:
    """SGLang's parser makes of the whole command line the values that were meant, and else its defaults."""
    expected = vars(sglang.parser.parse_args(["--model-path", "x"]))
    table = flag_table()
    given = {owned.flag: value for owned in OWNED if (value := owned.value(config)) is not None}
    for name, value in {**given, **config.engine.extra_args}.items():
        expected[table[name].dest] = meant(table[name], value, sglang.read_size)
    assert vars(sglang.parser.parse_args(sglang_arguments(config))) == expected


# The table


def test_the_table_is_what_the_script_writes_from_the_patched_sglang(sglang: SimpleNamespace) -> None:
    committed = (ROOT / "ddtree_appliance/sglang_flags.json").read_text()
    assert committed == sglang.table, "run scripts/write-flag-table"


def test_every_option_of_the_parser_is_in_the_table(sglang: SimpleNamespace) -> None:
    options = {name.removeprefix("--") for name in sglang.parser._option_string_actions if name.startswith("--")}
    negations = {f"no-{flag.flag}" for flag in flag_table().values() if flag.kind == "pair"}
    assert options - {"help"} == set(flag_table()) | negations


@pytest.mark.parametrize("flag", [*(owned.flag for owned in OWNED), *REFUSED_FLAGS])
def test_owned_and_refused_flags_go_by_their_own_names(flag: str) -> None:
    assert flag_table()[flag].flag == flag


@pytest.mark.parametrize(
    "key,flag", [("dtype", "dtype"), ("kv_dtype", "kv-cache-dtype"), ("attention_backend", "attention-backend")]
)
def test_every_choice_of_a_key_is_one_of_sglangs(key: str, flag: str) -> None:
    choices = set(get_args(EngineConfig.model_fields[key].annotation)) - {"auto"}
    assert choices and choices <= set(flag_table()[flag].choices or ())


# Command lines


@pytest.mark.parametrize("path", [SAMPLE, *PROFILES], ids=lambda path: path.name)
def test_sample_and_profiles_are_understood(path: Path, sglang: SimpleNamespace) -> None:
    assert_understood(load_config(path), sglang)


@fuzz(150)
@given(raw=sound_configs())
def test_a_sound_configuration_is_understood(raw: bytes, sglang: SimpleNamespace) -> None:
    assert_understood(config_from(raw, "appliance.yaml"), sglang)


@fuzz(300)
@given(extra_args=sound_extra_args())
@example(
    extra_args={"log-level": "-x=y z", "chat-template": "a\nb", "tokenizer-path": "-1", "chunked-prefill-size": -1}
)
@example(extra_args={"schedule-conservativeness": 1e-05, "mm-process-config": {"a": [1e300, -0.0, None, "ü"]}})
def test_sound_extra_arguments_are_understood(extra_args: dict[str, Any], sglang: SimpleNamespace) -> None:
    assert_understood(config_from(with_extra_args(extra_args), "appliance.yaml"), sglang)


def test_every_free_flag_is_understood_once(sglang: SimpleNamespace) -> None:
    examples = {"str": "x", "int": 3, "float": 0.5, "size": "64Ki", "json": {"a": 1}}
    understood = 0
    for name, flag in flag_table().items():
        value = True if flag.kind in ("switch", "pair") else flag.choices[-1] if flag.choices else examples[flag.type]
        extra_args = {name: [value] if flag.kind == "list" else value}
        config = Config.model_validate({"engine": {**PAIR["engine"], "extra_args": extra_args}})
        if not list(argument_problems(config)):
            assert_understood(config, sglang)
            understood += 1
    assert understood > 300


SIZES = st.from_regex(r"[-+ ]?[0-9_٣]{0,6}(\.[0-9]{0,3})?[kKmMgGtT]?i?[bB ]?", fullmatch=True) | st.text(max_size=6)


@fuzz(500)
@given(text=SIZES)
@example(text="9" * 4301)
@example(text="9" * 4301 + "k")
@example(text="9" * 4301 + "Ki")
@example(text="1_0Ki")
@example(text=" 64Ki\n")
def test_a_size_is_accepted_exactly_if_sglang_accepts_it(text: str, sglang: SimpleNamespace) -> None:
    try:
        sglang.read_size(text)
        is_size = True
    except (argparse.ArgumentTypeError, ValueError):
        is_size = False
    try:
        flag_table()["max-prefill-tokens"].arguments(text)
        accepted = True
    except ValueError:
        accepted = False
    assert accepted == is_size


@pytest.mark.parametrize(
    "name,value,words",
    [
        ("log-level", "-x", ["--log-level=-x"]),
        ("log-level", "--host", ["--log-level=--host"]),
        ("log-level", "---", ["--log-level=---"]),
        ("log-level", "-", ["--log-level=-"]),
        ("log-level", "a=b c", ["--log-level", "a=b c"]),
        ("log-level", "@file", ["--log-level", "@file"]),
        ("chunked-prefill-size", -1, ["--chunked-prefill-size=-1"]),
        ("chunked-prefill-size", 10**18, ["--chunked-prefill-size", "1000000000000000000"]),
        ("schedule-conservativeness", 1e-05, ["--schedule-conservativeness", "1e-05"]),
        ("schedule-conservativeness", -1e-05, ["--schedule-conservativeness=-1e-05"]),
        ("schedule-conservativeness", 1, ["--schedule-conservativeness", "1"]),
        ("max-prefill-tokens", 65536, ["--max-prefill-tokens", "65536"]),
        ("max-prefill-tokens", -1, ["--max-prefill-tokens=-1"]),
        ("gc-threshold", [700, 10, 10], ["--gc-threshold", "700", "10", "10"]),
        ("mm-process-config", {}, ["--mm-process-config", "{}"]),
        ("mm-process-config", {"a": [None, 1e-05]}, ["--mm-process-config", '{"a": [null, 1e-05]}']),
        ("mm-process-config", "-1", ["--mm-process-config=-1"]),
        ("disable-radix-cache", True, ["--disable-radix-cache"]),
        ("dllm-fdfo", True, ["--dllm-fdfo"]),
        ("dllm-fdfo", False, ["--no-dllm-fdfo"]),
        ("model-checksum", "x", ["--model-checksum", "x"]),
    ],
)
def test_a_value_becomes_the_words_that_mean_it(
    name: str, value: Any, words: list[str], sglang: SimpleNamespace
) -> None:
    flag = flag_table()[name]
    assert flag.arguments(value) == words
    parsed = getattr(sglang.parser.parse_args(["--model-path", "x", *words]), flag.dest)
    assert parsed == meant(flag, value, sglang.read_size)


MISTAKEN: dict[str, list[Any]] = {
    "log-level": ["", "--", "a\0b", None, 1, 1.5, True, ["a"], {}],
    "chunked-prefill-size": [True, 1.0, "1", None, [1]],
    "schedule-conservativeness": [True, "1e-05", None],
    "max-prefill-tokens": [True, 1.5, "64K", "1.5Ki", "", "k", "1kk", None],
    "gc-threshold": [700, [], [True], ["1"], [-1], [None], [[1]], {}, "1 2"],
    "log-requests-level": [4, True, "1", 1.0],
    "sampling-backend": ["", "Pytorch", 1],
    "mm-process-config": ["", "{", "NaN", "[Infinity]", "'a'", "[" * 100_000],
    "disable-radix-cache": [False, 1, "true", None],
    "dllm-fdfo": [0, "false", None],
}


@pytest.mark.parametrize(
    "name,value",
    [(name, value) for name, values in MISTAKEN.items() for value in values],
    ids=lambda part: str(part)[:30],
)
def test_a_value_that_would_not_be_understood_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        flag_table()[name].arguments(value)
    assert str(caught.value).isprintable()


def test_the_words_that_are_refused_for_their_dashes_are_really_misread(sglang: SimpleNamespace) -> None:
    assert sglang.parser.parse_args(["--model-path", "x", "--chat-template=--"]).chat_template != "--"
    with pytest.raises(AssertionError, match="unrecognized arguments: -x"):
        sglang.parser.parse_args(["--model-path", "x", "--log-requests-target", "a", "-x"])
