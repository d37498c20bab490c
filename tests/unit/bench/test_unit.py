"""One unit: rotation, one server at a time, refusals told, and nothing left of a unit that fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ddtree_appliance.bench.gpu_clock import ClockWatch, Sample
from ddtree_appliance.bench.plan import Plan, make_plan
from ddtree_appliance.bench.prompts import Prompt
from ddtree_appliance.bench.records import Agreement, Cell, GpuClock, UnitRecord
from ddtree_appliance.bench.servers import BenchServer
from ddtree_appliance.bench.unit import compare_tokens, measure_unit, rotated
from ddtree_appliance.errors import ApplianceError
from tests.unit.bench.fake_server import FakeServer

BASELINES = {"none": "none", "dflash": "dflash"}
PROMPTS: list[Prompt] = [[number] for number in range(8)]


def plan(temperature: float = 0.0) -> Plan:
    pair = {"model_path": "/t", "drafter": "/d", "variants": ["ddtree:budget=8"], "concurrency": (2,)}
    return make_plan({**pair, "prompts_per_cell": 4, "new_tokens": 8, "temperature": temperature})


def three() -> dict[str, FakeServer]:
    return {"none": FakeServer(), "dflash": FakeServer(accepted=2), "tree": FakeServer(accepted=3, token_shift=1)}


@contextmanager
def serving(fakes: dict[str, FakeServer]) -> Iterator[list[BenchServer]]:
    with ExitStack() as stack:
        for fake in fakes.values():
            stack.enter_context(fake.serving())
        yield [BenchServer(name, fake.url) for name, fake in fakes.items()]


def measure(servers: list[BenchServer], temperature: float = 0.0) -> tuple[UnitRecord, list[Cell]]:
    seen: list[Cell] = []
    unit = measure_unit(
        servers, BASELINES, plan(temperature), PROMPTS, 3, 1, 2, lambda what, cell: seen.append(cell) if cell else None
    )
    return unit, seen


@pytest.mark.parametrize(("repeat", "expected"), [(0, "ABC"), (1, "BCA"), (2, "CAB"), (3, "ABC"), (4, "BCA")])
def test_each_repeat_begins_one_variant_further(repeat: int, expected: str) -> None:
    assert "".join(rotated("ABC", repeat)) == expected


def test_nothing_to_rotate_is_nothing() -> None:
    assert rotated([], 2) == []


def test_a_unit_has_every_variant_and_repeat_in_rotation_on_the_same_prompts() -> None:
    fakes = three()
    with serving(fakes) as servers:
        unit, seen = measure(servers)
    order = [(cell.repeat, cell.variant) for cell in seen]
    expected = [
        *((0, name) for name in ("none", "dflash", "tree")),
        *((1, name) for name in ("dflash", "tree", "none")),
        *((2, name) for name in ("tree", "none", "dflash")),
    ]
    assert order == expected
    assert list(unit.cells) == seen
    assert (unit.session, unit.group, unit.concurrency, unit.prompts) == (3, 1, 2, 4)
    for fake in fakes.values():
        # The warm-up, a wave of two, is in no cell; then three repeats of four.
        assert len(fake.prompts) == 2 + 3 * 4
        assert all(sorted(fake.prompts[2 + 4 * n : 6 + 4 * n]) == PROMPTS[:4] for n in range(3))
    assert {cell.tokens for cell in unit.cells} == {4 * 8}
    tree = next(cell for cell in unit.cells if cell.variant == "tree")
    assert 1 + tree.correct_drafts / tree.verify_steps == 3
    plain = next(cell for cell in unit.cells if cell.variant == "none")
    assert (plain.verify_steps, plain.decode_steps) == (0, 4 * 7)


def test_greedy_answers_are_compared_with_both_baselines_and_with_themselves() -> None:
    with serving(three()) as servers:
        unit, _ = measure(servers)
    same = Agreement(compared=12, share=1.0, first_difference=None)
    itself = Agreement(compared=8, share=1.0, first_difference=None)
    differs = Agreement(compared=12, share=0.0, first_difference=4.0)
    assert unit.agreement == {
        "none": {"dflash": same, "itself": itself},
        "dflash": {"none": same, "itself": itself},
        "tree": {"none": differs, "dflash": differs, "itself": itself},
    }


def test_sampled_answers_are_not_compared_and_a_refusal_is_told() -> None:
    fakes = three()
    fakes["tree"].refusal = "sampling is not built"
    with serving(fakes) as servers:
        unit, seen = measure(servers, temperature=1.0)
    assert unit.refused == {"tree": "sampling is not built"}
    assert {cell.variant for cell in seen} == {"none", "dflash"}
    assert len(seen) == 6
    assert unit.agreement == {}


def test_a_unit_that_fails_half_way_is_an_error_not_a_unit() -> None:
    fakes = three()
    # In the second repeat: the warm-up's 2, then 4, then the first of the next 4.
    fakes["tree"].fail_at = 2 + 4
    seen: list[Cell] = []
    with serving(fakes) as servers, pytest.raises(ApplianceError, match="variant tree: /generate answered 500"):
        measure_unit(
            servers, BASELINES, plan(), PROMPTS, 0, 0, 2, lambda what, cell: seen.append(cell) if cell else None
        )
    assert len(seen) == 4


class FakeWatch(ClockWatch):
    """Counts the repeats that are under way."""

    def __init__(self) -> None:
        super().__init__(lambda: Sample(1980, None, ()))
        self.begun = self.ended = 0

    def __enter__(self) -> FakeWatch:
        self.begun += 1
        return self

    def __exit__(self, *error: object) -> None:
        self.ended += 1

    def seen(self) -> GpuClock | None:
        assert self.begun == self.ended
        return GpuClock(samples=1, mhz=float(self.begun), lowest_mhz=1, watts=None, held_back={})


def test_the_clock_is_watched_in_every_repeat_and_not_in_the_warm_up() -> None:
    watch = FakeWatch()
    with serving(three()) as servers:
        unit = measure_unit(servers, BASELINES, plan(), PROMPTS, 0, 0, 2, lambda what, cell: None, watch)
    assert [cell.clock.mhz for cell in unit.cells if cell.clock] == [float(count) for count in range(1, 10)]
    assert watch.ended == 9


def test_step_times_are_the_cells_own_without_the_warm_up(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"steps": 64, "ms": {"step": 1000}}\n')  # of another concurrency
    with serving({"none": FakeServer(), "tree": FakeServer(accepted=3, step_times=path)}) as servers:
        servers[1].step_times = path
        unit, _ = measure(servers)
    found = {(cell.variant, cell.repeat): cell.breakdown_ms for cell in unit.cells}
    # Requests 0 and 1 are the warm-up's.
    assert [found["tree", repeat] for repeat in range(3)] == [
        {"steps": 4, "step": 3.5},
        {"steps": 4, "step": 7.5},
        {"steps": 4, "step": 11.5},
    ]
    assert all(found["none", repeat] is None for repeat in range(3))


@pytest.mark.parametrize(
    ("answers", "references", "expected"),
    [
        ([[1, 2]], [[1, 2]], (1, 1.0, None)),
        ([[1, 2], [3, 4]], [[1, 2], [3, 5]], (2, 0.5, 1.0)),
        ([[9, 2], [3, 4, 5]], [[1, 2], [3, 4, 6]], (2, 0.0, 1.0)),
        ([[1, 2, 3]], [[1, 2]], (1, 0.0, 2.0)),
        ([], [], (0, 1.0, None)),
    ],
)
def test_the_first_difference_is_a_position_from_zero(
    answers: list[list[int]], references: list[list[int]], expected: tuple[int, float, float | None]
) -> None:
    found = compare_tokens(answers, references)
    assert (found.compared, found.share, found.first_difference) == expected
