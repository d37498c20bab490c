"""The guest itself: what the scenarios rely on."""

from __future__ import annotations

import pytest

from tests.systemd.guest import CHECKOUT, Guest
from tests.systemd.guest_files import GuestError


def test_systemd_is_pid_1_and_podman_has_quadlet(guest: Guest) -> None:
    assert guest.output("cat /proc/1/comm") == "systemd"
    assert int(guest.output("podman version --format '{{.Client.Version}}'").split(".")[0]) >= 5
    guest.run("test -x /usr/libexec/podman/quadlet")


def test_a_failed_command_is_reported_with_its_output(guest: Guest) -> None:
    with pytest.raises(GuestError, match=r"exit status 7: (?s:.*)out\nerr"):
        guest.run("echo out; echo err >&2; exit 7")
    assert guest.run("exit 7", check=False).returncode == 7


def test_a_command_has_a_deadline(guest: Guest) -> None:
    with pytest.raises(GuestError, match="not done after 1 s: sleep 61"):
        guest.run("sleep 61", timeout_s=1)
    assert guest.run("pgrep --exact sleep", check=False).returncode == 1


def test_a_spawned_command_ends_with_its_guest(guest: Guest) -> None:
    short, long = guest.spawn("sleep 0.2; echo done"), guest.spawn("sleep 62")
    assert short.communicate(timeout=10)[0] == "done\n"
    guest.reboot()
    assert long.poll() is not None


def test_nothing_outside_is_reachable(guest: Guest) -> None:
    assert guest.output("ip -brief link | cut -d' ' -f1").split() == ["lo"]


def test_the_checkout_is_a_read_only_clone(guest: Guest) -> None:
    assert guest.output(f"git -C {CHECKOUT} ls-files pyproject.toml") == "pyproject.toml"
    assert guest.run(f"touch {CHECKOUT}/file", check=False).returncode


def test_a_reboot_keeps_disk_and_images_and_loses_the_rest(guest: Guest) -> None:
    guest.write("/etc/kept", "kept\n", mode=0o600)
    guest.write("/run/lost", "lost\n")
    images = guest.output("podman images --quiet --no-trunc")
    boot = guest.output("cat /proc/sys/kernel/random/boot_id")
    guest.reboot()
    assert guest.output("cat /etc/kept; stat -c %a /etc/kept") == "kept\n600"
    assert guest.run("test -e /run/lost", check=False).returncode
    assert guest.output("podman images --quiet --no-trunc") == images
    assert guest.output("cat /proc/sys/kernel/random/boot_id") != boot


def test_the_journal_is_read_from_a_cursor_on(guest: Guest) -> None:
    guest.run("systemd-run --unit=first --wait echo before")
    cursor = guest.journal_cursor()
    guest.run("systemd-run --unit=second --wait echo after")
    assert guest.wait_until("the journal", lambda: "after" in guest.journal("second", cursor), 10)
    assert "before" in guest.journal("first")
    assert "before" not in guest.journal(after=cursor)
    assert guest.unit("second", "Result") == "success"
