"""A scriptable stand-in for the patched SGLang's HTTP side: its methods are what happens to an engine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from ddtree_appliance.health import observation

LABELS = 'engine_type="unified",model_name="/models/a \\"b\\" {c} 1",tp_rank="0"'
OTHER_SERIES = f"""# HELP sglang:generation_tokens_total Number of generation tokens processed.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{{LABELS},is_streaming="false"}} 8.0
# HELP sglang:spec_accept_length Mean acceptance length.
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{{LABELS}}} 0.0
"""


def render_series(name: str, *values: float) -> str:
    """One series per value, as prometheus_client writes them."""
    kind = "counter" if name.endswith("_total") else "gauge"
    lines = [f"# HELP {name} Some text.", f"# TYPE {name} {kind}"]
    lines += [f'{name}{{{LABELS},dp_rank="{rank}"}} {value!r}' for rank, value in enumerate(values)]
    return "\n".join(lines) + "\n"


class FakeEngine:
    """Not listening at first. `clock` is the Unix time that its scheduler writes down.

    While the scheduler is well, every scrape of /metrics finds a fresh heartbeat and fresh progress.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.requests: list[str] = []
        self._clock = clock
        self._server: ThreadingHTTPServer | None = None
        self._processes = 0
        self._answers = threading.Event()
        self._hanging_path: str | None = None
        self.has_waiting_request = threading.Event()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.exit()

    # What happens to it

    def start(self) -> None:
        """A new process listens; it is not warmed up yet."""
        self._processes += 1
        self.health = 503
        self.unfinished = 0
        self.iterations = self.tokens = self.steps = 0
        self.heartbeat = self.progress = self._clock()
        self.turns = self.finishes_batches = True
        self.instead_of_metrics: tuple[int, str] | None = None
        self.headers: Mapping[str, str] = {}
        self._answers.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler_of(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def warm_up(self) -> None:
        self.health = 200
        self.generate(tokens=7, steps=3)

    def start_ready(self) -> None:
        self.start()
        self.warm_up()

    def generate(self, tokens: int, steps: int) -> None:
        self.tokens += tokens
        self.steps += steps

    def freeze_scheduler(self) -> None:
        self.turns = False

    def thaw_scheduler(self) -> None:
        self.turns = True

    def stop_finishing_batches(self, unfinished: int) -> None:
        self.finishes_batches, self.unfinished = False, unfinished

    def hang(self, only: str | None = None) -> None:
        """The HTTP side accepts connections and answers nothing; or nothing to requests for `only`."""
        self._hanging_path = only
        self._answers.clear()

    def recover(self) -> None:
        self._answers.set()

    def drain(self, unfinished: int) -> None:
        self.health, self.unfinished = 503, unfinished

    def break_metrics(self, status: int, page: str) -> None:
        self.instead_of_metrics = (status, page)

    def exit(self) -> None:
        """The process is gone: connections are refused."""
        self._answers.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    # What it answers

    def wait_until_answering(self, path: str) -> None:
        if self._hanging_path in (None, path) and not self._answers.is_set():
            self.has_waiting_request.set()
            self._answers.wait(30)

    def metrics_page(self) -> str:
        if self.turns:
            self.iterations += 1
            self.heartbeat = self._clock()
            if self.finishes_batches:
                self.progress = self._clock()
        return OTHER_SERIES + "".join(
            render_series(name, float(value))
            for name, value in {
                observation.ITERATIONS: self.iterations,
                observation.ACCEPT_TOKENS: self.tokens,
                observation.VERIFY_STEPS: self.steps,
                observation.STARTUP: 30.0 + self._processes / 7,
                observation.UNFINISHED: self.unfinished,
                observation.PROGRESS: self.progress,
                observation.HEARTBEAT: self.heartbeat,
            }.items()
        )

    def answer(self, path: str) -> tuple[int, str]:
        self.requests.append(path)
        if path == "/health":
            return self.health, ""
        if path == "/metrics":
            return self.instead_of_metrics or (200, self.metrics_page())
        return 404, ""


def _handler_of(engine: FakeEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            engine.wait_until_answering(self.path)
            status, text = engine.answer(self.path)
            body = text.encode()
            try:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **engine.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                pass  # whoever asked has given up

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
