"""Keep N requests in flight at one server until a fixed list of prompts is answered, and time it from outside.

Each request is streamed with an interval so long that the server sends two events, the first token and the end: the
client costs as little as without streaming, and the time between the two is decoding alone.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import requests

from ddtree_appliance.bench.prompts import Prompt
from ddtree_appliance.errors import ApplianceError

ONLY_FIRST_AND_LAST = 1_000_000  # tokens between events
CONNECT_LIMIT_S = 10.0
ANSWER_LIMIT_S = 300.0
_BODY_QUOTE = 400


@dataclass(frozen=True)
class Answer:
    """One request's answer. Times are the client's, in seconds.

    first_s: from sending to the first token. decode_s: from the first token to the end, in which the server made
    verify_steps steps, or len(tokens) - 1 if verify_steps is 0 (no speculation). cached_tokens: of the prompt.
    """

    tokens: list[int]
    verify_steps: int
    correct_drafts: int
    cached_tokens: int
    first_s: float
    decode_s: float


@dataclass(frozen=True)
class Load:
    """The answers in the prompts' order, and the time from the first request's sending to the last one's end."""

    wall_s: float
    answers: list[Answer]


class RequestRefused(ApplianceError):
    """The server answered HTTP 400: it does not serve what was asked for."""


def sampling_parameters(new_tokens: int, temperature: float) -> dict[str, Any]:
    """Exactly new_tokens tokens, whatever the text says."""
    return {
        "temperature": temperature,
        "max_new_tokens": new_tokens,
        "ignore_eos": True,
        "stream_interval": ONLY_FIRST_AND_LAST,
    }


def try_request(url: str, name: str, prompt: Prompt, temperature: float) -> None:
    """One short request that is not streamed, so that a refusal comes with its status.

    Raises RequestRefused with the server's words for HTTP 400, ApplianceError with the variant's name for any other
    failure.
    """
    body = _body(prompt, {**sampling_parameters(2, temperature), "stream_interval": None})
    try:
        with _session() as session:
            answer = session.post(f"{url}/generate", json=body, timeout=(CONNECT_LIMIT_S, ANSWER_LIMIT_S))
    except requests.RequestException as error:
        raise ApplianceError(f"{name}: no answer to /generate: {error}") from error
    if answer.status_code == 400:
        raise RequestRefused(_message(answer.text))
    if answer.status_code != 200:
        raise _failure(name, f"/generate answered {answer.status_code}: {answer.text[:_BODY_QUOTE]}")


def run_load(url: str, name: str, prompts: Sequence[Prompt], concurrency: int, sampling: Mapping[str, Any]) -> Load:
    """Send every prompt once, always `concurrency` of them at a time, the next as soon as one is answered.

    name: the variant's, for errors. Raises ApplianceError for the first request that fails; no further one is sent.
    """
    return _LoadRun(url, name, prompts, sampling).run(min(concurrency, len(prompts)))


class _LoadRun:
    def __init__(self, url: str, name: str, prompts: Sequence[Prompt], sampling: Mapping[str, Any]) -> None:
        self._url = f"{url}/generate"
        self._name = name
        # Encoded before the clock starts.
        self._bodies = [json.dumps({**_body(prompt, sampling), "stream": True}).encode() for prompt in prompts]
        self._answers: dict[int, Answer] = {}
        self._errors: list[ApplianceError] = []
        self._lock = threading.Lock()
        self._numbers: Iterator[int] = iter(range(len(self._bodies)))
        self._is_over = False

    def run(self, workers: int) -> Load:
        gate = threading.Barrier(workers + 1)
        # Daemons: an interrupt must not wait for requests that are in flight.
        threads = [threading.Thread(target=self._work, args=(gate,), daemon=True) for _ in range(workers)]
        for thread in threads:
            thread.start()
        begin = perf_counter()
        try:
            gate.wait()
            for thread in threads:
                thread.join()
        finally:
            self._is_over = True
        wall_s = perf_counter() - begin
        if self._errors:
            raise self._errors[0]
        return Load(wall_s, [self._answers[number] for number in range(len(self._bodies))])

    def _work(self, gate: threading.Barrier) -> None:
        with _session() as session:
            gate.wait()
            while (number := self._next()) is not None:
                try:
                    self._answers[number] = self._ask(session, self._bodies[number])
                except (ApplianceError, requests.RequestException, ValueError, LookupError) as error:
                    is_told = isinstance(error, ApplianceError)
                    told = error if is_told else _failure(self._name, f"prompt {number}: {error!r}")
                    self._errors.append(told)  # type: ignore[arg-type]
                    self._is_over = True

    def _next(self) -> int | None:
        with self._lock:
            return None if self._is_over else next(self._numbers, None)

    def _ask(self, session: requests.Session, body: bytes) -> Answer:
        first_at, last = 0.0, b""
        begin = perf_counter()
        with session.post(
            self._url,
            data=body,
            headers={"content-type": "application/json"},
            stream=True,
            timeout=(CONNECT_LIMIT_S, ANSWER_LIMIT_S),
        ) as response:
            if response.status_code != 200:
                raise _failure(self._name, f"/generate answered {response.status_code}: {response.text[:_BODY_QUOTE]}")
            for line in response.iter_lines(chunk_size=1 << 16):
                if line.startswith(b"data: {"):
                    end = perf_counter()
                    first_at = first_at or end
                    last = line
        if not last:
            raise _failure(self._name, "/generate ended without an event")
        event = json.loads(last.removeprefix(b"data: "))
        return self._answer(event, first_at - begin, end - first_at)

    def _answer(self, event: Mapping[str, Any], first_s: float, decode_s: float) -> Answer:
        if "error" in event:
            raise _failure(self._name, f"/generate: {event['error']}")
        meta = event["meta_info"]
        reason = meta["finish_reason"]
        if reason is None or reason.get("type") != "length":
            # An abort, or a stream that was cut: the cell would have fewer tokens than the others.
            raise _failure(self._name, f"a request did not end at its length: finish_reason {reason}")
        return Answer(
            tokens=event["output_ids"],
            verify_steps=meta.get("spec_verify_ct") or 0,
            correct_drafts=meta.get("spec_num_correct_drafts") or 0,
            cached_tokens=meta.get("cached_tokens") or 0,
            first_s=first_s,
            decode_s=decode_s,
        )


def _session() -> requests.Session:
    session = requests.Session()
    session.trust_env = False  # no proxy between client and server
    return session


def _body(prompt: Prompt, sampling: Mapping[str, Any]) -> dict[str, Any]:
    return {"text" if isinstance(prompt, str) else "input_ids": prompt, "sampling_params": dict(sampling)}


def _failure(name: str, what: str) -> ApplianceError:
    return ApplianceError(f"variant {name}: {what}", "its server's log says more")


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text[:_BODY_QUOTE]
