"""One look at the engine over HTTP. Nothing here raises: an engine that cannot be read is an observation too.

Nothing of what the engine answered is quoted, only described: reasons are shown to anybody who asks the sidecar.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import requests
from prometheus_client.parser import text_string_to_metric_families

from ddtree_appliance.health.observation import SERIES, Failure, MissingSeriesError, Observation, combine

MAX_PAGE_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 16
_MAX_DETAIL = 160


class _UnansweredError(Exception):
    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure
        self.detail = detail


def new_session() -> requests.Session:
    """A session for `observe`: straight to the engine, whatever proxies the environment names."""
    session = requests.Session()
    session.trust_env = False
    # The engine closes idle connections after 5 s, about when the next look begins; a look must not meet that.
    session.headers["Connection"] = "close"
    return session


def observe(session: requests.Session, url: str, timeout_s: float, clock: Callable[[], float]) -> Observation:
    """Ask the engine at `url` for /health and then /metrics, both together within about `timeout_s`.

    `clock` gives Unix time. Never raises.
    """
    began = time.monotonic()
    health, numbers, failure, detail = None, None, None, ""
    try:
        health, _ = _get(session, f"{url}/health", began + timeout_s, timeout_s)
        if health not in (200, 503):
            raise _UnansweredError(Failure.STATUS, f"/health answered HTTP {health}")
        numbers = combine(_read_metrics(session, f"{url}/metrics", began + timeout_s, timeout_s))
    except _UnansweredError as error:
        failure, detail = error.failure, error.detail
    except MissingSeriesError as error:
        failure, detail = Failure.METRICS_INCOMPLETE, str(error)
    return Observation(clock(), time.monotonic() - began, health, numbers, failure, detail)


def _read_metrics(
    session: requests.Session, url: str, deadline: float, timeout_s: float
) -> Iterator[tuple[str, float]]:
    try:
        status, page = _get(session, url, deadline, timeout_s)
    except _UnansweredError as error:
        raise _UnansweredError(Failure.METRICS_UNREADABLE, f"/metrics: {error.detail}") from error
    if status != 200:
        raise _UnansweredError(Failure.METRICS_UNREADABLE, f"/metrics answered HTTP {status}")
    # Half a thousand lines, of which a dozen matter; a fault in another series is none of ours.
    ours = [line for line in page.decode("utf-8", "replace").splitlines() if line.startswith(SERIES)]
    try:
        families = list(text_string_to_metric_families("\n".join(ours) + "\n"))
    except Exception as error:  # the parser raises whatever its string handling meets
        detail = f"/metrics cannot be parsed ({type(error).__name__})"
        raise _UnansweredError(Failure.METRICS_UNREADABLE, detail) from error
    return ((sample.name, sample.value) for family in families for sample in family.samples)


def _get(session: requests.Session, url: str, deadline: float, timeout_s: float) -> tuple[int, bytes]:
    late = _UnansweredError(Failure.TIMEOUT, f"no answer within {timeout_s:g} s")
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise late
    try:
        with session.get(url, timeout=remaining, stream=True, allow_redirects=False) as answer:
            page = bytearray()
            for chunk in answer.iter_content(_CHUNK_BYTES):
                page += chunk
                if time.monotonic() > deadline:
                    raise late
                if len(page) > MAX_PAGE_BYTES:
                    raise _UnansweredError(Failure.BROKEN, f"the answer is larger than {MAX_PAGE_BYTES} bytes")
            return answer.status_code, bytes(page)
    except _UnansweredError:
        raise
    except Exception as error:  # besides requests' own: OSError, ValueError and UnicodeError, by the URL and the moment
        causes = list(_causes(error))
        if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
            raise _UnansweredError(Failure.REFUSED, "connection refused") from error
        if any(isinstance(cause, (TimeoutError, requests.Timeout)) for cause in causes):
            raise late from error
        # The system's errors are about addresses; those of HTTP parsers quote what they could not parse.
        said = " ".join(str(causes[-1]).split()) if isinstance(causes[-1], OSError) else ""
        raise _UnansweredError(Failure.BROKEN, (said or type(causes[-1]).__name__)[:_MAX_DETAIL]) from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    # urllib3 keeps the real cause in `reason`, requests in its first argument.
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        inner = [error.__cause__, getattr(error, "reason", None), *error.args[:1], error.__context__]
        found = next((cause for cause in inner if isinstance(cause, BaseException)), None)
        if found is None:
            return
        error = found
