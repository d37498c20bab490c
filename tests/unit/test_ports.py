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
    dp_size: int = 1

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


@pytest.mark.parametrize(
    "host,port,words", [("192.0.2.1", 8000, "Cannot assign requested address"), ("no.such.invalid", 8000, "")]
)
def test_launch_refuses_an_address_that_is_not_this_hosts(host: str, port: int, words: str) -> None:
    with pytest.raises(HostError) as error:
        keep_ports(ServerArgs(host, port))
    assert error.value.message.startswith(f"nothing can listen on port {port} of {host}: {words}")
    assert error.value.hint == "give an address of this host, and a port"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_every_ipv6_address_is_not_every_ipv4_address() -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = other.getsockname()[1]
        assert reserve_port("::", port) == port


@pytest.mark.parametrize("nccl_port,dp_size", [(1, 1), (None, 2)])
def test_launch_chooses_no_rendezvous_port_for_others(nccl_port: int | None, dp_size: int) -> None:
    """The operator's own, and data-parallel replicas, of which each needs one."""
    arguments = ServerArgs("127.0.0.1", reserve_port(), nccl_port, dp_size)
    keep_ports(arguments)
    assert arguments.nccl_port == nccl_port


def test_launch_refuses_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(HostError) as error:
            keep_ports(ServerArgs("127.0.0.1", port))
    assert error.value.message == f"port {port} on 127.0.0.1 is not free: Address already in use"
    assert error.value.hint == f"stop what listens there: ss -ltnp sport = :{port}"
