"""The sample, the schema and the profiles in config/: complete, generated, loadable, and not a word too much."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from pydantic import BaseModel

from ddtree_appliance.checkpoint import Checkpoint, read_checkpoint
from ddtree_appliance.config import Config
from ddtree_appliance.config_source import ConfigError, config_from, load_config
from ddtree_appliance.engine_args import sglang_arguments
from ddtree_appliance.memory import GIB, MemoryPlan, plan_memory
from ddtree_appliance.rehearsal.server import DRAFTER, TARGET

ROOT = Path(__file__).parents[3]
SAMPLE = ROOT / "config/appliance.yaml"
SCHEMA = ROOT / "config/appliance.schema.json"
PROFILES = sorted((ROOT / "config/profiles").glob("*.yaml"))
# The engine refuses it until accept results are broadcast between the ranks.
TWO_GPUS = "rtx-pro-6000-tp2.yaml"
PAIR = {"engine": {"model": "/srv/models/target", "drafter": "/srv/models/drafter"}}

# What the profiles speak of: a dense target of 8B, one that a card does not hold, and drafters of five such layers.
SHAPE_8B = {
    **{"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "dtype": "bfloat16"},
}
SHAPE_40B = {**SHAPE_8B, "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64}
MODELS = {
    "hopper.yaml": (SHAPE_8B, 8_190_000_000, 79 * GIB),
    "one-gpu.yaml": (SHAPE_8B, 8_190_000_000, 94 * GIB),
    TWO_GPUS: (SHAPE_40B, 40_000_000_000, 94 * GIB),
}


def plain(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = yaml.safe_load(path.read_text())
    return value


def leaves(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of `value` by dotted key; extra arguments and lists count as values."""
    found = {}
    for name, inner in value.items():
        if isinstance(inner, dict) and name != "extra_args":
            found.update(leaves(inner, f"{prefix}{name}."))
        else:
            found[prefix + name] = inner
    return found


def fields(model: type[BaseModel], prefix: str = "") -> list[str]:
    found = []
    for name, info in model.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += fields(inner, f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return found


DEFAULTS = leaves(Config.model_validate(PAIR).model_dump())


# The sample


def test_sample_and_schema_are_what_the_script_writes() -> None:
    script = runpy.run_path(str(ROOT / "scripts/write-config-sample"), run_name="script")
    assert SAMPLE.read_text() == script["sample"](), "run scripts/write-config-sample"
    assert SCHEMA.read_text() == script["schema"](), "run scripts/write-config-sample"


def test_the_sample_shows_every_default() -> None:
    assert leaves(plain(SAMPLE)) == DEFAULTS
    assert leaves(load_config(SAMPLE).model_dump()) == DEFAULTS
    assert list(leaves(plain(SAMPLE))) == fields(Config)


def test_every_key_stands_once_below_a_comment_that_describes_it() -> None:
    lines = SAMPLE.read_text().splitlines()
    keys = [index for index, line in enumerate(lines) if line and not line.lstrip().startswith("#")]
    sections = [name for name in Config.model_fields if name != "gpus"]
    assert len(keys) == len(fields(Config)) + len(sections)
    for index in keys:
        indent = re.match(" *", lines[index])
        assert indent is not None and lines[index - 1].startswith(f"{indent[0]}# "), lines[index]


def test_every_field_has_a_description_in_whole_sentences() -> None:
    for name in fields(Config):
        section, _, key = name.rpartition(".")
        model: Any = Config.model_fields[section].annotation if section else Config
        description = model.model_fields[key].description
        assert description and re.fullmatch(r"[A-Za-z].*[.]", description, re.S), name


# The profiles


def test_there_are_the_promised_profiles() -> None:
    names = ["hopper.yaml", "one-gpu.yaml", "rehearsal.yaml", TWO_GPUS]
    assert [path.name for path in PROFILES] == names


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.name)
def test_a_profile_loads_as_what_it_says(path: Path) -> None:
    config = load_config(path)
    assert sglang_arguments(config)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.name)
def test_a_profile_says_only_what_differs_from_the_defaults(path: Path) -> None:
    given = leaves(plain(path))
    required = {"engine.model", "engine.drafter"}
    assert required <= set(given)
    assert [key for key, value in given.items() if key not in required and value == DEFAULTS[key]] == []
    assert path.read_text().splitlines()[1].startswith("# "), "what the profile is for"


def planned(path: Path, config: Config) -> MemoryPlan:
    if config.engine.device == "cpu":
        return plan_memory(config, read_checkpoint(TARGET, True), read_checkpoint(DRAFTER, False), 4 * GIB)
    shape, elements, free = MODELS[path.name]
    drafter = {**shape, "num_hidden_layers": 5, "block_size": 16}
    return plan_memory(config, Checkpoint(path, shape, elements, 0), Checkpoint(path, drafter, 1_050_000_000, 0), free)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.name)
def test_the_values_of_a_profile_make_sense_together(path: Path) -> None:
    config = load_config(path)
    assert planned(path, config).problems == ()
    assert config.unit.shm_size_gb >= config.tp_size
    assert config.unit.stop_timeout_s < config.unit.start_timeout_s
    assert bool(config.gpus) == (config.engine.device == "cuda")


def test_the_target_of_the_profile_for_two_gpus_needs_both() -> None:
    path = ROOT / "config/profiles" / TWO_GPUS
    assert planned(path, load_config(path).model_copy(update={"gpus": ["0"]})).problems


# The schema


def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", [SAMPLE, *PROFILES], ids=lambda path: path.name)
def test_the_schema_accepts_the_sample_and_every_profile(path: Path) -> None:
    validator().validate(plain(path))
    schema_line = path.read_text().splitlines()[0]
    named = schema_line.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / named).resolve() == SCHEMA


@pytest.mark.parametrize(
    "change",
    [
        {"other": 1},
        {"engine": {**PAIR["engine"], "modle": "x"}},
        *({section: {"other": 1}} for section in ("ddtree", "server", "health", "paths", "unit")),
        {"server": {"port": 70000}},
        {"engine": {"model": "/srv/models/target"}},
        {"gpus": "0"},
        {"ddtree": {"budget": "32"}},
    ],
    ids=str,
)
def test_the_schema_refuses_what_the_command_refuses(change: dict[str, Any]) -> None:
    value = {**PAIR, **change}
    assert not validator().is_valid(value)
    with pytest.raises(ConfigError):
        config_from(json.dumps(value).encode(), "appliance.yaml")
