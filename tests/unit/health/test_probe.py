"""What podman's health command says about an engine, and what it costs."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from ddtree_appliance.errors import EXIT_FAILED, EXIT_OK
from ddtree_appliance.health.observation import HEARTBEAT
from ddtree_appliance.health.probe import probe
from tests.unit.health.fake_engine import FakeEngine

CPU_BUDGET_S = 0.3


class WallClock:
    """Unix time, set back by `behind_s`: what an engine wrote down that long ago."""

    behind_s = 0.0

    def __call__(self) -> float:
        return time.time() - self.behind_s


@pytest.fixture
def clock() -> WallClock:
    return WallClock()


@pytest.fixture
def engine(clock: WallClock) -> Iterator[FakeEngine]:
    with FakeEngine(clock) as fake:
        yield fake


def ask(engine: FakeEngine, startup: bool = False, timeout_s: float = 10.0) -> int:
    return probe(engine.url, heartbeat_limit_s=60, progress_limit_s=180, timeout_s=timeout_s, startup=startup)


Situation = Callable[[FakeEngine, WallClock], None]


def ready(engine: FakeEngine, clock: WallClock) -> None:
    engine.start_ready()


def working(engine: FakeEngine, clock: WallClock) -> None:
    engine.start_ready()
    engine.unfinished = 3


def draining(engine: FakeEngine, clock: WallClock) -> None:
    engine.start_ready()
    engine.drain(unfinished=2)


def frozen_for(seconds: float) -> Situation:
    def arrange(engine: FakeEngine, clock: WallClock) -> None:
        clock.behind_s = seconds
        engine.start_ready()
        engine.freeze_scheduler()

    return arrange


def without_progress_for(seconds: float, unfinished: int) -> Situation:
    def arrange(engine: FakeEngine, clock: WallClock) -> None:
        clock.behind_s = seconds
        engine.start_ready()
        engine.stop_finishing_batches(unfinished)
        clock.behind_s = 0.0

    return arrange


def draining_frozen(engine: FakeEngine, clock: WallClock) -> None:
    frozen_for(70)(engine, clock)
    engine.drain(unfinished=1)


def clock_set_back(engine: FakeEngine, clock: WallClock) -> None:
    clock.behind_s = -3600
    working(engine, clock)


HEALTHY: list[Situation] = [
    ready,
    working,
    draining,
    frozen_for(50),
    without_progress_for(170, unfinished=2),
    without_progress_for(999, unfinished=0),
    clock_set_back,
]


@pytest.mark.parametrize("arrange", HEALTHY)
def test_a_healthy_engine_passes_in_silence(
    arrange: Situation, engine: FakeEngine, clock: WallClock, capfd: pytest.CaptureFixture[str]
) -> None:
    arrange(engine, clock)
    assert ask(engine) == EXIT_OK
    assert capfd.readouterr() == ("", "")


def not_listening(engine: FakeEngine, clock: WallClock) -> None:
    pass


def on_another_path(engine: FakeEngine, clock: WallClock) -> None:
    engine.start_ready()
    engine.url += "/elsewhere"


def metrics_broken(status: int, page: str) -> Situation:
    def arrange(engine: FakeEngine, clock: WallClock) -> None:
        engine.start_ready()
        engine.break_metrics(status, page)

    return arrange


SICK: list[tuple[Situation, str]] = [
    (frozen_for(61), "stuck: the scheduler's heartbeat is 61."),
    (draining_frozen, "stuck: the scheduler's heartbeat is 70."),
    (without_progress_for(181, unfinished=1), "stalled: 1 unfinished request and no finished batch for 181."),
    (without_progress_for(181, unfinished=2), "stalled: 2 unfinished requests"),
    (not_listening, "/health did not answer: [Errno 111] Connection refused"),
    (on_another_path, "/health answered HTTP 404"),
    (metrics_broken(500, "sk-secret"), "/metrics answered HTTP 500"),
    (metrics_broken(200, "sk-secret"), f"/metrics has no {HEARTBEAT}"),
    (metrics_broken(200, f"{HEARTBEAT} sk-secret"), f"/metrics has no {HEARTBEAT}"),
]


@pytest.mark.parametrize(("arrange", "reason"), SICK)
def test_a_sick_engine_fails_with_one_line(
    arrange: Situation, reason: str, engine: FakeEngine, clock: WallClock, capfd: pytest.CaptureFixture[str]
) -> None:
    arrange(engine, clock)
    assert ask(engine) == EXIT_FAILED
    out, err = capfd.readouterr()
    assert out.startswith(reason) and out.count("\n") == 1, out
    assert "sk-secret" not in out
    assert err == ""


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_a_hanging_engine_fails_in_time(path: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.start_ready()
    engine.hang(only=path)
    begin = time.monotonic()
    assert ask(engine, timeout_s=0.2) == EXIT_FAILED
    assert 0.2 <= time.monotonic() - begin < 2
    assert capsys.readouterr().out == f"{path} did not answer within 0.2 s\n"


def test_no_time_is_left_for_metrics_after_a_slow_health(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.start_ready()
    times = iter([100.0, 100.1, 100.3])
    monkeypatch.setattr("ddtree_appliance.health.probe.time.monotonic", lambda: next(times))
    assert ask(engine, timeout_s=0.2) == EXIT_FAILED
    assert capsys.readouterr().out == "/metrics did not answer within 0.2 s\n"
    assert engine.requests == ["/health"]


@pytest.mark.parametrize("url", ["", "nonsense", "http://", "http://[::1", "http://127.0.0.1:99999"])
def test_a_wrong_address_fails_with_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe(url, heartbeat_limit_s=60, progress_limit_s=180, timeout_s=2, startup=False) == EXIT_FAILED
    assert capsys.readouterr().out.count("\n") == 1


# At start


def test_a_start_waits_for_health_and_asks_nothing_else(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(engine, startup=True) == EXIT_FAILED
    assert "Connection refused" in capsys.readouterr().out
    engine.start()
    assert ask(engine, startup=True) == EXIT_FAILED
    assert capsys.readouterr().out == "/health answered HTTP 503: not ready yet\n"
    engine.break_metrics(500, "")
    engine.warm_up()
    assert ask(engine, startup=True) == EXIT_OK
    assert capsys.readouterr().out == ""
    assert engine.requests == ["/health", "/health"]


# What it costs

ONCE = """
import sys
from ddtree_appliance.health.probe import probe
code = probe(sys.argv[1], heartbeat_limit_s=60, progress_limit_s=180, timeout_s=10, startup=False)
heavy = {"requests", "prometheus_client", "pydantic", "yaml", "asyncio", "torch", "sglang"} & set(sys.modules)
assert not heavy, heavy
sys.exit(code)
"""


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_one_check_is_cheap(engine: FakeEngine) -> None:
    engine.start_ready()
    costs = []
    for _ in range(3):  # the first may compile modules, and other processes may get in the way of any
        before = cpu_seconds_of_children()
        done = subprocess.run([sys.executable, "-c", ONCE, engine.url], capture_output=True, text=True, timeout=60)
        costs.append(cpu_seconds_of_children() - before)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert min(costs) < CPU_BUDGET_S
