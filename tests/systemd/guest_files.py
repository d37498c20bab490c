"""What a guest is made of, in one folder: Debian 13 with podman, the image's base, the checkout as a clone holds it."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# The first Debian whose podman (5.4) has Quadlet with Notify=healthy. The image's base is the Containerfile's.
GUEST_SUITE = "trixie"
GUEST_PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "procps", "iproute2", "curl", "ca-certificates"),
    *("podman", "crun", "netavark", "aardvark-dns", "nftables"),
    *("git", "python3-venv"),
)
BASE_SUITE = "bookworm"
BASE_PACKAGES = ("ca-certificates",)
MASKED_UNITS = (
    *("systemd-modules-load.service", "apt-daily.timer", "apt-daily-upgrade.timer"),
    *("netavark-dhcp-proxy.socket", "netavark-dhcp-proxy.service"),
)
PROGRAMS = ("systemd-nspawn", "mmdebstrap", "apt-get", "git", "tar", "nsenter", "setpriv", "pgrep")
# The image is 6 GB; while its largest layer is committed that layer is on the disk three times.
FREE_BYTES = 25 * 10**9


class GuestError(Exception):
    """A guest could not be made, or a command in it failed."""


@dataclass(frozen=True)
class GuestFiles:
    """The parts of a guest below `folder`. store: podman's images and volumes, which outlive a boot."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def checkout(self) -> Path:
        return self.folder / "checkout"

    @property
    def base_tar(self) -> Path:
        return self.folder / "base.tar"

    @property
    def root_tar(self) -> Path:
        return self.folder / "root.tar"


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Print how long the block took (pytest -s shows it)."""
    begin = time.monotonic()
    yield
    print(f"[guest] {name}: {time.monotonic() - begin:.1f} s", flush=True)


def missing_requirement(folder: Path) -> str | None:
    """Why this machine cannot have a guest in `folder`, or None if it can."""
    if os.geteuid() != 0:
        return "only root can boot one"
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"{', '.join(missing)} missing (scripts/systemd-rehearsal installs it)"
    group = cgroup_root()
    if group is None or not os.access(group, os.W_OK):
        return "no writable cgroup2 hierarchy is mounted"
    if (free := shutil.disk_usage(folder).free) < FREE_BYTES:
        return f"{free / 1e9:.0f} GB free in {folder}, {FREE_BYTES / 1e9:.0f} GB needed"
    return None


def cgroup_root() -> Path | None:
    """Where the cgroup2 hierarchy is mounted, beside v1 controllers or alone."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount_point, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(mount_point)
    return None


def prepare(folder: Path, checkout: Path) -> GuestFiles:
    """Make all parts in `folder`. Tars and store that an earlier call left there are used again, root and checkout not.

    Raises GuestError.
    """
    files = GuestFiles(folder)
    with phase("Debian root and base image"):
        _make_tars(files)
    with phase("unpack the root, copy the checkout"):
        for fresh in (files.root, files.checkout):
            shutil.rmtree(fresh, ignore_errors=True)
        files.root.mkdir()
        files.store.mkdir(exist_ok=True)
        _call(["tar", "-C", str(files.root), "--exclude=./dev/*", "-xf", str(files.root_tar)])
        _configure(files.root)
        _copy_checkout(checkout, files.checkout)
    return files


def set_resolver(root: Path, text: str) -> None:
    """Write the guest's /etc/resolv.conf; it may be a symbolic link or what an earlier boot has copied."""
    path = root / "etc/resolv.conf"
    path.unlink(missing_ok=True)
    path.write_text(text)


def _make_tars(files: GuestFiles) -> None:
    mirror = _debian_mirror()
    wanted = (
        (files.root_tar, GUEST_SUITE, GUEST_PACKAGES),
        (files.base_tar, BASE_SUITE, BASE_PACKAGES),
    )
    jobs: list[tuple[Path, Path, str, subprocess.Popen[str]]] = []
    try:
        for tar, suite, packages in wanted:
            stamp = tar.with_suffix(".stamp")
            content = " ".join((suite, *packages))
            if tar.exists() and stamp.exists() and stamp.read_text() == content:
                continue
            stamp.unlink(missing_ok=True)
            # Below the folder, so that nothing of an interrupted run is left anywhere else.
            job = subprocess.Popen(
                [
                    *("mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", f"--include={','.join(packages)}"),
                    *(suite, str(tar), f"deb {mirror} {suite} main"),
                ],
                env={**os.environ, "TMPDIR": str(files.folder)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            jobs.append((tar, stamp, content, job))
        for tar, stamp, content, job in jobs:
            _, complaints = job.communicate()
            if job.returncode:
                raise GuestError(f"mmdebstrap {tar.stem}: {_without_addresses(complaints)[-2000:]}")
            stamp.write_text(content)
    finally:
        for *_, job in jobs:
            if job.poll() is None:
                job.terminate()
                job.communicate()


def _debian_mirror() -> str:
    listed = _call(["apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)", "Created-By: Packages"])
    mirrors = [line.split()[1] for line in listed.splitlines() if line.startswith("Debian ")]
    # Updates of a release are listed with the same origin; only the archive itself has every suite.
    mirrors = [mirror for mirror in mirrors if "security" not in mirror]
    if not mirrors:
        raise GuestError("apt knows no Debian archive (is this Debian, and did apt-get update run?)")
    return mirrors[0]


def _configure(root: Path) -> None:
    for unit in MASKED_UNITS:
        (root / "etc/systemd/system" / unit).symlink_to("/dev/null")
    (root / "etc/machine-id").write_text("")
    set_resolver(root, "")
    # podman asks for limits of its own; without CAP_SYS_RESOURCE nobody can have more than this process has. A guest
    # beside cgroup v1 controllers has no pids controller.
    nofile = _hard_limit(resource.RLIMIT_NOFILE, 1048576)
    nproc = _hard_limit(resource.RLIMIT_NPROC, 32768)
    settings = root / "etc/containers/containers.conf"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(
        f'[containers]\npids_limit = 0\ndefault_ulimits = ["nofile={nofile}:{nofile}", "nproc={nproc}:{nproc}"]\n'
    )


def _hard_limit(kind: int, ceiling: int) -> int:
    hard = resource.getrlimit(kind)[1]
    return ceiling if hard == resource.RLIM_INFINITY else min(hard, ceiling)


def _copy_checkout(checkout: Path, target: Path) -> None:
    # A container or a CI job may own the checkout with another uid.
    git = ["git", "-c", f"safe.directory={checkout}", "-C", str(checkout)]
    _call([*git, "clone", "--quiet", "--no-checkout", "--no-hardlinks", str(checkout), str(target)])
    listed = _call([*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
    for name in filter(None, listed.split("\0")):
        source, copy = checkout / name, target / name
        if source.is_symlink() or source.is_file():  # a deleted file is still listed
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)
    _call(["git", "-C", str(target), "reset", "--quiet"])


def _call(command: Sequence[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise GuestError(f"{' '.join(command)}: {_without_addresses(result.stderr)[-2000:]}")
    return result.stdout


def _without_addresses(text: str) -> str:
    # A mirror may be an internal host, which does not belong into a log.
    return re.sub(r"\w+://\S+", "MIRROR", text)
