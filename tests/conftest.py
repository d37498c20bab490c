"""Options and fixtures that several suites use."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from ddtree_appliance.errors import ApplianceError
from tests.quadlet import quadlet

__all__ = ["quadlet"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what an ApplianceError advises, such as the end of a server's log, below its traceback."""
    report = yield
    if call.excinfo is not None and isinstance(error := call.excinfo.value, ApplianceError) and error.hint:
        report.sections.append(("hint", error.hint))
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/ from what is rendered now")
