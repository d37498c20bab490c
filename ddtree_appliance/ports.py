"""Keep a TCP port for the server it was chosen for, in the seconds or minutes before that server listens."""

from __future__ import annotations

import errno
import socket

from ddtree_appliance.errors import HostError


def bound_socket(address: str, port: int) -> socket.socket:
    """A TCP socket bound to address and port (0: one that is free), not listening. Raises OSError if it is taken."""
    family, kind, protocol, _, where = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        # As servers do: a closing connection of the last start does not count, and "::" leaves IPv4 alone.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(where)
    except BaseException:
        bound.close()
        raise
    return bound


def reserve_port(address: str = "127.0.0.1", port: int = 0) -> int:
    """A TCP port that nothing listens on (port 0: any), kept until this process ends. Raises OSError if it is taken.

    Until a server listens, connections and other servers draw from the same ports. The kernel gives a bound port to
    none of them, only to a socket that asks for it by its number and, as servers do, with SO_REUSEADDR.
    """
    reservation = bound_socket(address, port)
    number = int(reservation.getsockname()[1])
    # Without its object nobody closes the descriptor.
    reservation.detach()
    return number


def not_free(address: str, port: int, error: OSError) -> HostError:
    """What to tell the operator when `bound_socket` or `reserve_port` failed."""
    if error.errno == errno.EADDRINUSE:
        hint = f"stop what listens there: ss -ltnp sport = :{port}"
        return HostError(f"port {port} on {address} is not free: {error.strerror}", hint)
    return HostError(
        f"nothing can listen on port {port} of {address}: {error.strerror}", "give an address of this host, and a port"
    )
