"""The one-shot health check that podman runs inside the engine's container: quiet when all is well.

Standard library only, and little of it: it starts anew at every check, next to the engine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

from ddtree_appliance.errors import EXIT_FAILED, EXIT_OK
from ddtree_appliance.health.observation import SERIES, MissingSeriesError, combine

MAX_PAGE_BYTES = 16 << 20


def probe(url: str, *, heartbeat_limit_s: float, progress_limit_s: float, timeout_s: float, startup: bool) -> int:
    """Return 0 and print nothing if the engine at `url` is healthy; else print the reason on one line and return 1.

    With `startup` only /health is asked, which is 200 once the engine has generated a token. Otherwise /health and
    /metrics must answer, both together within about `timeout_s`, and heartbeat and progress be younger than their
    limits by the wall clock. A draining engine that makes progress is healthy: killing it would cost its last requests.
    """
    fault = _startup_fault(url, timeout_s) if startup else _fault(url, heartbeat_limit_s, progress_limit_s, timeout_s)
    if fault is None:
        return EXIT_OK
    print(fault)
    return EXIT_FAILED


def _startup_fault(url: str, timeout_s: float) -> str | None:
    try:
        status, _ = _get(url, "/health", time.monotonic() + timeout_s, timeout_s)
    except _UnansweredError as error:
        return str(error)
    return None if status == 200 else f"/health answered HTTP {status}: not ready yet"


def _fault(url: str, heartbeat_limit_s: float, progress_limit_s: float, timeout_s: float) -> str | None:
    deadline = time.monotonic() + timeout_s
    try:
        status, _ = _get(url, "/health", deadline, timeout_s)
        if status not in (200, 503):
            return f"/health answered HTTP {status}"
        status, page = _get(url, "/metrics", deadline, timeout_s)
        if status != 200:
            return f"/metrics answered HTTP {status}"
        numbers = combine(parse_samples(page.decode("utf-8", "replace")))
    except (_UnansweredError, MissingSeriesError) as error:
        return str(error)
    now = time.time()
    if (age := now - numbers.heartbeat_time) > heartbeat_limit_s:
        return f"stuck: the scheduler's heartbeat is {age:.1f} s old (limit {heartbeat_limit_s:g} s)"
    if numbers.unfinished and (age := now - numbers.progress_time) > progress_limit_s:
        requests = f"{numbers.unfinished} unfinished request{'s' if numbers.unfinished > 1 else ''}"
        return f"stalled: {requests} and no finished batch for {age:.1f} s (limit {progress_limit_s:g} s)"
    return None


def parse_samples(page: str) -> Iterator[tuple[str, float]]:
    """The (series, value) pairs of interest on a metrics page; lines that are none are passed over.

    SGLang writes no timestamps behind values, so a value is a line's last word.
    """
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in SERIES:
            with contextlib.suppress(ValueError):
                yield name, float(line.rpartition(" ")[2])


class _UnansweredError(Exception):
    pass


def _get(url: str, path: str, deadline: float, timeout_s: float) -> tuple[int, bytes]:
    connection = None
    try:
        if (remaining := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        address = urlsplit(url)
        connection = HTTPConnection(address.hostname or "", address.port or 80, timeout=remaining)
        connection.request("GET", address.path.rstrip("/") + path)
        answer = connection.getresponse()
        return answer.status, answer.read(MAX_PAGE_BYTES)
    except TimeoutError:
        raise _UnansweredError(f"{path} did not answer within {timeout_s:g} s") from None
    except (OSError, HTTPException, ValueError) as error:
        # The system's errors are about addresses; those of HTTP parsers quote what they could not parse.
        said = " ".join(str(error).split()) if isinstance(error, OSError) else ""
        raise _UnansweredError(f"{path} did not answer: {said or type(error).__name__}") from None
    finally:
        if connection is not None:
            connection.close()
