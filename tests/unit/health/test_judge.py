"""Whole timelines: what an engine's life looks like from outside, look by look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_appliance.health.history import History
from ddtree_appliance.health.judge import Limits, State, Verdict, judge
from ddtree_appliance.health.observation import Failure, Numbers, Observation

LIMITS = Limits(
    heartbeat_limit_s=60,
    progress_limit_s=180,
    busy_after_s=10,
    unreachable_limit_s=30,
    start_limit_s=600,
    accept_length_floor=1.2,
    accept_length_min_steps=100,
)
UNIX = 1.8e9  # Unix time at t = 0
At = Callable[[float], Observation]
Timeline = list[tuple[float, At, State]]

STARTING, LOADING, READY, BUSY, DEGRADED = (
    State.STARTING,
    State.LOADING,
    State.READY,
    State.BUSY,
    State.DEGRADED,
)
DRAINING, RESTARTING, BLIND, STUCK, STALLED, DEAD = (
    State.DRAINING,
    State.RESTARTING,
    State.BLIND,
    State.STUCK,
    State.STALLED,
    State.DEAD,
)
NOT_LIVE = {STUCK, STALLED, DEAD}
READY_STATES = {READY, BUSY, DEGRADED}


# What a look at time t may find


def up(
    heartbeat: float | None = None,
    progress: float | None = None,
    *,
    unfinished: int = 0,
    tokens: float = 0,
    steps: float = 0,
    process: float | None = 1.0,
    iterations: float | None = None,
    health: int = 200,
    wall_step: float = 0.0,
) -> At:
    """heartbeat and progress are the times at which they were written; a quarter of a second ago unless given.

    wall_step is how far the host's wall clock has been set forward when the look is made.
    """

    def at(t: float) -> Observation:
        now = UNIX + t + wall_step
        numbers = Numbers(
            heartbeat_time=now - 0.25 if heartbeat is None else UNIX + heartbeat,
            progress_time=now - 0.25 if progress is None else UNIX + progress,
            unfinished=unfinished,
            iterations=100 * t if iterations is None else iterations,
            accept_tokens=tokens,
            verify_steps=steps,
            startup_s=process,
        )
        return Observation(now, 0.03, health, numbers)

    return at


def gone(failure: Failure = Failure.REFUSED, detail: str = "connection refused", health: int | None = None) -> At:
    return lambda t: Observation(UNIX + t, 0.01, health, None, failure, detail)


def blind(health: int = 200) -> At:
    return gone(Failure.METRICS_UNREADABLE, "/metrics answered HTTP 500", health)


def bare(health: int = 503) -> At:
    """The metrics page is sound, but the scheduler's loop has not run."""
    return gone(Failure.METRICS_INCOMPLETE, "/metrics has no sglang:scheduler_heartbeat", health)


LATE = gone(Failure.TIMEOUT, "no answer within 5 s")


def play(timeline: list[tuple[float, At]], limits: Limits = LIMITS) -> list[tuple[Verdict, History]]:
    history, played = History(), []
    for t, observe in timeline:
        verdict, history = judge(history, observe(t), t, limits)
        played.append((verdict, history))
    return played


TIMELINES: dict[str, Timeline] = {
    # Starting
    "a cold start: nothing listens, it answers, it is ready": [
        (0, gone(), STARTING),
        (300, gone(), STARTING),
        (310, bare(), LOADING),
        (315, up(health=503), LOADING),
        (320, up(), READY),
    ],
    "a kernel is compiled during the warm-up, longer than any limit on heartbeats": [
        (0, up(health=503), LOADING),
        (100, up(heartbeat=0, progress=0, unfinished=1, health=503), LOADING),
        (400, up(heartbeat=0, progress=0, unfinished=1, health=503), LOADING),
        (401, up(), READY),
    ],
    "it never comes": [(0, gone(), STARTING), (600, gone(), STARTING), (600.1, gone(), DEAD), (9999, LATE, DEAD)],
    "it answers but is never warmed up": [(0, gone(), STARTING), (590, bare(), LOADING), (601, bare(), DEAD)],
    "it comes at last": [(0, gone(), STARTING), (601, gone(), DEAD), (700, up(), READY)],
    "started by hand in the morning, it has the whole limit": [
        (0, gone(), STARTING),
        (28800, gone(), DEAD),
        (28805, bare(), LOADING),
        (29405, bare(), LOADING),
        (29406, bare(), DEAD),
    ],
    "it dies while loading, again and again": [
        (0, gone(), STARTING),
        (100, bare(), LOADING),
        (105, gone(), STARTING),
        (130, gone(), STARTING),
        (131, gone(), DEAD),  # it had been up, and is gone for longer than 30 s
        (200, bare(), LOADING),
        (205, gone(), STARTING),
        (590, bare(), LOADING),
        (601, bare(), DEAD),
        (610, up(), READY),
    ],
    "the sidecar starts later than the engine": [(0, up(), READY), (5, up(), READY)],
    "the sidecar starts while the scheduler is stuck": [(0, up(heartbeat=-61), STUCK)],
    "the sidecar starts while requests are stalled": [(0, up(progress=-181, unfinished=1), STALLED)],
    # Busy, stuck, stalled
    "idle for a day": [(0, up(), READY), (86400, up(), READY)],
    "a long prefill stops the loop, then ends": [
        (0, up(), READY),
        (10, up(heartbeat=0, progress=0), READY),
        (10.5, up(heartbeat=0, progress=0), BUSY),  # it arrived after the last heartbeat, which says 0 unfinished
        (59, up(heartbeat=0, progress=0), BUSY),
        (64, up(unfinished=1), READY),
    ],
    "chunks of a long prefill finish within the limits": [
        (0, up(unfinished=1), READY),
        (15, up(heartbeat=14, progress=2, unfinished=1), BUSY),
        (30, up(heartbeat=29, progress=29, unfinished=1), READY),
    ],
    "the loop stands still": [
        (0, up(), READY),
        (55, up(heartbeat=0, progress=0, unfinished=3), BUSY),
        (60, up(heartbeat=0, progress=0, unfinished=3), BUSY),
        (60.5, up(heartbeat=0, progress=0, unfinished=3), STUCK),
        (300, up(heartbeat=0, progress=0, unfinished=3), STUCK),
    ],
    "an idle loop stands still": [(0, up(), READY), (61, up(heartbeat=0, progress=0), STUCK)],
    "a stopped scheduler goes on": [
        (0, up(), READY),
        (70, up(heartbeat=0, progress=0), STUCK),
        (75, up(), READY),
    ],
    "the loop turns, requests wait, nothing finishes": [
        (0, up(unfinished=2), READY),
        (10, up(progress=0, unfinished=2), READY),
        (11, up(progress=0, unfinished=2), BUSY),
        (180, up(progress=0, unfinished=2), BUSY),
        (181, up(progress=0, unfinished=2), STALLED),
        (190, up(unfinished=1), READY),
    ],
    "old progress without requests is no stall": [(0, up(), READY), (500, up(progress=0), READY)],
    "it hangs, is killed, and comes back": [
        (0, up(), READY),
        (70, up(heartbeat=0), STUCK),
        (75, gone(), RESTARTING),
        (101, gone(), DEAD),
        (400, up(process=2.0), READY),
    ],
    # Shutting down, restarting
    "a stop: requests are drained, then it is gone": [
        (0, up(unfinished=2), READY),
        (5, up(unfinished=2, health=503), DRAINING),
        (1000, up(unfinished=1, health=503), DRAINING),
        (1005, up(heartbeat=1001, progress=1001, health=503), DRAINING),
        (1010, LATE, RESTARTING),
        (1036, gone(), DEAD),
    ],
    "stuck while draining": [
        (0, up(unfinished=2), READY),
        (5, up(unfinished=2, health=503), DRAINING),
        (66, up(heartbeat=5, progress=5, unfinished=2, health=503), STUCK),
    ],
    "stalled while draining": [
        (0, up(unfinished=2), READY),
        (5, up(unfinished=2, health=503), DRAINING),
        (190, up(progress=5, unfinished=2, health=503), STALLED),
    ],
    "a stop and a start": [
        (0, up(), READY),
        (5, up(health=503), DRAINING),
        (10, gone(), RESTARTING),
        (30, bare(), LOADING),
        (35, up(health=503, process=2.0, iterations=5), LOADING),
        (40, up(process=2.0, iterations=9), READY),
    ],
    "a new process that was never missed": [
        (0, up(), READY),
        (5, up(health=503, process=2.0), LOADING),
        (10, up(process=2.0), READY),
    ],
    "a new process, told only by its counters": [
        (0, up(process=None, iterations=1000), READY),
        (5, up(process=None, iterations=10, health=503), LOADING),
        (10, up(process=None, iterations=20), READY),
    ],
    "the heartbeat is gone: a new process loads": [
        (0, up(), READY),
        (5, bare(), LOADING),
        (10, up(process=2.0), READY),
    ],
    "silent, then 503, with nothing to tell processes by": [
        (0, up(), READY),
        (5, gone(), RESTARTING),
        (10, blind(503), LOADING),
        (15, up(process=2.0), READY),
    ],
    "draining begins during a pause": [
        (0, up(), READY),
        (5, LATE, RESTARTING),
        (10, up(health=503, unfinished=1), DRAINING),
    ],
    "one look is late": [(0, up(), READY), (5, LATE, RESTARTING), (10, up(), READY)],
    "its HTTP side hangs": [(0, up(), READY), (30, LATE, RESTARTING), (31, LATE, DEAD), (40, up(), READY)],
    "something else answers on its port": [
        (0, up(), READY),
        (5, gone(Failure.STATUS, "/health answered HTTP 404", 404), RESTARTING),
        (31, gone(Failure.STATUS, "/health answered HTTP 404", 404), DEAD),
    ],
    "a new process has its own start limit": [
        (0, up(), READY),
        (500, up(), READY),
        (1000, bare(), LOADING),
        (1600, bare(), LOADING),
        (1601, bare(), DEAD),
    ],
    # Blind
    "its metrics go away and come back": [
        (0, up(), READY),
        (5, blind(), BLIND),
        (100, blind(), BLIND),
        (105, up(), READY),
    ],
    "its metrics were never there": [(0, gone(), STARTING), (5, bare(200), BLIND), (99, bare(200), BLIND)],
    "draining without metrics": [
        (0, up(), READY),
        (5, blind(503), DRAINING),
        (35, blind(503), DRAINING),
        (36, blind(503), BLIND),
    ],
    # The drafter
    "the drafter stops helping, then helps again": [
        (0, up(tokens=5000, steps=1000), READY),  # what was before is not judged
        (5, up(tokens=5099, steps=1099), READY),
        (10, up(tokens=5101, steps=1100), DEGRADED),
        (15, up(tokens=5101, steps=1100), DEGRADED),
        (20, up(tokens=5300, steps=1199), DEGRADED),  # the next window is not full yet
        (25, up(tokens=5302, steps=1200), READY),
    ],
    "an accept length at the floor is no alarm": [
        (0, up(), READY),
        (5, up(tokens=120, steps=100), READY),
        (10, up(tokens=239, steps=200), DEGRADED),
    ],
    "degraded and busy is still degraded": [
        (0, up(), READY),
        (5, up(tokens=100, steps=100, unfinished=1), DEGRADED),
        (20, up(heartbeat=5, progress=5, tokens=100, steps=100, unfinished=1), DEGRADED),
    ],
    "a new process is not blamed for the old one's drafter": [
        (0, up(), READY),
        (5, up(tokens=100, steps=100), DEGRADED),
        (10, gone(), RESTARTING),
        (15, up(process=2.0), READY),
    ],
    "no speculation, no window": [(0, up(), READY), (99, up(), READY)],
    # Clocks
    "the wall clock is set back by an hour": [
        (0, up(), READY),
        (5, up(wall_step=-3600), READY),
        (10, up(wall_step=-3600), READY),
    ],
    "it is set back between the heartbeat and the look": [
        (0, up(), READY),
        (5, up(heartbeat=4, progress=4, wall_step=-3600, unfinished=1), READY),
        (7, up(heartbeat=4, progress=4, wall_step=-3600, unfinished=1), READY),
    ],
    "it is set forward between the heartbeat and the look": [
        (0, up(), READY),
        (5, up(heartbeat=4, progress=4, wall_step=3600, unfinished=1), READY),
    ],
    "a clock set back hides no stuck scheduler": [
        (0, up(), READY),
        (5, up(wall_step=-3600), READY),
        (60, up(heartbeat=4.75 - 3600, progress=4.75 - 3600, wall_step=-3600), BUSY),
        (66, up(heartbeat=4.75 - 3600, progress=4.75 - 3600, wall_step=-3600), STUCK),
    ],
    "the first look finds a heartbeat of the future": [
        (0, up(heartbeat=3600, progress=3600), READY),
        (11, up(heartbeat=3600, progress=3600), BUSY),
        (61, up(heartbeat=3600, progress=3600), STUCK),
    ],
    "the machine sleeps for an hour": [  # the monotonic clock does not count it
        (0, up(), READY),
        (1, up(heartbeat=-0.25, progress=-0.25, wall_step=3600), READY),
        (2, up(wall_step=3600), READY),
    ],
}


@pytest.mark.parametrize("timeline", TIMELINES.values(), ids=TIMELINES.keys())
def test_timeline(timeline: Timeline) -> None:
    verdicts = [verdict for verdict, _ in play([(t, observe) for t, observe, _ in timeline])]
    assert [verdict.state for verdict in verdicts] == [expected for _, _, expected in timeline]
    for verdict in verdicts:
        if verdict.state is not BLIND:
            assert verdict.ready == (verdict.state in READY_STATES), verdict
        assert verdict.live == (verdict.state not in NOT_LIVE), verdict


# Blindness: what is not seen keeps its last meaning for a while


def test_readiness_outlives_the_metrics_for_the_unreachable_limit() -> None:
    looks = [(0, up()), (5, blind()), (35, blind()), (35.1, blind()), (40, up())]
    assert [verdict.ready for verdict, _ in play(looks)] == [True, True, True, False, True]


def test_an_engine_whose_metrics_were_never_read_is_not_ready() -> None:
    assert [verdict.ready for verdict, _ in play([(0, blind()), (5, blind())])] == [False, False]


def test_an_engine_that_did_not_answer_is_not_ready_before_its_metrics_are_back() -> None:
    looks = [(0, up()), (5, gone()), (10, blind()), (15, up())]
    assert [verdict.ready for verdict, _ in play(looks)] == [True, False, False, True]


def test_a_sick_engine_does_not_recover_by_losing_its_metrics() -> None:
    looks = [(0, up()), (61, up(heartbeat=0)), (66, blind()), (71, blind(503)), (76, up())]
    played = [(verdict.state, verdict.live, verdict.ready) for verdict, _ in play(looks)]
    assert played[1:] == [(STUCK, False, False), (BLIND, False, False), (BLIND, False, False), (READY, True, True)]


# Reasons


@pytest.mark.parametrize(
    ("looks", "parts"),
    [
        ([(0, gone()), (12, gone())], ["no answer yet: connection refused", "12.0 s", "limit 600 s"]),
        ([(0, gone()), (601, gone())], ["connection refused", "601.0 s", "limit 600 s", "journal"]),
        ([(0, up(health=503))], ["/health 503", "limit 600 s"]),
        ([(0, up(heartbeat=-0.5, unfinished=1))], ["1 request unfinished", "heartbeat 0.5 s old"]),
        ([(0, up(heartbeat=-14, unfinished=2))], ["2 requests", "heartbeat 14.0 s old", "long prefill"]),
        ([(0, up(heartbeat=-61))], ["not turned for 61.0 s", "limit 60 s", "restart the engine"]),
        ([(0, up(progress=-181, unfinished=2))], ["2 requests", "181.0 s", "limit 180 s", "restart the engine"]),
        ([(0, up()), (5, up(tokens=103, steps=100))], ["accept length 1.030", "100 verify steps", "1.2", "drafter"]),
        ([(0, up()), (5, up(health=503, unfinished=2))], ["shutting down", "2 requests unfinished"]),
        ([(0, up()), (5, LATE)], ["no answer for 5.0 s", "no answer within 5 s", "after 30 s"]),
        ([(0, up()), (31, LATE)], ["no answer for 31.0 s", "limit 30 s", "journal"]),
        ([(0, up()), (5, blind()), (9, blind())], ["metrics unreachable for 4.0 s", "HTTP 500", "--enable-metrics"]),
        ([(0, up(health=503)), (5, gone())], ["no answer for 5.0 s", "not become ready"]),
        ([(0, up()), (5, blind(503))], ["shutting down", "HTTP 500"]),
    ],
)
def test_a_reason_is_one_sentence_with_the_numbers(looks: list[tuple[float, At]], parts: list[str]) -> None:
    reason = play(looks)[-1][0].reason
    assert [part for part in parts if part not in reason] == [], reason
    assert "\n" not in reason


# What is remembered for the metrics


def test_totals_are_monotonic_across_processes_and_begin_at_the_first_look() -> None:
    looks = [
        (0, up(tokens=1000, steps=300)),
        (5, up(tokens=1010, steps=303)),
        (10, blind()),
        (15, up(tokens=1020, steps=306)),
        (20, gone()),
        (25, up(tokens=7, steps=3, process=2.0)),
        (30, up(tokens=8, steps=4, process=2.0)),
        (35, bare()),
        (40, up(tokens=5, steps=2, process=3.0)),
    ]
    histories = [history for _, history in play(looks)]
    assert [history.accept_tokens_total for history in histories] == [0, 10, 10, 20, 20, 27, 28, 28, 33]
    assert [history.verify_steps_total for history in histories] == [0, 3, 3, 6, 6, 9, 10, 10, 12]
    assert [history.restarts for history in histories] == [0, 0, 0, 0, 0, 1, 1, 2, 2]


def test_a_process_is_first_seen_once() -> None:
    looks = [(0, gone()), (5, bare()), (10, up()), (15, LATE), (20, up()), (25, up(process=2.0)), (30, up(process=2.0))]
    seen = [history.process_seen_unix for _, history in play(looks)]
    assert seen == [None, *[UNIX + 5] * 4, *[UNIX + 25] * 2]


def test_a_slow_answer_does_not_count_as_a_restart() -> None:
    assert [history.restarts for _, history in play([(0, up()), (5, LATE), (40, LATE), (45, up())])] == [0, 0, 0, 0]


def test_a_restart_is_seen_although_the_new_process_has_counted_further() -> None:
    looks = [(0, up(iterations=10)), (5, gone()), (10, up(iterations=500, process=2.0))]
    assert play(looks)[-1][1].restarts == 1


def test_ages_are_those_at_the_look() -> None:
    looks = [(0, up(heartbeat=-3, progress=-8)), (5, up(heartbeat=-3, progress=-8)), (10, up(heartbeat=9, progress=4))]
    played = [(history.heartbeat_age_s, history.progress_age_s) for _, history in play(looks)]
    # At the last look progress was written before the look before: it changed within these 5 s all the same.
    assert played == [pytest.approx(ages) for ages in [(3, 8), (8, 13), (1, 5)]]


def test_the_accept_length_is_that_of_the_last_full_window() -> None:
    looks = [
        (0, up(tokens=900, steps=300)),
        (5, up(tokens=1200, steps=399)),
        (10, up(tokens=1400, steps=500)),
        (15, up(tokens=1500, steps=599)),
        (20, up(tokens=1600, steps=600)),
    ]
    lengths = [history.accept_length for _, history in play(looks)]
    assert lengths == [None, None, 2.5, 2.5, 2.0]


# Any sequence


def any_observation() -> st.SearchStrategy[At]:
    numbers = st.builds(
        Numbers,
        heartbeat_time=st.floats(UNIX - 1e5, UNIX + 1e5),
        progress_time=st.floats(UNIX - 1e5, UNIX + 1e5),
        unfinished=st.integers(0, 3),
        iterations=st.integers(0, 1000),
        accept_tokens=st.integers(0, 1000),
        verify_steps=st.integers(0, 1000),
        startup_s=st.sampled_from([None, 1.0, 2.0]),
    )
    seen = st.builds(
        Observation, st.floats(UNIX - 1e5, UNIX + 1e5), st.floats(0, 9), st.sampled_from([200, 503]), numbers
    )
    return st.one_of(
        st.sampled_from([up(), up(process=2.0), up(health=503), gone(), LATE, blind(), blind(503), bare(), bare(200)]),
        seen.map(lambda observation: lambda t: replace(observation)),
    )


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 5.0, 31.0, 200.0, 700.0, -5.0]), any_observation()), max_size=30))
def test_no_sequence_raises_and_ready_implies_live(steps: list[tuple[float, At]]) -> None:
    t, looks = 0.0, []
    for pause, observe in steps:
        t += pause
        looks.append((t, observe))
    before = History()
    for verdict, history in play(looks):
        assert verdict.live or not verdict.ready
        assert verdict.ready or verdict.state not in READY_STATES
        assert verdict.reason
        assert history.accept_tokens_total >= before.accept_tokens_total
        assert history.verify_steps_total >= before.verify_steps_total
        assert history.restarts - before.restarts in (0, 1)
        before = history
