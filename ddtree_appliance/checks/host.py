"""Checks of the host and of the container: variables, secrets, folders, shared memory, port and GPUs."""

from __future__ import annotations

import os
import shutil

from ddtree_appliance.checks import NOT_HERE, Facts, Host
from ddtree_appliance.ddtree.start_rules import environment_problems
from ddtree_appliance.engine_args import ENGINE_PORT
from ddtree_appliance.errors import HostError
from ddtree_appliance.gpus import CAPABILITIES, MIN_CUDA, MIN_DRIVER, named_gpus
from ddtree_appliance.key_file import read_keys
from ddtree_appliance.memory import GIB, gib
from ddtree_appliance.ports import not_free

# A first start compiles some hundred MiB of kernels into the cache.
_MIN_CACHE_BYTES = GIB
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def environment(facts: Facts, host: Host) -> str:
    """No variable changes what is served, or names what is not there."""
    given = host.environment
    problems = environment_problems(given)
    interfaces = sorted(host.interfaces())
    for variable in _INTERFACE_VARIABLES:
        if missing := _missing_interfaces(variable, given.get(variable, ""), interfaces):
            problems.append(f"{variable} names {', '.join(missing)}; there are {', '.join(interfaces)}")
    if given.get("FLASHINFER_DISABLE_VERSION_CHECK"):
        problems.append("FLASHINFER_DISABLE_VERSION_CHECK: mixed flashinfer packages read illegal memory")
    if host.in_container and given.get("CUDA_VISIBLE_DEVICES"):
        problems.append("CUDA_VISIBLE_DEVICES: the configuration's gpus are what the container sees")
    if problems:
        raise HostError("; ".join(problems), "remove the variable from the unit's drop-in")
    return "no variable that changes what is served"


def _missing_interfaces(variable: str, value: str, interfaces: list[str]) -> list[str]:
    # NCCL takes prefixes, =NAME for exact names and ^NAME for all but these; gloo takes names.
    if value.startswith("^"):
        return []
    by_prefix = variable.startswith("NCCL") and not value.startswith("=")
    names = [name.strip() for name in value.lstrip("=").split(",") if name.strip()]
    return [name for name in names if not any(has.startswith(name) if by_prefix else has == name for has in interfaces)]


def keys(facts: Facts, host: Host) -> str:
    """The secrets that the configuration names can be read and are usable keys."""
    if not host.in_container:
        return NOT_HERE
    return f"{len(read_keys(facts.config, host.secrets))} keys are readable"


def folders(facts: Facts, host: Host) -> str:
    """What the engine writes to can be written."""
    if not host.in_container:
        return NOT_HERE
    problems = []
    for folder in (host.cache, host.temporary):
        if not os.access(folder, os.W_OK | os.X_OK):
            problems.append(f"{folder} is not writable as user {os.geteuid()}")
    if problems:
        raise HostError("; ".join(problems), "mount the cache volume with :U, and /tmp as tmpfs")
    free = shutil.disk_usage(host.cache).free
    if facts.config.engine.device == "cuda" and free < _MIN_CACHE_BYTES:
        raise HostError(
            f"{host.cache} has {gib(free)} free; compiled kernels need {gib(_MIN_CACHE_BYTES)}",
            f"make room on the volume {facts.config.paths.cache_volume}; folders of earlier images in it can go",
        )
    return f"{host.cache} and {host.temporary} are writable, {gib(free)} free"


def shm(facts: Facts, host: Host) -> str:
    """Shared memory for NCCL; podman's own default is 64 MB."""
    if facts.config.engine.device != "cuda":
        return NOT_HERE
    tp_size = facts.config.tp_size
    total = shutil.disk_usage(host.shm).total
    if total < GIB * tp_size:
        raise HostError(
            f"{host.shm} has {gib(total)}; {tp_size} ranks need {gib(GIB * tp_size)}",
            f"unit.shm_size_gb in the configuration, or podman run --shm-size={4 * tp_size}g",
        )
    return f"{host.shm} has {gib(total)}"


def port(facts: Facts, host: Host) -> str:
    """Nothing listens where the engine will."""
    server = facts.config.server
    address, number = ("0.0.0.0", ENGINE_PORT) if host.in_container else (server.host.strip("[]"), server.port)
    try:
        host.bind(address, number)
    except OSError as error:
        raise not_free(address, number, error) from error
    return f"{address}:{number} is free"


def gpus(facts: Facts, host: Host) -> str:
    """Driver, number and kind of the GPUs."""
    if facts.config.engine.device != "cuda":
        return NOT_HERE
    driver, visible = host.see_gpus()
    problems = []
    if driver.cuda < MIN_CUDA:
        runs, needs = (".".join(map(str, version)) for version in (driver.cuda, MIN_CUDA))
        problems.append(
            f"driver {driver.version} runs CUDA {runs}; the image needs {needs}, driver {MIN_DRIVER} or newer"
        )
    if host.in_container:
        found = visible  # podman passes in those that the configuration names, and no others
        if len(visible) != len(facts.config.gpus):
            problems.append(f"{len(visible)} GPUs are visible, gpus names {len(facts.config.gpus)}")
    else:
        found, missing = named_gpus(visible, facts.config.gpus)
        there = ", ".join(f"{gpu.name_in_cdi} {gpu.uuid}" for gpu in visible) or "none"
        problems += [f"gpus names {name}; there are {there}" for name in missing]
    for gpu in found:
        if gpu.capability not in CAPABILITIES:
            have, *known = (f"{major}.{minor}" for major, minor in (gpu.capability, *CAPABILITIES))
            problems.append(f"{gpu.name} has compute capability {have}; served are {', '.join(known)}")
    if problems:
        raise HostError("; ".join(problems), "see gpus in the configuration, and nvidia-smi on the host")
    facts.driver, facts.gpus = driver, found
    return f"driver {driver.version}: " + ", ".join(f"{gpu.name} ({gib(gpu.free_bytes)} free)" for gpu in found)
