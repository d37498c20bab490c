"""The report's two forms and its exit code, and what a target refuses before anything is sent."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent
from typing import Any

import pytest

from ddtree_appliance.errors import UsageError
from ddtree_appliance.smoke import CheckResult, SmokeReport, SmokeTarget, Status
from ddtree_appliance.smoke.outcome import Outcome
from ddtree_appliance.smoke.run import DETAIL_LIMIT, _presentable

URL = "http://127.0.0.1:30000"


def report(*statuses: Status) -> SmokeReport:
    rows = [
        CheckResult(f"check {number}", "a claim", Outcome(status, "seen", "do it" if status is Status.FAILED else None))
        for number, status in enumerate(statuses)
    ]
    return SmokeReport(URL, tuple(rows), 12.34)


def test_the_table_has_a_row_per_check_and_a_hint_below_a_failed_one() -> None:
    text = report(Status.PASSED, Status.FAILED, Status.NOT_RUN).to_text()
    assert text + "\n" == dedent("""\
        CHECK    RESULT   DETAIL
        check 0  passed   seen
        check 1  failed   seen
                          hint: do it
        check 2  not run  seen
        FAILED: 1 passed, 1 failed, 1 not run in 12.3 s (http://127.0.0.1:30000)
        """)


def test_the_json_holds_the_same_facts() -> None:
    value = report(Status.PASSED, Status.SKIPPED, Status.REPORTED).to_json()
    assert value["ok"] is True and value["engine_url"] == URL and value["elapsed_s"] == 12.34
    assert value["counts"] == {"passed": 1, "failed": 0, "skipped": 1, "reported": 1, "not_run": 0}
    first = {"name": "check 0", "proves": "a claim", "status": "passed", "detail": "seen", "hint": None}
    assert value["checks"][0] == {**first, "elapsed_s": 0.0}


@pytest.mark.parametrize(
    ("statuses", "exit_code"),
    [
        ((Status.PASSED, Status.SKIPPED, Status.REPORTED), 0),
        ((Status.PASSED, Status.FAILED), 1),
        ((Status.PASSED, Status.NOT_RUN), 1),
    ],
)
def test_only_failed_and_not_run_checks_fail_the_run(statuses: tuple[Status, ...], exit_code: int) -> None:
    assert report(*statuses).exit_code == exit_code


def presented(detail: str, **target: Any) -> str:
    row = CheckResult("a", "b", Outcome(Status.FAILED, detail))
    return _presentable(row, SmokeTarget(URL, **target)).outcome.detail


def test_a_service_cannot_write_control_characters_or_pages_to_the_terminal() -> None:
    assert presented("one\n\ttwo \x1b[31mred\x07") == "one two [31mred"
    assert presented("x" * 10_000) == "x" * DETAIL_LIMIT + "..."


def test_a_key_at_the_cut_is_taken_out_whole() -> None:
    text = presented("x" * (DETAIL_LIMIT - 3) + "s3cr3t-key and more", api_key="s3cr3t-key")
    assert "s3" not in text


def test_of_two_keys_one_inside_the_other_nothing_is_left() -> None:
    assert presented("inner-outer", api_key="inner", admin_key="inner-outer") == "[redacted]"


BAD_TARGETS: dict[str, tuple[dict[str, Any], str]] = {
    "no scheme": ({"engine_url": "127.0.0.1:30000"}, "the engine's URL is not an http:// or https:// address"),
    "other scheme": ({"engine_url": "ftp://host"}, "the engine's URL is not an http"),
    "no host": ({"engine_url": "http://"}, "the engine's URL is not an http"),
    "bad port": ({"engine_url": "http://host:many"}, "the engine's URL is not an http"),
    "sidecar": ({"engine_url": URL, "health_url": "host"}, "the sidecar's URL is not an http"),
    "user": ({"engine_url": "http://user:s3cr3t@host"}, "the engine's URL carries a user"),
    "query": ({"engine_url": URL + "?key=s3cr3t"}, "the engine's URL carries a user, a query"),
    "empty key": ({"engine_url": URL, "api_key": ""}, "the API key is empty"),
    "newline in the key": ({"engine_url": URL, "api_key": "s3cr3t\n"}, "the API key is empty or has characters"),
    "letter in the key": ({"engine_url": URL, "admin_key": "s3cr3t\u00e9"}, "the admin key is empty or has"),
    "no time": ({"engine_url": URL, "deadline_s": 0}, "the time limit must be a positive number of seconds"),
    "not a time": ({"engine_url": URL, "deadline_s": float("nan")}, "the time limit must be a positive"),
}


@pytest.mark.parametrize("name", BAD_TARGETS)
def test_a_target_that_cannot_be_asked_is_refused_and_no_key_is_quoted(name: str) -> None:
    arguments, message = BAD_TARGETS[name]
    with pytest.raises(UsageError) as caught:
        SmokeTarget(**arguments)
    assert message in caught.value.message
    assert "s3cr3t" not in f"{caught.value.message} {caught.value.hint}"


def test_the_keys_are_not_in_the_targets_repr() -> None:
    assert "s3cr3t" not in repr(SmokeTarget(URL, api_key="s3cr3t", admin_key="s3cr3t-admin"))


def test_the_package_needs_nothing_of_the_engine() -> None:
    heavy = "{'torch', 'sglang', 'pydantic', 'numpy'}"
    code = f"import sys, ddtree_appliance.smoke; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
