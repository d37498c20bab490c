"""What a session ran on: versions, GPU, driver, revision of this project."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ddtree_appliance import __version__

_PACKAGES = ("sglang", "torch", "triton", "sglang-kernel", "flashinfer-python", "transformers")


def host_facts(device: str) -> dict[str, Any]:
    """Facts for a result's reader. Raises HostError if device is "cuda" and no GPU can be seen."""
    facts: dict[str, Any] = {
        "ddtree_appliance": __version__,
        "revision": git_revision(Path(__file__).resolve().parents[2]),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
    }
    if device == "cuda":
        from ddtree_appliance.gpus import see_gpus

        driver, gpus = see_gpus()
        facts["driver"] = driver.version
        facts["cuda_of_driver"] = ".".join(map(str, driver.cuda))
        facts["gpus"] = [
            # Free before any server of the session is started: what is missing is in use by others.
            {"name": gpu.name, "memory_mib": gpu.total_bytes >> 20, "free_mib": gpu.free_bytes >> 20}
            for gpu in gpus
        ]
    return facts


def git_revision(folder: Path) -> str | None:
    """The commit of the checkout, with "+changes" if files differ from it; None where it is no checkout."""
    if not (folder / ".git").exists():
        return None  # installed, perhaps below another project's checkout
    try:
        revision = _git(folder, "rev-parse", "HEAD")
        return f"{revision}+changes" if _git(folder, "status", "--porcelain") else revision
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", os.fspath(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
