"""Builds the patched SGLang wheel from the pinned one, and verifies an installed engine against what was built.

Nothing is fuzzy: the wheel must have the pinned hash, every patch must apply exactly, every file that a patch names
must change. The built wheel carries a manifest of what changed, so that a start-up check reads only those files.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.machinery
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_appliance.errors import HostError, PatchError
from ddtree_appliance.patch_series import Patch, PatchSeries, series_sha256

__all__ = [
    "Patch",
    "PatchSeries",
    "VerifyReport",
    "build_wheel",
    "read_pinned_wheel",
    "unpack_wheel",
    "verify_installed",
]

MANIFEST = "sglang/_ddtree_manifest.json"
MANIFEST_FORMAT = 1
CHANGE_NOTICE = "Modified by the DDTree appliance"
# The earliest time a zip can hold; the wheel must not depend on when it was built.
_SOURCE_DATE_EPOCH = "315532800"
_WHEEL_MINIMUM = (0, 48)
_SHA256 = re.compile(r"[0-9a-f]{64}")


# Building


def build_wheel(wheel: Path, series: PatchSeries, out_dir: Path, *, upto: int | None = None) -> Path:
    """Apply the series to the pinned wheel and write the result into `out_dir`; return its path.

    The same inputs give the same bytes. The wheel appears under its final name only when everything has succeeded.
    With `upto=k` only the first k patches are applied, so that tests can prove every prefix; the version stays.

    Raises PatchError: the wheel is not a pinned one or is already patched; a patch does not apply, leaves a file that
    it names unchanged or touches anything outside sglang/; a modified module has no change notice.
    Raises HostError: git or the `wheel` package is missing.
    """
    if upto is not None and not 0 <= upto <= len(series.patches):
        raise ValueError(f"upto={upto} with {len(series.patches)} patches")
    patches = series.patches[:upto]
    _require_tools()
    content = read_pinned_wheel(wheel, series)
    name, base_version, tags = wheel.name.removesuffix(".whl").split("-", 2)
    version = f"{base_version}+{series.local_version}"
    built_name = f"{name}-{version}-{tags}.whl"

    with tempfile.TemporaryDirectory(prefix="ddtree-patching-") as temporary:
        # Resolved, because git compares its ceiling with the physical working directory.
        work = Path(temporary).resolve()
        tree, packed = work / "tree", work / "packed"
        unpack_wheel(content, tree)
        if (tree / MANIFEST).exists():
            raise PatchError(f"{wheel} is already patched: it holds {MANIFEST}", "start from the wheel on PyPI")
        before = _hash_tree(tree)
        for patch in patches:
            _apply(patch, tree)
        files = _changes(before, _hash_tree(tree))
        _check_change_notices(tree, files)
        manifest = {
            "format": MANIFEST_FORMAT,
            "base": {
                "name": name,
                "version": base_version,
                "wheel": wheel.name,
                "sha256": series.wheels[wheel.name],
            },
            "version": version,
            "series_sha256": series_sha256(patches),
            "patches": [{"name": p.name, "sha256": p.sha256, "subject": p.subject} for p in patches],
            "files": files,
        }
        (tree / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        _set_version(tree / f"{name}-{base_version}.dist-info", base_version, version)
        _pack(tree, packed)
        if [path.name for path in packed.iterdir()] != [built_name]:
            raise PatchError(f"packing gave {sorted(path.name for path in packed.iterdir())}, not {built_name}")
        return _publish(packed / built_name, out_dir)


def read_pinned_wheel(wheel: Path, series: PatchSeries) -> bytes:
    """Return the wheel's bytes if its name and hash are pinned; the caller then works on what was checked.

    Raises PatchError naming the expected and the found hash.
    """
    hint = "download it: pip download --no-deps --only-binary :all: sglang==0.5.17"
    try:
        content = wheel.read_bytes()
    except FileNotFoundError:
        raise PatchError(f"wheel {wheel} does not exist", hint) from None
    actual, expected = hashlib.sha256(content).hexdigest(), series.wheels.get(wheel.name)
    if expected is None:
        pinned = "; ".join(f"{name} (sha256 {digest})" for name, digest in sorted(series.wheels.items()))
        raise PatchError(f"{wheel} (sha256 {actual}) is not a pinned wheel; pinned: {pinned}", hint)
    if actual != expected:
        raise PatchError(f"{wheel} has sha256 {actual}, the pinned one is {expected}", hint)
    return content


def unpack_wheel(content: bytes, into: Path) -> None:
    """Unpack a wheel with its executable bits, which zipfile's own extraction drops."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for info in archive.infolist():
            target = Path(archive.extract(info, into))
            if not info.is_dir():
                target.chmod(_plain_mode(info.external_attr >> 16))


def _plain_mode(mode: int) -> int:
    # Two modes only, so that neither the umask nor the upstream packager shows in the built wheel.
    return 0o755 if mode & 0o111 else 0o644


def _require_tools() -> None:
    if shutil.which("git") is None:
        raise HostError("git is missing", "patches are applied with `git apply`; install git")
    needed = ".".join(map(str, _WHEEL_MINIMUM))
    hint = f"{sys.executable} -m pip install 'wheel~={needed}'"
    try:
        found = importlib.metadata.version("wheel")
    except importlib.metadata.PackageNotFoundError:
        raise HostError("the Python package `wheel` is missing", hint) from None
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < _WHEEL_MINIMUM:
        raise HostError(f"the Python package `wheel` is {found}, at least {needed} is needed", hint)


def _run(command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    # Nothing is inherited but PATH: a user's GIT_*, PYTHON* or locale settings must not change the result.
    clean = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", **environment}
    return subprocess.run(
        command, cwd=cwd, env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def _apply(patch: Patch, tree: Path) -> None:
    environment = {
        # Below some other work tree, `git apply` finds that repository, silently skips every file and returns 0.
        "GIT_CEILING_DIRECTORIES": os.fspath(tree.parent),
        # apply.whitespace or core.autocrlf of the user would change what is written.
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
    }
    command = ["git", "apply", "-p1", "--whitespace=nowarn"]
    patch_file = os.fspath(patch.path.resolve())

    # git itself says which files it is about to touch, so that no second parser can disagree with it.
    listing = _run([*command, "--numstat", "-z", patch_file], tree, environment)
    if listing.returncode != 0:
        raise PatchError(f"{patch.name} cannot be read by git: {listing.stderr.strip()}")
    names = [entry.split("\t", 2)[2] for entry in listing.stdout.split("\0") if entry]
    if not names:
        raise PatchError(f"{patch.name} names no file", "a patch must change something")
    if outside := [name for name in names if not name.startswith("sglang/")]:
        raise PatchError(f"{patch.name} touches {outside[0]}, which is outside sglang/")

    before = {name: _hash_file(tree / name) for name in names}
    applied = _run([*command, patch_file], tree, environment)
    if applied.returncode != 0:
        raise PatchError(
            f"{patch.name} does not apply: {applied.stderr.strip()}",
            "refresh the series for this wheel: scripts/refresh-patches --checkout WHEEL",
        )
    if unchanged := [name for name in names if _hash_file(tree / name) == before[name]]:
        raise PatchError(f"{patch.name} was applied but left {', '.join(unchanged)} unchanged")


def _hash_file(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _hash_tree(tree: Path) -> dict[str, str | None]:
    return {path.relative_to(tree).as_posix(): _hash_file(path) for path in tree.rglob("*") if path.is_file()}


def _changes(before: Mapping[str, str | None], after: Mapping[str, str | None]) -> dict[str, dict[str, str | None]]:
    # From the whole tree, not from the patches' own lists: the manifest is complete by construction.
    return {
        name: {"before": before.get(name), "after": after.get(name)}
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    }


def _check_change_notices(tree: Path, files: Mapping[str, Mapping[str, str | None]]) -> None:
    for name, hashes in files.items():
        modified = hashes["before"] is not None and hashes["after"] is not None
        if modified and name.endswith(".py") and CHANGE_NOTICE not in (tree / name).read_text(encoding="utf-8"):
            raise PatchError(
                f"{name} is modified but does not say {CHANGE_NOTICE!r}",
                "Apache-2.0 section 4(b) asks for a notice in every modified file; add it in the patch",
            )


def _set_version(dist_info: Path, old: str, new: str) -> None:
    # Not left to `wheel pack --local-version`, which reflows METADATA and garbles the licence text in its header.
    metadata = dist_info / "METADATA"
    content = metadata.read_bytes()
    changed = content.replace(f"\nVersion: {old}\n".encode(), f"\nVersion: {new}\n".encode(), 1)
    if changed == content:
        raise PatchError(f"{metadata.name} of the wheel does not say `Version: {old}`")
    metadata.write_bytes(changed)
    dist_info.rename(dist_info.with_name(dist_info.name.replace(old, new)))


def _pack(tree: Path, into: Path) -> None:
    for path in tree.rglob("*"):
        if path.is_file():
            path.chmod(_plain_mode(path.stat().st_mode))
    into.mkdir()
    # `wheel pack` names the wheel after its dist-info and writes RECORD anew.
    command = [sys.executable, "-m", "wheel", "pack", "--dest-dir", os.fspath(into), os.fspath(tree)]
    packed = _run(command, into, {"SOURCE_DATE_EPOCH": _SOURCE_DATE_EPOCH})
    if packed.returncode != 0:
        raise PatchError(f"`wheel pack` failed: {packed.stderr.strip()}")


def _publish(built: Path, out_dir: Path) -> Path:
    out_dir.mkdir(parents=True, exist_ok=True)
    target, partial = out_dir / built.name, out_dir / f".{built.name}.partial"
    try:
        shutil.copyfile(built, partial)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target


# Verifying


@dataclass(frozen=True)
class VerifyReport:
    """What was found installed; `problems` is empty exactly if the engine is the one that was built."""

    site: Path
    version: str
    series_sha256: str | None
    patches: tuple[str, ...]
    files_checked: int
    series_compared: bool
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class _Manifest:
    version: str
    series_sha256: str
    patches: tuple[str, ...]
    after: Mapping[str, str | None]


def verify_installed(site: Path | None = None, series: PatchSeries | None = None) -> VerifyReport:
    """Check the installed `sglang` against the manifest that it carries, and against `series` if one is given.

    `site` is the site-packages directory to look in; without it the interpreter's own path is searched. sglang is not
    imported, and only the patched files are read, so that the engine can afford this check at every start.

    Raises HostError: no sglang is installed. Everything else that is wrong is a line in the report's `problems`.
    """
    where = sys.path if site is None else [os.fspath(site)]
    found = list(importlib.metadata.distributions(name="sglang", path=where))
    if not found:
        place = "in this Python environment" if site is None else f"in {site}"
        raise HostError(f"sglang is not installed {place}", "install the wheel that `patches apply` builds")
    installed = found[0]
    root = Path(str(installed.locate_file("")))
    problems = _conflicts(found, root, search=site is None)

    def report(manifest: _Manifest | None) -> VerifyReport:
        digest, patches, files = (
            (manifest.series_sha256, manifest.patches, len(manifest.after)) if manifest else (None, (), 0)
        )
        compared = manifest is not None and series is not None
        return VerifyReport(root, installed.version, digest, patches, files, compared, tuple(problems))

    try:
        manifest = _read_manifest(root / MANIFEST)
    except FileNotFoundError:
        problems.append(f"sglang {installed.version} is installed but not patched ({MANIFEST} is missing)")
        return report(None)
    except PatchError as error:
        problems.append(error.message)
        return report(None)

    problems += _file_problems(root, manifest, _read_record(installed))
    if installed.version != manifest.version:
        problems.append(f"sglang {installed.version} is installed, but its manifest is that of {manifest.version}")
    if series is not None:
        problems += _series_problems(manifest, series)
    return report(manifest)


def _conflicts(found: Sequence[importlib.metadata.Distribution], root: Path, *, search: bool) -> list[str]:
    problems = []
    versions = {dist.version for dist in found if Path(str(dist.locate_file(""))) == root}
    if len(versions) > 1:
        problems.append(f"{root} holds several versions of sglang: {', '.join(sorted(versions))}")
    # A directory earlier on the path could hide the files that are verified here.
    spec = importlib.machinery.PathFinder.find_spec("sglang") if search else None
    if spec is not None and spec.origin is not None and not Path(spec.origin).is_relative_to(root):
        problems.append(f"`import sglang` would load {spec.origin}, not the sglang in {root}")
    return problems


def _read_manifest(path: Path) -> _Manifest:
    try:
        raw: Any = json.loads(path.read_bytes())
        if raw["format"] != MANIFEST_FORMAT:
            raise PatchError(f"{MANIFEST} has format {raw['format']!r}, this version reads {MANIFEST_FORMAT}")
        after = {str(name): hashes["after"] for name, hashes in raw["files"].items()}
        manifest = _Manifest(
            raw["version"], raw["series_sha256"], tuple(str(patch["name"]) for patch in raw["patches"]), after
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PatchError(f"{MANIFEST} cannot be read: {error!r}") from None
    for name, digest in after.items():
        if digest is not None and not (isinstance(digest, str) and _SHA256.fullmatch(digest)):
            raise PatchError(f"{MANIFEST} cannot be read: {digest!r} is no sha256 (for {name})")
    return manifest


def _read_record(installed: importlib.metadata.Distribution) -> dict[str, str]:
    rows = csv.reader((installed.read_text("RECORD") or "").splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 3}


def _record_hash(digest: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(bytes.fromhex(digest)).decode().rstrip("=")


def _file_problems(root: Path, manifest: _Manifest, record: Mapping[str, str]) -> list[str]:
    problems = []
    expected_in_record = dict(manifest.after)
    expected_in_record[MANIFEST] = _hash_file(root / MANIFEST)
    for name, expected in manifest.after.items():
        actual = _hash_file(root / name)
        if actual is None and expected is not None:
            problems.append(f"{name}: missing")
        elif expected is None and actual is not None:
            problems.append(f"{name}: present, but the patches delete it")
        elif actual != expected:
            problems.append(f"{name}: differs from the build (expected sha256 {expected}, found {actual})")
    for name, digest in expected_in_record.items():
        expected_entry = None if digest is None else _record_hash(digest)
        if record.get(name) != expected_entry:
            problems.append(f"{name}: RECORD says {record.get(name)}, expected {expected_entry}")
    return problems


def _series_problems(manifest: _Manifest, series: PatchSeries) -> list[str]:
    problems = []
    if manifest.series_sha256 != series.sha256:
        problems.append(
            f"the installed patches are not those of {series.directory}"
            f" (series sha256 {manifest.series_sha256}, expected {series.sha256})"
        )
    if manifest.version.partition("+")[2] != series.local_version:
        problems.append(f"sglang {manifest.version} is installed, {series.directory} is revision {series.revision}")
    return problems
