"""The health sidecar: /livez, /readyz, /version and /metrics, answered from the last look and never by a new one.

However often it is asked, the engine is asked once per interval.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from ddtree_appliance.errors import EXIT_OK, HostError
from ddtree_appliance.health.endpoints import EndpointServer, Page, json_page
from ddtree_appliance.health.judge import Limits
from ddtree_appliance.health.metrics import new_registry
from ddtree_appliance.health.observation import Observation
from ddtree_appliance.health.observe import new_session, observe
from ddtree_appliance.health.poller import Poller, Report

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}


def serve_health(
    engine_url: str, listen_host: str, listen_port: int, interval_s: float, limits: Limits, version: Mapping[str, Any]
) -> int:
    """Watch the engine at `engine_url` and serve its health until SIGTERM; return 0. Call it from the main thread.

    `version` is what /version answers; see metrics.new_registry for what becomes a label. A look may take one
    interval. Raises HostError if it cannot listen, KeyboardInterrupt on SIGINT.
    """
    session = new_session()

    def look() -> Observation:
        return observe(session, engine_url.rstrip("/"), interval_s, time.time)

    poller = Poller(look, interval_s, limits)
    # Blocked before any thread starts, so that all inherit it and only sigwait takes the signals, without a race.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with serving(listen_host, listen_port, make_pages(poller.report, version)):
            stop = threading.Event()
            threading.Thread(target=poller.run, args=(stop.wait,), name="poller", daemon=True).start()
            received = signal.sigwait(STOP_SIGNALS)
            stop.set()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if received == signal.SIGINT:
        raise KeyboardInterrupt
    return EXIT_OK


@contextmanager
def serving(host: str, port: int, pages: Mapping[str, Callable[[], Page]]) -> Iterator[EndpointServer]:
    """Serve `pages` from a thread of its own. Raises HostError if it cannot listen."""
    try:
        server = EndpointServer(host, port, pages)
    except OSError as error:
        reason = error.strerror or str(error)
        raise HostError(f"cannot listen on {host} port {port}: {reason}", "is another sidecar running?") from error
    threading.Thread(target=server.serve_forever, args=(0.1,), name="endpoints", daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def make_pages(report: Callable[[], Report], version: Mapping[str, Any]) -> dict[str, Callable[[], Page]]:
    """The sidecar's pages, each made from the current report."""
    registry = new_registry(version, report)

    def livez() -> Page:
        current = report()
        return json_page(200 if current.verdict.live else 503, _describe(current))

    def readyz() -> Page:
        current = report()
        return json_page(200 if current.verdict.ready else 503, _describe(current))

    return {
        "/livez": livez,
        "/readyz": readyz,
        "/version": lambda: json_page(200, dict(version)),
        "/metrics": lambda: Page(200, CONTENT_TYPE_LATEST, generate_latest(registry)),
    }


def _describe(report: Report) -> dict[str, str]:
    since = datetime.fromtimestamp(report.since_unix, timezone.utc)
    return {
        "state": report.verdict.state.value,
        "reason": report.verdict.reason,
        "since": since.isoformat(timespec="seconds").replace("+00:00", "Z"),
    }
