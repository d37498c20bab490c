"""The engine's own times of a step: only whole new lines, weighted by their steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_appliance.bench.step_times import StepTimesReader, mean_breakdown
from ddtree_appliance.errors import ApplianceError


def line(steps: int, draft: float, step: float) -> str:
    return f'{{"steps": {steps}, "batch": 1.0, "ms": {{"draft": {draft}, "step": {step}}}}}\n'


def test_a_read_gives_whole_lines_since_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    reader = StepTimesReader(path)
    assert reader.read_new() == []
    path.write_text(line(64, 1.0, 5.0))
    assert [record["steps"] for record in reader.read_new()] == [64]
    half = line(32, 2.0, 6.0)
    with path.open("a") as file:
        file.write(half[:10])
        file.flush()
        assert reader.read_new() == []
        file.write(half[10:])
        file.flush()
        assert [record["ms"]["draft"] for record in reader.read_new()] == [2.0]


def test_lines_that_may_hold_steps_from_before_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(line(64, 100.0, 100.0))
    reader = StepTimesReader(path)
    reader.skip_old()
    drafts = []
    for late in (True, True, False, False):
        with path.open("a") as file:
            file.write(line(64, 50.0 if late else 1.0, 60.0))
        drafts += [record["ms"]["draft"] for record in reader.read_new()]
    assert drafts == [1.0, 1.0]


@pytest.mark.parametrize(
    "bad", ["x\n", "[]\n", '{"steps": 0, "ms": {}}\n', '{"steps": 1, "ms": {"draft": -1}}\n', "5\n"]
)
def test_a_line_that_is_no_record_is_an_error_with_the_file(bad: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(bad)
    with pytest.raises(ApplianceError, match=f"{path}: not a record of step times"):
        StepTimesReader(path).read_new()


def test_the_mean_is_weighted_by_steps() -> None:
    records = [
        {"steps": 64, "ms": {"draft": 1.0, "step": 4.0}},
        {"steps": 192, "ms": {"draft": 2.0, "step": 8.0, "gap": 0.5}},
    ]
    # A part that some records lack is the mean of those that have it.
    assert mean_breakdown(records) == {"steps": 256, "draft": 1.75, "step": 7.0, "gap": 0.5}
    assert mean_breakdown([]) is None
