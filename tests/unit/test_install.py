"""Installing on a host in a folder, with fake `podman`, `systemctl` and generator that do what the tests tell them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree_appliance import managed_files
from ddtree_appliance.config import Config
from ddtree_appliance.config_source import ConfigError
from ddtree_appliance.errors import ApplianceError, HostError, UsageError
from ddtree_appliance.install import InstallReport, Roots, install, uninstall
from ddtree_appliance.render import UNITS, config_digest, render_units
from ddtree_appliance.yaml_source import parse
from tests.quadlet import Quadlet, quadlet_binary

CONFIG = """\
# Ours.
engine: {model: /srv/models/target, drafter: /srv/models/drafter}
"""
OTHER = CONFIG + "unit: {shm_size_gb: 8}\n"
ENGINE = "ddtree-sglang.container"

PODMAN = """\
#!/bin/sh
echo "podman $*" >> {state}/calls
case "$1 $2" in
    "--version ") cat {state}/podman-version ;;
    "secret exists") [ -e {state}/secrets/"$3" ] ;;
    "image exists") [ -e {state}/has-image ] ;;
    *) exit 9 ;;
esac
"""
SYSTEMCTL = """\
#!/bin/sh
echo "systemctl $*" >> {state}/calls
case "$1" in
    --version) ;;
    daemon-reload) [ ! -e {state}/reload-fails ] || {{ echo "Connection timed out" >&2; exit 1; }} ;;
    cat)
        [ ! -e {state}/no-"$2" ] || {{ echo "No files found for $2." >&2; exit 1; }}
        [ ! -e {state}/other-"$2" ] || {{ printf '# /etc/systemd/system/%s\\n[Service]\\n' "$2"; exit 0; }}
        cat {root}/etc/containers/systemd/"${{2%.service}}.container" ;;
    is-active) cat {state}/active; exit 3 ;;
    stop)
        [ ! -e {state}/stuck-"$2" ] || {{ echo "Job canceled" >&2; exit 1; }}
        [ ! -e {state}/unknown-"$2" ] || exit 5 ;;
    *) exit 9 ;;
esac
"""
GENERATOR = """\
#!/bin/sh
echo "generator $* $(cd "$QUADLET_UNIT_DIRS" && echo * */*)" >> {state}/calls
echo "quadlet-generator[1]: Loading source unit file $QUADLET_UNIT_DIRS/ddtree.network" >&2
[ ! -e {state}/generator-refuses ] ||
    {{ echo "converting: unsupported key 'Memory' in $QUADLET_UNIT_DIRS/ddtree-sglang.container" >&2; exit 1; }}
"""


class Host:
    """A host in a folder. state: files whose presence tells the fakes what to do, and the calls that they got."""

    def __init__(self, folder: Path) -> None:
        self.roots = Roots(folder / "root")
        self.state, self.bin = folder / "state", folder / "bin"
        self.roots.systemd.mkdir(parents=True)
        self.roots.generator.parent.mkdir(parents=True)
        (self.state / "secrets").mkdir(parents=True)
        self.bin.mkdir()
        for path, text in ((self.bin / "podman", PODMAN), (self.bin / "systemctl", SYSTEMCTL)):
            self.program(path, text)
        self.program(self.roots.generator, GENERATOR)
        for tool in ("cat", "env"):
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        self.tell("podman-version", "podman version 5.4.2\n")
        self.tell("secrets/ddtree-api-key")
        self.tell("has-image")
        self.tell("active", "inactive\ninactive\n")
        self.config = folder / "mine.yaml"

    def program(self, path: Path, text: str) -> None:
        path.write_text(text.format(state=self.state, root=self.roots.root))
        path.chmod(0o755)

    def tell(self, name: str, text: str = "") -> None:
        (self.state / name).write_text(text)

    def forget(self, name: str) -> None:
        (self.state / name).unlink()

    def install(self, text: str = CONFIG, *, discard_edits: bool = False) -> InstallReport:
        self.config.write_text(text)
        return install(self.config, self.roots, discard_edits=discard_edits)

    def unit(self, name: str = ENGINE) -> Path:
        return self.roots.units / name

    def calls(self) -> list[str]:
        calls = self.state / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def files(self) -> dict[str, bytes]:
        """Everything below /etc."""
        etc = self.roots.root / "etc"
        return {str(path.relative_to(etc)): path.read_bytes() for path in etc.rglob("*") if path.is_file()}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host(tmp_path)
    monkeypatch.setenv("PATH", str(made.bin))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return made


def config_of(text: str) -> Config:
    return Config.model_validate(parse(text.encode()).data)


# A first install


def test_install_writes_configuration_and_units_and_reloads_systemd(host: Host) -> None:
    report = host.install()
    units = {f"containers/systemd/{name}": text.encode() for name, text in render_units(config_of(CONFIG)).items()}
    files = host.files()
    assert files.pop("ddtree/installed.json")
    assert files == {**units, "ddtree/appliance.yaml": CONFIG.encode()}
    assert host.calls().count("systemctl daemon-reload") == 1
    assert report.written == [*(str(host.unit(name)) for name in UNITS), str(host.roots.config)]
    assert (report.unchanged, report.removed, report.notes) == ([], [], [])
    assert report.config_sha256 == config_digest(config_of(CONFIG))


def test_install_starts_nothing_and_says_how(host: Host) -> None:
    report = host.install()
    assert report.next_steps == ["systemctl start ddtree-sglang"]
    assert str(report).endswith("next:\n  systemctl start ddtree-sglang")
    assert not [call for call in host.calls() if "start" in call]


def test_installed_files_are_readable_for_the_container_whatever_the_umask(host: Host) -> None:
    old = os.umask(0o077)
    try:
        host.install()
    finally:
        os.umask(old)
    modes = {path: path.stat().st_mode & 0o777 for path in (host.roots.root / "etc").rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o644}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o755}


def test_no_half_written_file_looks_like_a_unit(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    replace = os.replace

    def watched(new: str, old: Path) -> None:
        names.append(Path(new).suffix)
        replace(new, old)

    monkeypatch.setattr(os, "replace", watched)
    host.install()
    assert set(names) == {".new"}
    assert {path.name for path in host.roots.units.iterdir()} == set(UNITS)


def test_record_names_hashes_and_what_podman_will_hold(host: Host) -> None:
    host.install()
    record = json.loads(host.roots.record.read_text())
    assert record["units"] == {name: managed_files.sha256(host.unit(name).read_bytes()) for name in UNITS}
    assert record["config"] == managed_files.sha256(CONFIG.encode())
    assert record["resources"]["secret"] == ["ddtree-api-key"]


def test_report_as_json_holds_the_same_facts(host: Host) -> None:
    report = host.install().as_json()
    assert json.loads(json.dumps(report)) == report
    assert report["next_steps"] == ["systemctl start ddtree-sglang"]


# Again


def test_unchanged_files_are_left_alone(host: Host) -> None:
    host.install()
    times = {path: path.stat().st_mtime_ns for path in (host.roots.root / "etc").rglob("*") if path.is_file()}
    report = host.install()
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert report.written == []
    assert len(report.unchanged) == len(UNITS) + 1


def test_a_changed_configuration_replaces_what_was_installed(host: Host) -> None:
    host.install()
    report = host.install(OTHER)
    assert b"ShmSize=8g" in host.unit().read_bytes()
    assert host.roots.config.read_text() == OTHER
    assert str(host.unit()) in report.written
    assert host.install(OTHER).written == []


def test_the_installed_configuration_can_be_edited_and_installed_in_place(host: Host) -> None:
    host.install()
    host.roots.config.write_text(OTHER)
    report = install(host.roots.config, host.roots)
    assert str(host.roots.config) in report.unchanged
    assert b"ShmSize=8g" in host.unit().read_bytes()


def test_a_deleted_unit_comes_back(host: Host) -> None:
    host.install()
    host.unit().unlink()
    assert host.install().written == [str(host.unit())]


def test_a_unit_that_is_no_longer_made_is_removed(host: Host) -> None:
    host.install()
    record = json.loads(host.roots.record.read_text())
    host.unit("old.container").write_text("old")
    record["units"]["old.container"] = managed_files.sha256(b"old")
    host.roots.record.write_text(json.dumps(record))
    report = host.install()
    assert report.removed == [str(host.unit("old.container"))]
    assert not host.unit("old.container").exists()


@pytest.mark.parametrize("states", ["active\nactive\n", "activating\ninactive\n", "inactive\nactive\n"])
def test_running_services_are_to_be_restarted(host: Host, states: str) -> None:
    host.tell("active", states)
    assert host.install().next_steps == ["systemctl restart ddtree-sglang ddtree-health"]


def test_a_renamed_network_is_to_be_made_anew(host: Host) -> None:
    host.install()
    report = host.install(CONFIG + "unit: {network: other}\n")
    assert report.next_steps == ["systemctl stop ddtree-network.service", "systemctl start ddtree-sglang"]


def test_a_private_configuration_in_place_is_opened_and_said_so(host: Host) -> None:
    host.install()
    host.roots.config.chmod(0o600)
    report = install(host.roots.config, host.roots)
    assert host.roots.config.stat().st_mode & 0o777 == 0o644
    assert report.notes == [f"{host.roots.config} has mode 0644 now: the container's user reads it"]


# Edits


def refused(host: Host, text: str = CONFIG, error: type[ApplianceError] = ApplianceError) -> ApplianceError:
    """Install `text`, which must be refused with nothing changed."""
    before = host.files()
    with pytest.raises(error) as caught:
        host.install(text)
    assert host.files() == before
    assert type(caught.value) is error
    return caught.value


def test_an_edited_unit_is_not_overwritten(host: Host) -> None:
    host.install()
    host.unit().write_text(host.unit().read_text().replace("ShmSize=16g", "ShmSize=20g"))
    error = refused(host, OTHER)
    assert error.exit_code == 1
    assert f"{host.unit()} was edited since it was installed" in error.message
    assert "\n-ShmSize=20g\n+ShmSize=8g\n" in error.message
    assert f"{host.unit()}.d/10-local.conf" in (error.hint or "")
    assert "--discard-edits" in (error.hint or "")


def test_discard_edits_overwrites(host: Host) -> None:
    host.install()
    host.unit().write_text("edited")
    report = host.install(discard_edits=True)
    assert report.written == [str(host.unit())]
    assert host.unit().read_text() == render_units(config_of(CONFIG))[ENGINE]


def test_a_foreign_unit_is_not_overwritten(host: Host) -> None:
    host.roots.units.mkdir(parents=True)
    host.unit().write_text("[Container]\nImage=mine\n")
    assert "was not written by ddtree-appliance" in refused(host).message


def test_a_configuration_edited_in_place_is_not_overwritten_by_another(host: Host) -> None:
    host.install()
    host.roots.config.write_text(CONFIG + "ddtree: {budget: 64}\n")
    error = refused(host, OTHER)
    assert "\n-ddtree: {budget: 64}\n+unit: {shm_size_gb: 8}" in error.message
    assert f"ddtree-appliance install {host.roots.config}" in (error.hint or "")


def test_all_edits_are_reported_at_once(host: Host) -> None:
    host.install()
    for name in UNITS:
        host.unit(name).write_text("edited")
    assert refused(host).message.count("was edited since it was installed") == len(UNITS)


def test_a_file_that_is_already_as_wanted_is_no_edit(host: Host) -> None:
    host.install()
    host.roots.record.unlink()
    assert host.install().written == []


@pytest.mark.parametrize("discard", [False, True])
@pytest.mark.parametrize("target", ["/dev/null", "nowhere", "elsewhere.yaml", None])
def test_a_link_or_folder_in_the_way_is_never_replaced(host: Host, target: str | None, discard: bool) -> None:
    # The container sees the folder only: a configuration that is a link to outside would be missing there.
    host.roots.config.parent.mkdir(parents=True)
    (host.roots.config.parent / "elsewhere.yaml").write_text(CONFIG)
    if target is None:
        host.roots.config.mkdir()
    else:
        host.roots.config.symlink_to(target)
    with pytest.raises(ApplianceError, match="is not a plain file"):
        host.install(discard_edits=discard)
    assert host.roots.config.is_symlink() == (target is not None)
    assert not host.roots.units.exists()


def test_a_damaged_record_is_not_taken_for_an_empty_one(host: Host) -> None:
    host.install()
    for text in ("{", "[]", '{"format": 2}', '{"format": 1, "units": {"../x": ""}, "config": "", "resources": {}}'):
        host.roots.record.write_text(text)
        assert "is no record that this version can read" in refused(host).message


# What the host lacks


def old_podman(host: Host) -> None:
    host.tell("podman-version", "podman version 4.9.3\n")


def no_secret(host: Host) -> None:
    host.forget("secrets/ddtree-api-key")


def no_image(host: Host) -> None:
    host.forget("has-image")


def no_systemctl(host: Host) -> None:
    (host.bin / "systemctl").unlink()


def no_podman(host: Host) -> None:
    (host.bin / "podman").unlink()


def not_booted(host: Host) -> None:
    host.roots.systemd.rmdir()


def closed_folder(host: Host) -> None:
    host.roots.config.parent.mkdir(parents=True)
    host.roots.config.parent.chmod(0o700)


@pytest.mark.parametrize(
    ("spoil", "message", "hint"),
    [
        (no_systemctl, "systemctl is missing", "systemd"),
        (not_booted, "systemd does not run on this host", "such a host"),
        (no_podman, "podman is missing", "install podman 5.0 or newer"),
        (old_podman, "podman is older than 5.0: podman version 4.9.3", "install podman 5.0 or newer"),
        (no_secret, "podman has no secret ddtree-api-key", "| podman secret create ddtree-api-key -"),
        (no_image, "the image localhost/ddtree-sglang:latest is not on this host", "build it: scripts/build-image"),
        (closed_folder, "is closed to the container's user", "chmod 755"),
    ],
)
def test_what_the_host_lacks_is_named_before_anything_is_written(
    host: Host, spoil: Callable[[Host], None], message: str, hint: str
) -> None:
    spoil(host)
    error = refused(host, error=HostError)
    assert error.exit_code == 3
    assert message in error.message
    assert hint in (error.hint or "")
    assert "systemctl daemon-reload" not in host.calls()


def test_only_root_installs(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in refused(host, error=HostError).message
    assert host.calls() == []


def test_all_missing_secrets_are_named_at_once(host: Host) -> None:
    no_secret(host)
    error = refused(host, CONFIG + "server: {admin_key_secret: admin}\n", HostError)
    assert error.message == "podman has no secret ddtree-api-key and no secret admin"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (
            CONFIG + f"unit: {{image: registry.example/ddtree@sha256:{'0' * 64}}}\n",
            "podman pull registry.example/ddtree@",
        ),
        (
            "engine: {device: cpu, model: bundled:target, drafter: bundled:drafter, kv_tokens: 4096}\ngpus: []\n",
            "build it: scripts/build-image --rehearsal",
        ),
    ],
)
def test_hint_for_a_missing_image_fits_the_image(host: Host, text: str, hint: str) -> None:
    no_image(host)
    assert hint in (refused(host, text, HostError).hint or "")


def test_podman_5_is_new_enough(host: Host) -> None:
    host.tell("podman-version", "podman version 5.0.0-dev\n")
    assert host.install().written


def test_a_refused_configuration_touches_nothing(host: Host) -> None:
    error = refused(host, "engine: {modell: x}\n", ConfigError)
    assert (error.exit_code, host.calls()) == (2, [])
    with pytest.raises(UsageError, match="No such file"):
        install(host.config.parent / "missing.yaml", host.roots)


# What podman or systemd rejects


def test_units_are_tried_with_their_drop_ins_before_they_are_installed(host: Host) -> None:
    host.install()
    drop_ins = host.roots.units / f"{ENGINE}.d"
    drop_ins.mkdir()
    (drop_ins / "10-local.conf").write_text("[Container]\nMemory=1g\n")
    host.tell("generator-refuses")
    error = refused(host, OTHER)
    assert error.message == (
        "podman refuses the units, nothing was installed: "
        f"converting: unsupported key 'Memory' in {host.roots.units}/ddtree-sglang.container"
    )
    tried = [call for call in host.calls() if call.startswith("generator")][-1]
    assert f"{ENGINE}.d/10-local.conf" in tried
    assert set(UNITS) <= set(tried.split())


def test_the_real_generator_refuses_a_misspelt_drop_in(host: Host, quadlet: Quadlet) -> None:
    host.roots.generator.unlink()
    host.roots.generator.symlink_to(quadlet_binary())
    host.install()
    drop_ins = host.roots.units / f"{ENGINE}.d"
    drop_ins.mkdir()
    (drop_ins / "10-local.conf").write_text("[Container]\nShmSizes=1g\n")
    assert "unsupported key 'ShmSizes' in group 'Container'" in refused(host, OTHER).message


def test_without_a_generator_the_report_says_that_nothing_was_tried(host: Host) -> None:
    host.roots.generator.unlink()
    (note,) = host.install().notes
    assert "the units were not tried" in note


@pytest.mark.parametrize("installed_before", [False, True])
@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("reload-fails", "systemctl daemon-reload failed: Connection timed out"),
        ("no-ddtree-sglang.service", "podman's generator made no ddtree-sglang.service"),
        ("no-ddtree-health.service", "podman's generator made no ddtree-health.service"),
        (
            "other-ddtree-sglang.service",
            "systemd reads another ddtree-sglang.service than the installed one: /etc/systemd",
        ),
    ],
)
def test_what_systemd_does_not_take_is_rolled_back(
    host: Host, state: str, message: str, installed_before: bool
) -> None:
    if installed_before:
        host.install()
    host.tell(state)
    error = refused(host, OTHER)
    assert message in error.message
    assert error.message.endswith("; the previous files are back")
    assert host.calls()[-1] == "systemctl daemon-reload"


def test_a_disk_error_half_way_is_rolled_back(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.install()
    replace, failures = os.replace, [OSError(28, "No space left on device")]

    def fail_once_at_the_network(new: str, old: Path) -> None:
        if old == host.unit("ddtree.network") and failures:
            raise failures.pop()
        replace(new, old)

    monkeypatch.setattr(os, "replace", fail_once_at_the_network)
    assert "No space left on device; the previous files are back" in refused(host, OTHER).message


def test_what_cannot_be_restored_is_named(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.install()
    host.tell("reload-fails")
    write, limit = managed_files.write_file, [6]

    def fail_after_all_were_written(path: Path, content: bytes) -> None:
        limit[0] -= 1
        if limit[0] < 0 and path == host.unit():
            raise OSError(5, "Input/output error")
        write(path, content)

    monkeypatch.setattr(managed_files, "write_file", fail_after_all_were_written)
    with pytest.raises(ApplianceError) as caught:
        host.install(OTHER)
    assert caught.value.message.endswith(f"; cannot be restored: {host.unit()}")
    assert host.roots.config.read_text() == CONFIG


def test_an_interrupt_is_rolled_back_and_stays_one(host: Host) -> None:
    host.install()
    before = host.files()
    host.config.write_text(OTHER)

    def interrupted(command: list[str]) -> object:
        if command == ["systemctl", "daemon-reload"] and host.files() != before:
            raise KeyboardInterrupt
        from ddtree_appliance.host import run_command

        return run_command(command)

    with pytest.raises(KeyboardInterrupt):
        install(host.config, host.roots, interrupted)  # type: ignore[arg-type]
    assert host.files() == before


# Uninstalling


def test_uninstall_stops_the_services_and_removes_only_what_was_installed(host: Host) -> None:
    host.install()
    host.unit("neighbour.container").write_text("not ours")
    report = uninstall(host.roots)
    stops = [call for call in host.calls() if call.startswith("systemctl stop")]
    assert set(stops[:2]) == {"systemctl stop ddtree-sglang.service", "systemctl stop ddtree-health.service"}
    assert report.stopped == [call.rpartition(" ")[2] for call in stops]
    assert sorted(report.removed) == sorted(str(host.unit(name)) for name in UNITS)
    assert sorted(host.files()) == ["containers/systemd/neighbour.container", "ddtree/appliance.yaml"]
    assert host.calls()[-1] == "systemctl daemon-reload"


def test_uninstall_says_what_it_keeps_and_how_to_remove_it(host: Host) -> None:
    host.install()
    drop_ins = host.roots.units / f"{ENGINE}.d"
    drop_ins.mkdir()
    report = uninstall(host.roots)
    assert report.kept == {
        str(host.roots.config): f"rm {host.roots.config}",
        str(drop_ins): f"rm -r {drop_ins}",
        "podman secret ddtree-api-key": "podman secret rm ddtree-api-key",
        "podman volume ddtree-cache": "podman volume rm ddtree-cache",
        "podman network ddtree": "podman network rm ddtree",
        "podman image localhost/ddtree-sglang:latest": "podman image rm localhost/ddtree-sglang:latest",
    }
    assert "kept podman volume ddtree-cache; to remove it: podman volume rm ddtree-cache" in str(report)
    assert not [call for call in host.calls() if call.startswith("podman") and " rm" in call]
    assert json.loads(json.dumps(report.as_json())) == report.as_json()


def test_uninstall_leaves_an_edited_unit_and_stops_nothing(host: Host) -> None:
    host.install()
    host.unit().write_text("edited")
    before = host.files()
    with pytest.raises(ApplianceError, match="was edited since it was installed"):
        uninstall(host.roots)
    assert host.files() == before
    assert not [call for call in host.calls() if " stop " in call]
    assert str(host.unit()) in uninstall(host.roots, discard_edits=True).removed


def test_uninstall_removes_nothing_while_a_service_does_not_stop(host: Host) -> None:
    host.install()
    before = host.files()
    host.tell("stuck-ddtree-sglang.service")
    with pytest.raises(
        ApplianceError, match=r"ddtree-sglang\.service does not stop, nothing was removed: Job canceled"
    ):
        uninstall(host.roots)
    assert host.files() == before


def test_uninstall_does_not_mind_a_unit_that_systemd_does_not_know(host: Host) -> None:
    host.install()
    host.tell("unknown-ddtree-health.service")
    assert "ddtree-health.service" not in uninstall(host.roots).stopped
    assert not host.unit().exists()


def test_uninstall_twice_says_that_nothing_is_installed(host: Host) -> None:
    host.install()
    uninstall(host.roots)
    with pytest.raises(ApplianceError, match="nothing is installed"):
        uninstall(host.roots)


def test_a_failed_reload_brings_the_uninstalled_units_back(host: Host) -> None:
    host.install()
    before = host.files()
    host.tell("reload-fails")
    with pytest.raises(ApplianceError, match="the previous files are back"):
        uninstall(host.roots)
    assert host.files() == before


def test_uninstall_needs_root(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.install()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostError, match="root"):
        uninstall(host.roots)
    assert host.unit().exists()
