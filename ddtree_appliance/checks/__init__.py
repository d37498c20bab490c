"""What preflight checks, by topic. A check takes `Facts` and `Host`, returns a detail for people or raises."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddtree_appliance.checkpoint import Checkpoint
from ddtree_appliance.config import Config
from ddtree_appliance.gpus import Driver, Gpu, see_gpus
from ddtree_appliance.memory import MemoryPlan
from ddtree_appliance.ports import bound_socket

CACHE = Path("/var/cache/ddtree")
NOT_HERE = "not applicable here"
NOT_CHECKED = "not checked: an earlier check failed"


def bind(address: str, port: int) -> None:
    """Take and free a TCP port. Raises OSError if it is taken."""
    bound_socket(address, port).close()


@dataclass
class Host:
    """The edges that checks look at; tests pass their own."""

    in_container: bool = field(default_factory=lambda: Path("/run/.containerenv").exists())
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    see_gpus: Callable[[], tuple[Driver, list[Gpu]]] = see_gpus
    interfaces: Callable[[], Collection[str]] = lambda: [name for _, name in socket.if_nameindex()]
    bind: Callable[[str, int], None] = bind
    secrets: Path = Path("/run/secrets")
    cache: Path = CACHE
    temporary: Path = Path("/tmp")
    shm: Path = Path("/dev/shm")
    meminfo: Path = Path("/proc/meminfo")
    cgroup: Path = Path("/sys/fs/cgroup")


@dataclass
class Facts:
    """What earlier checks found, for later ones; None where the check that finds it failed.

    config: with target and drafter as local folders once they were found.
    """

    config: Config
    target: Checkpoint | None = None
    drafter: Checkpoint | None = None
    gpus: list[Gpu] | None = None
    driver: Driver | None = None
    plan: MemoryPlan | None = None
