"""From a configuration to the text of the Quadlet units, which says nothing about the host or the time.

The templates in `systemd/` look like the units they make. Every value that they print goes through `unit_value`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from ddtree_appliance.config import Config
from ddtree_appliance.engine_args import ENGINE_PORT, SIDECAR_PORT
from ddtree_appliance.errors import UsageError
from ddtree_appliance.key_file import SECRETS
from ddtree_appliance.managed_files import diff, write_file

ENGINE = "ddtree-sglang"
SIDECAR = "ddtree-health"
NETWORK = "ddtree.network"
UNITS = (f"{ENGINE}.container", f"{SIDECAR}.container", NETWORK, "ddtree-cache.volume")

# podman's own timeout must not strike before the probe's, whose message says what was slow.
_PROBE_STARTS_IN_S = 5
# Quotes and backslashes are syntax in some keys and text in others, and ExecStart= expands a dollar.
_UNSAFE = re.compile(r"""[\s"'\\$]""")


def config_digest(config: Config) -> str:
    """The sha256 of what `config` means: comments, key order and defaults written out do not change it."""
    canonical = json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def unit_value(value: object) -> str:
    """`value` as one word of a unit file. Raises UsageError for text that a unit cannot hold as one word."""
    if isinstance(value, jinja2.Undefined) or value is None or isinstance(value, bool):
        raise TypeError(f"a template prints {value!r}")
    text = str(value)
    if not text.isprintable() or _UNSAFE.search(text):
        raise UsageError(
            f"{text!r} cannot stand in a systemd unit",
            "use a name without blanks, quotes, backslashes and dollar signs",
        )
    return text.replace("%", "%%")


def render_units(config: Config) -> dict[str, str]:
    """The units for `config`, by file name. Raises UsageError for a value that a unit cannot hold."""
    values: dict[str, Any] = {
        "config": config,
        "digest": config_digest(config),
        "engine_port": ENGINE_PORT,
        "sidecar_port": SIDECAR_PORT,
        "podman_timeout_s": config.health.check_timeout_s + _PROBE_STARTS_IN_S,
        "secrets": secret_files(config),
    }
    return {name: _templates().get_template(f"{name}.j2").render(values) for name in UNITS}


@functools.cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("ddtree_appliance", "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Rather than a filter: no value can be printed past it.
        finalize=unit_value,
    )


def secret_files(config: Config) -> list[tuple[str, str]]:
    """The podman secrets that the engine needs, each with its file name below /run/secrets in the container."""
    return [(name, secret.file) for secret in SECRETS.values() if (name := secret.name_in(config)) is not None]


def write_units(units: Mapping[str, str], out_dir: Path) -> list[Path]:
    """Write the units into `out_dir`, which is made if need be; return their paths. No reader ever sees half a file."""
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, text in units.items():
        write_file(out_dir / name, text.encode())
    return [out_dir / name for name in units]


def diff_units(units: Mapping[str, str], directory: Path) -> str:
    """What `units` would change in `directory`, as a unified diff; empty if nothing."""
    return "".join(diff(directory / name, text.encode()) for name, text in units.items())
