"""The conditions of a benchmark: what is refused, and that a later command cannot change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddtree_appliance.bench.plan import Plan, continue_plan, make_plan
from ddtree_appliance.errors import UsageError

PAIR: dict[str, Any] = {"model_path": "/t", "drafter": "/d"}


def test_the_default_plan_is_the_whole_sweep() -> None:
    plan = make_plan(PAIR)
    assert [variant.name for variant in plan.variants][:3] == ["none", "dflash", "dflash-b8"]
    assert plan.concurrency == (1, 2, 4, 8, 16, 32)
    assert (plan.repeats, plan.temperature, plan.breakdown) == (3, 0.0, True)
    assert [plan.prompt_count(n) for n in plan.concurrency] == [8, 8, 8, 16, 32, 64]
    assert len(plan.groups()) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "/d"}, "--model-path is missing"),
        ({"model_path": "/t"}, "--drafter is missing"),
        ({**PAIR, "repeats": 2}, "--repeats: input should be greater than or equal to 3, not 2"),
        ({**PAIR, "new_tokens": 4}, "--new-tokens"),
        ({**PAIR, "temperature": -1.0}, "--temperature"),
        ({**PAIR, "concurrency": (0, 1)}, "--concurrency: positive numbers"),
        ({**PAIR, "concurrency": (1, 1)}, "--concurrency: each number once"),
        ({**PAIR, "concurrency": (1, 4), "prompts_per_cell": 7}, "4 concurrent requests need 8 prompts"),
        ({**PAIR, "group_size": 2}, "--group-size must be at least 3"),
        ({"attach": {"a": "http://x"}, "model_path": "/t"}, "--model-path: attached servers run already"),
        ({"attach": {"a": "http://x"}, "server_args": ("a",)}, "--server-arg: attached"),
    ],
)
def test_a_bad_plan_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan(options)
    assert message in caught.value.message


def test_attached_servers_are_one_group_and_record_no_step_times() -> None:
    plan = make_plan({"attach": {"a": "http://x", "b": "http://y"}})
    assert (plan.groups(), plan.breakdown) == ([[]], False)


@pytest.mark.parametrize(
    "given",
    [{}, PAIR, {"variants": ["ddtree:budget=8"]}, {"variants": ["none", "dflash", "ddtree:budget=8"], "repeats": 3}],
)
def test_a_continued_benchmark_need_not_repeat_its_options(given: dict[str, Any]) -> None:
    stored = make_plan({**PAIR, "variants": ["ddtree:budget=8"]})
    assert continue_plan(Plan.model_validate_json(stored.model_dump_json()), given, Path("x")) == stored


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"repeats": 5}, "repeats: 3 before, 5 now"),
        ({"model_path": "/other"}, "model_path: /t before, /other now"),
        ({"variants": ["ddtree:budget=9"]}, "variants: none,dflash,ddtree-8 before, none,dflash,ddtree-9 now"),
        ({"concurrency": (1, 2)}, "concurrency: (1, 2, 4, 8, 16, 32) before, (1, 2) now"),
        ({"temperature": 1.0, "new_tokens": 64}, "temperature: 0.0 before, 1.0 now; "),
    ],
)
def test_other_conditions_in_the_same_folder_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    stored = make_plan({**PAIR, "variants": ["ddtree:budget=8"]})
    order = [message] if "; " not in message else message.split("; ")
    with pytest.raises(UsageError) as caught:
        continue_plan(stored, given, Path("/out"))
    assert "/out holds a benchmark under other conditions" in caught.value.message
    assert all(part in caught.value.message for part in order)
