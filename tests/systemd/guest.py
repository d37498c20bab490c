"""A booted Debian with real systemd and podman on a machine that has neither: systemd-nspawn in a cgroup of its own.

The host needs no systemd and no podman, and nothing of a guest outlives its owner: it runs in namespaces of its own,
and is powered off when the process that booted it dies.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import shlex
import signal
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TypeVar

from tests.systemd.guest_files import GuestError, GuestFiles, cgroup_root, set_resolver

CHECKOUT = "/host/checkout"
BASE_TAR = "/host/base.tar"
CA_BUNDLE = "/host/ca.crt"
BASE_IMAGE = "localhost/debian:bookworm"
BOOT_LIMIT_S = 60.0
HALT_LIMIT_S = 90.0
# Without an upstream every foreign name takes aardvark-dns ten seconds, and torch looks up its own address.
OFFLINE_RESOLVER = "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", "HOME": "/root", "LANG": "C.UTF-8"}

T = TypeVar("T")
_boots = itertools.count()


class Network(enum.Enum):
    """HOST reaches package registries, for builds; PRIVATE has only a loopback and podman's bridges, for tests."""

    HOST = "host"
    PRIVATE = "private"


class Guest:
    """A machine made of `files`. A context manager that halts it; boot it from the main thread."""

    def __init__(self, files: GuestFiles) -> None:
        self.files = files
        self._console = files.folder / "console.log"
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._spawned: list[subprocess.Popen[str]] = []
        self._init = 0
        self._cgroup: Path | None = None
        self._network = Network.PRIVATE

    def __enter__(self) -> Guest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.halt()

    def boot(self, network: Network) -> None:
        """Boot until basic.target is active; units of later targets may still be starting. Raises GuestError."""
        assert self._nspawn is None, "the guest is running"
        self._network = network
        options = ["--private-network", "--resolv-conf=off"]
        if network is Network.HOST:
            options = ["--resolv-conf=copy-host"]
        else:
            set_resolver(self.files.root, OFFLINE_RESOLVER)
        try:
            self._start_nspawn(options)
            self._wait_for_boot()
        except BaseException:
            self._kill()
            raise

    def halt(self) -> None:
        """Power off cleanly, by force after HALT_LIMIT_S; nothing happens if the guest is not running."""
        if self._nspawn is None:
            return
        try:
            # systemd stops every process before it kills them, and a stopped nsenter would not reap its child.
            for process in self._spawned:
                self.end(process)
            self._nspawn.terminate()
            self._nspawn.wait(HALT_LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"[guest] did not power off within {HALT_LIMIT_S:.0f} s; killed", flush=True)
        finally:
            self._kill()

    def reboot(self) -> None:
        """Power off and boot again on the same network: what is not on the disk is lost."""
        self.halt()
        self.boot(self._network)

    def run(
        self,
        script: str,
        timeout_s: float = 60.0,
        check: bool = True,
        stdin: str = "",
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run `script` with bash -euo pipefail as root; with `log`, all that it prints goes there as it comes.

        Raises GuestError with the script and the end of its output if it takes longer than `timeout_s`, or with `check`
        if it fails.
        """
        limited = ["timeout", "--kill-after=5", f"{timeout_s:g}", "bash", "-euo", "pipefail", "-c", script]
        begin = time.monotonic()
        with contextlib.nullcontext(subprocess.PIPE) if log is None else log.open("w") as output:
            process = self._start(limited, environment, output, subprocess.PIPE if log is None else subprocess.STDOUT)
            try:
                shown, complaints = process.communicate(stdin)
            finally:
                self.end(process)
        result = subprocess.CompletedProcess(script, process.returncode, shown or "", complaints or "")
        late = time.monotonic() - begin >= timeout_s
        if late or (check and result.returncode):
            text = result.stdout + result.stderr if log is None else log.read_text(errors="replace")
            ended = f"not done after {timeout_s:g} s" if late else f"exit status {result.returncode}"
            raise GuestError(f"{ended}: {script}\n{_tail(text)}")
        return result

    def spawn(self, script: str) -> subprocess.Popen[str]:
        """Start `script` and return at once: requests in flight. Ended by `end`, with the guest or with this thread."""
        process = self._start(["bash", "-euo", "pipefail", "-c", script], None, subprocess.PIPE, subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None  # communicate() would flush it
        self._spawned.append(process)
        return process

    def end(self, process: subprocess.Popen[str]) -> None:
        """Kill what `spawn` has started, if it still runs."""
        while process.poll() is None:
            # The process itself is nsenter. Without it nobody would reap its child, and the guest could not end either.
            for child in _children(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)

    def output(self, script: str, timeout_s: float = 60.0) -> str:
        """What `script` prints, without the last newline. Raises GuestError if it fails."""
        return self.run(script, timeout_s).stdout.rstrip("\n")

    def wait_until(self, what: str, condition: Callable[[], T], timeout_s: float, interval_s: float = 0.3) -> T:
        """Call `condition` until it is true; return its value. Raises GuestError with the last one and the journal."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise GuestError(
                    f"{what}: not within {timeout_s:g} s; the last value was {value!r}\n{_tail(self.journal())}"
                )
            time.sleep(interval_s)
        return value

    def unit(self, name: str, unit_property: str) -> str:
        """A property of a unit as `systemctl show` tells it, for example ActiveState, NRestarts, Result."""
        return self.output(f"systemctl show --property={unit_property} --value {shlex.quote(name)}")

    def journal(self, unit: str | None = None, after: str | None = None) -> str:
        """The journal of this boot, of one unit or of all, after a cursor that `journal_cursor` gave."""
        options = [f"--unit={unit}"] if unit else []
        options += [f"--after-cursor={after}"] if after else []
        return self.output(f"journalctl --boot --no-pager --output=short-precise --quiet {shlex.join(options)}")

    def journal_cursor(self) -> str:
        """The journal's present end."""
        shown = self.output("journalctl --boot --no-pager --quiet --lines=0 --show-cursor")
        return shown.removeprefix("-- cursor: ")

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file in the guest; folders are made."""
        name = shlex.quote(path)
        self.run(f"mkdir -p $(dirname {name}); install -m {mode:o} /dev/stdin {name}", stdin=text)

    def import_base_image(self) -> None:
        """Have the image BASE_IMAGE, made of Debian packages only."""
        change = shlex.quote('CMD ["/bin/bash"]')
        self.run(
            f"podman image exists {BASE_IMAGE} || podman import --quiet --change {change} {BASE_TAR} {BASE_IMAGE}",
            timeout_s=300,
        )

    def registry_environment(self) -> dict[str, str]:
        """What programs of a guest on the host's network need to trust the registries that the host trusts."""
        if _ca_bundle() is None:
            return {}
        return {"SSL_CERT_FILE": CA_BUNDLE, "PIP_CERT": CA_BUNDLE}

    def _start(
        self, command: Sequence[str], environment: Mapping[str, str] | None, stdout: IO[str] | int, stderr: int
    ) -> subprocess.Popen[str]:
        if self._nspawn is None or self._nspawn.poll() is not None:
            raise GuestError(f"the guest is not running\n{self._console_tail()}")
        variables = [f"{name}={value}" for name, value in {**ENVIRONMENT, **(environment or {})}.items()]
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]
        enter = ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--target={self._init}", *spaces, "--"]
        return subprocess.Popen(
            [*enter, "env", "--ignore-environment", *variables, *command],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
        )

    def _start_nspawn(self, options: list[str]) -> None:
        name = f"ddtree-guest-{os.getpid()}-{next(_boots)}"
        hierarchy = cgroup_root()
        assert hierarchy is not None
        self._cgroup = hierarchy / name
        self._cgroup.mkdir()
        bundle = _ca_bundle()
        binds = [
            f"--bind={self.files.store}:/var/lib/containers",
            f"--bind-ro={self.files.checkout}:{CHECKOUT}",
            f"--bind-ro={self.files.base_tar}:{BASE_TAR}",
            *([f"--bind-ro={bundle}:{CA_BUNDLE}"] if bundle else []),
        ]
        command = [
            *("systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit"),
            # What nspawn passes on when it is terminated: systemd's signal for a power-off.
            "--kill-signal=SIGRTMIN+4",
            *(f"--machine={name}", "--hostname=appliance", f"--directory={self.files.root}"),
            # podman in the guest makes namespaces, mounts and keyrings of its own.
            *("--capability=all", "--system-call-filter=add_key keyctl bpf"),
            *binds,
            *options,
        ]
        # In a cgroup of its own, since a second boot in the caller's would find it busy; terminated by the kernel if
        # the caller dies; not in the caller's session, since Ctrl-C must reach the caller only, which powers it off.
        join = 'echo $$ > "$0/cgroup.procs"; exec setpriv --pdeathsig TERM "$@"'
        with self._console.open("wb") as console:
            self._nspawn = subprocess.Popen(
                ["sh", "-c", join, str(self._cgroup), *command],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Else nspawn gives the guest the host's v1 hierarchy, read-only.
                env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
            )

    def _wait_for_boot(self) -> None:
        assert self._nspawn is not None
        deadline = time.monotonic() + BOOT_LIMIT_S
        while time.monotonic() < deadline and self._nspawn.poll() is None:
            if found := _children(self._nspawn.pid, "--exact", "systemd"):
                self._init = found[0]
                if self.run("systemctl is-active --quiet basic.target", check=False).returncode == 0:
                    return
            time.sleep(0.1)
        raise GuestError(f"the guest did not boot within {BOOT_LIMIT_S:.0f} s\n{self._console_tail()}")

    def _kill(self) -> None:
        if self._nspawn is not None:
            self._nspawn.kill()
            self._nspawn.wait()
        # Now nobody can join the cgroup any more; the end of nspawn alone does not end the guest.
        if self._cgroup is not None:
            (self._cgroup / "cgroup.kill").write_text("1")
        self._nspawn = None
        for stream in (stream for process in self._spawned for stream in (process.stdout, process.stderr)):
            assert stream is not None
            stream.close()
        self._spawned.clear()
        if self._cgroup is not None:
            # nspawn mirrors its cgroup into the v1 hierarchy of systemd, where there is one.
            for group in (self._cgroup, Path("/sys/fs/cgroup/systemd", self._cgroup.name)):
                _remove_cgroup(group)
            self._cgroup = None

    def _console_tail(self) -> str:
        return _tail(self._console.read_text(errors="replace")) if self._console.exists() else ""


def _children(parent: int, *pattern: str) -> list[int]:
    command = ["pgrep", "--parent", str(parent), *pattern]
    return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()]


def _ca_bundle() -> Path | None:
    # The bundle may hold the CA of a network that re-signs TLS; elsewhere it holds the public ones.
    paths = ssl.get_default_verify_paths()
    candidates = (os.environ.get("SSL_CERT_FILE"), paths.cafile, "/etc/ssl/certs/ca-certificates.crt")
    return next((Path(name) for name in candidates if name and Path(name).is_file()), None)


def _remove_cgroup(group: Path) -> None:
    if not group.is_dir():
        return
    deadline = time.monotonic() + 5
    while True:
        # A killed process stays in its group until it is reaped.
        try:
            for folder, _, _ in os.walk(group, topdown=False):
                os.rmdir(folder)
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _tail(text: str, lines: int = 40) -> str:
    return "\n".join(text.splitlines()[-lines:])
