"""A small HTTP server for a handful of read-only pages that stays answerable under bad clients.

One request per connection, a limit for the time that one may take, and a limit for how many are served at once.
"""

from __future__ import annotations

import io
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

REQUEST_LIMIT_S = 5.0
MAX_CONNECTIONS = 64


@dataclass(frozen=True)
class Page:
    """One answer."""

    status: int
    content_type: str
    body: bytes


def json_page(status: int, value: Any) -> Page:
    """`value` as a page of JSON that ends in a newline."""
    return Page(status, "application/json", (json.dumps(value) + "\n").encode())


class EndpointServer(ThreadingMixIn, HTTPServer):
    """Serves `pages`, functions by path, on host and port (0: any free port). Raises OSError if it cannot listen."""

    daemon_threads = True  # a slow client does not hold up the end
    request_queue_size = MAX_CONNECTIONS

    def __init__(
        self,
        host: str,
        port: int,
        pages: Mapping[str, Callable[[], Page]],
        *,
        request_limit_s: float = REQUEST_LIMIT_S,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self.pages = dict(pages)
        self.request_limit_s = request_limit_s
        self._free = threading.BoundedSemaphore(max_connections)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self.server_address[1])

    def server_bind(self) -> None:
        """Bind without HTTPServer's look-up of this host's name, which may take long and is not used."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.port

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve in a thread of its own, or hang up if too many are being served."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection and make room for another."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Be silent about clients that went away; anything else is a bug and is shown."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _DeadlineReader(io.RawIOBase):
    """Reads from a socket until a deadline, however slowly the bytes come."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._connection.settimeout(remaining)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: EndpointServer

    def setup(self) -> None:
        super().setup()
        deadline = time.monotonic() + self.server.request_limit_s
        self.rfile = io.BufferedReader(_DeadlineReader(self.connection, deadline))

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._send(Page(405, "text/plain; charset=utf-8", b"only GET and HEAD\n"), {"Allow": "GET, HEAD"})

    do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_POST

    def _answer(self) -> None:
        make = self.server.pages.get(self.path.partition("?")[0])
        if make is None:
            paths = "\n".join(["not found; there are:", *self.server.pages, ""])
            self._send(Page(404, "text/plain; charset=utf-8", paths.encode()), {})
            return
        self._send(make(), {})

    def _send(self, page: Page, headers: Mapping[str, str]) -> None:
        self.connection.settimeout(self.server.request_limit_s)
        self.send_response(page.status)
        fixed = {"Content-Type": page.content_type, "Content-Length": str(len(page.body)), "Cache-Control": "no-store"}
        for name, value in {**fixed, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    def version_string(self) -> str:
        return "ddtree-health"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: checks come every few seconds."""
