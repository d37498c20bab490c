"""API keys: from podman secrets to the file that SGLang reads; never in a command line, an environment or a log."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddtree_appliance.config import Config
from ddtree_appliance.errors import HostError

KEY_FILE = Path("/run/ddtree/keys.yaml")
MIN_LENGTH = 16
MAX_LENGTH = 512
_TMPFS_TYPES = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Secret:
    """A key: its file below /run/secrets, and the name of the podman secret, if the configuration names one."""

    file: str
    name_in: Callable[[Config], str | None]


# By SGLang's name of the setting.
SECRETS = {
    "api-key": Secret("ddtree-api-key", lambda config: config.server.api_key_secret),
    "admin-api-key": Secret("ddtree-admin-key", lambda config: config.server.admin_key_secret),
}


def read_key(path: Path) -> str:
    """The key in `path`. Raises HostError, never with the key in it, if it is missing or no usable key."""
    try:
        text = path.read_bytes().decode("ascii")
    except OSError as error:
        raise HostError(
            f"the secret {path} cannot be read: {error.strerror}",
            f"head -c 32 /dev/urandom | base64 | podman secret create {path.name} -, then ddtree-appliance install",
        ) from None
    except UnicodeDecodeError:
        raise HostError(f"the secret {path} is not ASCII text", "make a new one of letters and digits") from None
    key = text.strip("\r\n")
    if not MIN_LENGTH <= len(key) <= MAX_LENGTH:
        raise HostError(
            f"the secret {path} has {len(key)} characters; a key has {MIN_LENGTH} to {MAX_LENGTH}",
            "head -c 32 /dev/urandom | base64 makes a good one",
        )
    if not key.isprintable() or " " in key or key.startswith("-"):
        raise HostError(
            f"the secret {path} holds blanks, several lines or a leading dash: no HTTP client could send it",
            "make a new one of letters and digits",
        )
    return key


def read_keys(config: Config, secrets: Path) -> dict[str, str]:
    """The configured keys by SGLang's name. Raises HostError, never with a key in it, for all that are unusable."""
    keys, errors = {}, []
    for name, secret in SECRETS.items():
        if not secret.name_in(config):
            continue
        try:
            keys[name] = read_key(secrets / secret.file)
        except HostError as error:
            errors.append(error)
    if errors:
        hints = dict.fromkeys(error.hint for error in errors if error.hint)
        raise HostError("; ".join(error.message for error in errors), "\n  ".join(hints))
    if len(set(keys.values())) < len(keys):
        raise HostError("both secrets hold the same key: every user could manage the engine", "make a second key")
    return keys


def write_key_file(config: Config, secrets: Path = Path("/run/secrets"), target: Path = KEY_FILE) -> Path | None:
    """Write the configured keys as SGLang's --config file, mode 0600, on a tmpfs. None if there are no keys.

    Raises HostError if a secret is unusable, or if `target` is not in memory and ours alone: a key must reach neither a
    disk nor another user.
    """
    keys = read_keys(config, secrets)
    if not keys:
        return None
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_private(target.parent)
        target.unlink(missing_ok=True)  # of an earlier start in the same container
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            for name, key in keys.items():
                file.write(f"{name}: {json.dumps(key)}\n")
    except OSError as error:
        raise HostError(f"{target} cannot be written: {error.strerror}", _TMPFS_HINT) from None
    return target


_TMPFS_HINT = "podman run --tmpfs /run/ddtree:mode=0700,U"


def _require_private(folder: Path) -> None:
    kind = _filesystem_of(folder)
    if kind not in _TMPFS_TYPES:
        raise HostError(f"{folder} is on {kind}, not on a tmpfs: the key would reach a disk", _TMPFS_HINT)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise HostError(f"{folder} is not this user's alone: others could replace the key file", _TMPFS_HINT)


def _filesystem_of(folder: Path) -> str:
    # By device, not by path: one mount may cover another.
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return "an unknown filesystem"
