"""What the appliance needs of the host that it is installed on: root, systemd, a new enough podman, image, secrets."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from ddtree_appliance.config import Config
from ddtree_appliance.errors import HostError
from ddtree_appliance.render import secret_files

PODMAN_MINIMUM = (5, 0)  # Notify=healthy and drop-ins of Quadlet units

Runner = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def run_command(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end. Raises HostError if the program is missing."""
    try:
        return subprocess.run(list(command), capture_output=True, text=True, errors="replace", check=False)
    except FileNotFoundError as error:
        hints = {"podman": "install podman 5.0 or newer", "systemctl": "the appliance needs a host that runs systemd"}
        raise HostError(f"{command[0]} is missing", hints.get(command[0])) from error


def output_of(result: subprocess.CompletedProcess[str]) -> str:
    """What the command printed: its result, or if it failed, rather what it complained about."""
    return (result.stderr.strip() if result.returncode else "") or result.stdout.strip()


def require_systemd(booted: Path, run: Runner) -> None:
    """Raise HostError unless root can manage services here. booted: the folder that systemd makes as PID 1."""
    if os.geteuid() != 0:
        raise HostError("system services are managed by root", "run it with sudo")
    run(["systemctl", "--version"])
    if not booted.is_dir():
        raise HostError("systemd does not run on this host", "the appliance is a systemd service: use such a host")


def require_podman(config: Config, run: Runner) -> None:
    """Raise HostError unless podman is new enough and holds what the units of `config` name."""
    version = output_of(run(["podman", "--version"]))
    found = re.search(r"(\d+)\.(\d+)", version)
    minimum = ".".join(map(str, PODMAN_MINIMUM))
    if not found or (int(found[1]), int(found[2])) < PODMAN_MINIMUM:
        raise HostError(f"podman is older than {minimum}: {version}", f"install podman {minimum} or newer")
    names = [name for name, _ in secret_files(config)]
    if missing := [name for name in names if run(["podman", "secret", "exists", name]).returncode]:
        hints = [f"head -c 32 /dev/urandom | base64 | podman secret create {name} -" for name in missing]
        raise HostError(f"podman has no secret {' and no secret '.join(missing)}", "; ".join(hints))
    image = config.unit.image
    if run(["podman", "image", "exists", image]).returncode:
        build = "scripts/build-image" + (" --rehearsal" if config.engine.device == "cpu" else "")
        hint = f"build it: {build}" if image.startswith("localhost/") else f"podman pull {image}"
        raise HostError(f"the image {image} is not on this host", hint)
