"""docs/known-failures.md names tests: they must exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [line for line in (ROOT / "docs/known-failures.md").read_text().splitlines() if re.match(r"\| [^-r]", line)]
REFERENCE = re.compile(r"`((?:unit|rehearsal|systemd)/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip()[:40] for row in ROWS])
def test_a_row_names_tests_that_exist(row: str) -> None:
    references = REFERENCE.findall(row.split("|")[-2])
    assert references
    for file, test in references:
        text = (ROOT / "tests" / file).read_text()
        assert f"def {test or 'test_'}" in text, f"{file} has no {test}"


def test_no_row_is_overlooked() -> None:
    assert len(ROWS) >= 30
