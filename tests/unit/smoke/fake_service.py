"""A service to put to the proof, without a model: an engine and a sidecar over loopback, with faults to order."""

from __future__ import annotations

import json
import math
import re
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ddtree_appliance.smoke.context import SERIAL_TOKENS

MODEL = "fake-model"
AT_ONCE = 8
NO_TEMPLATE = "Cannot use chat template functions because tokenizer.chat_template is not set"


@dataclass
class Faults:
    """How the service behaves; the defaults are a sound one."""

    api_key: str | None = None
    admin_key: str | None = None
    open_paths: str = "/health|/metrics"  # answered without the key
    health_status: int = 200
    dtype: str = "float32"
    algorithm: str = "DDTREE"
    budget: int = 32
    sidecar: dict[str, Any] = field(default_factory=dict)  # overrides of /version
    state: str = "ready"
    ready_status: int = 200
    engine_seen_ready: float | None = 1
    leak: tuple[str, str] | None = None  # (path, what): put into that answer
    openai_text: str = ""  # appended to the OpenAI endpoints' text
    flips: int = 0  # so many OpenAI answers differ, then none
    chat_status: int = 200
    chat_reply: dict[str, Any] = field(default_factory=lambda: {"content": "The sea is wide."})
    lost_in_stream: str | None = None  # a path whose last piece of text is lost
    stream_finish: tuple[str, str] | None = None  # (path, the finish reason of its stream)
    incremental: bool = False
    stream_ends: bool = True
    stream_error: bool = False
    tokens_per_step: float = 3
    reports_steps: bool = True
    tokens_short: int = 0
    at_once: str = "same"  # or "other's", "last token", "status 500"
    sampled: str = "by seed"  # or "greedily", "freshly"
    refusal_answer: tuple[int, str] | None = (400, "DDTREE does not support return_routed_experts")  # None: served
    heartbeat: str = "moves"  # or "frozen", "one rank frozen", "missing"
    counts_steps: bool = True
    metrics_status: int = 200
    metrics_text: str | None = None
    hangs_at: str | None = None  # a path that is answered after a minute
    drips_at: str | None = None  # a path whose body never ends
    echoes_key: bool = False  # refusals quote the request's headers
    body: tuple[str, str] | None = None  # (path, text) instead of its answer


class FakeService:
    """Both servers' shared state. Use `running` to start them."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.stopping = threading.Event()
        self.asked: list[tuple[str, str]] = []  # (path, Authorization header) of every request to the engine
        self.engine_url = ""
        self.health_url = ""
        self._lock = threading.Lock()
        self._seen: set[tuple[str, int]] = set()
        self._at_once = threading.Barrier(AT_ONCE, timeout=5)
        self._scrapes = 0
        self._steps = 0
        self._published_steps = 0
        self._flips = faults.flips

    @contextmanager
    def running(self) -> Iterator[FakeService]:
        with _served(_EngineHandler, self) as self.engine_url, _served(_SidecarHandler, self) as self.health_url:
            try:
                yield self
            finally:
                self.stopping.set()

    def generate(self, prompt: str, count: int) -> dict[str, Any]:
        """The native answer: the same for the same prompt."""
        ids = _ids(prompt, count - self.faults.tokens_short)
        if count == SERIAL_TOKENS:
            ids = self._asked_again(prompt, ids)
        steps = math.ceil((count - 1) / self.faults.tokens_per_step)
        with self._lock:
            self._steps += steps
        finish = {"type": "length", "length": count}
        meta = {"finish_reason": finish, "completion_tokens": len(ids)}
        if self.faults.reports_steps and steps:
            meta["spec_verify_ct"] = steps
        return {"text": _text(ids), "output_ids": ids, "meta_info": meta}

    def _asked_again(self, prompt: str, ids: list[int]) -> list[int]:
        """The serial check's prompts come one by one, then again all at once: the second time waits for the others."""
        with self._lock:
            if (prompt, len(ids)) not in self._seen:
                self._seen.add((prompt, len(ids)))
                return ids
            others = [other for other, _ in sorted(self._seen) if other != prompt]
        if len(others) < AT_ONCE - 1:
            return ids  # the first round failed half-way
        self._at_once.wait()
        if self.faults.at_once == "other's":
            return _ids(others[0], len(ids))
        if self.faults.at_once == "last token":
            return [*ids[:-1], ids[-1] + 1]
        if self.faults.at_once == "status 500":
            raise RuntimeError("out of memory")
        return ids

    def openai_text(self, prompt: str, count: int) -> str:
        text: str = self.generate(prompt, count)["text"] + self.faults.openai_text
        with self._lock:
            self._flips -= 1
            return text + " flipped" if self._flips >= 0 else text

    def scrape(self) -> str:
        """Like the engine's: counters lag behind, here by one scrape."""
        if self.faults.metrics_text is not None:
            return self.faults.metrics_text
        with self._lock:
            self._scrapes += 1
            published, self._published_steps = self._published_steps, self._steps
        beats = {"0": self._scrapes, "1": self._scrapes}
        if self.faults.heartbeat == "frozen":
            beats = {"0": 1, "1": 1}
        if self.faults.heartbeat == "one rank frozen":
            beats["1"] = 1
        lines = ["# TYPE sglang:scheduler_heartbeat_timestamp_seconds gauge"]
        if self.faults.heartbeat != "missing":
            name = "sglang:scheduler_heartbeat_timestamp_seconds"
            lines += [f'{name}{{tp_rank="{rank}"}} {1.7e9 + beat}' for rank, beat in beats.items()]
        lines.append("# TYPE sglang:spec_verify_steps_total counter")
        lines.append(f"sglang:spec_verify_steps_total {published if self.faults.counts_steps else 7}")
        return "\n".join(lines) + "\n"


class _Server(ThreadingHTTPServer):
    request_queue_size = 4 * AT_ONCE  # of the default, 5, some of 8 at once are dropped and come again after a second

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that has given up is what the tests about time are for.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def _served(handler: type[BaseHTTPRequestHandler], service: FakeService) -> Iterator[str]:
    server = _Server(("127.0.0.1", 0), type("Handler", (handler,), {"service": service}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _ids(prompt: str, count: int) -> list[int]:
    seed = zlib.crc32(prompt.encode())
    return [(seed >> 3) * (index + 1) * 2654435761 % 4093 for index in range(count)]


def _text(ids: list[int]) -> str:
    return "".join(f" w{token}" for token in ids)


class _Handler(BaseHTTPRequestHandler):
    service: FakeService
    # Headers and body are written apart; the kernel would hold the body back for an acknowledgement.
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    @property
    def faults(self) -> Faults:
        return self.service.faults

    def answer(self, status: int, body: Any) -> None:
        text = body if isinstance(body, str) else json.dumps(body)
        if self.faults.body is not None and self.faults.body[0] == self.path:
            text = self.faults.body[1]
        if self.faults.leak is not None and self.faults.leak[0] == self.path:
            text += self.faults.leak[1] if isinstance(body, str) else ""
        self.send_response(status)
        if status == 302:
            self.send_header("Location", f"{self.service.health_url}/readyz")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def leaking(self, fields: dict[str, Any]) -> dict[str, Any]:
        is_here = self.faults.leak is not None and self.faults.leak[0] == self.path
        return {**fields, "api_key": self.faults.leak[1]} if is_here and self.faults.leak else fields


class _SidecarHandler(_Handler):
    def do_GET(self) -> None:
        faults = self.faults
        if self.path == "/readyz":
            self.answer(faults.ready_status, {"state": faults.state, "reason": "accept length 1.02", "since": 1.0})
        elif self.path == "/version":
            told = {"version": "0.1.0", "sglang_version": "0.5.17+ddtree.2", "patchset_sha256": "ab" * 32}
            told |= {"image": None, "model": MODEL, "budget": 32, **faults.sidecar}
            self.answer(200, self.leaking(told))
        elif self.path == "/metrics":
            ready = faults.engine_seen_ready
            self.answer(200, "" if ready is None else f"ddtree_engine_ready {ready}\n")


class _EngineHandler(_Handler):
    def _is_let_in(self) -> bool:
        key, authorization = self.faults.api_key, self.headers.get("Authorization", "")
        self.service.asked.append((self.path, authorization))
        if key is None or authorization == f"Bearer {key}" or re.fullmatch(self.faults.open_paths, self.path):
            return True
        self.answer(401, {"error": "Unauthorized"})
        return False

    def _delay(self) -> None:
        if self.path == self.faults.hangs_at:
            self.service.stopping.wait(60)
        if self.path == self.faults.drips_at:
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            while not self.service.stopping.wait(0.02):
                self.wfile.write(b" ")

    def do_GET(self) -> None:
        if not self._is_let_in():
            return
        self._delay()
        faults = self.faults
        if self.path == "/health":
            self.answer(faults.health_status, "")
        elif self.path == "/v1/models":
            self.answer(200, {"data": [{"id": MODEL}]})
        elif self.path == "/server_info":
            info = {"version": "0.5.17", "dtype": faults.dtype, "speculative_algorithm": faults.algorithm}
            info |= {"speculative_ddtree_budget": faults.budget, "incremental_streaming_output": faults.incremental}
            self.answer(200, self.leaking(info))
        elif self.path == "/metrics":
            self.answer(faults.metrics_status, self.service.scrape())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_let_in():
            return
        self._delay()
        if body.get("return_routed_experts") and self.faults.refusal_answer is not None:
            status, message = self.faults.refusal_answer
            self.answer(status, {"error": {"message": message}})
            return
        if self.faults.echoes_key:
            self.answer(500, {"headers": self.headers.get("Authorization")})
            return
        try:
            {"/generate": self._native, "/v1/completions": self._completions}.get(self.path, self._chat)(body)
        except RuntimeError as error:
            self.answer(500, str(error))

    def _native(self, body: dict[str, Any]) -> None:
        prompt, sampling = body["text"], body["sampling_params"]
        if sampling["temperature"] != 0 and self.faults.sampled != "greedily":
            seed = sampling["sampling_seed"] if self.faults.sampled == "by seed" else time.monotonic_ns()
            prompt = f"{seed}: {prompt}"
        whole = self.service.generate(prompt, sampling["max_new_tokens"])
        if not body.get("stream"):
            self.answer(200, whole)
            return
        half = len(whole["output_ids"]) // 2
        first, rest = _text(whole["output_ids"][:half]), _text(whole["output_ids"][half:])
        last = rest if self.faults.incremental else whole["text"]
        if self.faults.lost_in_stream == self.path:
            last = "" if self.faults.incremental else first
        meta = {**whole["meta_info"], "finish_reason": None, "completion_tokens": half}
        events = [{"text": first, "output_ids": whole["output_ids"][:half], "meta_info": meta}]
        end = dict(whole["meta_info"])
        if self.faults.stream_finish is not None and self.faults.stream_finish[0] == self.path:
            end["finish_reason"] = {"type": self.faults.stream_finish[1]}
        self._stream([*events, {**whole, "text": last, "meta_info": end}])

    def _completions(self, body: dict[str, Any]) -> None:
        text = self.service.openai_text(body["prompt"], body["max_tokens"])
        if not body.get("stream"):
            self.answer(200, {"choices": [{"text": text, "finish_reason": "length"}]})
            return
        pieces = [text[:20], text[20:-9], text[-9:]]
        if self.faults.lost_in_stream == self.path:
            pieces[-1] = ""
        finish = [None, None, "length"]
        if self.faults.stream_finish is not None and self.faults.stream_finish[0] == self.path:
            finish[-1] = self.faults.stream_finish[1]
        choices = [[{"text": piece, "finish_reason": reason}] for piece, reason in zip(pieces, finish, strict=True)]
        self._stream([{"choices": choice} for choice in [*choices, []]])

    def _chat(self, body: dict[str, Any]) -> None:
        if self.faults.chat_status != 200:
            self.answer(self.faults.chat_status, {"message": NO_TEMPLATE})
            return
        self.answer(200, {"choices": [{"message": {"role": "assistant", **self.faults.chat_reply}}]})

    def _stream(self, events: list[Any]) -> None:
        if self.faults.stream_error:
            events = [*events[:1], {"error": {"message": "the scheduler died"}}]
        self.send_response(200)
        self.end_headers()
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if self.faults.stream_ends:
            self.wfile.write(b"data: [DONE]\n\n")


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        time.sleep(0)
