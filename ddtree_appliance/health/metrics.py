"""The sidecar's own Prometheus series, made from the last report when they are scraped.

What is not known is absent, never 0: an alert on `absent()` or on a threshold must not see an invented number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ddtree_appliance.health.judge import State
from ddtree_appliance.health.observation import Failure
from ddtree_appliance.health.poller import Report

PATCHSET_VERIFIED = "patchset_verified"
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def new_registry(version: Mapping[str, Any], report: Callable[[], Report]) -> CollectorRegistry:
    """A registry with the sidecar's series only.

    The texts and numbers of `version` become labels of ddtree_build_info; its `patchset_verified`, true or false, a
    series of its own.
    """
    registry = CollectorRegistry()
    registry.register(_SidecarCollector(version, report))
    return registry


class _SidecarCollector(Collector):
    def __init__(self, version: Mapping[str, Any], report: Callable[[], Report]) -> None:
        self._version = version
        self._report = report

    def collect(self) -> Iterator[Metric]:
        report = self._report()
        yield from _describe_build(self._version)
        yield from _describe_state(report)
        yield from _describe_engine(report)
        yield from _describe_looks(report)


def _describe_build(version: Mapping[str, Any]) -> Iterator[Metric]:
    labels = {
        name: str(value)
        for name, value in version.items()
        if isinstance(value, (str, int, float)) and not isinstance(value, bool) and _LABEL_NAME.fullmatch(name)
    }
    build = GaugeMetricFamily("ddtree_build_info", "What is running; always 1.", labels=list(labels))
    build.add_metric(list(labels.values()), 1)
    yield build
    if isinstance(verified := version.get(PATCHSET_VERIFIED), bool):
        yield _gauge("ddtree_patchset_verified", "Whether the installed SGLang is the one that was built.", verified)


def _describe_state(report: Report) -> Iterator[Metric]:
    observation, verdict = report.observation, report.verdict
    is_up = observation is not None and observation.reachable and not report.is_stale
    yield _gauge("ddtree_engine_up", "Whether the engine answered the last look.", is_up)
    yield _gauge("ddtree_engine_ready", "Whether the engine takes requests, as /readyz says.", verdict.ready)
    yield _gauge("ddtree_engine_live", "Whether the engine needs no restart, as /livez says.", verdict.live)
    states = GaugeMetricFamily("ddtree_engine_state", "1 for the state that the engine is in.", labels=["state"])
    for state in State:
        states.add_metric([state.value], state is verdict.state)
    yield states


def _describe_engine(report: Report) -> Iterator[Metric]:
    history, observation = report.history, report.observation
    if observation is not None and observation.numbers is not None and not report.is_stale:
        heartbeat, progress = history.heartbeat_age_s, history.progress_age_s
        yield _gauge("ddtree_heartbeat_age_seconds", "Since the scheduler's loop turned, at the last look.", heartbeat)
        yield _gauge(
            "ddtree_progress_age_seconds",
            "Since a batch was finished or there was nothing to do, at the last look.",
            progress,
        )
        unfinished = observation.numbers.unfinished
        yield _gauge("ddtree_unfinished_requests", "Requests that the scheduler has not finished.", unfinished)
    if history.accept_length is not None:
        yield _gauge(
            "ddtree_accept_length",
            "Accepted drafts and bonus tokens per verify step, over the last full window.",
            history.accept_length,
        )
    if history.process_seen_unix is not None:
        yield _gauge(
            "ddtree_engine_start_time_seconds",
            "Unix time at which the sidecar first saw this engine process.",
            history.process_seen_unix,
        )
    yield _counter(
        "ddtree_verify_steps", "Verify steps, per request, since the sidecar began.", history.verify_steps_total
    )
    yield _counter(
        "ddtree_accept_tokens",
        "Accepted drafts and bonus tokens since the sidecar began.",
        history.accept_tokens_total,
    )
    yield _counter("ddtree_engine_restarts", "New engine processes seen since the sidecar began.", history.restarts)


def _describe_looks(report: Report) -> Iterator[Metric]:
    if report.observation is not None:
        yield _gauge("ddtree_probe_duration_seconds", "How long the last look took.", report.observation.took_s)
        yield _gauge("ddtree_probe_timestamp_seconds", "Unix time at which the last look ended.", report.observation.at)
    failures = CounterMetricFamily(
        "ddtree_probe_failures", "Looks that did not find everything, by reason.", labels=["reason"]
    )
    for failure in Failure:
        failures.add_metric([failure.value], report.failures[failure])
    yield failures


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=float(value))
