"""podman's real Quadlet generator, Debian trixie's (5.4), as a fixture. It runs on any glibc and needs no podman.

It comes out of Debian's package, fetched with lists of its own from the mirror that this machine's apt uses, and is
kept in build/quadlet/VERSION. Where that is impossible the tests that need it are skipped with the reason.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

CACHE = Path(__file__).resolve().parent.parent / "build" / "quadlet"
_MEMBER = "./usr/libexec/podman/quadlet"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class Unavailable(Exception):
    """The generator cannot be had on this machine; the message says why."""


@dataclass(frozen=True)
class Service:
    """A generated systemd unit: the values of each key, by section."""

    text: str
    sections: Mapping[str, Mapping[str, list[str]]]

    def values(self, section: str, key: str) -> list[str]:
        """All values of `key`, in order."""
        return self.sections.get(section, {}).get(key, [])

    def value(self, section: str, key: str) -> str:
        """The one value of `key`."""
        (only,) = self.values(section, key)
        return only

    @property
    def podman(self) -> list[str]:
        """The words of the podman command that starts it, as podman gets them."""
        return [word.replace("%%", "%") for word in shlex.split(self.value("Service", "ExecStart"))]

    def options(self, option: str) -> list[str]:
        """The arguments of every `option` in the podman command."""
        return [word for before, word in zip(self.podman, self.podman[1:], strict=False) if before == option]


@dataclass(frozen=True)
class Generated:
    """What the generator made of a folder of units. complaints: its stderr without the files that it read."""

    returncode: int
    complaints: str
    services: Mapping[str, Service]


Quadlet = Callable[[Path], Generated]


@pytest.fixture(scope="session")
def quadlet() -> Quadlet:
    """Run the generator over a folder of units, as systemd does."""
    try:
        binary = quadlet_binary()
    except Unavailable as reason:
        pytest.skip(f"no Quadlet generator: {reason}")
    return lambda folder: _generate(binary, folder)


def quadlet_binary() -> Path:
    """The generator's path, from the cache or the mirror. Raises Unavailable."""
    cached = sorted(CACHE.glob("*/quadlet"), key=lambda path: path.stat().st_mtime)
    return cached[-1] if cached else _fetch()


def write_services(binary: Path, units: Path, out_dir: Path) -> None:
    """Generate into `out_dir`, as at boot."""
    subprocess.run([binary, "-no-kmsg-log", out_dir], env={"QUADLET_UNIT_DIRS": str(units)}, check=True)


def _generate(binary: Path, folder: Path) -> Generated:
    environment = {"QUADLET_UNIT_DIRS": str(folder)}
    result = subprocess.run(
        [binary, "-dryrun", "-no-kmsg-log"], env=environment, capture_output=True, text=True, check=False
    )
    complaints = [line for line in result.stderr.splitlines() if not re.search(r"\]: Loading source \S+ file ", line)]
    parts = re.split(r"^---(.+)---$\n", result.stdout, flags=re.MULTILINE)[1:]
    services = {name: _service(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}
    return Generated(result.returncode, "\n".join(complaints), services)


def _service(text: str) -> Service:
    sections: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith(("#", ";")):
            key, _, value = line.partition("=")
            sections.setdefault(section, {}).setdefault(key, []).append(value)
    return Service(text, sections)


def _fetch() -> Path:
    if missing := [tool for tool in ("apt-get", "dpkg-deb", "tar") if shutil.which(tool) is None]:
        raise Unavailable(f"{', '.join(missing)} missing: this is no Debian machine")
    reasons = []
    for mirror in _mirrors():
        with tempfile.TemporaryDirectory(prefix="quadlet-") as temporary:
            try:
                return _fetch_from(mirror, Path(temporary))
            except Unavailable as reason:
                reasons.append(str(reason))
    raise Unavailable("; ".join(reasons) or "apt knows no mirror")


def _mirrors() -> list[str]:
    targets = _run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages")
    return [uri for uri in dict.fromkeys(targets.split()) if "security" not in uri]


def _fetch_from(mirror: str, work: Path) -> Path:
    for folder in ("lists/partial", "cache/archives/partial"):
        (work / folder).mkdir(parents=True)
    signed = f"[signed-by={_KEYRING}] " if _KEYRING.exists() else ""
    (work / "sources.list").write_text(f"deb {signed}{mirror} trixie main\n")
    settings = {
        "Dir::Etc::sourcelist": f"{work}/sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": f"{work}/lists",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": f"{work}/cache",
        "APT::Sandbox::User": "root",
        "Acquire::http::Timeout": "20",
        "Acquire::Languages": "none",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    _run("apt-get", *options, "-q", "update", "--error-on=any")
    _run("apt-get", *options, "-q", "download", "podman", folder=work)
    (package,) = work.glob("podman_*.deb")
    version = _run("dpkg-deb", "--field", str(package), "Version").strip()
    _run("dpkg-deb", "--extract", str(package), str(work / "unpacked"))
    CACHE.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=CACHE, prefix=".new-"))
    shutil.copy2(work / "unpacked" / _MEMBER, staging / "quadlet")
    os.utime(staging / "quadlet")
    try:
        staging.rename(CACHE / version)
    except OSError:  # another run was faster
        shutil.rmtree(staging)
    return CACHE / version / "quadlet"


def _run(*command: str, folder: Path | None = None) -> str:
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=180)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{command[0]} takes longer than {error.timeout:g} s") from error
    if result.returncode:
        last = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:]
        # The mirror may be an internal host: its address does not belong into a log.
        raise Unavailable(re.sub(r"\w+://\S+", "MIRROR", f"{command[0]}: {' '.join(last)}"))
    return result.stdout
