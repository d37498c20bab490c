"""Options and fixtures that several suites use."""

from __future__ import annotations

import pytest

from tests.quadlet import quadlet

__all__ = ["quadlet"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/ from what is rendered now")
