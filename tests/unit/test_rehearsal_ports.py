"""A rehearsal server's port is its own from the moment it is chosen, long before the server listens."""

import errno
import socket

import pytest

from ddtree_appliance.checks import bind
from ddtree_appliance.rehearsal.server import free_port


def test_nobody_else_gets_a_chosen_port_and_nothing_listens_there() -> None:
    port = free_port()
    with socket.socket() as other, pytest.raises(OSError) as error:
        other.bind(("127.0.0.1", port))
    assert error.value.errno == errno.EADDRINUSE
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_the_server_it_was_chosen_for_can_listen_there(address: str) -> None:
    port = free_port()
    bind(address, port)  # preflight's own check
    with socket.create_server((address, port)), socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
