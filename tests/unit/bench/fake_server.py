"""A stand-in for SGLang's HTTP side as the benchmark uses it, in this process or, run as a program, as a child."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class FakeServer:
    """Answers every prompt with tokens that follow from it, so that all fakes agree unless `token_shift` is set.

    accepted: tokens per verify step, 0 for a server that does not speculate. fail_at: the number of the streamed
    request (from 0) that gets `fail_status`. step_times: gets a record of one step, as long as the request's number,
    per streamed request. wait_for: nobody is answered before so many requests have been in flight.
    """

    accepted: int = 0
    algorithm: str | None = None
    budget: int | None = None
    delay_s: float = 0.0
    token_shift: int = 0
    refusal: str | None = None
    fail_at: int | None = None
    fail_status: int = 500
    finish: str = "length"
    disable_radix_cache: bool = True
    pool_tokens: int = 1 << 20
    max_running: int = 64
    step_times: Path | None = None
    wait_for: int = 0
    port: int = 0
    prompts: list[Any] = field(default_factory=list)
    flushes: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    _lock: threading.Condition = field(default_factory=threading.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def serving(self) -> Iterator[FakeServer]:
        server = self.bind()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def bind(self) -> ThreadingHTTPServer:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._answer(200, fake.server_info())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                if self.path.startswith("/flush_cache"):
                    fake.flushes += 1
                    self._answer(200, {})
                    return
                request = json.loads(body)
                if fake.refusal is not None:
                    self._answer(400, {"error": {"message": fake.refusal}})
                elif not request.get("stream"):
                    self._answer(200, fake.event(request))
                else:
                    self._stream(request)

            def _stream(self, request: dict[str, Any]) -> None:
                with fake.counted(request) as number:
                    if number == fake.fail_at:
                        self._answer(fake.fail_status, {"error": {"message": "out of luck"}})
                        return
                    self.send_response(200)
                    self.send_header("transfer-encoding", "chunked")
                    self.end_headers()
                    self._chunk(fake.event(request, is_first=True))
                    time.sleep(fake.delay_s)
                    fake.wait_until_busy()
                    if fake.step_times is not None:
                        with fake.step_times.open("a") as file:
                            file.write(json.dumps({"steps": 1, "ms": {"step": number}}) + "\n")
                    event = fake.event(request)
                # Counted out before the client can know: else its next request would overlap with this one.
                self._chunk(event)
                self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

            def _chunk(self, event: dict[str, Any]) -> None:
                data = b"data: " + json.dumps(event).encode() + b"\n\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()

            def _answer(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        server.daemon_threads = True
        self.port = server.server_address[1]
        return server

    @contextmanager
    def counted(self, request: dict[str, Any]) -> Iterator[int]:
        with self._lock:
            number = len(self.prompts)
            self.prompts.append(request.get("input_ids", request.get("text")))
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self._lock.notify_all()
        try:
            yield number
        finally:
            with self._lock:
                self.in_flight -= 1

    def wait_until_busy(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self.most_in_flight >= self.wait_for, timeout=30)

    def event(self, request: dict[str, Any], is_first: bool = False) -> dict[str, Any]:
        wanted = request["sampling_params"]["max_new_tokens"]
        prompt = request.get("input_ids") or list(request["text"].encode())
        tokens = [prompt[-1] + at + (self.token_shift if at >= 4 else 0) for at in range(wanted)]
        meta: dict[str, Any] = {"finish_reason": None, "cached_tokens": 0}
        if is_first:
            return {"output_ids": tokens[:1], "meta_info": meta}
        meta["finish_reason"] = {"type": self.finish}
        if self.accepted:
            steps = -(-(wanted - 1) // self.accepted)
            meta |= {"spec_verify_ct": steps, "spec_num_correct_drafts": steps * (self.accepted - 1)}
        return {"output_ids": tokens, "meta_info": meta}

    def server_info(self) -> dict[str, Any]:
        return {
            "version": "0.5.17",
            "speculative_algorithm": self.algorithm,
            "speculative_num_draft_tokens": 16 if self.algorithm == "DFLASH" else None,
            "speculative_dflash_block_size": 16 if self.algorithm == "DDTREE" else None,
            "speculative_ddtree_budget": self.budget,
            "attention_backend": "triton",
            "disable_radix_cache": self.disable_radix_cache,
            "max_total_num_tokens": self.pool_tokens,
            "max_running_requests": self.max_running,
        }


def main() -> None:
    """Takes SGLang's arguments, of which it knows a few."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--speculative-algorithm")
    parser.add_argument("--speculative-ddtree-budget", type=int)
    parser.add_argument("--delay-s", type=float, default=0.0)
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--pool-tokens", type=int, default=1 << 20)
    parser.add_argument("--max-running", type=int, default=64)
    given, _ = parser.parse_known_args(sys.argv[1:])
    accepted = {None: 0, "DFLASH": 2, "DDTREE": 3}[given.speculative_algorithm]
    fake = FakeServer(
        accepted=accepted,
        algorithm=given.speculative_algorithm,
        budget=given.speculative_ddtree_budget,
        delay_s=given.delay_s,
        fail_at=given.fail_at,
        pool_tokens=given.pool_tokens,
        max_running=given.max_running,
        port=given.port,
    )
    server = fake.bind()
    print("The server is fired up and ready to roll!", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
