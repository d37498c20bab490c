"""One look, over real sockets, at every kind of engine and at what is none."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from ddtree_appliance.errors import EXIT_FAILED
from ddtree_appliance.health import observe as observe_module
from ddtree_appliance.health.observation import (
    ACCEPT_TOKENS,
    HEARTBEAT,
    ITERATIONS,
    PROGRESS,
    SERIES,
    STARTUP,
    UNFINISHED,
    VERIFY_STEPS,
    Failure,
    MissingSeriesError,
    Numbers,
    Observation,
    combine,
)
from ddtree_appliance.health.observe import new_session, observe
from ddtree_appliance.health.probe import parse_samples, probe
from tests.unit.health.fake_engine import FakeEngine, render_series

NOW = 1.8e9
KEY = "sk-secret-1234"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(lambda: NOW - 0.5) as fake:
        yield fake


def look(url: str, timeout_s: float = 10.0) -> Observation:
    with new_session() as session:
        return observe(session, url, timeout_s, lambda: NOW)


# A sound engine


def test_a_ready_engine_is_seen_with_its_numbers(engine: FakeEngine) -> None:
    engine.start_ready()
    engine.generate(tokens=40, steps=12)
    engine.unfinished = 2
    seen = look(engine.url)
    assert (seen.at, seen.health, seen.reachable, seen.failure, seen.detail) == (NOW, 200, True, None, "")
    assert 0 < seen.took_s < 10
    assert seen.numbers == Numbers(
        heartbeat_time=NOW - 0.5,
        progress_time=NOW - 0.5,
        unfinished=2,
        iterations=1,
        accept_tokens=47,
        verify_steps=15,
        startup_s=30 + 1 / 7,
    )


def test_an_engine_that_starts_or_drains_is_reachable(engine: FakeEngine) -> None:
    engine.start()
    seen = look(engine.url)
    assert (seen.health, seen.reachable, seen.failure) == (503, True, None)
    assert seen.numbers is not None


def test_one_look_asks_twice_and_closes_its_connections(engine: FakeEngine) -> None:
    engine.start_ready()
    look(engine.url)
    assert engine.requests == ["/health", "/metrics"]
    assert new_session().headers["Connection"] == "close"


def test_proxies_of_the_environment_are_not_used(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    engine.start_ready()
    assert look(engine.url).failure is None


# Several schedulers


def test_the_slowest_scheduler_decides_and_counts_are_added() -> None:
    names = {HEARTBEAT: (5.0, 3.0), PROGRESS: (2.0, 4.0), UNFINISHED: (1.0, 2.0), ITERATIONS: (10.0, 20.0)}
    names |= {ACCEPT_TOKENS: (7.0, 8.0), VERIFY_STEPS: (3.0, 4.0), STARTUP: (1.0, 9.0)}
    samples = [(name, value) for name, values in names.items() for value in values]
    expected = Numbers(3.0, 2.0, 3, 30.0, 15.0, 7.0, 9.0)
    assert combine(samples) == combine(reversed(samples)) == expected


@pytest.mark.parametrize("missing", [name for name in SERIES if name != STARTUP])
def test_a_missing_series_is_named(missing: str) -> None:
    samples = [(name, 1.0) for name in SERIES if name != missing]
    with pytest.raises(MissingSeriesError, match=missing):
        combine(samples)
    with pytest.raises(MissingSeriesError, match=missing):
        combine([*samples, (missing, float("nan"))])


def test_the_start_up_time_may_be_missing() -> None:
    assert combine([(name, 1.0) for name in SERIES if name != STARTUP]).startup_s is None


# What is not there, or broken

PAGES: list[tuple[str, int, str, Failure, str]] = [
    # (what, status, page, failure, a part of the detail)
    ("an error", 500, "Internal Server Error", Failure.METRICS_UNREADABLE, "HTTP 500"),
    ("not found", 404, "", Failure.METRICS_UNREADABLE, "HTTP 404"),
    ("a redirect", 307, "", Failure.METRICS_UNREADABLE, "HTTP 307"),
    ("nothing", 200, "", Failure.METRICS_INCOMPLETE, HEARTBEAT),
    ("another page", 200, "<html>hello</html>", Failure.METRICS_INCOMPLETE, HEARTBEAT),
    ("no value", 200, f'{HEARTBEAT}{{a="b"}}\n', Failure.METRICS_UNREADABLE, "cannot be parsed"),
    ("no number", 200, f"{HEARTBEAT} {KEY}\n", Failure.METRICS_UNREADABLE, "cannot be parsed"),
    ("a broken label", 200, f'{HEARTBEAT}{{a="b 1.0\n', Failure.METRICS_UNREADABLE, "cannot be parsed"),
    ("NaN", 200, "".join(render_series(name, float("nan")) for name in SERIES), Failure.METRICS_INCOMPLETE, HEARTBEAT),
    ("no progress", 200, render_series(HEARTBEAT, NOW), Failure.METRICS_INCOMPLETE, PROGRESS),
]


@pytest.mark.parametrize(
    ("status", "page", "failure", "part"), [row[1:] for row in PAGES], ids=[row[0] for row in PAGES]
)
def test_a_broken_metrics_page_is_an_observation(
    status: int, page: str, failure: Failure, part: str, engine: FakeEngine
) -> None:
    engine.start_ready()
    engine.break_metrics(status, page)
    seen = look(engine.url)
    assert (seen.health, seen.reachable, seen.numbers, seen.failure) == (200, True, None, failure)
    assert part in seen.detail


def test_a_fault_in_a_foreign_series_does_not_matter(engine: FakeEngine) -> None:
    engine.start_ready()
    engine.break_metrics(200, 'sglang:other{a="} x\n\x00\n' + engine.metrics_page())
    assert look(engine.url).failure is None


def test_a_page_cut_short_is_unreadable(engine: FakeEngine) -> None:
    engine.start_ready()
    engine.headers = {"Content-Length": "1000000"}
    engine.health = 503  # whose empty body is cut short too
    seen = look(engine.url)
    assert seen.failure in (Failure.BROKEN, Failure.METRICS_UNREADABLE)


def test_nothing_that_the_engine_says_is_quoted(engine: FakeEngine) -> None:
    engine.start_ready()
    for page in (KEY, f"{HEARTBEAT} {KEY}", f'{HEARTBEAT}{{key="{KEY}}}', f"# HELP {HEARTBEAT} {KEY}"):
        for status in (200, 500):
            engine.break_metrics(status, page)
            seen = look(engine.url)
            assert seen.failure is not None
            assert KEY not in seen.detail


def test_nobody_listens(engine: FakeEngine) -> None:
    seen = look(engine.url)
    assert (seen.health, seen.reachable, seen.failure) == (None, False, Failure.REFUSED)
    assert seen.detail == "connection refused"


def test_an_engine_that_hangs_is_given_up_in_time(engine: FakeEngine) -> None:
    engine.start_ready()
    engine.hang()
    seen = look(engine.url, timeout_s=0.2)
    assert (seen.health, seen.failure, seen.detail) == (None, Failure.TIMEOUT, "no answer within 0.2 s")
    assert 0.2 <= seen.took_s < 2


@pytest.mark.parametrize("status", [204, 301, 401, 404, 500, 502])
def test_another_status_is_no_engine(status: int, engine: FakeEngine) -> None:
    engine.start_ready()
    engine.health = status
    engine.headers = {"Location": f"{engine.url}/metrics"}
    seen = look(engine.url)
    assert (seen.health, seen.reachable, seen.failure) == (status, False, Failure.STATUS)
    assert str(status) in seen.detail
    assert engine.requests == ["/health"]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "http://",
        "http://[::1",
        "http://127.0.0.1:99999",
        "ftp://x",
        "http://" + "a" * 70,
        "http://127.0.0.1:" + "a" * 300,
        "http://\x00",
    ],
)
def test_a_wrong_address_is_an_observation(url: str) -> None:
    seen = look(url, timeout_s=2.0)
    assert (seen.reachable, seen.failure) == (False, Failure.BROKEN)
    assert 0 < len(seen.detail) <= 160
    assert "\n" not in seen.detail


def test_no_time_is_left_for_metrics_after_a_slow_health(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.start_ready()
    times = iter([100.0, 100.1, 100.3, 100.3])
    monkeypatch.setattr(observe_module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    seen = look(engine.url, timeout_s=0.2)
    assert (seen.health, seen.failure) == (200, Failure.METRICS_UNREADABLE)
    assert seen.detail == "/metrics: no answer within 0.2 s"
    assert engine.requests == ["/health"]


@contextmanager
def raw_server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Answers every connection without any HTTP library."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        connection.recv(65536)
                        answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # which, unlike closing it, ends a waiting accept
            thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        f"SSH-2.0-{KEY}\r\n",
        f"HTTP/1.1 {KEY}\r\n\r\n",
        f"HTTP/1.1 200 OK\r\nContent-Length: {KEY}\r\n\r\n",
        f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{KEY}\r\n",
        f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n{KEY}",
        f"HTTP/1.1 200 OK\r\n{KEY}\r\n\r\n",
        "",
    ],
)
def test_what_speaks_no_proper_http_is_described_but_not_quoted(
    answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def send(connection: socket.socket) -> None:
        connection.sendall(answer.encode())

    with raw_server(send) as url:
        seen = look(url)
        assert seen.failure is not None
        assert seen.detail and KEY not in seen.detail
        assert probe(url, heartbeat_limit_s=60, progress_limit_s=180, timeout_s=5, startup=False) == EXIT_FAILED
    said = capsys.readouterr().out
    assert said and KEY not in said


def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe_module, "MAX_PAGE_BYTES", 1 << 20)

    def flood(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(1000):
            connection.sendall(b"x" * 65536)

    with raw_server(flood) as url:
        seen = look(url)
    assert (seen.reachable, seen.failure) == (False, Failure.BROKEN)
    assert "larger than" in seen.detail


def test_an_answer_that_trickles_is_given_up() -> None:
    def trickle(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            connection.sendall(b"1\r\nx\r\n")
            time.sleep(0.02)

    with raw_server(trickle) as url:
        seen = look(url, timeout_s=0.2)
    assert seen.failure is Failure.TIMEOUT
    assert seen.took_s < 2


# The probe reads the same page with a parser of its own

LABEL_VALUES = st.text('ab1 {}=,"\\\n#\u00e9', max_size=8)


@given(
    st.lists(
        st.tuples(st.sampled_from([*SERIES, f"{HEARTBEAT}_x", "sglang:x"]), LABEL_VALUES, st.floats()), max_size=12
    )
)
def test_both_parsers_find_the_same_values(rows: list[tuple[str, str, float]]) -> None:
    lines = []
    for name, label, value in rows:
        escaped = label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
        labels = f'{{model_name="{escaped}"}}' if label else ""
        lines.append(f"{name}{labels} {value!r}")
    page = "# HELP x y\n" + "\n".join(lines) + "\n"
    families = text_string_to_metric_families(page)
    found = [(sample.name, sample.value) for family in families for sample in family.samples if sample.name in SERIES]
    assert sorted(map(repr, parse_samples(page))) == sorted(map(repr, found))
