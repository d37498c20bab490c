"""The service as an operator meets it: real systemd, real podman, the image built from this checkout, real SGLang.

The tests are one story, in the file's order. The units are the rendered ones; only limits that this kind of guest
cannot have (memlock, pids) are taken back, by a drop-in.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.systemd.guest import Guest

ENGINE, SIDECAR = "ddtree-sglang", "ddtree-health"
CONFIG = "/etc/ddtree/appliance.yaml"
API, HEALTH = "http://127.0.0.1:30000", "http://127.0.0.1:30001"
# podman 5.4 checks every health_interval + ~1 s; fast here, so that a kill takes seconds instead of minutes.
FAST_HEALTH = """
health:
  interval_s: 1
  busy_after_s: 2
  heartbeat_limit_s: 4
  progress_limit_s: 30
  unreachable_limit_s: 5
  check_interval_s: 2
  check_timeout_s: 2
  check_retries: 2
  startup_interval_s: 1
"""
UNIT = """
unit:
  image: localhost/ddtree-sglang:rehearsal
  shm_size_gb: 1
  start_timeout_s: 240
  stop_timeout_s: 40
  restart_delay_s: 1
  restart_limit: 20
"""
FAKE_GPUS = """\
cdiVersion: "0.5.0"
kind: "nvidia.com/gpu"
devices:
  - name: "0"
    containerEdits: {deviceNodes: [{path: /dev/nvidia0, hostPath: /dev/null, type: c, permissions: rw}]}
  - name: "1"
    containerEdits: {deviceNodes: [{path: /dev/nvidia1, hostPath: /dev/zero, type: c, permissions: rw}]}
"""


class Service:
    """The installed appliance in the guest, and the journal since the suite began."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self.key = secrets.token_urlsafe(24)

    def get(self, url: str) -> tuple[int, str]:
        """(HTTP status, body); status 0 if nobody answers."""
        answer = self.guest.run(f"curl --silent --max-time 10 --write-out '\\n%{{http_code}}' {url}", check=False)
        body, _, status = answer.stdout.rpartition("\n")
        return int(status or 0), body

    def state(self) -> str:
        """What the sidecar says of the engine."""
        status, body = self.get(f"{HEALTH}/readyz")
        return str(json.loads(body)["state"]) if status else "unreachable"

    def generate(self, tokens: int) -> str:
        """A shell command that asks for `tokens` tokens and prints the answer and its status; curl reads the key."""
        body = {
            "text": "def f(x):",
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        return (
            f"curl --silent --max-time 120 --write-out '\\n%{{http_code}}' {API}/generate --header @/root/auth "
            f"--header 'content-type: application/json' --data '{json.dumps(body)}'"
        )

    def answer(self, tokens: int = 16) -> dict[str, Any]:
        """The engine's answer. Raises if it is no answer."""
        text, _, status = self.guest.output(self.generate(tokens), 130).rpartition("\n")
        assert status == "200", text
        result: dict[str, Any] = json.loads(text)
        return result

    def processes(self) -> dict[str, int]:
        """The engine's processes by title, as the guest's process ids."""
        lines = self.guest.output(f"podman top {ENGINE} hpid args").splitlines()[1:]
        return {words[1]: int(words[0]) for words in (line.split(maxsplit=1) for line in lines)}

    def scheduler(self) -> int:
        """The scheduler's process id."""
        return next(pid for title, pid in self.processes().items() if title.startswith("sglang::scheduler"))

    def wait_for(self, state: str, timeout_s: float = 120.0) -> None:
        """Wait until the sidecar reports `state`."""
        self.guest.wait_until(f"the sidecar says {state}", lambda: self.state() == state, timeout_s)

    def wait_restarted(self, restarts: int) -> None:
        """Wait until systemd has restarted the engine and it is active and ready again."""

        def is_back() -> bool:
            return (
                int(self.guest.unit(ENGINE, "NRestarts")) > restarts
                and self.guest.unit(ENGINE, "ActiveState") == "active"
                and self.state() == "ready"
            )

        self.guest.wait_until("restarted and ready", is_back, 300)


@pytest.fixture(scope="module")
def service(guest: Guest) -> Iterator[Service]:
    """Installed as the README says, started once."""
    service = Service(guest)
    guest.run("podman secret create ddtree-api-key -", stdin=service.key + "\n")
    guest.write("/root/auth", f"authorization: Bearer {service.key}\n", mode=0o600)
    profile = guest.output("sed '/^unit:/,$d' /root/ddtree/config/profiles/rehearsal.yaml")
    guest.write("/root/my.yaml", profile + UNIT + FAST_HEALTH)
    for unit in (ENGINE, SIDECAR):
        # No pids controller, no CAP_SYS_RESOURCE: what this guest cannot have.
        guest.write(f"/etc/containers/systemd/{unit}.container.d/10-guest.conf", "[Container]\nPidsLimit=0\nUlimit=\n")
    installed = guest.run("ddtree-appliance install /root/my.yaml")
    assert "systemctl start ddtree-sglang" in installed.stdout
    yield service


def test_start_returns_only_when_the_engine_has_answered(service: Service) -> None:
    guest = service.guest
    start = guest.spawn(f"systemctl start {ENGINE}")
    guest.wait_until("the sidecar answers", lambda: service.state() in ("starting", "loading"), 60)
    assert start.poll() is None, "systemctl start returned while the engine was loading"
    assert service.get(f"{HEALTH}/livez")[0] == 200 and service.get(f"{HEALTH}/readyz")[0] == 503
    _, complaints = start.communicate(timeout=240)
    assert start.returncode == 0, complaints + guest.journal(ENGINE)
    # At this moment, not a little later.
    assert service.get(f"{API}/health")[0] == 200
    assert service.answer()["meta_info"]["spec_verify_ct"] > 0
    assert guest.unit(ENGINE, "ActiveState") == "active" and guest.unit(ENGINE, "NRestarts") == "0"


def test_the_sidecar_tells_state_and_versions_without_a_key(service: Service) -> None:
    service.wait_for("ready", 20)
    version = json.loads(service.get(f"{HEALTH}/version")[1])
    assert version["sglang_version"].startswith("0.5.17+ddtree.") and version["patchset_verified"] is True
    assert version["image"] == "localhost/ddtree-sglang:rehearsal" and version["budget"] == 31
    assert "ddtree_engine_ready 1.0" in service.get(f"{HEALTH}/metrics")[1]


def test_the_generated_units_pass_systemds_own_check(service: Service) -> None:
    for unit in (ENGINE, SIDECAR, "ddtree-network", "ddtree-cache-volume"):
        verified = service.guest.run(f"systemd-analyze --man=no --generators=true verify {unit}.service", check=False)
        assert verified.returncode == 0 and not verified.stderr, (unit, verified.stderr)


def test_smoke_passes(service: Service) -> None:
    smoke = service.guest.run("ddtree-appliance smoke --json", 90, check=False)
    report = json.loads(smoke.stdout)
    assert smoke.returncode == 0, smoke.stdout + smoke.stderr
    assert service.key not in smoke.stdout + smoke.stderr
    assert report["ok"] is True


def test_the_container_has_no_more_rights_than_it_needs(service: Service) -> None:
    status = service.guest.output(f"podman exec {ENGINE} cat /proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split()[0] == "10001" and fields["NoNewPrivs"] == "1"
    assert int(fields["CapEff"], 16) == 0 and int(fields["CapBnd"], 16) == 0
    assert service.guest.run(f"podman exec {ENGINE} touch /opt/file", check=False).returncode != 0
    # SGLang has read the keys; neither the file nor any command line holds them.
    assert service.guest.run(f"podman exec {ENGINE} ls /run/ddtree/keys.yaml", check=False).returncode != 0
    assert service.key not in service.guest.output(f"podman top {ENGINE} hpid args")
    assert service.key not in service.guest.output(f"podman inspect {ENGINE} {SIDECAR}")


def test_a_killed_scheduler_is_restarted_and_ready_again(service: Service) -> None:
    restarts = int(service.guest.unit(ENGINE, "NRestarts"))
    service.guest.run(f"kill -KILL {service.scheduler()}")
    service.wait_restarted(restarts)
    assert service.answer()["meta_info"]["spec_verify_ct"] > 0


def test_a_frozen_scheduler_is_reported_killed_and_restarted(service: Service) -> None:
    restarts = int(service.guest.unit(ENGINE, "NRestarts"))
    cursor = service.guest.journal_cursor()
    service.guest.run(f"kill -STOP {service.scheduler()}")
    service.guest.wait_until("reported", lambda: service.state() in ("stuck", "restarting", "dead"), 30)
    service.wait_restarted(restarts)
    assert "state=stuck" in service.guest.journal(SIDECAR, cursor)
    assert service.answer()["meta_info"]["spec_verify_ct"] > 0


def test_a_killed_engine_is_restarted_while_the_sidecar_stays(service: Service) -> None:
    sidecar = service.guest.unit(SIDECAR, "MainPID")
    restarts = int(service.guest.unit(ENGINE, "NRestarts"))
    service.guest.run(f"podman kill --signal KILL {ENGINE}")
    service.wait_restarted(restarts)
    assert service.guest.unit(SIDECAR, "MainPID") == sidecar


def test_stop_finishes_the_request_in_flight_and_refuses_new_ones(service: Service) -> None:
    guest = service.guest
    request = guest.spawn(service.generate(800))
    guest.wait_until(
        "the request runs",
        lambda: (
            "sglang:scheduler_unfinished_requests" in (page := service.get(f"{API}/metrics")[1])
            and any(
                line.startswith("sglang:scheduler_unfinished_requests") and float(line.split()[-1]) > 0
                for line in page.splitlines()
            )
        ),
        20,
    )
    stop = guest.spawn(f"systemctl stop {ENGINE}")
    service.wait_for("draining", 20)
    refused, _, status = guest.output(service.generate(1)).rpartition("\n")
    assert status == "503" and "shutting down" in refused
    text, _ = request.communicate(timeout=60)
    body, _, status = text.rpartition("\n")
    assert status == "200" and json.loads(body)["meta_info"]["completion_tokens"] == 800
    stop.communicate(timeout=120)
    assert stop.returncode == 0
    assert guest.unit(ENGINE, "ActiveState") == "inactive" and guest.unit(ENGINE, "Result") == "success"
    assert guest.unit(SIDECAR, "ActiveState") == "active"


def test_a_bad_configuration_fails_at_once_with_its_cause_and_no_restart(service: Service) -> None:
    guest = service.guest
    guest.run(f"sed -i 's/^  device: cpu/  device: gpu/' {CONFIG}")
    cursor = guest.journal_cursor()
    begin = time.monotonic()
    assert guest.run(f"systemctl start {ENGINE}", check=False).returncode != 0
    assert time.monotonic() - begin < 30
    assert guest.unit(ENGINE, "ActiveState") == "failed" and guest.unit(ENGINE, "ExecMainStatus") == "2"
    assert guest.unit(ENGINE, "NRestarts") == "0"
    journal = guest.wait_until("the cause", lambda: guest.journal(ENGINE, cursor), 10)
    assert f'{CONFIG}:4:11: engine.device: "gpu" is not one of cuda, cpu' in journal
    # Set right, but other than what the units were made from.
    guest.run(f"sed -i 's/^  device: gpu/  device: cpu/; s/context_length: 1024/context_length: 1000/' {CONFIG}")
    cursor = guest.journal_cursor()
    assert guest.run(f"systemctl start {ENGINE}", check=False).returncode != 0
    assert guest.unit(ENGINE, "ExecMainStatus") == "2"
    guest.wait_until("the cause", lambda: "has changed since the units were made" in guest.journal(ENGINE, cursor), 10)
    guest.run("ddtree-appliance install /root/my.yaml --discard-edits")


def test_a_missing_gpu_fails_at_once_and_a_configured_one_reaches_the_container(service: Service) -> None:
    guest = service.guest
    dropin = f"/etc/containers/systemd/{ENGINE}.container.d/20-gpu.conf"
    guest.write("/etc/cdi/nvidia.yaml", FAKE_GPUS)
    guest.write(dropin, "[Container]\nAddDevice=nvidia.com/gpu=7\n")
    guest.run("systemctl daemon-reload")
    cursor = guest.journal_cursor()
    assert guest.run(f"systemctl start {ENGINE}", check=False).returncode != 0
    assert guest.unit(ENGINE, "ExecMainStatus") == "126" and guest.unit(ENGINE, "NRestarts") == "0"
    assert "unresolvable CDI devices nvidia.com/gpu=7" in guest.journal(ENGINE, cursor)

    # The rendered unit of a GPU configuration, with the device it names; the image cannot use it and says so.
    gpu = guest.output("sed -e 's/^  device: cpu/  device: cuda/' -e 's/dtype: float32/dtype: bfloat16/' /root/my.yaml")
    guest.write("/root/gpu.yaml", gpu.replace("gpus: []", 'gpus: ["1"]'))
    guest.run(f"rm {dropin}; ddtree-appliance install /root/gpu.yaml")
    cursor = guest.journal_cursor()
    assert guest.run(f"systemctl start {ENGINE}", check=False).returncode != 0
    assert guest.unit(ENGINE, "ExecMainStatus") == "3" and guest.unit(ENGINE, "NRestarts") == "0"
    guest.wait_until("the cause", lambda: "gpus: NVML does not start" in guest.journal(ENGINE, cursor), 10)
    unit = guest.output(f"systemctl cat {ENGINE}")
    devices = " ".join(word for word in unit.split() if word.startswith("nvidia.com/gpu="))
    seen = guest.output(f"podman run --rm --entrypoint ls --device {devices} localhost/ddtree-sglang:rehearsal /dev")
    assert "nvidia1" in seen.split() and "nvidia0" not in seen.split()
    guest.run("ddtree-appliance install /root/my.yaml")


@pytest.mark.parametrize(
    ("line", "later_s"),
    [("container start", 0.0), ("starting sglang", 0.0), ("starting sglang", 1.0), ("Uvicorn running", 0.0)],
)
def test_a_stop_while_starting_is_clean(service: Service, line: str, later_s: float) -> None:
    """The moments: before serve runs, while it becomes SGLang, while that is imported, and before its warm-up."""
    guest = service.guest
    cursor = guest.journal_cursor()
    guest.run(f"systemctl start --no-block {ENGINE}")
    guest.wait_until(line, lambda: line in guest.journal(ENGINE, cursor), 120, 0.05)
    time.sleep(later_s)
    begin = time.monotonic()
    guest.run(f"systemctl stop {ENGINE}", 90)
    assert time.monotonic() - begin < 20
    assert guest.unit(ENGINE, "ActiveState") == "inactive", guest.journal(ENGINE)


def test_a_reboot_brings_the_service_back_by_itself(service: Service) -> None:
    guest = service.guest
    guest.reboot()
    guest.wait_until("active", lambda: guest.unit(ENGINE, "ActiveState") == "active", 240)
    service.wait_for("ready", 20)
    assert service.answer()["meta_info"]["spec_verify_ct"] > 0


def test_the_image_serves_without_systemd_too(service: Service) -> None:
    guest = service.guest
    guest.run(f"systemctl stop {ENGINE}", 120)
    run = (
        "podman run --rm --detach --name plain --publish 127.0.0.1:30000:30000 --tmpfs /run/ddtree:mode=0700,U "
        "--secret ddtree-api-key,uid=10001,mode=0400 --volume /root/my.yaml:/etc/ddtree/appliance.yaml:ro "
        "localhost/ddtree-sglang:rehearsal serve"
    )
    guest.run(run)
    try:
        guest.wait_until("it answers", lambda: service.get(f"{API}/health")[0] == 200, 240)
        assert service.answer()["meta_info"]["spec_verify_ct"] > 0
    finally:
        guest.run("podman stop --time 30 plain", 60)


def test_uninstall_leaves_nothing_running(service: Service) -> None:
    guest = service.guest
    guest.run("ddtree-appliance uninstall", 120)
    assert guest.output("podman ps --all --quiet") == ""
    for unit in (ENGINE, SIDECAR):
        assert guest.unit(unit, "LoadState") == "not-found"
    assert guest.run(f"test -e {CONFIG}", check=False).returncode == 0


def test_the_key_is_nowhere_in_the_journal(service: Service) -> None:
    journal = service.guest.output("journalctl --no-pager --output=json --quiet", 120)
    assert "starting sglang" in journal, "the journal does not hold the starts"
    assert service.key not in journal
