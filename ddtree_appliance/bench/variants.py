"""What is compared: an algorithm with its budget, block size, backend and extra SGLang arguments."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ddtree_appliance.ddtree.limits import MAX_BUDGET, MAX_TOPK
from ddtree_appliance.errors import UsageError

Algorithm = Literal["none", "DFLASH", "DDTREE"]
ALGORITHMS: dict[str, Algorithm] = {"none": "none", "dflash": "DFLASH", "ddtree": "DDTREE"}
# Which keys an algorithm takes; "name" and "arg" and "backend" fit all.
_OWN_KEYS: dict[Algorithm, tuple[str, ...]] = {"none": (), "DFLASH": ("block",), "DDTREE": ("budget", "topk")}
_COMMON_KEYS = ("backend", "arg", "name")
_UPPER_LIMITS = {"budget": MAX_BUDGET, "topk": MAX_TOPK, "block": 64}
DEFAULT_VARIANTS = ("none", "dflash", "dflash:block=8", *(f"ddtree:budget={n}" for n in (7, 15, 31, 63, 127)))
EXAMPLE = "for example none, dflash:block=8, ddtree:budget=63,topk=16,backend=triton"


class Variant(BaseModel):
    """One server's way to decode. None in a number: the server's own default (the drafter's block size).

    arguments: further SGLang arguments, after all others. label: the name that the operator gave it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    algorithm: Algorithm
    budget: int | None = None
    topk: int | None = None
    block_size: int | None = None
    backend: str | None = None
    arguments: tuple[str, ...] = ()
    label: str | None = None

    @property
    def name(self) -> str:
        """Unique for what it says; fit for a file name."""
        if self.label is not None:
            return self.label
        parts = [self.algorithm.lower()]
        if self.budget is not None:
            parts.append(str(self.budget))
        if self.topk is not None:
            parts.append(f"k{self.topk}")
        if self.block_size is not None:
            parts.append(f"b{self.block_size}")
        if self.backend is not None:
            parts.append(self.backend)
        parts += [re.sub(r"[^A-Za-z0-9.]+", "-", argument).strip("-") for argument in self.arguments]
        return "-".join(parts)

    def sglang_arguments(self, drafter: str | None) -> list[str]:
        """What this variant adds to the arguments that all servers share. Raises UsageError without a drafter."""
        arguments: list[str] = []
        if self.algorithm != "none":
            if drafter is None:
                raise UsageError(f"variant {self.name} needs a drafter", "give --drafter DIR")
            arguments += ["--speculative-algorithm", self.algorithm, "--speculative-draft-model-path", drafter]
        for flag, value in (
            ("--speculative-ddtree-budget", self.budget),
            ("--speculative-ddtree-topk", self.topk),
            ("--speculative-num-draft-tokens", self.block_size),
            ("--attention-backend", self.backend),
        ):
            if value is not None:
                arguments += [flag, str(value)]
        return [*arguments, *self.arguments]


def parse_variant(text: str) -> Variant:
    """`ALGORITHM[:KEY=VALUE,...]` as given on the command line. Raises UsageError that quotes it."""
    word, _, options = text.partition(":")
    algorithm = ALGORITHMS.get(word.lower())
    if algorithm is None:
        raise UsageError(f"--variant {text}: {word!r} is not one of {', '.join(ALGORITHMS)}", EXAMPLE)
    numbers: dict[str, int] = {}
    words: dict[str, str] = {}
    arguments: list[str] = []
    for option in options.split(",") if options else []:
        key, separator, value = option.partition("=")
        _check_key(text, algorithm, key)
        if not separator or not value:
            raise UsageError(f"--variant {text}: {key} has no value", EXAMPLE)
        if key == "arg":
            arguments.append(value)
        elif key in numbers or key in words:
            raise UsageError(f"--variant {text}: {key} is given twice")
        elif key in _UPPER_LIMITS:
            numbers[key] = _number(text, key, value)
        else:
            words[key] = value
    label = words.get("name")
    if label is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", label):
        raise UsageError(f"--variant {text}: the name {label!r} does not fit a file name", "letters, digits, . _ -")
    if algorithm == "DDTREE" and "budget" not in numbers:
        raise UsageError(f"--variant {text}: DDTREE needs a budget", EXAMPLE)
    return Variant(
        algorithm=algorithm,
        budget=numbers.get("budget"),
        topk=numbers.get("topk"),
        block_size=numbers.get("block"),
        backend=words.get("backend"),
        arguments=tuple(arguments),
        label=label,
    )


def _check_key(text: str, algorithm: Algorithm, key: str) -> None:
    allowed = (*_OWN_KEYS[algorithm], *_COMMON_KEYS)
    if key in allowed:
        return
    if algorithm == "DDTREE" and key == "block":
        raise UsageError(f"--variant {text}: a tree is as deep as the drafter's own block", "leave block= out")
    near = difflib.get_close_matches(key, allowed, n=1)
    hint = f"did you mean {near[0]}=?" if near else f"{algorithm} takes {', '.join(allowed)}"
    raise UsageError(f"--variant {text}: {algorithm} takes no {key!r}", hint)


def _number(text: str, key: str, value: str) -> int:
    smallest = 2 if key == "block" else 1
    if not value.isascii() or not value.isdigit() or not smallest <= int(value) <= _UPPER_LIMITS[key]:
        raise UsageError(f"--variant {text}: {key} must be {smallest} to {_UPPER_LIMITS[key]}, not {value!r}")
    return int(value)


def with_baselines(variants: Sequence[Variant]) -> list[Variant]:
    """The variants with the two baselines first: `none`, and DFLASH with the drafter's own block size.

    A baseline that is missing is added. Raises UsageError if two variants share a name.
    """
    plain = next((v for v in variants if v.algorithm == "none"), Variant(algorithm="none"))
    chain = next((v for v in variants if is_chain_baseline(v)), Variant(algorithm="DFLASH"))
    ordered = [plain, chain, *(v for v in variants if v not in (plain, chain))]
    names = [variant.name for variant in variants] + [v.name for v in (plain, chain) if v not in variants]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"two variants are named {', '.join(doubled)}", "tell them apart with name=LABEL")
    return ordered


def is_chain_baseline(variant: Variant) -> bool:
    """Whether it is DFLASH as it comes: the chain that the drafter was trained for."""
    return variant.algorithm == "DFLASH" and variant.block_size is None


def split_into_groups(variants: Sequence[Variant], group_size: int) -> list[list[Variant]]:
    """Groups of at most group_size variants, the two baselines (the first two variants) in each of them."""
    baselines, others = list(variants[:2]), list(variants[2:])
    room = group_size - len(baselines)
    if not others:
        return [baselines]
    if room < 1:
        raise UsageError(f"--group-size must be at least 3, not {group_size}", "both baselines are in every group")
    return [baselines + others[first : first + room] for first in range(0, len(others), room)]
