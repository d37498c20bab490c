"""Puts the configuration and its units on the host, and takes the units away again. It starts nothing.

An edit that somebody made to an installed file is never overwritten unasked, a unit that podman refuses never reaches
its place, and what fails leaves the files as they were.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddtree_appliance.config import Config
from ddtree_appliance.config_source import config_from, read_source
from ddtree_appliance.errors import ApplianceError, HostError
from ddtree_appliance.host import Runner, output_of, require_podman, require_systemd, run_command
from ddtree_appliance.managed_files import Change, Record, apply_changes, diff, sha256
from ddtree_appliance.render import ENGINE, NETWORK, SIDECAR, config_digest, render_units, secret_files, write_units

_LONG_RUNNING = (f"{ENGINE}.service", f"{SIDECAR}.service")
_NOT_LOADED = 5  # systemctl's exit status for a unit that systemd does not know


@dataclass(frozen=True)
class Roots:
    """Where the host's files are. Tests put `root` elsewhere."""

    root: Path = Path("/")

    @property
    def config(self) -> Path:
        """The configuration, which the containers read too."""
        return self.root / "etc/ddtree/appliance.yaml"

    @property
    def record(self) -> Path:
        """What was installed."""
        return self.root / "etc/ddtree/installed.json"

    @property
    def units(self) -> Path:
        """Where podman's generator looks for units."""
        return self.root / "etc/containers/systemd"

    @property
    def generator(self) -> Path:
        """The program that turns them into systemd's."""
        return self.root / "usr/lib/systemd/system-generators/podman-system-generator"

    @property
    def systemd(self) -> Path:
        """Exists where systemd is PID 1."""
        return self.root / "run/systemd/system"


@dataclass(frozen=True)
class InstallReport:
    """What `install` did. next_steps: commands for the operator."""

    config_sha256: str
    written: list[str]
    removed: list[str]
    unchanged: list[str]
    notes: list[str]
    next_steps: list[str]

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"wrote {path}" for path in self.written] + [f"removed {path}" for path in self.removed]
        lines += [f"unchanged {path}" for path in self.unchanged] + [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, "next:", *(f"  {step}" for step in self.next_steps)])


@dataclass(frozen=True)
class UninstallReport:
    """What `uninstall` did. kept: what is still on the host, each with the command that removes it."""

    stopped: list[str]
    removed: list[str]
    kept: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"stopped {service}" for service in self.stopped] + [f"removed {path}" for path in self.removed]
        return "\n".join([*lines, *(f"kept {what}; to remove it: {command}" for what, command in self.kept.items())])


def install(
    config_path: Path, roots: Roots | None = None, run: Runner = run_command, *, discard_edits: bool = False
) -> InstallReport:
    """Write the configuration and the units made from it to their places, and make systemd read them.

    Raises UsageError for a configuration that is refused, HostError for a host that cannot run it, ApplianceError for
    files that were edited since the last install (unless `discard_edits`) and for units that podman or systemd rejects.
    After any of them the files are those from before.
    """
    roots = roots or Roots()
    raw = read_source(config_path)
    config = config_from(raw, str(config_path))
    digest, units = config_digest(config), render_units(config)
    require_systemd(roots.systemd, run)
    require_podman(config, run)
    _require_open_folder(roots.config.parent)

    record = Record.read(roots.record)
    wanted = {name: text.encode() for name, text in units.items()}
    changes = [Change.of(roots.units / name, wanted.get(name)) for name in {**wanted, **record.units}]
    changes.append(Change.of(roots.config, raw))
    if not discard_edits:
        _refuse_edits(changes, record, roots)
    notes = _try_generator(units, roots, run)
    new_record = Record({name: sha256(text) for name, text in wanted.items()}, sha256(raw), _resources(config))

    def take_effect() -> None:
        _daemon_reload(run)
        for service in _LONG_RUNNING:
            _require_in_force(service, digest, run)

    apply_changes([*changes, Change.of(roots.record, new_record.content())], take_effect, _reloading(run))
    if roots.config.stat().st_mode & 0o777 != 0o644:
        roots.config.chmod(0o644)
        notes.append(f"{roots.config} has mode 0644 now: the container's user reads it")
    return InstallReport(
        digest,
        [str(change.path) for change in changes if change.new not in (None, change.old)],
        [str(change.path) for change in changes if change.new is None and change.old is not None],
        [str(change.path) for change in changes if change.new == change.old is not None],
        notes,
        _next_steps(changes, run),
    )


def uninstall(roots: Roots | None = None, run: Runner = run_command, *, discard_edits: bool = False) -> UninstallReport:
    """Stop the services and remove the units that `install` wrote; configuration, secrets and volume stay.

    Raises HostError without systemd or root, ApplianceError if nothing is installed, a unit was edited (unless
    `discard_edits`) or a service does not stop.
    """
    roots = roots or Roots()
    require_systemd(roots.systemd, run)
    record = Record.read(roots.record)
    if not record.units:
        raise ApplianceError(f"nothing is installed: {roots.record} does not exist")
    changes = [Change.of(roots.units / name, None) for name in record.units]
    if not discard_edits:
        _refuse_edits(changes, record, roots)
    stopped = []
    for service in sorted(map(_service, record.units), key=lambda service: service not in _LONG_RUNNING):
        result = run(["systemctl", "stop", service])
        if result.returncode == 0:
            stopped.append(service)
        elif result.returncode != _NOT_LOADED:
            message = f"{service} does not stop, nothing was removed: {output_of(result)}"
            raise ApplianceError(message, f"journalctl -u {service}")
    apply_changes([*changes, Change.of(roots.record, None)], lambda: _daemon_reload(run), _reloading(run))
    return UninstallReport(stopped, [str(c.path) for c in changes if c.old is not None], _kept(record, roots))


def _require_open_folder(folder: Path) -> None:
    # The container's user is not root: what only root may enter would look like a missing configuration to it.
    if folder.exists() and folder.stat().st_mode & 0o005 != 0o005:
        raise HostError(f"{folder} is closed to the container's user", f"chmod 755 {folder}; it holds no secrets")


def _refuse_edits(changes: Sequence[Change], record: Record, roots: Roots) -> None:
    told, hints = [], []
    for change in changes:
        is_config = change.path == roots.config
        recorded = record.config if is_config else record.units.get(change.path.name)
        if not change.edited(recorded):
            continue
        why = "was edited since it was installed" if recorded else "was not written by ddtree-appliance"
        told.append(f"{change.path} {why}; nothing was changed\n{diff(change.path, change.new)}".rstrip())
        if is_config:
            hints.append(f"ddtree-appliance install {roots.config} installs what stands there")
        else:
            hints.append(f"keep changes in {change.path}.d/10-local.conf")
    if told:
        raise ApplianceError("\n".join(told), "; ".join([*hints, "--discard-edits overwrites them"]))


def _try_generator(units: Mapping[str, str], roots: Roots, run: Runner) -> list[str]:
    # The installed drop-ins go with the units: a key that one of them misspells must not surface at the next boot.
    if not roots.generator.exists():
        return [f"the units were not tried before they were installed: {roots.generator} is missing"]
    with tempfile.TemporaryDirectory(prefix="ddtree-units-") as temporary:
        write_units(units, Path(temporary))
        for drop_ins in filter(Path.is_dir, roots.units.glob("*.d")):
            shutil.copytree(drop_ins, Path(temporary) / drop_ins.name, ignore_dangling_symlinks=True)
        result = run(["env", f"QUADLET_UNIT_DIRS={temporary}", str(roots.generator), "--dryrun"])
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "Loading source " not in line]
        told = "\n".join(lines).replace(temporary, str(roots.units))
        raise ApplianceError(
            f"podman refuses the units, nothing was installed: {told}",
            f"look for a key that this podman does not know in the drop-ins {roots.units}/*.d",
        )
    return []


def _daemon_reload(run: Runner) -> None:
    result = run(["systemctl", "daemon-reload"])
    if result.returncode:
        raise ApplianceError(f"systemctl daemon-reload failed: {output_of(result)}", "see journalctl -b -p err")


def _reloading(run: Runner) -> Callable[[], object]:
    return lambda: run(["systemctl", "daemon-reload"])


def _require_in_force(service: str, digest: str, run: Runner) -> None:
    shown = run(["systemctl", "cat", service])
    if shown.returncode:
        hint = "see journalctl -b -t quadlet-generator"
        raise ApplianceError(f"podman's generator made no {service}: {output_of(shown)}", hint)
    if digest not in shown.stdout:
        place = shown.stdout.partition("\n")[0].removeprefix("# ")
        raise ApplianceError(f"systemd reads another {service} than the installed one: {place}", f"remove {place}")


def _next_steps(changes: Sequence[Change], run: Runner) -> list[str]:
    steps = []
    network = next(change for change in changes if change.path.name == NETWORK)
    if network.old is not None and _body(network.old) != _body(network.new):
        # It stays active after it has made the old network, and would not make the new one.
        steps.append(f"systemctl stop {_service(NETWORK)}")
    # The sidecar outlives the engine, and reads its configuration only when it starts.
    states = run(["systemctl", "is-active", *_LONG_RUNNING]).stdout.split()
    runs = not {"active", "activating", "reloading", "deactivating"}.isdisjoint(states)
    return [*steps, f"systemctl restart {ENGINE} {SIDECAR}" if runs else f"systemctl start {ENGINE}"]


def _resources(config: Config) -> dict[str, list[str]]:
    return {
        "secret": [name for name, _ in secret_files(config)],
        "volume": [config.paths.cache_volume],
        "network": [config.unit.network],
        "image": [config.unit.image],
    }


def _kept(record: Record, roots: Roots) -> dict[str, str]:
    kept = {str(roots.config): f"rm {roots.config}"} if roots.config.exists() else {}
    for drop_ins in (roots.units / f"{name}.d" for name in record.units):
        if drop_ins.exists():
            kept[str(drop_ins)] = f"rm -r {drop_ins}"
    for kind, names in record.resources.items():
        kept |= {f"podman {kind} {name}": f"podman {kind} rm {name}" for name in names}
    return kept


def _service(unit: str) -> str:
    stem, _, kind = unit.rpartition(".")
    return f"{stem}.service" if kind == "container" else f"{stem}-{kind}.service"


def _body(unit: bytes | None) -> list[bytes]:
    return [line for line in (unit or b"").splitlines() if not line.startswith(b"#")]
