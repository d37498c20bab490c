"""What a variant means, how it is written down, and how variants are put into groups."""

from __future__ import annotations

import pytest

from ddtree_appliance.bench.variants import (
    DEFAULT_VARIANTS,
    Variant,
    parse_variant,
    split_into_groups,
    with_baselines,
)
from ddtree_appliance.errors import UsageError

DRAFTER = ["--speculative-draft-model-path", "/d"]
GOOD = {
    "none": ("none", []),
    "NONE:backend=fa3": ("none-fa3", ["--attention-backend", "fa3"]),
    "dflash": ("dflash", ["--speculative-algorithm", "DFLASH", *DRAFTER]),
    "dflash:block=8": (
        "dflash-b8",
        ["--speculative-algorithm", "DFLASH", *DRAFTER, "--speculative-num-draft-tokens", "8"],
    ),
    "ddtree:budget=64,topk=8,backend=triton": (
        "ddtree-64-k8-triton",
        [
            *("--speculative-algorithm", "DDTREE", *DRAFTER),
            *("--speculative-ddtree-budget", "64", "--speculative-ddtree-topk", "8", "--attention-backend", "triton"),
        ],
    ),
    "ddtree:budget=1,arg=--page-size=16": (
        "ddtree-1-page-size-16",
        ["--speculative-algorithm", "DDTREE", *DRAFTER, "--speculative-ddtree-budget", "1", "--page-size=16"],
    ),
    "none:name=a.b_c-1": ("a.b_c-1", []),
}


@pytest.mark.parametrize("text", GOOD)
def test_a_variant_has_a_name_and_arguments(text: str) -> None:
    variant = parse_variant(text)
    assert (variant.name, variant.sglang_arguments("/d")) == GOOD[text]


BAD = {
    "eagle": "'eagle' is not one of none, dflash, ddtree",
    "": "'' is not one of",
    "ddtree": "DDTREE needs a budget",
    "ddtree:budget": "budget has no value",
    "ddtree:budget=": "budget has no value",
    "ddtree:budget=0": "budget must be 1 to 128, not '0'",
    "ddtree:budget=129": "budget must be 1 to 128",
    "ddtree:budget=-8": "budget must be 1 to 128",
    "ddtree:budget=٣": "budget must be 1 to 128",
    "ddtree:budget=8,budget=16": "budget is given twice",
    "ddtree:budget=8,topk=65": "topk must be 1 to 64",
    "ddtree:budget=8,block=8": "a tree is as deep as the drafter's own block",
    "dflash:block=1": "block must be 2 to 64",
    "dflash:budget=8": "DFLASH takes no 'budget'",
    "none:block=8": "none takes no 'block'",
    "none:name=a/b": "does not fit a file name",
    "none:name=..": "does not fit a file name",
    "none:backend=a,backend=b": "backend is given twice",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_variant_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_variant(text)
    assert f"--variant {text}: " in caught.value.message
    assert BAD[text] in caught.value.message


def test_an_unknown_key_suggests_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        parse_variant("ddtree:buget=8")
    assert caught.value.hint == "did you mean budget=?"


def test_speculation_without_a_drafter_is_refused() -> None:
    with pytest.raises(UsageError, match="variant dflash needs a drafter"):
        parse_variant("dflash").sglang_arguments(None)


def names(variants: list[Variant]) -> list[str]:
    return [variant.name for variant in variants]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ["none", "dflash"]),
        (["ddtree:budget=8"], ["none", "dflash", "ddtree-8"]),
        (["ddtree:budget=8", "dflash:block=8"], ["none", "dflash", "ddtree-8", "dflash-b8"]),
        (["ddtree:budget=8", "dflash:backend=fa3", "none"], ["none", "dflash-fa3", "ddtree-8"]),
        (DEFAULT_VARIANTS, ["none", "dflash", "dflash-b8", *(f"ddtree-{n}" for n in (7, 15, 31, 63, 127))]),
    ],
)
def test_the_baselines_come_first_and_are_added_if_missing(given: list[str], expected: list[str]) -> None:
    assert names(with_baselines([parse_variant(text) for text in given])) == expected


@pytest.mark.parametrize("given", [["none", "none"], ["ddtree:budget=8,name=x", "dflash:name=x"]])
def test_two_variants_of_one_name_are_refused(given: list[str]) -> None:
    with pytest.raises(UsageError, match="two variants are named"):
        with_baselines([parse_variant(text) for text in given])


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (3, [["none", "dflash", "ddtree-8"], ["none", "dflash", "ddtree-16"], ["none", "dflash", "ddtree-32"]]),
        (4, [["none", "dflash", "ddtree-8", "ddtree-16"], ["none", "dflash", "ddtree-32"]]),
        (5, [["none", "dflash", "ddtree-8", "ddtree-16", "ddtree-32"]]),
    ],
)
def test_both_baselines_are_in_every_group(size: int, expected: list[list[str]]) -> None:
    variants = with_baselines([parse_variant(f"ddtree:budget={n}") for n in (8, 16, 32)])
    assert [names(group) for group in split_into_groups(variants, size)] == expected


def test_a_group_without_room_for_a_third_is_refused() -> None:
    variants = with_baselines([parse_variant("ddtree:budget=8")])
    with pytest.raises(UsageError, match="--group-size must be at least 3, not 2"):
        split_into_groups(variants, 2)
    assert [names(group) for group in split_into_groups(variants[:2], 2)] == [["none", "dflash"]]
