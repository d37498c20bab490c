"""The benchmark against real servers: none, DFLASH and DDTREE side by side. What is checked is structure, not speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddtree_appliance.cli import main
from ddtree_appliance.rehearsal.server import DRAFTER, TARGET
from tests.rehearsal.conftest import ServerPool

pytestmark = pytest.mark.rehearsal

PROMPTS = 4
NEW_TOKENS = 24
REPEATS = 3


@pytest.fixture(scope="module")
def folder(pool: ServerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pool.stop_all_but([])  # three servers of its own fill the machine
    out: Path = tmp_path_factory.mktemp("bench") / "out"
    command = [
        *("bench", "run", "--out", str(out), "--device", "cpu", "--model-path", str(TARGET), "--drafter", str(DRAFTER)),
        *("--variant", "ddtree:budget=8", "--concurrency", "1,2", "--prompt-tokens", "48"),
        *("--prompts-per-cell", str(PROMPTS), "--new-tokens", str(NEW_TOKENS)),
    ]
    assert main(command) == 0
    return out


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def test_every_variant_is_measured_at_every_concurrency_in_one_session(results: dict[str, Any]) -> None:
    rows = results["results"]
    found = [(row["concurrency"], row["algorithm"], row["budget"], row["block_size"]) for row in rows]
    assert found == [
        (concurrency, *what)
        for concurrency in (1, 2)
        for what in (("none", None, None), ("DFLASH", None, 16), ("DDTREE", 8, 16))
    ]
    assert {row["session"] for row in rows} == {0}
    assert {row["backend"] for row in rows} == {"torch_native"}
    assert {row["tokens"] for row in rows} == {REPEATS * PROMPTS * NEW_TOKENS}
    assert {row["cached_tokens"] for row in rows} == {0}
    assert all(row["tok_s"] > 0 and row["step_ms"] > 0 and len(row["tok_s_repeats"]) == REPEATS for row in rows)
    assert results["missing"] == []


def test_the_tree_accepts_more_than_the_chain_and_both_write_the_plain_tokens(results: dict[str, Any]) -> None:
    for concurrency in (1, 2):
        none, chain, tree = (row for row in results["results"] if row["concurrency"] == concurrency)
        assert none["accept_length"] is None
        assert 1.3 < chain["accept_length"] < tree["accept_length"] < 9
        # The same work each time, up to drafts that the batch's shape rounds differently.
        assert tree["accept_length_range"] == pytest.approx([tree["accept_length"]] * 2, abs=0.05)
        assert {row["equal_to_none"] for row in (chain, tree)} == {1.0}
        assert {row["equal_to_itself"] for row in (none, chain, tree)} == {1.0}


def test_ratios_are_the_repeats_own(results: dict[str, Any]) -> None:
    for row in results["results"]:
        chain = next(
            each
            for each in results["results"]
            if each["concurrency"] == row["concurrency"] and each["algorithm"] == "DFLASH"
        )
        ratios = [own / other for own, other in zip(row["tok_s_repeats"], chain["tok_s_repeats"], strict=True)]
        assert row["ratio_to_dflash"] == pytest.approx(sorted(ratios)[1], abs=1e-3)


def test_the_report_can_be_written_again_and_a_second_run_has_nothing_to_do(folder: Path) -> None:
    text = (folder / "results.md").read_text()
    assert "## 2 concurrent requests" in text
    assert main(["bench", "report", str(folder)]) == 0
    assert main(["bench", "run", "--out", str(folder)]) == 0
    assert (folder / "results.md").read_text() == text
    assert len((folder / "sessions.jsonl").read_text().splitlines()) == 1
