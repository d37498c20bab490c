"""Bad configurations and exactly what is said about them; the tables stand in `cases/`."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from ddtree_appliance.config import Config
from ddtree_appliance.config_rules import RULES
from ddtree_appliance.config_source import ConfigError, config_from, load_config
from ddtree_appliance.ddtree.start_rules import START_RULES, StartRule, unread_problems
from ddtree_appliance.engine_args import OWNED, REFUSED_FLAGS, sglang_arguments
from ddtree_appliance.errors import EXIT_USAGE, UsageError
from ddtree_appliance.flag_table import Flag, flag_table
from ddtree_appliance.yaml_source import MAX_BYTES, parse
from tests.unit.config.cases import CPU, FOLDER, PAIR, Case, messages, read_cases, with_file
from tests.unit.config.generators import with_extra_args
from tests.unit.test_start_rules import CASES as START_CASES

BAD = [case for name in ("yaml", "schema", "flags") for case in read_cases(name)]
RULE_CASES = read_cases("rules")
PYTHON = ("None", "True", "False", "dict", "tuple", "list[", "<class", "Value error", "Traceback")
HELP = "podman run --rm localhost/ddtree-sglang:latest launch -- --help shows SGLang's flags"

# What a text file cannot hold.
BAD_BYTES: dict[str, tuple[bytes, list[str]]] = {
    "an empty file": (
        b"",
        [
            "1:1: engine: is required",
            "  hint: give engine.model and engine.drafter; config/appliance.yaml shows every key",
        ],
    ),
    "a YAML version that is no number": (
        b"%YAML " + b"9" * 5000 + b".1\n---\nengine: {}\n",
        ["1:7: no YAML: a number is out of range", "  hint: correct or remove it"],
    ),
    "a directive and nothing else": (
        b"%YAML 1.1\n\n",
        ["1:10: no YAML: directives are not supported", "  hint: remove the lines that begin with %"],
    ),
    "a file that ends within a list": (
        b"gpus: [\n\n",
        ["1:8: no YAML: the file ends too early", "  hint: write the value, and close what is open"],
    ),
    "bytes that are not UTF-8": (
        "engine:\n  model: ü".encode() + b"\xff\n",
        ["2:11: the file is not UTF-8 text", "  hint: save it as UTF-8"],
    ),
    "UTF-16": ("engine: {}\n".encode("utf-16"), ["1:1: the file is not UTF-8 text", "  hint: save it as UTF-8"]),
    "a NUL": (b"engine:\n  model: \0\n", ["2:10: the character U+0000 may not occur", "  hint: remove it"]),
    "a line separator": (
        "engine: {} # \u2028\nserver: no\n".encode(),
        ["1:14: the character U+2028 ends a line to YAML only", "  hint: remove it"],
    ),
    "carriage returns alone": (
        b"engine:\r  model: no\r",
        ["1:8: the character U+000D ends a line to YAML only", "  hint: remove it"],
    ),
    "33 levels": (
        b"a: " + b"[" * 33 + b"]" * 33,
        ["1:35: values are nested more than 32 levels deep", "  hint: the configuration needs few"],
    ),
    "thousands of levels": (
        b"a: " + b"[" * 100_000,
        ["1:35: values are nested more than 32 levels deep", "  hint: the configuration needs few"],
    ),
    "too big": (
        b"#" * (MAX_BYTES + 1),
        [
            "1:1: the file has 262145 bytes; the limit is 262144",
            "  hint: a configuration has a few thousand: is it the right file?",
        ],
    ),
    "JSON that is nested too deeply": (
        f"{PAIR}  extra_args: {{preferred-sampling-params: '{'[' * 5000}'}}\n".encode(),
        [
            "4:16: engine.extra_args.preferred-sampling-params: must be keys and values, a list, or JSON text, is "
            f'"{"[" * 77}..."',
            f"  hint: {HELP}",
        ],
    ),
    "an argument that is too long for the kernel": (
        f"{PAIR}  extra_args: {{chat-template: {'x' * 131072}}}\n".encode(),
        [
            "4:16: engine.extra_args.chat-template: has 131072 bytes; an argument can have 131071",
            f"  hint: {HELP}",
        ],
    ),
}

# Where an operator is sent who sets what the appliance sets.
OWNED_HINTS = {
    "model-path": "use engine.model instead",
    "speculative-draft-model-path": "use engine.drafter instead",
    "revision": "use engine.model_revision instead",
    "speculative-draft-model-revision": "use engine.drafter_revision instead",
    "served-model-name": "use engine.served_model_name instead",
    "trust-remote-code": "use engine.trust_remote_code instead",
    "device": "use engine.device instead",
    "dtype": "use engine.dtype instead",
    "context-length": "use engine.context_length instead",
    "max-running-requests": "use engine.max_running_requests instead",
    "mem-fraction-static": "use engine.memory_fraction instead",
    "max-total-tokens": "use engine.kv_tokens instead",
    "attention-backend": "use engine.attention_backend instead",
    "prefill-attention-backend": "use engine.attention_backend instead",
    "decode-attention-backend": "use engine.attention_backend instead",
    "speculative-draft-attention-backend": "use engine.attention_backend instead",
    "page-size": "use engine.page_size instead",
    "kv-cache-dtype": "use engine.kv_dtype instead",
    "quantization": "use engine.quantization instead",
    "speculative-draft-model-quantization": "use engine.drafter_quantization instead",
    "speculative-algorithm": "leave it out",
    "speculative-ddtree-budget": "use ddtree.budget instead",
    "speculative-ddtree-topk": "use ddtree.topk instead",
    "speculative-dflash-block-size": "use ddtree.block_size instead",
    "speculative-num-draft-tokens": "use ddtree.budget instead",
    "tp-size": "use gpus instead",
    "base-gpu-id": "use gpus instead",
    "gpu-id-step": "use gpus instead",
    "host": "use server.host instead",
    "port": "use server.port instead",
    "api-key": "use server.api_key_secret instead",
    "admin-api-key": "use server.admin_key_secret instead",
    "enable-metrics": "leave it out",
    "uvicorn-access-log-exclude-prefixes": "leave it out",
    "sleep-on-idle": "leave it out",
    "disable-decode-cuda-graph": "leave it out",
    "disable-prefill-cuda-graph": "leave it out",
}
# Start rules that no configuration reaches: its own types and limits are in the way.
UNREACHABLE = {
    "speculative_draft_model_path",
    "speculative_ddtree_budget",
    "speculative_ddtree_topk",
    "speculative_num_draft_tokens",
}
START_RULES_OF_KEYS = {
    "kv_cache_dtype": (
        "  kv_dtype: fp8_e5m2\n",
        "4:13: engine.kv_dtype: --kv-cache-dtype = fp8_e5m2 is refused: ",
        "change or remove it",
    ),
}


def extra(name: str, message: str, hint: str, line_and_column: str = "4:16") -> list[str]:
    return with_file([f"{line_and_column}: engine.extra_args.{name}: {message}", f"  hint: {hint}"])


# The tables


@pytest.mark.parametrize("case", [*BAD, *RULE_CASES], ids=lambda case: case.name)
def test_a_bad_configuration_is_refused_with_exactly_these_messages(case: Case) -> None:
    assert messages(case.text) == with_file(case.expected)


@pytest.mark.parametrize("name", BAD_BYTES)
def test_bad_bytes_are_refused_with_exactly_these_messages(name: str) -> None:
    raw, expected = BAD_BYTES[name]
    assert messages(raw) == with_file(expected)


@pytest.mark.parametrize("case", [*BAD, *RULE_CASES], ids=lambda case: case.name)
def test_every_message_has_a_place_and_a_remedy_in_an_operators_words(case: Case) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from(case.text.encode(), "appliance.yaml")
    assert caught.value.exit_code == EXIT_USAGE and caught.value.hint is None
    for problem in caught.value.problems:
        assert problem.mark.line <= case.text.count("\n")
        assert problem.hint and problem.hint.isprintable() and problem.message.isprintable()
    assert [word for word in PYTHON if word in caught.value.message and word not in case.text] == []


@pytest.mark.parametrize("case", read_cases("good"), ids=lambda case: case.name)
def test_a_good_configuration_is_accepted(case: Case) -> None:
    command_line = shlex.join(sglang_arguments(config_from(case.text.encode(), "appliance.yaml")))
    assert [part for part in case.expected if part not in command_line] == []


def test_the_tables_are_read_whole() -> None:
    written = sum(path.read_text().count("\n=== ") for path in FOLDER.glob("*.txt"))
    assert len(BAD) + len(RULE_CASES) + len(read_cases("good")) == written
    assert len(BAD) + len(RULE_CASES) + len(BAD_BYTES) >= 200


def test_a_configuration_cannot_be_changed_after_it_was_judged() -> None:
    config = config_from(PAIR.encode(), "appliance.yaml")
    with pytest.raises(ValueError, match="frozen"):
        config.engine.page_size = 3  # type: ignore[misc]


# Rules: a new row without a case fails here


def test_every_rule_has_its_case_in_the_order_of_the_rules() -> None:
    assert [case.name for case in RULE_CASES] == [rule.key for rule in RULES]


@pytest.mark.parametrize("index", range(len(RULES)), ids=lambda index: f"{index}-{RULES[index].key}")
def test_a_rule_is_broken_by_its_case_alone_and_just_not_by_the_sound_one(index: int) -> None:
    rule, case = RULES[index], RULE_CASES[index]
    broken = Config.model_validate(parse(case.text.encode()).data)
    sound = Config.model_validate(parse(case.sound.encode()).data)
    message = rule.broken(broken)
    assert message is not None and rule.broken(sound) is None
    assert with_file(case.expected)[0].endswith(f": {rule.key}: {message}")
    assert case.expected[1:] == [f"  hint: {rule.hint}"]
    assert messages(case.sound) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.key)
def test_a_rule_reads_keys_that_exist(rule: Any) -> None:
    for key in (rule.key, *rule.reads):
        section, _, name = key.partition(".")
        model = Config.model_fields[section].annotation
        assert not name or name in model.model_fields  # type: ignore[union-attr]


def test_a_rule_is_skipped_while_a_key_that_it_reads_is_invalid() -> None:
    said = messages(f"{PAIR}server: {{host: nowhere, api_key_secret: null}}\n")
    assert len(said) == 2 and said[0].startswith("appliance.yaml:4:16: server.host: ")


# Flags: a new entry without a case fails here


def value_for(flag: Flag) -> Any:
    if flag.kind in ("switch", "pair"):
        return True
    value = flag.choices[0] if flag.choices else {"str": "x", "int": 1, "float": 0.5, "size": 1, "json": []}[flag.type]
    return [value] if flag.kind == "list" else value


def test_every_owned_flag_has_its_hint() -> None:
    assert list(OWNED_HINTS) == [owned.flag for owned in OWNED]


@pytest.mark.parametrize("flag", OWNED_HINTS)
def test_a_flag_that_the_appliance_sets_is_refused_with_the_key_to_use(flag: str) -> None:
    only_if_set = {owned.flag for owned in OWNED if owned.only_if_set}
    for name in (flag, *flag_table()[flag].aliases):
        extra_args = {name: value_for(flag_table()[flag])}
        message = "is set by the appliance"
        if flag in only_if_set:
            assert messages(with_extra_args(extra_args)) == []
            said = messages(with_extra_args(extra_args, CPU))
            assert said == extra(name, f"{message} for engine.device: cpu", OWNED_HINTS[flag], "7:16")
        else:
            assert messages(with_extra_args(extra_args)) == extra(name, message, OWNED_HINTS[flag])


@pytest.mark.parametrize("flag", REFUSED_FLAGS)
def test_a_refused_flag_says_why_and_what_to_do(flag: str) -> None:
    reason, remedy = REFUSED_FLAGS[flag]
    for name in (flag, *flag_table()[flag].aliases):
        said = messages(with_extra_args({name: value_for(flag_table()[flag])}))
        assert said == extra(name, f"is refused: {reason}", remedy)


@pytest.mark.parametrize("flag", [name for name, flag in flag_table().items() if flag.kind == "deprecated"])
def test_a_deprecated_flag_names_its_successor(flag: str) -> None:
    successor = flag_table()[flag].replaced_by
    hint = f"use {successor}" if successor else "leave it out: it has no effect"
    assert messages(with_extra_args({flag: True})) == extra(flag, "is deprecated in SGLang 0.5.17", hint)
    if successor is not None:
        names = [part.partition(":")[0] for part in successor.split(" and ")]
        assert all(flag_table()[name].kind != "deprecated" for name in names)


def test_every_start_rule_is_reached_or_known_to_be_unreachable() -> None:
    by_dest = {flag.dest: flag for flag in flag_table().values() if flag.kind != "deprecated"}
    for rule in START_RULES:
        flag = by_dest[rule.field].flag
        by_extra_argument = flag not in OWNED_HINTS and flag not in REFUSED_FLAGS
        assert [rule.field in UNREACHABLE, rule.field in START_RULES_OF_KEYS, by_extra_argument].count(True) == 1, flag


@pytest.mark.parametrize(
    "rule,value",
    [
        (rule, value)
        for rule in START_RULES
        if rule.field not in UNREACHABLE and rule.field not in START_RULES_OF_KEYS
        for value in START_CASES[rule.field][0]
    ],
    ids=lambda part: part.field if isinstance(part, StartRule) else str(part),
)
def test_a_start_rule_refuses_the_flag_with_its_reason(rule: StartRule, value: Any) -> None:
    flag = next(flag for flag in flag_table().values() if flag.dest == rule.field and flag.kind != "deprecated")
    as_written = value if isinstance(value, str) else json.dumps(value)
    expected = extra(flag.flag, f"{as_written} is refused: {rule.reason}", "change or remove it")
    assert messages(with_extra_args({flag.flag: value})) == expected


@pytest.mark.parametrize("field", START_RULES_OF_KEYS)
def test_a_start_rule_about_a_key_is_shown_at_the_key(field: str) -> None:
    text, message, hint = START_RULES_OF_KEYS[field]
    reason = next(rule.reason for rule in START_RULES if rule.field == field)
    assert messages(PAIR + text) == with_file([message + reason, f"  hint: {hint}"])


def test_what_ddtree_does_not_read_is_refused_here_as_at_the_start() -> None:
    fields = sorted({flag.dest for flag in flag_table().values()})
    stand_in = dataclasses.make_dataclass("ServerArgs", [(name, Any, None) for name in fields])
    unread = [field for field in fields if unread_problems(stand_in(**{field: 1}))]
    assert len(unread) > 20
    message = "belongs to another speculative algorithm: DDTREE does not read it"
    for flag in flag_table().values():
        if flag.flag in OWNED_HINTS or flag.flag in REFUSED_FLAGS or flag.kind == "deprecated":
            continue
        said = messages(with_extra_args({flag.flag: value_for(flag)}))
        assert (said == extra(flag.flag, message, "leave it out")) == (flag.dest in unread), flag.flag


# The error as a whole


def test_problems_come_all_together_in_the_order_of_the_lines() -> None:
    many = next(case for case in BAD if case.name.startswith("errors in every section"))
    places = [tuple(map(int, line.split(":")[:2])) for line in many.expected if not line.startswith("  hint")]
    assert len(places) == 13 and places == sorted(places)


def test_the_same_facts_are_there_as_data() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from(f"{PAIR}server:\n  port: 0\n  prot: 1\n".encode(), "a.yaml")
    place = {"file": "a.yaml", "line": 5, "column": 9, "path": "server.port"}
    first = {**place, "message": "0 is below the lowest value 1", "hint": "Port of the API on the host."}
    second = {"line": 6, "column": 3, "path": "server.prot", "message": "unknown key", "hint": "did you mean port?"}
    assert caught.value.as_json() == [first, {**first, **second}]


def test_a_file_with_blanks_in_its_name_is_named_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "my files" / "a: b.yaml"
    path.parent.mkdir()
    path.write_text("engine: {}\nserver: {port: 0}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert f"{path}:2:16: server.port: 0 is below the lowest value 1" in caught.value.message.split("\n")
    path.write_text(PAIR)
    assert load_config(path).engine.model == "/srv/models/target"


@pytest.mark.parametrize("name,reason", [("nowhere.yaml", "No such file or directory"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_named_with_the_reason(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(tmp_path / name)
    assert caught.value.message == f"{tmp_path / name}: {reason}"
    assert caught.value.hint == "name an existing, readable configuration file"
