"""The scheduler's heartbeat on a real server: as the sidecar and podman's probe see it, working, frozen and draining.

One server for all; the last test stops it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from ddtree_appliance.errors import EXIT_FAILED, EXIT_OK
from ddtree_appliance.health.history import History
from ddtree_appliance.health.judge import Limits, State, Verdict, judge
from ddtree_appliance.health.observation import Failure, Numbers, Observation
from ddtree_appliance.health.observe import new_session, observe
from ddtree_appliance.health.probe import probe
from ddtree_appliance.rehearsal.server import RehearsalServer
from tests.rehearsal.conftest import PLAIN, Kind, ServerPool

pytestmark = pytest.mark.rehearsal

WATCHED = Kind("DDTREE", 32, ("--enable-metrics",), (("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "0"),))
# An idle scheduler turns once a second; on two busy cores a turn may come late.
LIMITS = Limits(
    heartbeat_limit_s=8,
    progress_limit_s=16,
    busy_after_s=4,
    unreachable_limit_s=60,
    start_limit_s=300,
    accept_length_floor=1.2,
    accept_length_min_steps=50,
)
LOOK_LIMIT_S = 5.0
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def server(pool: ServerPool) -> Iterator[RehearsalServer]:
    pool.stop_all_but([PLAIN, WATCHED])
    yield pool[WATCHED]
    pool.stop_all_but([PLAIN])


def look(server: RehearsalServer) -> Observation:
    with new_session() as session:
        return observe(session, server.url, LOOK_LIMIT_S, time.time)


def numbers(server: RehearsalServer) -> Numbers:
    found = look(server).numbers
    assert found is not None
    return found


def ask_probe(server: RehearsalServer, startup: bool = False) -> int:
    return probe(
        server.url,
        heartbeat_limit_s=LIMITS.heartbeat_limit_s,
        progress_limit_s=LIMITS.progress_limit_s,
        timeout_s=10,
        startup=startup,
    )


def wait_until(what: str, is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(0.1)


class Watch:
    """Looks and judges as the sidecar does."""

    def __init__(self, server: RehearsalServer) -> None:
        self._server = server
        self._history = History()
        self.verdicts: list[Verdict] = []

    def state(self) -> State:
        verdict, self._history = judge(self._history, look(self._server), time.monotonic(), LIMITS)
        self.verdicts.append(verdict)
        return verdict.state


def launcher_of(server: RehearsalServer) -> psutil.Process:
    """The server's own first process, by its port: other servers may run on this machine."""
    (launcher,) = (child for child in psutil.Process().children() if str(server.port) in child.cmdline())
    return launcher


def scheduler_of(server: RehearsalServer) -> psutil.Process:
    children = launcher_of(server).children(recursive=True)
    (scheduler,) = (child for child in children if child.name().startswith("sglang::sched"))
    assert os.getpgid(scheduler.pid) == launcher_of(server).pid
    return scheduler


def test_an_idle_scheduler_beats_and_counts_as_progressing(
    server: RehearsalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    before = look(server)
    assert (before.health, before.failure) == (200, None)
    assert before.numbers is not None and before.numbers.startup_s is not None
    first = before.numbers
    wait_until("the heartbeat moves", lambda: numbers(server).heartbeat_time > first.heartbeat_time)
    after = numbers(server)
    assert after.unfinished == 0
    assert after.progress_time > first.progress_time
    assert after.heartbeat_time - after.progress_time < 0.5
    assert after.iterations > first.iterations
    assert after.startup_s == first.startup_s
    assert ask_probe(server) == ask_probe(server, startup=True) == EXIT_OK
    assert capsys.readouterr().out == ""


def test_requests_are_unfinished_while_they_progress(server: RehearsalServer, prompts: list[list[int]]) -> None:
    watch, seen = Watch(server), []
    with ThreadPoolExecutor(4) as clients:
        answers = [clients.submit(server.generate, prompt, 256) for prompt in prompts[:8]]
        while not all(answer.done() for answer in answers):
            seen.append(numbers(server))
            assert watch.state() in (State.READY, State.BUSY), watch.verdicts[-1]
            time.sleep(0.2)
    assert all(len(answer.result()["output_ids"]) == 256 for answer in answers)
    assert max(found.unfinished for found in seen) >= 2
    assert len({found.progress_time for found in seen if found.unfinished}) >= 3
    wait_until("no request is unfinished", lambda: numbers(server).unfinished == 0)


def test_the_counters_are_what_the_answers_say(server: RehearsalServer, prompts: list[list[int]]) -> None:
    before = numbers(server)
    # Both sides count whole accepted runs, also what the last one holds beyond the 61st token.
    metas = [server.generate(prompt, 61)["meta_info"] for prompt in prompts[:6]]
    steps = sum(meta["spec_verify_ct"] for meta in metas)
    tokens = sum(meta["spec_num_correct_drafts"] for meta in metas) + steps

    def counted() -> tuple[float, float]:
        now = numbers(server)
        return now.accept_tokens - before.accept_tokens, now.verify_steps - before.verify_steps

    wait_until(f"{steps} steps are counted", lambda: counted()[1] >= steps)
    assert counted() == (tokens, steps)


def test_a_frozen_scheduler_is_stuck_until_it_goes_on(
    server: RehearsalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    watch, scheduler = Watch(server), scheduler_of(server)
    assert watch.state() is State.READY
    assert ask_probe(server) == EXIT_OK
    scheduler.suspend()
    try:
        wait_until("the verdict is stuck", lambda: watch.state() is State.STUCK)
        assert (watch.verdicts[-1].live, watch.verdicts[-1].ready) == (False, False)
        assert State.BUSY in {verdict.state for verdict in watch.verdicts}
        capsys.readouterr()
        assert ask_probe(server) == EXIT_FAILED
        reason = capsys.readouterr().out
        assert reason.startswith("stuck: the scheduler's heartbeat is ") and "s old (limit 8 s)" in reason
        # Only the heartbeat tells: the HTTP side is well.
        assert ask_probe(server, startup=True) == EXIT_OK
    finally:
        scheduler.resume()
    wait_until("the verdict is ready", lambda: watch.state() is State.READY)
    assert ask_probe(server) == EXIT_OK
    assert capsys.readouterr().out == ""


def test_a_draining_server_is_healthy_until_its_last_request_is_answered(
    server: RehearsalServer, prompts: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Watch(server)
    assert watch.state() is State.READY
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(server.generate, prompts[0], 700)
        wait_until("the request runs", lambda: numbers(server).unfinished > 0)
        launcher_of(server).send_signal(signal.SIGTERM)
        wait_until("it drains", lambda: watch.state() is State.DRAINING)
        assert not answer.done(), "the request is too short to see the server drain"
        assert ask_probe(server) == EXIT_OK
        assert ask_probe(server, startup=True) == EXIT_FAILED
        capsys.readouterr()
        assert len(answer.result()["output_ids"]) == 700
    wait_until("it is gone", lambda: watch.state() is State.RESTARTING and look(server).failure is Failure.REFUSED)
    assert {verdict.state for verdict in watch.verdicts} == {State.READY, State.DRAINING, State.RESTARTING}
