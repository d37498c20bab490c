"""2,000 HTTP bodies, sound and not: each is answered or refused clearly, and the server is then what it was before."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, seed, settings

from ddtree_appliance.rehearsal.server import RehearsalServer
from tests.rehearsal.conftest import PLAIN, ServerPool, tree
from tests.rehearsal.request_bodies import MODELS, NATIVE, SAMPLING, Request, field_names, request_bodies

pytestmark = pytest.mark.rehearsal

BODIES = 2000
SEED = 20260101
CONNECTIONS = 8
ANSWER_LIMIT_S = 60.0
IDLE_LIMIT_S = 60.0
NEW_TOKENS = 48
SHOWN = 20
LOG_EXCERPT = 4000

# (path, what the answer holds) -> why a status of 500 or more is right there.
SERVER_ERRORS: dict[tuple[str, str], str] = {}
STREAM_TYPES = ("text/event-stream", "application/x-ndjson")
IDLE = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}
# What the log of a server holds that went on, but lost something.
BAD_LOG = re.compile(r"Traceback \(most recent call last\)|[Mm]emory leak|hit an exception|Task exception was never")


@dataclass
class Answer:
    request: Request
    status: int
    content_type: str
    text: str
    seconds: float


@dataclass
class Fuzz:
    """What came back, and what was in flight when a connection failed: one of these has ended the server."""

    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)
    log: bytes = b""


@pytest.fixture(scope="module")
def server(pool: ServerPool) -> Iterator[RehearsalServer]:
    pool.stop_all_but([PLAIN, tree(64)])
    yield pool[tree(64)]
    if not pool[tree(64)].is_alive():  # the next module starts its own
        pool.stop_all_but([PLAIN])


def drawn(count: int) -> list[Request]:
    """The same different bodies in every run."""
    bodies: dict[tuple[str, bytes], Request] = {}

    @seed(SEED)
    @settings(
        max_examples=3 * count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(request_bodies)
    def collect(request: Request) -> None:
        bodies.setdefault((request.endpoint.path, request.body), request)

    collect()
    return list(bodies.values())[:count]


def tokens(server: RehearsalServer, prompts: list[list[int]]) -> list[list[int]]:
    return [server.generate(prompt, NEW_TOKENS)["output_ids"] for prompt in prompts]


class Sender:
    """Sends from several threads; after a connection failed, nothing more."""

    def __init__(self, server: RehearsalServer) -> None:
        self.fuzz = Fuzz()
        self._server = server
        self._in_flight: dict[int, Request] = {}
        self._lock = threading.Lock()

    def send(self, request: Request) -> None:
        with self._lock:
            if self.fuzz.failures:
                return
            self._in_flight[id(request)] = request
        begin = time.monotonic()
        try:
            # A connection of its own: after a status of 500 uvicorn closes it, which is not what is tested here.
            answer = requests.post(
                self._server.url + request.endpoint.path,
                data=request.body,
                headers={"content-type": "application/json"},
                timeout=ANSWER_LIMIT_S,
            )
        except requests.RequestException as error:
            with self._lock:
                if not self.fuzz.failures:
                    self.fuzz.suspects = [str(other) for other in self._in_flight.values()]
                self.fuzz.failures.append(f"{request}\n  {error}")
        else:
            seconds = time.monotonic() - begin
            kind = answer.headers.get("content-type", "")
            with self._lock:
                self.fuzz.answers.append(Answer(request, answer.status_code, kind, answer.text, seconds))
        finally:
            with self._lock:
                self._in_flight.pop(id(request), None)


@pytest.fixture(scope="module")
def greedy_before(server: RehearsalServer, prompts: list[list[int]]) -> list[list[int]]:
    return tokens(server, prompts[:8])


@pytest.fixture(scope="module")
def fuzz(server: RehearsalServer, greedy_before: list[list[int]]) -> Fuzz:
    bodies = drawn(BODIES)
    assert len(bodies) == BODIES
    logged = len(server.log_path.read_bytes())
    sender = Sender(server)
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        list(threads.map(sender.send, bodies))
    sender.fuzz.log = server.log_path.read_bytes()[logged:]
    return sender.fuzz


def loads(server: RehearsalServer) -> dict[str, int]:
    load = server.get("/v1/loads").json()["loads"][0]
    return {name: load[name] for name in IDLE}


def is_stream(answer: Answer) -> bool:
    return answer.status == 200 and answer.content_type.startswith(STREAM_TYPES)


def events(answer: Answer) -> list[Any]:
    """What a stream holds, in order; the end mark of server-sent events is "[DONE]"."""
    # Not splitlines: text may hold other line ends than the protocol's.
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line and not line.startswith("event: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def ended(answer: Answer) -> bool:
    """[DONE] ends server-sent events, but for /v1/responses, whose last one has a type; `done` ends Ollama's lines."""
    *chunks, last = events(answer)
    if answer.content_type.startswith("application/x-ndjson"):
        return last["done"] is True and not any(chunk["done"] for chunk in chunks)
    if answer.request.endpoint.path == "/v1/responses":
        return last["type"] in ("response.completed", "response.incomplete", "response.failed")
    return last == "[DONE]" and "[DONE]" not in chunks


def worst_status(answer: Answer) -> int:
    """The status, or the one that an error within a stream has."""
    if not is_stream(answer):
        return answer.status
    errors = [event["error"] for event in events(answer) if isinstance(event, dict) and event.get("error")]
    return max([answer.status, *(int(error["code"]) for error in errors)])


def report(problems: list[str]) -> str:
    return f"{len(problems)} problems\n" + "\n".join(problems[:SHOWN])


def messages(value: Any) -> Iterator[str]:
    """The messages of an error's body: OpenAI's, SGLang's or FastAPI's."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("message", "detail", "error") and isinstance(item, str):
                yield item
            else:
                yield from messages(item)
    elif isinstance(value, list):
        for item in value:
            yield from messages(item)


def leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    else:
        yield str(value)


def names_something(message: str, request: Request) -> bool:
    """Whether `message` holds a field or a value of the request, or, of what is no JSON object, says that."""
    message = re.sub(r"[\s-]", "_", message.lower())
    if request.value is None:
        return re.search("body|json|dictionary|object", message) is not None
    # SGLang's own names too: it calls OpenAI's min_tokens min_new_tokens.
    words = {request.endpoint.path, *request.endpoint.names, *NATIVE, *SAMPLING, *leaves(request.value)}
    # A prompt of one letter would be found anywhere.
    if any(word.lower() in message for word in words if len(word) > 3):
        return True
    return re.search(r"(^|_)(n|rid|request_id)_", message) is not None


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model[1])
def test_every_field_of_sglangs_request_models_is_drawn(model: tuple[str, str]) -> None:
    assert field_names(*model) == set(MODELS[model])


def test_every_body_is_answered_in_time(fuzz: Fuzz) -> None:
    assert not fuzz.failures, f"{report(fuzz.failures)}\nin flight then:\n{report(fuzz.suspects)}"
    assert len(fuzz.answers) == BODIES
    assert not [f"{a.seconds:.0f} s: {a.request}" for a in fuzz.answers if a.seconds > ANSWER_LIMIT_S]


def test_no_body_is_the_servers_fault(fuzz: Fuzz) -> None:
    def allowed(answer: Answer) -> bool:
        return any(answer.request.endpoint.path == path and part in answer.text for path, part in SERVER_ERRORS)

    faults = [a for a in fuzz.answers if worst_status(a) >= 500 and not allowed(a)]
    assert not faults, report([f"{a.status} {a.request}\n  {a.text[:500]}" for a in faults])


def test_bodies_are_both_answered_and_refused_at_every_generating_endpoint(fuzz: Fuzz) -> None:
    """A fuzz that only ever gets 400 tests the validation and nothing behind it."""
    seen = {(a.request.endpoint.path, a.status) for a in fuzz.answers}
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/api/generate"):
        assert {(path, 200), (path, 400)} <= seen


def test_every_refusal_says_what_of_the_request_it_refuses(fuzz: Fuzz) -> None:
    vague = []
    for answer in fuzz.answers:
        if 400 <= answer.status < 500:
            try:
                told = [message for message in messages(json.loads(answer.text)) if message.strip()]
            except ValueError:
                told = []
            if not any(names_something(message, answer.request) for message in told):
                vague.append(f"{answer.status} {answer.request}\n  {answer.text[:500]}")
    assert not vague, report(vague)


def test_every_stream_ends_as_its_protocol_says(fuzz: Fuzz) -> None:
    streams = [a for a in fuzz.answers if is_stream(a)]
    kinds = {a.content_type.partition(";")[0] for a in streams}
    assert kinds == set(STREAM_TYPES)
    wrong = [f"{a.request}\n  ...{a.text[-300:]}" for a in streams if not ended(a)]
    assert not wrong, report(wrong)


def test_the_log_holds_no_crash_and_no_leak(fuzz: Fuzz) -> None:
    log = fuzz.log.decode(errors="replace")
    found = [log[match.start() :][:LOG_EXCERPT] for match in BAD_LOG.finditer(log)]
    assert not found, report(found)


def test_the_server_then_writes_the_same_tokens_as_before(
    fuzz: Fuzz, server: RehearsalServer, prompts: list[list[int]], greedy_before: list[list[int]]
) -> None:
    assert not fuzz.failures
    assert server.is_alive()
    assert server.get("/health").status_code == 200
    assert tokens(server, prompts[:8]) == greedy_before


def test_nothing_of_the_bodies_is_left_in_the_server(fuzz: Fuzz, server: RehearsalServer) -> None:
    """No request is unfinished, and without the prefix cache no token is held."""
    assert not fuzz.failures
    deadline = time.monotonic() + IDLE_LIMIT_S
    while (load := loads(server)) != IDLE and time.monotonic() < deadline:
        server.post("/flush_cache", {})
        time.sleep(1)
    assert load == IDLE
