"""A small HTTP client that always ends: explicit timeouts under one deadline, and no key in any text that it makes.

It asks exactly the address it was given: no proxy, no .netrc (which would replace the key), no redirect.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import requests

from ddtree_appliance.smoke.outcome import CheckFailed

# A little above a multiple of 3 s, the first retransmission of a lost SYN.
CONNECT_LIMIT_S = 3.05
# /health may generate for 20 s before it gives up; a client that leaves earlier orphans that request (sglang#35884).
READ_LIMIT_S = 25.0
STATUS_HINTS = {
    401: "give the service's key",
    404: "is this the engine's address, and the pinned SGLang?",
    503: "the service is starting, draining or stuck; its log says which",
}

Value = TypeVar("Value")


class Credential(Enum):
    """Which key a request carries."""

    GIVEN = "the given key"
    NONE = "no key"
    WRONG = "a wrong key"


class Deadline:
    """The end of the run: limit_s seconds from now on the clock that is passed in."""

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._end = clock() + limit_s

    def remaining_s(self) -> float:
        """The seconds left, 0 when it has passed."""
        return max(0.0, self._end - self._clock())

    def passed(self, during: str) -> CheckFailed:
        """The failure that says so."""
        return CheckFailed(
            f"the time limit of {self.limit_s:g} s passed during {during}",
            "the service is slow or overloaded; look at its log and load, or allow more time",
            stops_run=True,
        )


@dataclass(frozen=True)
class Answer:
    """An HTTP answer read whole. asked names the request for messages, such as `GET /health`."""

    asked: str
    status: int
    text: str

    def expect(self, status: int = 200) -> Answer:
        """This answer if it has that status. Raises CheckFailed with the body otherwise."""
        if self.status == status:
            return self
        # Whole: the report cuts it, after it has taken out the keys, which a cut here could split.
        raise CheckFailed(f"{self.asked} answered {self.status}: {self.message}", STATUS_HINTS.get(self.status))

    @property
    def message(self) -> str:
        """What the service says about an error: the message in its JSON, or all of its answer."""
        try:
            value = json.loads(self.text)
            error = value.get("error", value)
            return str(error["message"] if isinstance(error, dict) else error)
        except (ValueError, AttributeError, KeyError):
            return self.text

    def json(self) -> Any:
        """The body as JSON. Raises CheckFailed if it is none."""
        return _parse(self.text, self.asked)


def pick(value: Any, kind: type[Value], *path: str | int, where: str) -> Value:
    """The value of type `kind` at `path` in parsed JSON. Raises CheckFailed that names path and request."""
    for step in path:
        try:
            value = value[step]
        except (LookupError, TypeError):
            break
    else:
        if isinstance(value, kind):
            return value
    name = ".".join(map(str, path))
    raise CheckFailed(f"{where}: the answer has no {kind.__name__} `{name}`", "is this the pinned, patched SGLang?")


class ServiceClient:
    """Asks one service at a base URL, every request within `deadline`. Safe to use from several threads."""

    def __init__(self, url: str, key: str | None, deadline: Deadline) -> None:
        self._url = url.rstrip("/")
        self._key = key
        self._deadline = deadline

    def get(self, path: str, credential: Credential = Credential.GIVEN) -> Answer:
        """GET; the answer, whatever its status. Raises CheckFailed if there is none."""
        with self._response("GET", path, None, credential) as (asked, response):
            return Answer(asked, response.status_code, _text(response))

    def post(self, path: str, body: Mapping[str, Any], credential: Credential = Credential.GIVEN) -> Answer:
        """POST JSON; the answer, whatever its status. Raises CheckFailed if there is none."""
        with self._response("POST", path, body, credential) as (asked, response):
            return Answer(asked, response.status_code, _text(response))

    def stream(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """POST with `stream`; the server-sent events' JSON. Raises CheckFailed if they do not end with [DONE]."""
        events: list[Any] = []
        with self._response("POST", path, {**body, "stream": True}, Credential.GIVEN) as (asked, response):
            if response.status_code != 200:
                Answer(asked, response.status_code, _text(response)).expect()
            for line in response.iter_lines():
                if not self._deadline.remaining_s():
                    raise self._deadline.passed(asked)
                if not line.startswith(b"data:"):
                    continue
                data = line[len(b"data:") :].decode("utf-8", "replace").strip()
                if data == "[DONE]":
                    return events
                event = _parse(data, asked)
                if isinstance(event, dict) and "error" in event:
                    raise CheckFailed(f"{asked}: an error in the stream: {data}")
                events.append(event)
        raise CheckFailed(f"{asked}: the stream ended without [DONE] after {len(events)} events")

    @contextmanager
    def _response(
        self, method: str, path: str, body: Mapping[str, Any] | None, credential: Credential
    ) -> Iterator[tuple[str, requests.Response]]:
        asked = f"{method} {path}"
        remaining_s = self._deadline.remaining_s()
        if not remaining_s:
            raise self._deadline.passed(asked)
        limits = (min(CONNECT_LIMIT_S, remaining_s), min(READ_LIMIT_S, remaining_s))
        session = requests.Session()
        session.trust_env = False
        try:
            with session.request(
                method,
                self._url + path,
                json=body,
                headers=self._headers(credential),
                timeout=limits,
                stream=True,
                allow_redirects=False,
            ) as response:
                yield asked, response
        except requests.RequestException as error:
            if not self._deadline.remaining_s():
                raise self._deadline.passed(asked) from None
            raise _no_answer(asked, error) from None
        finally:
            session.close()

    def _headers(self, credential: Credential) -> dict[str, str]:
        if credential is Credential.WRONG:
            return {"Authorization": f"Bearer wrong-{secrets.token_hex(16)}"}
        if credential is Credential.GIVEN and self._key is not None:
            return {"Authorization": f"Bearer {self._key}"}
        return {}


def _text(response: requests.Response) -> str:
    # Not response.text, which guesses at the encoding of answers that name none.
    return response.content.decode("utf-8", "replace")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise CheckFailed(f"{where}: the answer is not JSON: {text}") from None


def _no_answer(asked: str, error: requests.RequestException) -> CheckFailed:
    """Why there was no answer, never in the exception's own words: they may quote what was sent."""
    reason, hint = type(error).__name__, "does the service run at this address?"
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, requests.ConnectTimeout):
            return CheckFailed(f"{asked}: no connection within {CONNECT_LIMIT_S} s", hint)
        if isinstance(inner, TimeoutError):
            return CheckFailed(f"{asked}: no answer within {READ_LIMIT_S:g} s", "look at the service's log and load")
        if isinstance(inner, ssl.SSLError):
            return CheckFailed(
                f"{asked}: TLS failed: {inner.reason}", "http:// or https://? a certificate that is known?"
            )
        if isinstance(inner, socket.gaierror):
            reason = "the host's name does not resolve"
        elif isinstance(inner, OSError) and isinstance(inner.errno, int):
            reason = os.strerror(inner.errno)
        inner = inner.__cause__ or inner.__context__
    return CheckFailed(f"{asked}: no answer: {reason}", hint)
