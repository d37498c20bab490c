"""The smoke test against a real server with keys and metrics: every check passes, well within the minute."""

from pathlib import Path

import pytest

from ddtree_appliance.rehearsal.server import RehearsalServer
from ddtree_appliance.smoke import SmokeReport, SmokeTarget, Status, run_smoke
from tests.rehearsal.conftest import Kind, ServerPool

pytestmark = pytest.mark.rehearsal

API_KEY = "rehearsal-api-key-7d41"
ADMIN_KEY = "rehearsal-admin-key-7d41"


@pytest.fixture(scope="module")
def server(pool: ServerPool, tmp_path_factory: pytest.TempPathFactory) -> RehearsalServer:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(f"api-key: {API_KEY}\nadmin-api-key: {ADMIN_KEY}\n")
    flags = ("--enable-metrics", "--config", str(keys))
    # As in the service: probes do not generate.
    kind = Kind("DDTREE", 32, flags, (("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "0"),))
    pool.stop_all_but([kind])
    return pool[kind]


@pytest.fixture(scope="module")
def report(server: RehearsalServer) -> SmokeReport:
    return run_smoke(SmokeTarget(server.url, api_key=API_KEY, admin_key=ADMIN_KEY))


def test_a_sound_server_passes_within_a_minute(report: SmokeReport) -> None:
    outcomes = {check.name: check.outcome.status for check in report.checks}
    assert outcomes.pop("sidecar ready") is Status.SKIPPED
    assert set(outcomes.values()) == {Status.PASSED}, report.to_text()
    assert report.exit_code == 0
    assert report.elapsed_s < 60


def test_the_report_shows_budget_and_accept_length_and_no_key(report: SmokeReport) -> None:
    text = report.to_text()
    assert "DDTREE, 32 nodes" in text
    details = {check.name: check.outcome.detail for check in report.checks}
    assert float(details["speculation"].split()[2]) > 2
    assert API_KEY not in text and ADMIN_KEY not in text


def test_without_the_key_the_real_server_stops_the_run(server: RehearsalServer) -> None:
    report = run_smoke(SmokeTarget(server.url))
    outcomes = [check.outcome for check in report.checks]
    assert [outcome.status for outcome in outcomes[:3]] == [Status.PASSED, Status.FAILED, Status.NOT_RUN]
    assert "wants a key" in outcomes[1].detail
