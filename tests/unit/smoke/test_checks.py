"""Each check against a service with one fault: that check fails, says what it saw, and no other does."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from ddtree_appliance.ports import reserve_port
from ddtree_appliance.smoke import SmokeReport, SmokeTarget, Status, run_smoke
from ddtree_appliance.smoke.checks import CHECKS, Check
from ddtree_appliance.smoke.context import SmokeContext
from ddtree_appliance.smoke.outcome import Outcome
from tests.unit.smoke.fake_service import NO_TEMPLATE, FakeService, FakeTime, Faults

KEY = "s3cr3t-key"
ADMIN = "s3cr3t-admin"
BOTH_KEYS = {"api_key": KEY, "admin_key": ADMIN}


def smoke(service: FakeService, *, sidecar: bool = True, **target: Any) -> SmokeReport:
    fake = FakeTime()
    keys = {"api_key": service.faults.api_key, "admin_key": service.faults.admin_key}
    health_url = service.health_url if sidecar else None
    return run_smoke(
        SmokeTarget(service.engine_url, health_url, **{**keys, **target}), clock=fake.clock, sleep=fake.sleep
    )


def smoke_with(faults: dict[str, Any], **target: Any) -> SmokeReport:
    with FakeService(Faults(**faults)).running() as service:
        return smoke(service, **target)


def by_status(report: SmokeReport, status: Status) -> dict[str, str]:
    return {check.name: check.outcome.detail for check in report.checks if check.outcome.status is status}


# A sound service


def test_a_sound_service_passes_every_check() -> None:
    report = smoke_with(BOTH_KEYS)
    assert set(by_status(report, Status.PASSED)) == {check.name for check in CHECKS}, report.to_text()
    assert report.ok and report.exit_code == 0


def test_what_was_seen_is_shown() -> None:
    seen = by_status(smoke_with({**BOTH_KEYS, "tokens_per_step": 4}), Status.PASSED)
    assert seen["versions"] == (
        "sglang 0.5.17, DDTREE, 32 nodes; appliance 0.1.0, patches abababababab, image unknown, model fake-model"
    )
    assert seen["speculation"] == "accept length 3.88 (64 verify steps, 8 prompts)"
    assert seen["keys absent"] == "API key and admin key not in 4 answers"


def test_the_key_goes_to_the_engine_only_and_probes_carry_none() -> None:
    with FakeService(Faults(api_key=KEY)).running() as service:
        assert smoke(service).ok
    authorizations = {path: {value for asked, value in service.asked if asked == path} for path, _ in service.asked}
    assert authorizations["/health"] == authorizations["/metrics"] == {""}
    assert f"Bearer {KEY}" in authorizations["/generate"]


SOUND: dict[str, tuple[dict[str, Any], str, Status, str]] = {
    # (faults, check, its status, what its detail says)
    "no key": ({}, "auth enforced", Status.REPORTED, "no key: the service is open"),
    "no key to look for": ({}, "keys absent", Status.SKIPPED, "no key was given"),
    "admin key only": ({"admin_key": ADMIN}, "keys absent", Status.PASSED, "admin key not in 4 answers"),
    "degraded": ({"state": "degraded"}, "sidecar ready", Status.REPORTED, "degraded: accept length 1.02"),
    "no chat template": ({"chat_status": 400}, "chat", Status.SKIPPED, NO_TEMPLATE),
    "only thoughts": ({"chat_reply": {"reasoning_content": "Hm."}}, "chat", Status.PASSED, "3 characters"),
    "near-ties at once": (
        {"dtype": "bfloat16", "at_once": "last token"},
        "concurrency",
        Status.REPORTED,
        "8 of 8 requests at once differ from the same one by one (dtype bfloat16",
    ),
    "a flip in 16 bits": ({"dtype": "auto", "flips": 1}, "greedy", Status.PASSED, "at try 2 (auto"),
    "a drafter that hardly helps": (
        {"tokens_per_step": 1.05},
        "speculation",
        Status.REPORTED,
        "hardly helps: accept length 1.03",
    ),
    "incremental stream": ({"incremental": True}, "streaming", Status.PASSED, "native and OpenAI"),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_is_no_defect_does_not_fail(name: str) -> None:
    faults, check, status, detail = SOUND[name]
    report = smoke_with(faults)
    assert report.ok, report.to_text()
    assert detail in by_status(report, status).get(check, ""), report.to_text()


def test_without_a_sidecar_only_its_own_check_is_skipped() -> None:
    report = smoke_with(BOTH_KEYS, sidecar=False)
    assert list(by_status(report, Status.SKIPPED)) == ["sidecar ready"]
    assert report.ok and "no sidecar was asked" in by_status(report, Status.PASSED)["metrics"]


# One defect, one failed check


DEFECTS: dict[str, tuple[dict[str, Any], str, str]] = {
    # (faults, check, what its detail says)
    "auth is off": ({**BOTH_KEYS, "open_paths": ".*"}, "auth enforced", "POST /generate with no key (200)"),
    "one endpoint is open": (
        {**BOTH_KEYS, "open_paths": "/health|/metrics|/server_info"},
        "auth enforced",
        "not answered with 401: GET /server_info with no key (200), GET /server_info with a wrong key (200)",
    ),
    "sidecar not ready": ({"ready_status": 503, "state": "crashed"}, "sidecar ready", "GET /readyz answered 503"),
    "another algorithm": ({"algorithm": "DFLASH"}, "versions", "the engine's algorithm is DFLASH, not DDTREE"),
    "wrong budget": ({"budget": 64}, "versions", "the engine's node budget is 64, the sidecar's 32"),
    "sidecar's engine is not the patched one": (
        {"sidecar": {"patchset_verified": False}},
        "versions",
        "the sidecar's SGLang (0.5.17+ddtree.2) is not the one that was built",
    ),
    "no patch digest": ({"sidecar": {"patchset_sha256": ""}}, "versions", "leaves empty: patchset_sha256"),
    "no model": ({"sidecar": {"model": None}}, "versions", "GET /version: the answer has no str `model`"),
    "endpoints differ": ({"openai_text": "!"}, "greedy", "/generate and /v1/completions differ: after"),
    "a flip in float32": ({"flips": 1}, "greedy", "' flipped'"),
    "endpoints differ in 16 bits": ({"openai_text": "!", "dtype": "bfloat16"}, "greedy", "differ: after"),
    "empty chat": ({"chat_reply": {"content": " "}}, "chat", "the chat's answer is empty"),
    "native stream loses text": (
        {"lost_in_stream": "/generate"},
        "streaming",
        "/generate, whole and streamed, differ: after",
    ),
    "incremental stream loses text": (
        {"lost_in_stream": "/generate", "incremental": True},
        "streaming",
        "/generate, whole and streamed, differ: after",
    ),
    "OpenAI stream loses text": (
        {"lost_in_stream": "/v1/completions"},
        "streaming",
        "/v1/completions, whole and streamed, differ: after",
    ),
    "OpenAI stream loses text in 16 bits": (
        {"lost_in_stream": "/v1/completions", "dtype": "bfloat16"},
        "streaming",
        "/v1/completions, whole and streamed, differ: after",
    ),
    "native stream's finish reason": (
        {"stream_finish": ("/generate", "stop")},
        "streaming",
        "/generate, whole and streamed, differ: finish reason {'type': 'length', 'length': 24}",
    ),
    "OpenAI stream's finish reason": (
        {"stream_finish": ("/v1/completions", "stop")},
        "streaming",
        "/v1/completions, whole and streamed, differ: finish reason 'length' and 'stop'",
    ),
    "stream is cut": ({"stream_ends": False}, "streaming", "the stream ended without [DONE] after 2 events"),
    "error in the stream": ({"stream_error": True}, "streaming", "the scheduler died"),
    "nothing is speculated": ({"reports_steps": False}, "speculation", "no answer reports verify steps"),
    "useless drafter": ({"tokens_per_step": 1}, "speculation", "the drafter does not help: accept length 1.00"),
    "answers are mixed": ({"at_once": "other's"}, "concurrency", "8 of 8 requests at once got another request's"),
    "answers are mixed in 16 bits": (
        {"at_once": "other's", "dtype": "bfloat16"},
        "concurrency",
        "8 of 8 requests at once got another request's",
    ),
    "requests disturb each other": ({"at_once": "last token"}, "concurrency", "8 of 8 requests at once differ"),
    "requests at once are lost": ({"at_once": "status 500"}, "concurrency", "answered 500: out of memory"),
    "answered greedily": ({"sampled": "greedily"}, "sampling", "3 seeds at temperature 2 gave one text"),
    "a seed is not heard": ({"sampled": "freshly"}, "sampling", "a sampled request and the same again differ: after"),
    "a seed is not heard in 16 bits": (
        {"sampled": "freshly", "dtype": "bfloat16"},
        "sampling",
        "a sampled request and the same again differ: after",
    ),
    "answered though it cannot be": ({"refusal_answer": None}, "refusal", "answered with 200, not refused"),
    "refused without a reason": (
        {"refusal_answer": (400, "bad request")},
        "refusal",
        "answered with 400, not refused",
    ),
    "key in /server_info": (
        {**BOTH_KEYS, "leak": ("/server_info", KEY)},
        "keys absent",
        "the API key stands in the engine's answer to GET /server_info",
    ),
    "admin key in /server_info": (
        {**BOTH_KEYS, "leak": ("/server_info", ADMIN)},
        "keys absent",
        "the admin key stands in the engine's answer to GET /server_info",
    ),
    "escaped key in /server_info": (
        {"api_key": 'a"b\\c/d', "leak": ("/server_info", 'a"b\\c/d')},
        "keys absent",
        "the API key stands in the engine's answer to GET /server_info",
    ),
    "key in the sidecar's /version": (
        {**BOTH_KEYS, "leak": ("/version", KEY)},
        "keys absent",
        "the API key stands in the sidecar's answer to GET /version",
    ),
    "key in /metrics": (
        {**BOTH_KEYS, "leak": ("/metrics", f'build_info{{arguments="--api-key {KEY}"}} 1\n')},
        "keys absent",
        "the API key stands in the engine's answer to GET /metrics; the API key stands in the sidecar's",
    ),
    "heartbeat frozen": ({"heartbeat": "frozen"}, "metrics", "heartbeat_timestamp_seconds does not move: tp_rank=0"),
    "one rank frozen": ({"heartbeat": "one rank frozen"}, "metrics", "does not move: tp_rank=1"),
    "no heartbeat": ({"heartbeat": "missing"}, "metrics", "/metrics has no sglang:scheduler_heartbeat"),
    "steps are not counted": (
        {"counts_steps": False},
        "metrics",
        "sglang:spec_verify_steps_total rose by 0 while a request took 5 steps",
    ),
    "metrics are off": ({"metrics_status": 404}, "metrics", "GET /metrics answered 404"),
    "metrics are broken": ({"metrics_text": 'a{b="c 1\n'}, "metrics", "not in Prometheus' text format"),
    "sidecar does not see the engine": ({"engine_seen_ready": 0}, "metrics", "ddtree_engine_ready is 0, not 1"),
    "sidecar has no metric": ({"engine_seen_ready": None}, "metrics", "ddtree_engine_ready is missing, not 1"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_fails_its_own_check_and_no_other(name: str) -> None:
    faults, check, detail = DEFECTS[name]
    report = smoke_with(faults)
    failed = by_status(report, Status.FAILED)
    assert list(failed) == [check], report.to_text()
    assert detail in failed[check]
    assert report.exit_code == 1
    assert not by_status(report, Status.NOT_RUN)


@pytest.mark.parametrize("text", ["", "[]", '{"text": 3, "choices": []}'])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/models", "/server_info", "/version", "/readyz"])
def test_an_answer_of_another_shape_is_a_failed_check(path: str, text: str) -> None:
    report = smoke_with({"body": (path, text)})
    assert by_status(report, Status.FAILED), report.to_text()


def test_metrics_that_want_a_key_are_a_defect_of_auth() -> None:
    failed = by_status(smoke_with({**BOTH_KEYS, "open_paths": "/health"}), Status.FAILED)
    assert failed["auth enforced"] == "GET /metrics wants a key"
    assert "GET /metrics answered 401" in failed["metrics"]


def test_too_few_tokens_are_seen() -> None:
    failed = by_status(smoke_with({"tokens_short": 1}), Status.FAILED)
    assert failed["greedy"] == "POST /generate: 24 tokens were asked for: 23 counted, 23 sent"


# What stops the run


STOPS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    # (faults, target, failed check, what its detail says)
    "engine is starting": ({"health_status": 503}, {}, "engine ready", "GET /health answered 503"),
    "address leads elsewhere": ({"health_status": 302}, {}, "engine ready", "GET /health answered 302"),
    "probe wants a key": ({"api_key": KEY, "open_paths": "-"}, {}, "engine ready", "GET /health answered 401"),
    "key is missing": ({"api_key": KEY}, {"api_key": None}, "auth enforced", "wants a key and none was given"),
    "key is another's": ({"api_key": KEY}, {"api_key": "other"}, "auth enforced", "refuses the given key"),
}


@pytest.mark.parametrize("name", STOPS)
def test_without_an_engine_to_talk_to_the_rest_is_not_run(name: str) -> None:
    faults, target, check, detail = STOPS[name]
    report = smoke_with(faults, **target)
    assert list(by_status(report, Status.FAILED)) == [check], report.to_text()
    assert detail in by_status(report, Status.FAILED)[check]
    not_run = by_status(report, Status.NOT_RUN)
    assert list(not_run) == [c.name for c in CHECKS][-len(not_run) :]
    assert set(not_run.values()) == {f"stopped by `{check}`"}
    assert report.exit_code == 1


def test_an_unreachable_service_is_one_clear_failure() -> None:
    report = run_smoke(SmokeTarget(f"http://127.0.0.1:{reserve_port()}"))
    assert by_status(report, Status.FAILED) == {"engine ready": "GET /health: no answer: Connection refused"}
    assert len(by_status(report, Status.NOT_RUN)) == len(CHECKS) - 1
    assert report.exit_code == 1 and report.elapsed_s < 5


def test_an_unreachable_sidecar_fails_its_checks_and_the_engine_is_proved_all_the_same() -> None:
    with FakeService(Faults()).running() as service:
        service.health_url = f"http://127.0.0.1:{reserve_port()}"
        report = smoke(service)
    assert list(by_status(report, Status.FAILED)) == ["sidecar ready", "versions", "metrics"]
    assert "concurrency" in by_status(report, Status.PASSED)


# Time


@pytest.mark.parametrize(("path", "check"), [("/health", "engine ready"), ("/v1/completions", "greedy")])
def test_a_slow_service_hits_the_time_limit_and_the_report_says_so(path: str, check: str) -> None:
    with FakeService(Faults(hangs_at=path)).running() as service:
        report = run_smoke(SmokeTarget(service.engine_url, deadline_s=0.7))
    failed = by_status(report, Status.FAILED)
    method = "GET" if path == "/health" else "POST"
    assert failed == {check: f"the time limit of 0.7 s passed during {method} {path}"}
    assert by_status(report, Status.NOT_RUN)
    assert 0.6 < report.elapsed_s < 3
    assert report.exit_code == 1


def test_a_body_that_drips_does_not_outlast_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree_appliance.smoke.run.GRACE_S", 0.2)
    with FakeService(Faults(drips_at="/server_info")).running() as service:
        report = run_smoke(SmokeTarget(service.engine_url, deadline_s=0.5))
    assert by_status(report, Status.FAILED) == {"versions": "the time limit of 0.5 s passed during this check"}
    assert report.elapsed_s < 3


def test_a_connection_that_stays_silent_is_told_from_one_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddtree_appliance.smoke.client.READ_LIMIT_S", 0.6)
    with FakeService(Faults(hangs_at="/v1/chat/completions")).running() as service:
        report = smoke(service)
    assert by_status(report, Status.FAILED) == {"chat": "POST /v1/chat/completions: no answer within 0.6 s"}


def test_rows_are_handed_out_as_they_come() -> None:
    rows: list[str] = []
    with FakeService(Faults()).running() as service:
        fake = FakeTime()
        target = SmokeTarget(service.engine_url)
        report = run_smoke(target, on_result=lambda row: rows.append(row.name), clock=fake.clock, sleep=fake.sleep)
    assert rows == [check.name for check in report.checks] == [check.name for check in CHECKS]


def test_an_error_in_a_check_is_raised_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(context: SmokeContext) -> Outcome:
        raise ZeroDivisionError

    monkeypatch.setattr("ddtree_appliance.smoke.run.CHECKS", (Check("broken", "nothing", broken),))
    with pytest.raises(ZeroDivisionError):
        run_smoke(SmokeTarget("http://127.0.0.1:9"))


# Keys


@pytest.mark.parametrize("key", [KEY, 'quo"te\\d/key', "k" * 60])
def test_a_key_that_the_service_sends_back_is_not_shown(key: str) -> None:
    with FakeService(Faults(api_key=key, echoes_key=True)).running() as service:
        report = smoke(service)
    shown = report.to_text() + str(report.to_json()) + repr(report)
    assert "Bearer" in shown
    assert key not in shown and key[:6] not in shown


def test_a_netrc_file_does_not_replace_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login somebody password else\n")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert smoke_with(BOTH_KEYS).ok


def test_no_thread_is_left_behind() -> None:
    smoke_with({})
    assert not [thread for thread in threading.enumerate() if thread.name == "smoke" and thread.is_alive()]
