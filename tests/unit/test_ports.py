"""A server's port is its own from the moment it is chosen, long before the server listens."""

import errno
import socket
from dataclasses import dataclass

import pytest

from ddtree_appliance.checks import bind
from ddtree_appliance.errors import HostError
from ddtree_appliance.launch import keep_ports
from ddtree_appliance.ports import reserve_port


def test_nobody_else_gets_a_chosen_port_and_nothing_listens_there() -> None:
    port = reserve_port()
    with socket.socket() as other, pytest.raises(OSError) as error:
        other.bind(("127.0.0.1", port))
    assert error.value.errno == errno.EADDRINUSE
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_the_server_it_was_chosen_for_can_listen_there(address: str) -> None:
    port = reserve_port()
    bind(address, port)  # preflight's own check
    with socket.create_server((address, port)), socket.create_connection(("127.0.0.1", port), timeout=5):
        pass


def test_a_port_that_something_listens_on_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError) as error:
        reserve_port("127.0.0.1", other.getsockname()[1])
    assert error.value.errno == errno.EADDRINUSE


@dataclass
class ServerArgs:
    """Those of SGLang's arguments that matter here; read-only but through `override`, as there."""

    host: str
    port: int
    nccl_port: int | None = None

    def override(self, source: str, **fields: int) -> None:
        vars(self).update(fields)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_launch_keeps_the_ports_that_the_engine_will_listen_on(host: str) -> None:
    arguments = ServerArgs(host, reserve_port())
    keep_ports(arguments)
    assert arguments.nccl_port is not None
    for port in (arguments.port, arguments.nccl_port):
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(("127.0.0.1", port))
        with socket.create_server(("", port)):
            pass


def test_launch_leaves_a_rendezvous_port_alone_that_the_operator_chose() -> None:
    arguments = ServerArgs("127.0.0.1", reserve_port(), 1)
    keep_ports(arguments)
    assert arguments.nccl_port == 1


def test_launch_refuses_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(HostError) as error:
            keep_ports(ServerArgs("127.0.0.1", port))
    assert error.value.message == f"port {port} on 127.0.0.1 is not free: Address already in use"
    assert error.value.hint == f"stop what listens there: ss -ltnp sport = :{port}"
