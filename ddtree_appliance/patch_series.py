"""The patch series as the project keeps it: order, revision and hashes, checked before anything uses it.

A directory that is not exactly what its `series` and `SHA256SUMS` say is refused; nothing is skipped or repaired.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddtree_appliance.errors import PatchError

_PATCH_NAME = re.compile(r"(\d{4})(-[a-z0-9._]+){2,}\.patch")
_REVISION = re.compile(r"#\s*revision:\s*(.*?)\s*")
_SUM_LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/\s]+)")
# git folds a long subject into continuation lines that begin with a space.
_SUBJECT = re.compile(r"^Subject: \[PATCH[^\]]*\] (.+(?:\n[ \t].+)*)", re.MULTILINE)
_RESTORE = "restore the directory from git, or write it again with scripts/refresh-patches --export"


@dataclass(frozen=True)
class Patch:
    """One patch file; `subject` is its `Subject:` header without the `[PATCH]` mark."""

    name: str
    path: Path
    sha256: str
    subject: str


def series_sha256(patches: Iterable[Patch]) -> str:
    """Identify an ordered run of patches: sha256 over its `name sha256` lines."""
    lines = "".join(f"{patch.name} {patch.sha256}\n" for patch in patches)
    return hashlib.sha256(lines.encode()).hexdigest()


@dataclass(frozen=True)
class PatchSeries:
    """The patches in order, the revision they make, and the wheels (file name -> sha256) they are made for."""

    directory: Path
    revision: int
    patches: tuple[Patch, ...]
    wheels: Mapping[str, str]

    @property
    def sha256(self) -> str:
        return series_sha256(self.patches)

    @property
    def local_version(self) -> str:
        """What follows the `+` in the version of a wheel built with this series."""
        return f"ddtree.{self.revision}"

    @classmethod
    def load(cls, directory: Path) -> PatchSeries:
        """Read and check a series directory.

        The check is complete because the series decides what code the engine runs: a patch that is in only one of
        directory, `series` and `SHA256SUMS` is a mistake, whichever of the three is right. An empty series is valid.

        Raises PatchError: `series` or `SHA256SUMS` missing or malformed, no revision, a name that is not
        NNNN-verb-object.patch, a gap in the numbers, a patch missing, unlisted, without a subject or with another hash.
        """
        series_file, sums_file = directory / "series", directory / "SHA256SUMS"
        lines = _read_lines(series_file)
        revision = _parse_revision(lines, series_file)
        names = [stripped for line in lines if (stripped := line.partition("#")[0].strip())]
        _check_names(names, series_file)
        sums = _parse_sums(_read_lines(sums_file), sums_file)

        present = {path.name for path in directory.glob("*.patch")}
        if missing := [name for name in names if name not in present]:
            raise PatchError(f"{series_file} names {missing[0]}, which is not in the directory", _RESTORE)
        if unlisted := sorted(present.difference(names)):
            raise PatchError(f"{directory / unlisted[0]} is not listed in {series_file}", _RESTORE)

        wheels = {name: digest for name, digest in sums.items() if name.endswith(".whl")}
        if not wheels:
            raise PatchError(f"{sums_file} pins no wheel", _RESTORE)
        if unknown := [name for name in sums if name not in wheels and name not in names]:
            raise PatchError(f"{sums_file} has a line for {unknown[0]}, which is not in {series_file}", _RESTORE)
        return cls(directory, revision, tuple(_load_patch(directory / name, sums) for name in names), wheels)


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise PatchError(f"{path} does not exist", "name a patch series directory with --patches") from None


def _parse_revision(lines: list[str], source: Path) -> int:
    values = [match[1] for line in lines if (match := _REVISION.fullmatch(line))]
    if len(values) != 1:
        found = f"has {len(values)} `# revision: N` lines" if values else "has no `# revision: N` line"
        raise PatchError(f"{source} {found}", "give the series exactly one; it names the built version")
    if not re.fullmatch(r"[1-9][0-9]*", values[0]):
        raise PatchError(f"{source}: revision {values[0]!r} is not a positive whole number")
    return int(values[0])


def _check_names(names: list[str], source: Path) -> None:
    for number, name in enumerate(names, start=1):
        match = _PATCH_NAME.fullmatch(name)
        if match is None:
            raise PatchError(f"{source}: {name!r} is not of the form NNNN-verb-object.patch", "use lower case")
        if int(match[1]) != number:
            raise PatchError(f"{source}: {name} stands where number {number:04d} is due", "number without gaps")


def _parse_sums(lines: list[str], source: Path) -> dict[str, str]:
    sums: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        match = _SUM_LINE.fullmatch(line)
        if match is None:
            raise PatchError(f"{source}:{number}: not a line of sha256sum: {line!r}", _RESTORE)
        if match[2] in sums:
            raise PatchError(f"{source}:{number}: a second line for {match[2]}", _RESTORE)
        sums[match[2]] = match[1]
    return sums


def _load_patch(path: Path, sums: Mapping[str, str]) -> Patch:
    data = path.read_bytes()
    actual, expected = hashlib.sha256(data).hexdigest(), sums.get(path.name)
    if expected is None:
        raise PatchError(f"SHA256SUMS has no line for {path}", _RESTORE)
    if actual != expected:
        raise PatchError(f"{path} has sha256 {actual}, SHA256SUMS says {expected}", _RESTORE)
    subject = _SUBJECT.search(data.decode("utf-8", errors="replace"))
    if subject is None:
        raise PatchError(f"{path} has no `Subject: [PATCH] ...` header", "make patches with git format-patch")
    return Patch(path.name, path, actual, " ".join(subject[1].split()))
