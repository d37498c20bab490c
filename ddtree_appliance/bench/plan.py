"""The conditions of a benchmark, fixed when its folder is made: a later command continues, never changes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddtree_appliance.bench.variants import (
    DEFAULT_VARIANTS,
    Variant,
    parse_variant,
    split_into_groups,
    with_baselines,
)
from ddtree_appliance.errors import UsageError

MIN_REPEATS = 3
# Four pairs of 8B-class models with their pools and graphs fit a GPU with 141 GB.
DEFAULT_GROUP_SIZE = 4
# Few enough for a short command, many enough that the accept length does not hang on one text.
MIN_PROMPTS = 8


class Plan(BaseModel):
    """What every unit of one folder has in common. Lengths are in tokens.

    Either variants (servers to start) or attach (name -> base URL of servers that run already) is not empty.
    prompts: a JSON Lines file, None for the bundled held-out code, cut to prompt_tokens. prompts_per_cell: None for
    twice the concurrency, at least 8. group_size: servers up at the same time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    model_path: str | None = None
    drafter: str | None = None
    device: Literal["cpu", "cuda"] = "cuda"
    variants: tuple[Variant, ...] = ()
    attach: dict[str, str] = Field(default_factory=dict)
    group_size: int = Field(default=DEFAULT_GROUP_SIZE, ge=2)
    server_args: tuple[str, ...] = ()
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    repeats: int = Field(default=MIN_REPEATS, ge=MIN_REPEATS)
    prompts: str | None = None
    prompts_sha256: str | None = None
    prompt_tokens: int = Field(default=96, ge=1)
    prompts_per_cell: int | None = None
    new_tokens: int = Field(default=128, ge=8)
    temperature: float = Field(default=0.0, ge=0)
    breakdown: bool = True

    def prompt_count(self, concurrency: int) -> int:
        """The prompts that each variant gets per repeat at that concurrency."""
        return self.prompts_per_cell or max(MIN_PROMPTS, 2 * concurrency)

    @property
    def largest_prompt_count(self) -> int:
        """The prompts that must exist."""
        return max(map(self.prompt_count, self.concurrency))

    def groups(self) -> list[list[Variant]]:
        """The variants of each comparison group; one empty list for attached servers, which tell what they are."""
        return [[]] if self.attach else split_into_groups(self.variants, self.group_size)


def make_plan(given: Mapping[str, Any]) -> Plan:
    """A new folder's plan from the options that were given (by the plan's names; variants as text).

    Raises UsageError.
    """
    options = dict(given)
    if options.get("attach"):
        unused = [name for name in ("variants", "model_path", "drafter", "device", "server_args") if name in options]
        if unused:
            flags = ", ".join(f"--{name.removesuffix('s').replace('_', '-')}" for name in unused)
            raise UsageError(f"{flags}: attached servers run already", "leave it out with --attach")
        options["breakdown"] = False
    else:
        if "model_path" not in options:
            raise UsageError("--model-path is missing", "the target's folder; or --attach NAME=URL")
        texts = options.get("variants") or DEFAULT_VARIANTS
        options["variants"] = tuple(with_baselines([parse_variant(text) for text in texts]))
        if "drafter" not in options:
            raise UsageError("--drafter is missing", "the DFlash drafter's folder: the chain is in every comparison")
    plan = _validated(options)
    _check_numbers(plan)
    plan.groups()
    return plan


def continue_plan(stored: Plan, given: Mapping[str, Any], where: Path) -> Plan:
    """`stored`, if no option that is given now differs from it. Raises UsageError that names those which do."""
    options = dict(given)
    if "variants" in options:
        options["variants"] = tuple(with_baselines([parse_variant(text) for text in options["variants"]]))
    merged = _validated({**{name: getattr(stored, name) for name in Plan.model_fields}, **options})
    changed = [name for name in Plan.model_fields if getattr(merged, name) != getattr(stored, name)]
    if changed:
        details = "; ".join(f"{name}: {_shown(stored, name)} before, {_shown(merged, name)} now" for name in changed)
        raise UsageError(f"{where} holds a benchmark under other conditions: {details}", "use another --out folder")
    return stored


def _shown(plan: Plan, name: str) -> str:
    value = getattr(plan, name)
    if name == "variants":
        return ",".join(variant.name for variant in value)
    return str(value)


def _validated(options: Mapping[str, Any]) -> Plan:
    try:
        return Plan(**options)
    except ValidationError as error:
        first = error.errors()[0]
        name = "-".join(str(part) for part in first["loc"]).replace("_", "-")
        raise UsageError(f"--{name}: {first['msg'].lower()}, not {first['input']!r}") from error


def _check_numbers(plan: Plan) -> None:
    if not plan.concurrency or min(plan.concurrency) < 1:
        raise UsageError(f"--concurrency: positive numbers, not {list(plan.concurrency)}")
    if len(set(plan.concurrency)) != len(plan.concurrency):
        raise UsageError(f"--concurrency: each number once, not {list(plan.concurrency)}")
    for concurrency in plan.concurrency:
        if plan.prompt_count(concurrency) < 2 * concurrency:
            raise UsageError(
                f"--prompts-per-cell {plan.prompts_per_cell}: {concurrency} concurrent requests need"
                f" {2 * concurrency} prompts",
                "with fewer, most of a cell is its start and its end",
            )
