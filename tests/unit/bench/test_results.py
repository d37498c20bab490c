"""Numbers: ratios with spread and noise from constructed repeats, rows, and what can never become a ratio."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree_appliance.bench.records import GpuClock
from ddtree_appliance.bench.results import build_results
from ddtree_appliance.bench.statistics import ratio_of, spread_of
from ddtree_appliance.errors import ApplianceError
from tests.unit.bench.made_records import BREAKDOWN, SPEEDS, cell, session, unit

ONE_SESSION = (session(0),)


@pytest.mark.parametrize(
    ("values", "references", "median", "low", "high", "within_noise"),
    [
        # A clear gain on a steady baseline.
        ((130, 132, 131), (100, 100, 100), 1.31, 1.30, 1.32, False),
        # A clear loss.
        ((80, 81, 79), (100, 100, 100), 0.80, 0.79, 0.81, False),
        # The ratios lie on both sides of 1.
        ((99, 103, 104), (100, 100, 100), 1.03, 0.99, 1.04, True),
        # All gain 2 %, but the baseline itself varies by 10 %.
        ((102, 107.1, 112.2), (100, 105, 110), 1.02, 1.02, 1.02, True),
        # All gain 30 % while the machine drifts by 10 %: repeat by repeat the drift cancels.
        ((130, 136.5, 143), (100, 105, 110), 1.30, 1.30, 1.30, False),
        # Exactly equal, nothing varies.
        ((100, 100, 100), (100, 100, 100), 1.0, 1.0, 1.0, True),
        # One slow repeat of the variant does not move the median.
        ((130, 70, 131), (100, 100, 100), 1.30, 0.70, 1.31, True),
    ],
)
def test_ratios_have_a_spread_and_know_noise(
    values: tuple[float, ...],
    references: tuple[float, ...],
    median: float,
    low: float,
    high: float,
    within_noise: bool,
) -> None:
    ratio = ratio_of(values, references)
    assert (ratio.spread.median, ratio.spread.low, ratio.spread.high) == pytest.approx((median, low, high))
    assert ratio.within_noise is within_noise


def test_repeats_that_do_not_belong_together_have_no_ratio() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratio_of([1, 2, 3], [1, 2])


def test_a_spread_is_relative_to_the_median() -> None:
    assert spread_of([90, 100, 120]).relative_width == pytest.approx(0.3)


def rows(*units: Any, sessions: Any = ONE_SESSION) -> dict[tuple[int, int, str], dict[str, Any]]:
    results = build_results(sessions, units, 0.0)
    assert results["schema"] == 1
    return {(row["session"], row["concurrency"], row["variant"]): row for row in results["results"]}


def test_a_row_says_what_was_measured() -> None:
    row = rows(unit(0, 4, breakdown=BREAKDOWN))[0, 4, "ddtree-64"]
    assert row == {
        **{"variant": "ddtree-64", "algorithm": "DDTREE", "budget": 64, "topk": 16, "block_size": 16},
        **{"backend": "triton", "concurrency": 4, "temperature": 0.0, "prompts": 16, "repeats": 3, "tokens": 3000},
        **{"tok_s": 307.5, "tok_s_range": [300.0, 315.0], "tok_s_repeats": [300.0, 315.0, 307.5]},
        **{"ratio_to_dflash": 1.5, "ratio_to_dflash_range": [1.5, 1.5], "within_noise": False},
        **{"ratio_to_none": 3.075, "ratio_to_none_range": [3.0, 3.15], "within_noise_of_none": False},
        **{"ratio_to_best_dflash": 1.5, "ratio_to_best_dflash_range": [1.5, 1.5], "best_dflash": "dflash"},
        **{"within_noise_of_best_dflash": False, "accept_length": 4.0, "accept_length_range": [4.0, 4.0]},
        **{"step_ms": 36.0, "step_ms_range": [36.0, 36.0], "first_token_ms": 20.0, "cached_tokens": 0},
        "breakdown_ms": {**BREAKDOWN, "steps": 192},
        **{"equal_to_none": 0.875, "first_difference_to_none": 61.5},
        **{"equal_to_dflash": 0.875, "first_difference_to_dflash": 61.5},
        **{"equal_to_itself": 1.0, "first_difference_to_itself": None},
        **{"session": 0, "group": 0, "started": "2026-11-29T22:01:00+00:00", "refused": None},
        **{"gpu_mhz": None, "gpu_lowest_mhz": None, "gpu_watts": None, "gpu_held_back": None},
    }


def test_a_row_has_the_clock_of_all_samples() -> None:
    clocks = [
        GpuClock(samples=1, mhz=1980.0, lowest_mhz=1980, watts=600.0, held_back={}),
        GpuClock(samples=2, mhz=1950.0, lowest_mhz=1920, watts=690.0, held_back={"power limit": 0.5}),
        GpuClock(samples=1, mhz=1900.0, lowest_mhz=1900, watts=700.0, held_back={"power limit": 1.0}),
    ]
    row = rows(unit(0, 4, clocks={"ddtree-64": clocks}))[0, 4, "ddtree-64"]
    assert (row["gpu_mhz"], row["gpu_lowest_mhz"], row["gpu_watts"]) == (1945.0, 1900, 670.0)
    assert row["gpu_held_back"] == {"power limit": 0.5}
    silent = [clocks[0], clocks[1].model_copy(update={"watts": None}), clocks[2]]
    assert rows(unit(0, 4, clocks={"ddtree-64": silent}))[0, 4, "ddtree-64"]["gpu_watts"] is None


def test_baselines_and_chains_have_their_own_values() -> None:
    found = rows(unit(0, 1))
    none, chain, short = (found[0, 1, name] for name in ("none", "dflash", "dflash-b8"))
    assert (none["algorithm"], none["block_size"], none["accept_length"], none["step_ms"]) == ("none", None, None, 9.0)
    assert (none["ratio_to_none"], none["within_noise_of_none"], none["within_noise"]) == (1.0, None, False)
    assert (chain["block_size"], chain["budget"], chain["accept_length"]) == (16, None, 2.0)
    assert (chain["ratio_to_dflash"], chain["within_noise"], chain["equal_to_dflash"]) == (1.0, None, None)
    assert (short["block_size"], short["ratio_to_dflash"]) == (8, pytest.approx(0.7317))
    # 2 % more than a baseline that varies by 5 %.
    assert found[0, 1, "ddtree-8"]["within_noise"] is True
    assert {row["breakdown_ms"] for row in found.values()} == {None}


def test_the_best_chain_is_the_fastest_not_the_default() -> None:
    speeds = {**SPEEDS, "dflash-b8": (400.0, 400.0, 400.0)}
    row = rows(unit(0, 1, speeds=speeds))[0, 1, "ddtree-64"]
    assert (row["best_dflash"], row["ratio_to_dflash"], row["ratio_to_best_dflash"]) == ("dflash-b8", 1.5, 0.7688)


def test_a_refused_variant_has_a_row_that_says_so_and_no_figures() -> None:
    row = rows(unit(0, 1, refused={"ddtree-8": "no sampling"}))[0, 1, "ddtree-8"]
    assert (row["refused"], row["tok_s"], row["ratio_to_dflash"], row["accept_length"]) == ("no sampling", *[None] * 3)
    assert (row["algorithm"], row["budget"]) == ("DDTREE", 8)


def test_a_refused_baseline_leaves_no_ratio() -> None:
    row = rows(unit(0, 1, refused={"dflash": "no"}))[0, 1, "ddtree-64"]
    assert (row["ratio_to_dflash"], row["within_noise"], row["ratio_to_none"]) == (None, None, 3.075)
    assert row["best_dflash"] == "dflash-b8"


# What must never become a figure.


def test_a_ratio_never_crosses_sessions() -> None:
    """The second session's machine is twice as fast: its ratios are to its own baseline, not to the first's."""
    fast = {name: tuple(2 * value for value in values) for name, values in SPEEDS.items()}
    found = rows(unit(0, 1), unit(1, 2, speeds=fast), unit(2, 1, 1), sessions=[session(0), session(1), session(2, 1)])
    assert {row["ratio_to_dflash"] for (_, _, name), row in found.items() if name == "ddtree-64"} == {1.5}
    assert len(found) == 3 * 5


def test_a_session_without_the_chain_takes_no_ratio_from_another() -> None:
    few = ("none", "ddtree:budget=64")
    speeds = {name: SPEEDS[name] for name in ("none", "ddtree-64")}
    found = rows(unit(0, 1), unit(1, 1, 1, speeds), sessions=[session(0), session(1, 1, few)])
    assert found[1, 1, "ddtree-64"]["ratio_to_dflash"] is None
    assert found[1, 1, "ddtree-64"]["ratio_to_none"] == 3.075


def test_cells_cannot_be_moved_into_a_unit_of_another_session() -> None:
    foreign = unit(0, 1).model_copy(update={"session": 7})
    with pytest.raises(ApplianceError, match="a unit names session 7, which is not recorded"):
        rows(foreign)


@pytest.mark.parametrize(
    "cells",
    [
        unit(0, 1).cells[:-1],  # a variant with a repeat less
        tuple(c for c in unit(0, 1).cells if c.variant != "none"),  # a variant that is missing
        (*unit(0, 1).cells, cell("ddtree-64", 3, 500.0, 4)),  # one more try for the favourite
        tuple(c if c.repeat else c.model_copy(update={"repeat": 1}) for c in unit(0, 1).cells),  # the good one twice
        (*unit(0, 1).cells, *(cell("stranger", n, 1.0) for n in range(3))),
    ],
)
def test_a_unit_that_is_not_whole_has_no_rows(cells: Any) -> None:
    with pytest.raises(ApplianceError, match="the unit of session 0 at 1 concurrent requests is not whole"):
        rows(unit(0, 1).model_copy(update={"cells": cells}))
