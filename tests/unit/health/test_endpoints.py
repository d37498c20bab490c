"""The small HTTP server under good and bad clients, over real sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import requests

from ddtree_appliance.errors import EXIT_HOST, HostError
from ddtree_appliance.health.endpoints import EndpointServer, Page, _DeadlineReader, json_page
from ddtree_appliance.health.sidecar import serving

PAGES: dict[str, Callable[[], Page]] = {
    "/good": lambda: json_page(200, {"a": 1}),
    "/bad": lambda: json_page(503, {"a": 2}),
}


@contextmanager
def served(
    pages: dict[str, Callable[[], Page]] = PAGES, *, request_limit_s: float = 10.0, max_connections: int = 8
) -> Iterator[EndpointServer]:
    server = EndpointServer("127.0.0.1", 0, pages, request_limit_s=request_limit_s, max_connections=max_connections)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[EndpointServer]:
    with served() as running:
        yield running


def fetch(server: EndpointServer, path: str, method: str = "GET") -> requests.Response:
    return requests.request(method, f"http://127.0.0.1:{server.port}{path}", timeout=10)


def talk(server: EndpointServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        return answer


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [("/good", 200, {"a": 1}), ("/bad", 503, {"a": 2}), ("/good?verbose=1", 200, {"a": 1})],
)
def test_a_page_is_served(path: str, status: int, body: object, server: EndpointServer) -> None:
    answer = fetch(server, path)
    assert (answer.status_code, answer.json()) == (status, body)
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["Cache-Control"] == "no-store"
    assert "Python" not in answer.headers["Server"]


@pytest.mark.parametrize("path", ["/good", "/bad", "/nowhere"])
def test_head_is_get_without_the_body(path: str, server: EndpointServer) -> None:
    get, head = fetch(server, path), fetch(server, path, "HEAD")
    assert head.status_code == get.status_code
    assert head.headers["Content-Length"] == get.headers["Content-Length"] == str(len(get.content))
    assert head.content == b""
    raw = talk(server, f"HEAD {path} HTTP/1.0\r\n\r\n".encode())
    assert raw.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("path", ["/", "/good/", "/nowhere"])
def test_an_unknown_path_is_answered_with_those_that_exist(path: str, server: EndpointServer) -> None:
    answer = fetch(server, path)
    assert answer.status_code == 404
    assert answer.text.splitlines() == ["not found; there are:", "/good", "/bad"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(method: str, server: EndpointServer) -> None:
    answer = fetch(server, "/good", method)
    assert answer.status_code == 405
    assert answer.headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"\r\n",
        b"\x16\x03\x01\x00\x05hello\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /good HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n",
        b"GET /good HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n",
    ],
    ids=["nothing", "an empty line", "TLS", "half a line", "another version", "a long path", "many headers"],
)
def test_nonsense_is_refused_and_the_next_request_served(
    request_bytes: bytes, server: EndpointServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request_bytes)
    assert fetch(server, "/good").status_code == 200
    assert capfd.readouterr() == ("", "")


def test_requests_are_not_logged(server: EndpointServer, capfd: pytest.CaptureFixture[str]) -> None:
    fetch(server, "/good")
    fetch(server, "/nowhere")
    assert capfd.readouterr() == ("", "")


def test_a_slow_client_is_hung_up_on_and_hinders_nobody() -> None:
    with served(request_limit_s=0.2) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as slow:
            slow.sendall(b"GET /good HT")
            assert fetch(server, "/good").status_code == 200
            assert slow.recv(100) == b""


def test_a_client_that_trickles_is_hung_up_on() -> None:
    with served(request_limit_s=0.3) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as slow:
            slow.settimeout(0.02)
            with pytest.raises(OSError):
                for _ in range(500):
                    slow.sendall(b"X")
                    try:
                        if slow.recv(100) == b"":
                            raise ConnectionResetError
                    except TimeoutError:
                        continue


def test_only_so_many_are_served_at_once() -> None:
    entered, leave = threading.Semaphore(0), threading.Event()

    def slow_page() -> Page:
        entered.release()
        leave.wait(10)
        return json_page(200, {})

    with served({**PAGES, "/slow": slow_page}, max_connections=2) as server:
        threads = [threading.Thread(target=fetch, args=(server, "/slow")) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in threads:
            assert entered.acquire(timeout=10)
        with pytest.raises(requests.ConnectionError):
            fetch(server, "/good")
        leave.set()
        for thread in threads:
            thread.join()
        # A place is free again as soon as its thread has ended, which is after its answer.
        for _ in range(100):
            try:
                assert fetch(server, "/good").status_code == 200
                break
            except requests.ConnectionError:
                continue
        else:
            pytest.fail("no place became free")


def test_a_read_after_the_deadline_times_out() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"late")
        assert _DeadlineReader(ours, time.monotonic() + 10).read(2) == b"la"
        with pytest.raises(TimeoutError):
            _DeadlineReader(ours, time.monotonic() - 1).read(2)


def test_ipv6_is_served() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with serving("::1", 0, PAGES) as server:
        assert requests.get(f"http://[::1]:{server.port}/good", timeout=10).status_code == 200


def test_a_port_in_use_is_a_host_error(server: EndpointServer) -> None:
    with pytest.raises(HostError) as caught, serving("127.0.0.1", server.port, PAGES):
        pass
    assert caught.value.exit_code == EXIT_HOST
    assert caught.value.message == f"cannot listen on 127.0.0.1 port {server.port}: Address already in use"
    assert caught.value.hint
