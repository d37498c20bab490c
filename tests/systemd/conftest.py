"""One guest for the session: the image is built in it on the host's network, then it is booted on a private one.

DDTREE_GUEST_KEEP=DIR keeps the guest's parts and podman's layers in DIR, for the next run. DDTREE_GUEST_REQUIRED=1
makes a machine that cannot have a guest fail the tests instead of skipping them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.systemd.guest import BASE_IMAGE, CHECKOUT, Guest, Network
from tests.systemd.guest_files import missing_requirement, phase, prepare

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD_LIMIT_S = 1500.0


@pytest.fixture(scope="session")
def guest() -> Iterator[Guest]:
    """The appliance's host: image built, command installed, checkout in /root/ddtree; booted on a private network."""
    with _work_folder() as folder:
        if reason := missing_requirement(folder):
            if os.environ.get("DDTREE_GUEST_REQUIRED"):
                pytest.fail(f"no systemd guest: {reason}")
            pytest.skip(f"no systemd guest: {reason}")
        with Guest(prepare(folder, REPOSITORY)) as machine:
            machine.boot(Network.HOST)
            _install(machine)
            machine.halt()
            with phase("boot on a private network"):
                machine.boot(Network.PRIVATE)
            yield machine


def _install(machine: Guest) -> None:
    log = machine.files.folder / "build.log"
    environment = machine.registry_environment()
    # A kept store may hold what an interrupted run left.
    machine.run("podman rm --all --force; podman volume rm --all --force; podman secret rm --all")
    machine.run(f"cp -a {CHECKOUT} /root/ddtree")
    with phase("import the base image"):
        machine.import_base_image()
    with phase("build the image"):
        # Committing the locked packages, 5 GB, keeps one core busy: the small stages are built meanwhile.
        build = f"cd /root/ddtree; scripts/build-image --rehearsal --base {BASE_IMAGE} --network=host --jobs=2"
        machine.run(build, BUILD_LIMIT_S, environment=environment, log=log)
    with phase("install the command"):
        machine.run("cd /root/ddtree; scripts/install-command", 300, environment=environment)


@contextmanager
def _work_folder() -> Iterator[Path]:
    if kept := os.environ.get("DDTREE_GUEST_KEEP"):
        folder = Path(kept).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pytest.fail(f"another run uses {folder}")
            yield folder
        return
    # Not the default folder for temporary files, which may be in memory.
    folder = Path(tempfile.mkdtemp(prefix="ddtree-guest-", dir="/var/tmp"))
    try:
        yield folder
    finally:
        with phase("remove the guest"):
            shutil.rmtree(folder)
