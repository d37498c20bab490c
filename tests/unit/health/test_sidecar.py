"""The sidecar from end to end: a scripted engine behind it, real sockets on both sides, and a clock that we move."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from ddtree_appliance.health.judge import Limits, State
from ddtree_appliance.health.metrics import new_registry
from ddtree_appliance.health.observation import Failure, Observation
from ddtree_appliance.health.observe import new_session, observe
from ddtree_appliance.health.poller import Poller
from ddtree_appliance.health.sidecar import make_pages, serving
from tests.unit.health.fake_engine import FakeEngine

LIMITS = Limits(
    heartbeat_limit_s=60,
    progress_limit_s=180,
    busy_after_s=10,
    unreachable_limit_s=30,
    start_limit_s=600,
    accept_length_floor=1.2,
    accept_length_min_steps=100,
)
UNIX = 1795974052.0  # 2026-11-29T17:40:52Z
INTERVAL_S = 5.0
VERSION: dict[str, Any] = {
    "version": "0.1.0",
    "sglang_version": "0.5.17+ddtree.2",
    "patchset_sha256": "ab12",
    "image": "localhost/ddtree-sglang@sha256:12",
    "model": '/models/a "b"',
    "budget": 32,
    "patchset_verified": True,
    "patches": ["0001-x.patch"],
    "not a label": "x",
}


@dataclass
class Setting:
    """A sidecar whose looks are made by hand, `pass_time` apart."""

    engine: FakeEngine
    poller: Poller
    url: str = ""
    log: list[str] = field(default_factory=list)
    now: float = 1000.0

    def pass_time(self, seconds: float = INTERVAL_S) -> None:
        """In looks of one interval each, as the poller makes them."""
        while seconds > 0:
            step = min(seconds, INTERVAL_S)
            self.now += step
            seconds -= step
            self.poller.look()

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=10)

    def state(self) -> tuple[str, int, int]:
        """The state, the status of /livez, the status of /readyz."""
        ready, live = self.get("/readyz"), self.get("/livez")
        assert ready.json() == live.json()
        return ready.json()["state"], live.status_code, ready.status_code

    def metrics(self) -> dict[str, float]:
        return read_metrics(self.get("/metrics").text)


def read_metrics(page: str) -> dict[str, float]:
    """Values by series name, or by name and its only label's value."""
    return {
        ":".join([sample.name, *(sample.labels.values() if len(sample.labels) == 1 else [])]): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


@pytest.fixture
def setting() -> Iterator[Setting]:
    log: list[str] = []
    with FakeEngine(lambda: UNIX + made.now) as engine, new_session() as session:

        def look() -> Observation:
            return observe(session, engine.url, 10.0, lambda: UNIX + made.now)

        made = Setting(engine, None, log=log)  # type: ignore[arg-type]
        made.poller = Poller(
            look, INTERVAL_S, LIMITS, clock=lambda: made.now, wall_clock=lambda: UNIX + made.now, log=log.append
        )
        with serving("127.0.0.1", 0, make_pages(made.poller.report, VERSION)) as server:
            made.url = f"http://127.0.0.1:{server.port}"
            yield made


# A life


def test_an_engines_life_is_reported_as_it_goes(setting: Setting) -> None:
    engine = setting.engine
    assert setting.state() == ("starting", 200, 503)  # before the first look
    setting.poller.look()
    assert setting.state() == ("starting", 200, 503)
    engine.start()
    setting.pass_time()
    assert setting.state() == ("loading", 200, 503)
    engine.warm_up()
    setting.pass_time()
    assert setting.state() == ("ready", 200, 200)

    engine.unfinished = 1
    engine.freeze_scheduler()
    setting.pass_time(20)
    assert setting.state() == ("busy", 200, 200)
    engine.thaw_scheduler()
    setting.pass_time()
    assert setting.state() == ("ready", 200, 200)

    engine.generate(tokens=101, steps=100)
    setting.pass_time()
    assert setting.state() == ("degraded", 200, 200)
    assert "accept length 1.049 over the last 103 verify steps" in setting.get("/readyz").json()["reason"]
    engine.generate(tokens=300, steps=100)
    setting.pass_time()
    assert setting.state() == ("ready", 200, 200)

    engine.break_metrics(500, "")
    setting.pass_time()
    assert setting.state() == ("blind", 200, 200)
    setting.pass_time(35)
    assert setting.state() == ("blind", 200, 503)
    engine.instead_of_metrics = None
    setting.pass_time()
    assert setting.state() == ("ready", 200, 200)

    engine.freeze_scheduler()
    setting.pass_time(70)
    assert setting.state() == ("stuck", 503, 503)
    engine.exit()
    setting.pass_time()
    assert setting.state() == ("restarting", 200, 503)
    setting.pass_time(40)
    assert setting.state() == ("dead", 503, 503)
    engine.start_ready()
    setting.pass_time()
    assert setting.state() == ("ready", 200, 200)

    engine.stop_finishing_batches(unfinished=2)
    setting.pass_time(200)
    assert setting.state() == ("stalled", 503, 503)
    engine.finishes_batches = True
    setting.pass_time()
    engine.drain(unfinished=2)
    setting.pass_time()
    assert setting.state() == ("draining", 200, 503)

    states = [line.split()[0].removeprefix("state=") for line in setting.log]
    expected = "starting loading ready busy ready degraded ready blind ready busy stuck restarting dead ready"
    assert states == [*expected.split(), "busy", "stalled", "ready", "draining"]


def test_a_change_of_state_is_one_line_of_keys_and_values(setting: Setting) -> None:
    setting.poller.look()
    setting.engine.start_ready()
    setting.pass_time(20)
    assert setting.log[0].startswith('state=starting before=none live=true ready=false reason="no answer yet: ')
    assert setting.log[1:] == [
        'state=ready before=starting live=true ready=true reason="0 requests unfinished, heartbeat 0.0 s old"'
    ]


def test_readyz_says_since_when(setting: Setting) -> None:
    setting.engine.start_ready()
    setting.pass_time(INTERVAL_S)
    first = setting.get("/readyz").json()
    setting.pass_time(60)
    assert setting.get("/readyz").json() == first
    assert set(first) == {"state", "reason", "since"}
    assert first["since"] == "2026-11-29T17:57:37Z"  # 1005 s after UNIX


def test_the_version_is_what_it_was_given(setting: Setting) -> None:
    answer = setting.get("/version")
    assert (answer.status_code, answer.json()) == (200, VERSION)


def test_questions_cost_the_engine_nothing(setting: Setting) -> None:
    setting.engine.start_ready()
    setting.pass_time()
    asked = list(setting.engine.requests)
    for path in ("/livez", "/readyz", "/version", "/metrics", "/nowhere") * 3:
        setting.get(path)
    assert setting.engine.requests == asked == ["/health", "/metrics"]


def test_a_key_that_the_engine_leaks_is_not_passed_on(setting: Setting) -> None:
    key = "sk-secret-1234"
    setting.engine.start_ready()
    setting.pass_time()
    setting.engine.break_metrics(200, f"{key}\nsglang:scheduler_heartbeat_timestamp_seconds {key}\n")
    setting.pass_time()
    for path in ("/livez", "/readyz", "/version", "/metrics"):
        assert key not in setting.get(path).text
    assert key not in "".join(setting.log)


# The poller itself


def test_a_poller_that_hangs_fails_both_checks(setting: Setting) -> None:
    setting.engine.start_ready()
    setting.pass_time()
    setting.now += 3 * INTERVAL_S
    assert setting.state() == ("ready", 200, 200)
    setting.now += 0.5
    assert setting.state() == ("ready", 503, 503)
    reason = setting.get("/livez").json()["reason"]
    assert "no look at the engine has ended for 15.5 s" in reason and "restart it" in reason
    stale = setting.metrics()
    assert (stale["ddtree_engine_up"], stale["ddtree_engine_ready"], stale["ddtree_engine_live"]) == (0, 0, 0)
    assert "ddtree_heartbeat_age_seconds" not in stale
    setting.poller.look()
    assert setting.state() == ("ready", 200, 200)


def test_a_first_look_that_never_ends_is_noticed(setting: Setting) -> None:
    setting.now += 3 * INTERVAL_S + 0.5
    assert setting.state() == ("starting", 503, 503)


def test_looks_begin_one_interval_apart_and_end_when_told() -> None:
    now, looks, waits = [0.0], [], []

    def look() -> Observation:
        looks.append(now[0])
        now[0] += durations[len(looks) - 1]
        return Observation(UNIX, 0.1, None, None, Failure.REFUSED, "connection refused")

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        now[0] += seconds
        return len(waits) == 4

    durations = [1.0, 4.0, 7.0, 0.5]
    poller = Poller(look, INTERVAL_S, LIMITS, clock=lambda: now[0], wall_clock=lambda: UNIX, log=lambda line: None)
    poller.run(wait)
    assert waits == [4.0, 1.0, 0.0, 4.5]
    assert looks == [0.0, 5.0, 10.0, 17.0]


def test_a_log_that_cannot_be_written_does_not_end_the_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", broken)
    seen = Observation(UNIX, 0.1, None, None, Failure.REFUSED, "connection refused")
    poller = Poller(lambda: seen, INTERVAL_S, LIMITS)
    poller.look()
    assert poller.report().observation is seen


# Metrics


def test_what_is_not_known_is_absent(setting: Setting) -> None:
    known = set(setting.metrics())
    unknown = {
        "ddtree_heartbeat_age_seconds",
        "ddtree_progress_age_seconds",
        "ddtree_unfinished_requests",
        "ddtree_accept_length",
        "ddtree_engine_start_time_seconds",
        "ddtree_probe_duration_seconds",
        "ddtree_probe_timestamp_seconds",
    }
    assert not unknown & known
    setting.engine.start_ready()
    setting.pass_time()
    assert unknown - set(setting.metrics()) == {"ddtree_accept_length"}


def test_the_series_follow_the_engine(setting: Setting) -> None:
    setting.poller.look()
    assert setting.metrics()["ddtree_engine_up"] == 0
    setting.engine.start_ready()
    setting.pass_time()
    setting.engine.unfinished = 2
    setting.engine.generate(tokens=330, steps=100)
    setting.pass_time()
    setting.engine.freeze_scheduler()
    setting.pass_time()
    found = setting.metrics()
    expected = {
        "ddtree_engine_up": 1,
        "ddtree_engine_ready": 1,
        "ddtree_engine_live": 1,
        "ddtree_heartbeat_age_seconds": 5,
        "ddtree_progress_age_seconds": 5,
        "ddtree_unfinished_requests": 2,
        "ddtree_accept_length": 3.3,
        "ddtree_verify_steps_total": 100,
        "ddtree_accept_tokens_total": 330,
        "ddtree_engine_restarts_total": 0,
        "ddtree_engine_start_time_seconds": UNIX + 1005,
        "ddtree_probe_timestamp_seconds": UNIX + 1015,
        "ddtree_probe_failures_total:refused": 1,
        "ddtree_probe_failures_total:timeout": 0,
        "ddtree_patchset_verified": 1,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert 0 < found["ddtree_probe_duration_seconds"] < 10
    assert {name for name, value in found.items() if name.startswith("ddtree_engine_state:") and value} == {
        "ddtree_engine_state:ready"
    }
    assert sum(name.startswith("ddtree_engine_state:") for name in found) == len(State)

    setting.engine.exit()
    setting.pass_time()
    setting.engine.start_ready()
    setting.engine.generate(tokens=3, steps=1)
    setting.pass_time()
    again = setting.metrics()
    assert again["ddtree_engine_restarts_total"] == 1
    assert again["ddtree_accept_tokens_total"] == 330 + 7 + 3
    assert again["ddtree_verify_steps_total"] == 100 + 3 + 1
    assert again["ddtree_engine_start_time_seconds"] == pytest.approx(UNIX + 1025)
    assert "ddtree_accept_length" not in again


def test_the_build_is_described_by_labels(setting: Setting) -> None:
    page = setting.get("/metrics")
    assert page.headers["Content-Type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(page.text)}
    (build,) = families["ddtree_build_info"].samples
    assert build.value == 1
    expected = {name: str(VERSION[name]) for name in ("version", "sglang_version", "patchset_sha256", "image", "model")}
    assert build.labels == {**expected, "budget": "32"}


@pytest.mark.parametrize(("verified", "value"), [(True, 1.0), (False, 0.0), (None, None), ("yes", None)])
def test_a_patchset_is_verified_refuted_or_unknown(verified: object, value: float | None, setting: Setting) -> None:
    registry = new_registry({"patchset_verified": verified}, setting.poller.report)
    assert registry.get_sample_value("ddtree_patchset_verified") == value


def test_names_follow_the_prometheus_conventions(setting: Setting) -> None:
    setting.engine.start_ready()
    setting.pass_time()
    setting.engine.generate(tokens=330, steps=100)
    setting.pass_time()
    for family in text_string_to_metric_families(setting.get("/metrics").text):
        assert family.name.startswith("ddtree_")
        assert family.documentation
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name


# The process

SERVE = """
import json, sys
from ddtree_appliance.health.judge import Limits
from ddtree_appliance.health.sidecar import serve_health
url, port, limits = sys.argv[1], int(sys.argv[2]), Limits(**json.loads(sys.argv[3]))
code = serve_health(url, "127.0.0.1", port, 1.5, limits, {"version": "0.1.0"})
heavy = {"pydantic", "yaml", "torch", "sglang"} & set(sys.modules)
assert not heavy, heavy
sys.exit(code)
"""


def test_sigterm_ends_it_within_a_second_with_exit_code_0() -> None:
    with FakeEngine(time.time) as engine, FakeEngine(time.time) as spare:
        engine.start_ready()
        arguments = [engine.url, str(spare.port), json.dumps(asdict(LIMITS))]
        with subprocess.Popen(
            [sys.executable, "-c", SERVE, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            try:
                line = process.stdout.readline()
                assert line.startswith("state=ready before=none live=true ready=true "), line
                assert requests.get(f"{spare.url}/readyz", timeout=10).status_code == 200
                engine.hang()
                assert engine.has_waiting_request.wait(10)  # a look that waits does not hold it up
                begin = time.monotonic()
                process.send_signal(signal.SIGTERM)
                assert process.wait(10) == 0
                assert time.monotonic() - begin < 1
                assert (process.stdout.read(), process.stderr.read()) == ("", "")
            finally:
                process.kill()


def test_a_sidecar_in_this_process_leaves_no_thread(setting: Setting) -> None:
    before = set(threading.enumerate())
    with serving("127.0.0.1", 0, make_pages(setting.poller.report, {})) as server:
        assert requests.get(f"http://127.0.0.1:{server.port}/livez", timeout=10).status_code == 200
    left = [thread for thread in set(threading.enumerate()) - before if thread.name == "endpoints"]
    for thread in left:
        thread.join(10)
        assert not thread.is_alive()
