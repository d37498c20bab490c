"""Whether a target and a drafter belong together, judged from the bundled pair and from pairs broken in one place."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from ddtree_appliance.ddtree.pair import block_size_of, pair_problems
from ddtree_appliance.rehearsal.server import DRAFTER, TARGET

Config = dict[str, Any]

MISSING = object()
BUNDLED_TARGET: Config = json.loads((TARGET / "config.json").read_text())
BUNDLED_DRAFTER: Config = json.loads((DRAFTER / "config.json").read_text())


def changed(config: Config, changes: Config) -> Config:
    """A copy of `config`; a dot in a key leads into a nested table, `MISSING` removes the key."""
    result = copy.deepcopy(config)
    for key, value in changes.items():
        *path, last = key.split(".")
        table = result
        for part in path:
            table = table[part]
        if value is MISSING:
            del table[last]
        else:
            table[last] = value
    return result


def test_the_bundled_pair_belongs_together() -> None:
    assert pair_problems(BUNDLED_TARGET, BUNDLED_DRAFTER) == []


@pytest.mark.parametrize(
    "target,drafter",
    [
        # a drafter that does not say what it was trained for, or has no mask token, may still fit
        ({}, {"num_target_layers": MISSING}),
        ({}, {"dflash_config.mask_token_id": MISSING}),
        # the ends of the ranges
        ({}, {"dflash_config.target_layer_ids": [0, 3]}),
        ({}, {"dflash_config.mask_token_id": 0}),
        ({}, {"dflash_config.mask_token_id": 4095}),
        ({}, {"block_size": 2}),
        # the block size in its other place
        ({}, {"block_size": MISSING, "dflash_config.block_size": 8}),
        # one of several architectures
        ({}, {"architectures": ["Qwen3ForCausalLM", "DFlashDraftModel"]}),
        ({"hidden_size": 512}, {"hidden_size": 512}),
        ({"vocab_size": 9000}, {"vocab_size": 9000, "dflash_config.mask_token_id": 8999}),
        ({"num_hidden_layers": 8}, {"num_target_layers": 8, "dflash_config.target_layer_ids": [7]}),
    ],
)
def test_a_pair_that_fits_has_no_problem(target: Config, drafter: Config) -> None:
    assert pair_problems(changed(BUNDLED_TARGET, target), changed(BUNDLED_DRAFTER, drafter)) == []


@pytest.mark.parametrize(
    "target,drafter,problem",
    [
        (
            {},
            {"architectures": ["Qwen3ForCausalLM"]},
            "the drafter's architecture is ['Qwen3ForCausalLM'], not DFlashDraftModel",
        ),
        ({}, {"architectures": MISSING}, "the drafter's architecture is missing, not DFlashDraftModel"),
        ({}, {"architectures": None}, "the drafter's architecture is missing, not DFlashDraftModel"),
        ({}, {"hidden_size": 512}, "hidden_size differs: target 256, drafter 512"),
        ({"hidden_size": MISSING}, {}, "hidden_size differs: target None, drafter 256"),
        ({}, {"vocab_size": 4097}, "vocab_size differs: target 4096, drafter 4097"),
        ({"vocab_size": MISSING}, {}, "vocab_size differs: target None, drafter 4096"),
        (
            {"num_hidden_layers": 5},
            {},
            "the drafter was trained for a target of 4 layers, this one has 5",
        ),
        (
            {},
            {"layer_types": ["full_attention", "sliding_attention"]},
            "the drafter has sliding_attention layers; only full attention is supported",
        ),
        ({}, {"dflash_config.target_layer_ids": MISSING}, "the drafter names no dflash_config.target_layer_ids"),
        ({}, {"dflash_config.target_layer_ids": []}, "the drafter names no dflash_config.target_layer_ids"),
        ({}, {"dflash_config.target_layer_ids": [0, 4]}, "target_layer_ids [0, 4] are outside the target's 4 layers"),
        ({}, {"dflash_config.target_layer_ids": [-1, 2]}, "target_layer_ids [-1, 2] are outside the target's 4 layers"),
        ({}, {"dflash_config": MISSING}, "the drafter names no dflash_config.target_layer_ids"),
        ({}, {"dflash_config": None}, "the drafter names no dflash_config.target_layer_ids"),
        ({}, {"block_size": MISSING}, "the drafter names no block_size"),
        ({}, {"block_size": 1}, "block_size 1 leaves nothing to draft"),
        ({}, {"dflash_config.mask_token_id": 4096}, "mask_token_id 4096 is outside the target's vocabulary of 4096"),
        ({}, {"dflash_config.mask_token_id": -1}, "mask_token_id -1 is outside the target's vocabulary of 4096"),
    ],
)
def test_what_keeps_a_pair_apart_is_named(target: Config, drafter: Config, problem: str) -> None:
    assert pair_problems(changed(BUNDLED_TARGET, target), changed(BUNDLED_DRAFTER, drafter)) == [problem]


def test_all_problems_are_reported_at_once() -> None:
    broken = changed(BUNDLED_DRAFTER, {"hidden_size": 1, "vocab_size": 2, "block_size": 1})
    assert len(pair_problems(BUNDLED_TARGET, broken)) == 3


def test_a_target_is_no_drafter() -> None:
    problems = pair_problems(BUNDLED_TARGET, BUNDLED_TARGET)
    assert problems[0] == "the drafter's architecture is ['Qwen3ForCausalLM'], not DFlashDraftModel"
    assert "the drafter names no block_size" in problems


@pytest.mark.parametrize(
    "drafter,size",
    [
        # good
        ({"block_size": 16}, 16),
        ({"dflash_config": {"block_size": 8}}, 8),
        ({"block_size": 16, "dflash_config": {"block_size": 8}}, 16),
        ({"block_size": None, "dflash_config": {"block_size": 8}}, 8),
        # bad
        ({}, None),
        ({"block_size": None}, None),
        ({"dflash_config": None}, None),
        ({"dflash_config": {}}, None),
    ],
)
def test_block_size_is_read_from_either_place(drafter: Config, size: int | None) -> None:
    assert block_size_of(drafter) == size
