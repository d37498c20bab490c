"""What people read: the report as a golden text, the plots, and what is said where something is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ddtree_appliance.bench.plan import Plan, make_plan
from ddtree_appliance.bench.records import GpuClock
from ddtree_appliance.bench.report import markdown_table, render_report
from ddtree_appliance.bench.results import build_results
from ddtree_appliance.bench.store import Store
from ddtree_appliance.bench.write import NO_PLOTS, write_results
from tests.unit.bench.made_records import BREAKDOWN, SPEEDS, VARIANTS, session, unit

GOLDEN = Path(__file__).parent / "golden" / "results.md"
SLOW = {**SPEEDS, "ddtree-64": (120.0, 119.0, 121.0)}


def plan(**changed: Any) -> Plan:
    given = {"model_path": "/t", "drafter": "/d", "variants": VARIANTS, "concurrency": (1, 8), "group_size": 5}
    return make_plan({**given, **changed})


def text_of(*units: Any, of: Plan | None = None, missing: Any = ()) -> str:
    return render_report(build_results([session(0)], units, 0.0), of or plan(), missing)


def test_the_report_is_the_golden_one(request: pytest.FixtureRequest) -> None:
    text = text_of(unit(0, 1, breakdown=BREAKDOWN), unit(0, 8, speeds=SLOW, refused={"ddtree-8": "not at this size"}))
    if request.config.getoption("--update-golden"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_the_best_comes_first_and_losers_are_named() -> None:
    text = text_of(unit(0, 8, speeds=SLOW))
    order = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")][2:]
    assert order[:5] == ["ddtree-8", "dflash", "dflash-b8", "ddtree-64", "none"]
    assert "* Slower than DFLASH: dflash-b8 (0.73), ddtree-64 (0.59).\n" in text
    assert "* No different from DFLASH within noise: ddtree-8." in text


@pytest.mark.parametrize(
    ("mhz", "held_back", "words"),
    [
        (1970.0, {"power limit": 1.0}, None),
        (
            1900.0,
            {"power limit": 0.75},
            "1900 MHz with ddtree-64, held back by power limit (75 % of the time), and 1980",
        ),
        (1900.0, {}, "held back by nothing that the GPU names"),
    ],
)
def test_a_clock_that_differs_is_told(mhz: float, held_back: dict[str, float], words: str | None) -> None:
    full = GpuClock(samples=9, mhz=1980.0, lowest_mhz=1980, watts=600.0, held_back={})
    slow = full.model_copy(update={"mhz": mhz, "held_back": held_back})
    text = text_of(unit(0, 1, clocks={"dflash": [full] * 3, "ddtree-64": [slow] * 3}))
    assert ("The GPU's clock was not the same" in text) is (words is not None)
    assert words is None or words in text
    assert f" {mhz:.0f} |" in text


def test_what_is_missing_is_said() -> None:
    assert "**Not complete.** Still to be measured: group 0 at 8." in text_of(unit(0, 1), missing=[(0, 8)])
    assert "Not recorded: the engine wrote no step times." in text_of(unit(0, 1))
    assert "Not recorded: it was switched off" in text_of(unit(0, 1), of=plan(breakdown=False))
    assert "Not complete" not in text_of(unit(0, 1))


def test_what_holds_a_server_back_is_said() -> None:
    one = session(0)
    facts = {**one.servers["dflash"].facts, "disable_overlap_schedule": True, "disable_cuda_graph": True}
    slow = one.servers["dflash"].model_copy(update={"facts": facts})
    gpus = [{"name": "NVIDIA H200", "memory_mib": 143771, "free_mib": 100000}]
    one = one.model_copy(update={"servers": {**one.servers, "dflash": slow}, "host": {**one.host, "gpus": gpus}})
    text = render_report(build_results([one], [unit(0, 1)], 0.0), plan(), [])
    assert "Without CUDA graphs: dflash." in text
    assert "Without overlap scheduling: dflash." in text
    assert "Something else held 43771 MiB of the NVIDIA H200 before the session began." in text


def test_prompts_out_of_a_cache_are_said() -> None:
    measured = unit(0, 1)
    cells = tuple(cell.model_copy(update={"cached_tokens": 10}) for cell in measured.cells if cell.variant == "none")
    others = tuple(cell for cell in measured.cells if cell.variant != "none")
    text = text_of(measured.model_copy(update={"cells": (*cells, *others)}))
    assert "Prompt tokens came from a prefix cache, so prefill cost less: none (30)." in text


def test_a_table_is_aligned() -> None:
    assert markdown_table([("a", "bb"), ("ccc", "d")]) == "| a   | bb |\n| --- | -: |\n| ccc |  d |"


def stored(folder: Path) -> Store:
    store = Store(folder / "out")
    store.write_plan(plan())
    store.add_session(session(0))
    store.add_unit(unit(0, 1, breakdown=BREAKDOWN))
    return store


def test_the_folder_gets_json_text_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    store = stored(tmp_path)
    results, no_plots = write_results(store)
    assert no_plots is None
    assert json.loads((store.path / "results.json").read_text()) == results
    assert results["missing"] == [{"group": 0, "concurrency": 8}]
    assert [row["variant"] for row in results["results"]] == ["none", "dflash", "dflash-b8", "ddtree-8", "ddtree-64"]
    assert [each["session"] for each in results["sessions"]] == [0]
    for name in ("speed.png", "accept_length.png", "step_breakdown.png"):
        assert (store.path / name).read_bytes().startswith(b"\x89PNG")
    before = (store.path / "speed.png").read_bytes()
    write_results(store)
    assert (store.path / "speed.png").read_bytes() == before


def test_a_plot_without_data_is_not_left_from_before(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    store = stored(tmp_path)
    write_results(store)
    (store.path / "cells.jsonl").write_text(unit(0, 1).model_dump_json() + "\n")
    write_results(store)
    assert not (store.path / "step_breakdown.png").exists()


def test_without_matplotlib_the_rest_is_written_and_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "ddtree_appliance.bench.plots", raising=False)
    store = stored(tmp_path)
    _, no_plots = write_results(store)
    assert no_plots == NO_PLOTS
    assert (store.path / "results.md").read_text().startswith("# Benchmark results")
    assert not (store.path / "speed.png").exists()
