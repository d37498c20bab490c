"""The recorder of stage times: what it writes, when, and that it never waits for the device nor reads it too early."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")

from ddtree_appliance.bench.step_times import StepTimesReader  # noqa: E402
from ddtree_appliance.ddtree import step_times  # noqa: E402
from ddtree_appliance.ddtree.step_times import STAGES, STEPS_PER_LINE, VARIABLE, StepTimes  # noqa: E402

# The step at whose beginning the first line is written, and the last one before it.
FIRST_LINE = STEPS_PER_LINE + STEPS_PER_LINE // 2 + 1
STAGE_MS = {"draft": 1.0, "build": 2.0, "verify": 16.0, "accept": 4.0, "commit": 8.0}
GAP_MS = 0.5


@dataclass
class Clock:
    """A host clock in seconds that only the test moves."""

    now: float = 1000.0

    def pass_ms(self, ms: float) -> None:
        self.now += ms / 1e3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(step_times, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def run_steps(
    times: StepTimes,
    count: int,
    first: int = 0,
    pass_ms: Callable[[float], None] = lambda ms: None,
    batch: Callable[[int], int] = lambda step: 1,
    stage_ms: Callable[[int, str], float] = lambda step, stage: STAGE_MS[stage],
    gap_ms: Callable[[int], float] = lambda step: GAP_MS,
) -> None:
    """Steps number `first`, `first + 1`, ..., each followed by its gap."""
    for step in range(first, first + count):
        times.begin(batch(step))
        for stage in STAGES:
            pass_ms(stage_ms(step, stage))
            times.end(stage)
        pass_ms(gap_ms(step))


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize(
    "steps,expected",
    [
        (1, 0),
        (STEPS_PER_LINE, 0),
        (FIRST_LINE - 1, 0),
        (FIRST_LINE, 1),
        (FIRST_LINE + STEPS_PER_LINE - 1, 1),
        (FIRST_LINE + STEPS_PER_LINE, 2),
        (FIRST_LINE + 2 * STEPS_PER_LINE, 3),
    ],
)
def test_a_line_appears_half_a_ring_after_its_steps(steps: int, expected: int, tmp_path: Path) -> None:
    times = StepTimes(tmp_path / "times", "cpu")
    run_steps(times, steps)
    assert len(lines(tmp_path / "times")) == expected


def test_a_line_holds_the_mean_of_each_stage_and_their_sum(tmp_path: Path, clock: Clock) -> None:
    def slow_at_first(step: int, stage: str) -> float:
        return STAGE_MS[stage] * (3 if step < STEPS_PER_LINE // 4 else 1)

    run_steps(StepTimes(tmp_path / "times", "cpu"), FIRST_LINE, pass_ms=clock.pass_ms, stage_ms=slow_at_first)

    (line,) = lines(tmp_path / "times")
    expected = {stage: ms * 1.5 for stage, ms in STAGE_MS.items()} | {"gap": GAP_MS}
    assert list(line) == ["steps", "batch", "ms"]
    assert list(line["ms"]) == [*STAGES, "gap", "step"]
    assert line["ms"] == pytest.approx(expected | {"step": sum(expected.values())})


def test_each_line_is_of_its_own_steps(tmp_path: Path, clock: Clock) -> None:
    """Three lines: the third takes the place of the first in the ring."""
    run_steps(
        StepTimes(tmp_path / "times", "cpu"),
        FIRST_LINE + 2 * STEPS_PER_LINE,
        pass_ms=clock.pass_ms,
        batch=lambda step: 10 * (step // STEPS_PER_LINE) + step % 2,
        stage_ms=lambda step, stage: STAGE_MS[stage] * (1 + step // STEPS_PER_LINE),
    )
    written = lines(tmp_path / "times")
    assert [line["steps"] for line in written] == [STEPS_PER_LINE] * 3
    assert [line["batch"] for line in written] == [0.5, 10.5, 20.5]
    assert [line["ms"]["verify"] for line in written] == pytest.approx([16.0, 32.0, 48.0])


@pytest.mark.parametrize(
    "gap_ms,expected",
    [
        (lambda step: 5000.0 if step % 10 == 3 else GAP_MS, GAP_MS),  # pauses between requests
        (lambda step: float(step % STEPS_PER_LINE), (STEPS_PER_LINE - 2) / 2),  # the middle one of an odd number
        (lambda step: 5000.0 if step % STEPS_PER_LINE == STEPS_PER_LINE - 1 else 0.0, 0.0),  # between two lines: none's
    ],
)
def test_the_gap_is_the_median_one(
    gap_ms: Callable[[int], float], expected: float, tmp_path: Path, clock: Clock
) -> None:
    run_steps(StepTimes(tmp_path / "times", "cpu"), FIRST_LINE, pass_ms=clock.pass_ms, gap_ms=gap_ms)
    (line,) = lines(tmp_path / "times")
    assert line["ms"]["gap"] == pytest.approx(expected, abs=1e-6)
    assert line["ms"]["step"] == pytest.approx(sum(STAGE_MS.values()) + expected)


def test_lines_are_appended_and_are_what_the_benchmark_reads(tmp_path: Path) -> None:
    path = tmp_path / "times"
    path.write_text('{"steps": 1, "batch": 1.0, "ms": {"step": 1.0}}\n')
    run_steps(StepTimes(path, "cpu"), FIRST_LINE)
    assert path.read_text().endswith("}\n")
    assert lines(path)[0]["steps"] == 1
    assert StepTimesReader(path).read_new() == lines(path)
    assert len(lines(path)) == 2


# On a device


class Device:
    """Events of a device that is `lag` marks behind the host; a mark lies 1 ms after the one before it."""

    def __init__(self, lag: int = 0) -> None:
        self.lag = lag
        self.marks = 0

    def event(self, enable_timing: bool = False) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        self._device.marks += 1
        self.number = self._device.marks

    def query(self) -> bool:
        return self.number <= self._device.marks - self._device.lag

    def elapsed_time(self, later: Event) -> float:
        assert self.query() and later.query(), "CUDA raises for an event that is not over"
        return float(later.number - self.number)


MARKS_PER_STEP = len(STAGES) + 1
HALF_A_RING = STEPS_PER_LINE // 2 * MARKS_PER_STEP


@pytest.mark.parametrize("lag,expected", [(0, 1), (HALF_A_RING, 1), (HALF_A_RING + 1, 0), (10**6, 0)])
def test_a_device_more_than_half_a_ring_behind_writes_nothing(
    lag: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Device(lag).event)
    run_steps(StepTimes(tmp_path / "times", "cuda"), FIRST_LINE)
    written = lines(tmp_path / "times")
    assert [line["ms"] for line in written] == [dict.fromkeys([*STAGES, "gap"], 1.0) | {"step": 6.0}] * expected


def test_the_lines_of_a_stall_are_lost_and_the_later_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(lag=HALF_A_RING + 1)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    times = StepTimes(tmp_path / "times", "cuda")
    run_steps(times, FIRST_LINE)
    device.lag = 0
    run_steps(times, STEPS_PER_LINE, first=FIRST_LINE, batch=lambda step: step // STEPS_PER_LINE)
    # Of the second ring, whose first half ran while the device was stalled.
    assert [line["batch"] for line in lines(tmp_path / "times")] == pytest.approx([1.0])


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_no_device_event_is_made_for_the_cpu_and_all_are_before_the_first_step_elsewhere(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: made.append(enable_timing) or Device().event(True))
    StepTimes(tmp_path / "times", "cpu")
    assert not made
    times = StepTimes(tmp_path / "times", device)
    ready = len(made)
    run_steps(times, 3)
    assert ready == len(made) == 2 * STEPS_PER_LINE * MARKS_PER_STEP


# Use


@pytest.mark.parametrize(
    "ended,stage",
    [([], "build"), ([], "commit"), (["draft"], "draft"), (["draft"], "verify"), (["draft", "build"], "draft")],
)
def test_a_stage_out_of_order_is_an_error_that_names_it(ended: list[str], stage: str, tmp_path: Path) -> None:
    times = StepTimes(tmp_path / "times", "cpu")
    times.begin(1)
    for each in ended:
        times.end(each)
    with pytest.raises(AssertionError, match=f"{stage} out of order"):
        times.end(stage)


@pytest.mark.parametrize(
    "rank,value,records", [(0, "times", True), (1, "times", False), (0, None, False), (0, "", False)]
)
def test_rank_0_records_where_the_variable_says(rank: int, value: str | None, records: bool, tmp_path: Path) -> None:
    environment = {} if value is None else {VARIABLE: value and str(tmp_path / value)}
    times = StepTimes.of_environment("cpu", rank, environment)
    assert (times is not None) == records
    if times:
        run_steps(times, FIRST_LINE)
        assert len(lines(tmp_path / "times")) == 1


def test_the_variable_is_looked_up_in_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert StepTimes.of_environment("cpu", 0) is None
    monkeypatch.setenv(VARIABLE, "times")
    assert StepTimes.of_environment("cpu", 0) is not None


def test_the_benchmark_knows_the_variable_and_the_parts_without_importing_torch() -> None:
    from ddtree_appliance.bench import launching, step_times

    assert launching.STEP_TIMES_VARIABLE == VARIABLE
    assert step_times.PARTS == (*STAGES, "gap")
