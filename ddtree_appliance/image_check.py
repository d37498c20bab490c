"""The image's last build step: refuses an image whose parts do not belong together.

Everything is read from files (metadata, lock, ELF tables), so it needs neither a GPU nor libcuda nor an import of
torch. All problems are reported at once; any problem fails the build.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from ddtree_appliance.errors import EXIT_FAILED, EXIT_OK, ApplianceError
from ddtree_appliance.patch_series import PatchSeries
from ddtree_appliance.patching import VerifyReport, verify_installed

CUDA = "13.0"
SHARE = Path("/usr/share/ddtree")
UNKNOWN = "unknown"
# Installed by the Containerfile itself, after the lock.
_BESIDE_THE_LOCK = frozenset({"sglang", "ddtree-appliance"})
# The driver's libraries come from the host, when the container starts.
_FROM_THE_HOST = frozenset({"libcuda.so.1", "libnvidia-ml.so.1"})
_SYSTEM_LIBRARIES = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64")
_RELOCK = "pin the set that SGLang requires in config/locks/*.in, run scripts/lock, build again"
_REBUILD = "build again from the lock: scripts/build-image --no-cache"
# Functions, objects, vtables and typeinfo in torch's own namespaces, as the Itanium C++ ABI mangles them.
_TORCH_SYMBOL = re.compile(r"_Z(?:T[VTIS])?N[rVK]*[RO]?(?:3c10|4c10d|2at|5torch|6caffe2)")
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", re.MULTILINE)


@dataclass(frozen=True)
class Problem:
    """What is wrong, where it was read, and what to do about it."""

    what: str
    where: str
    hint: str


def normalize(name: str) -> str:
    """A distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_lock(text: str) -> dict[str, str]:
    """The pins of a lock file: normalized name -> version."""
    return {normalize(name): version for name, version in _PIN.findall(text)}


def compare_with_lock(
    locked: Mapping[str, str], installed: Iterable[tuple[str, str]], beside: Set[str] = _BESIDE_THE_LOCK
) -> list[Problem]:
    """Every way in which `installed` (name, version) is not exactly the lock's distributions and those `beside` it."""
    found: dict[str, list[str]] = {}
    for name, version in installed:
        found.setdefault(normalize(name), []).append(version)
    problems = []
    for name in sorted(locked.keys() | found.keys() | beside):
        versions, pin = found.get(name, []), locked.get(name)
        if not versions:
            what = f"{name} {pin or ''}".strip() + " is not installed"
        elif len(versions) > 1:
            what = f"{name} is installed {len(versions)} times: {', '.join(sorted(versions))}"
        elif pin is None and name not in beside:
            what = f"{name} {versions[0]} is installed, but the lock does not name it"
        elif pin is not None and versions[0] != pin:
            what = f"{name} {versions[0]} is installed, the lock says {pin}"
        else:
            continue
        problems.append(Problem(what, "the installed distributions", _REBUILD))
    return problems


def check_torch(version_py: str, where: str) -> list[Problem]:
    """Whether torch's generated version.py is that of the CUDA 13.0 build."""
    match = re.search(r"^cuda\b[^=]*=\s*(?:'([^']*)'|None)", version_py, re.MULTILINE)
    built_for = match[1] if match else None
    if built_for == CUDA:
        return []
    what = f"torch is built for {f'CUDA {built_for}' if built_for else 'no CUDA'}, not for CUDA {CUDA}"
    return [Problem(what, where, _RELOCK)]


def check_flashinfer(locked: Mapping[str, str], installed: Iterable[tuple[str, str]]) -> list[Problem]:
    """Whether all of FlashInfer's distributions are the one version that the lock has (a `+cuNNN` suffix aside)."""
    expected = locked.get("flashinfer-python")
    versions = {normalize(name): version for name, version in installed if normalize(name).startswith("flashinfer-")}
    return [
        Problem(
            f"{name} is {version}, the lock's flashinfer-python is {expected or 'not there'}",
            "the installed distributions",
            "FlashInfer's packages are one pin; mixing them makes kernels read wrong memory. " + _RELOCK,
        )
        for name, version in sorted(versions.items())
        if version.partition("+")[0] != expected
    ]


def check_needed(library: str, needed: Iterable[str], present: Set[str]) -> list[Problem]:
    """Whether every library (DT_NEEDED) that `library` asks for is among the names `present` in the image."""
    problems = []
    for name in needed:
        if name in present or name in _FROM_THE_HOST:
            continue
        stem = name.partition(".so")[0] + ".so"
        instead = sorted(other for other in present if other.startswith(stem)) or ["nothing like it"]
        what = f"{Path(library).name} needs {name}; the image has {', '.join(instead)}"
        problems.append(Problem(what, library, _RELOCK))
    return problems


def check_symbols(library: str, undefined: Set[str], defined: Set[str]) -> list[Problem]:
    """Whether torch defines every symbol of its own namespaces that `library` leaves undefined."""
    missing = sorted(symbol for symbol in undefined - defined if _TORCH_SYMBOL.match(symbol))
    if not missing:
        return []
    shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
    count = f"{len(missing)} of its symbols are in none of torch's libraries"
    what = f"{Path(library).name} is built for another torch: {count} ({shown})"
    return [Problem(what, library, _RELOCK)]


def check_patches(report: VerifyReport, engine: str = UNKNOWN, patchset: str = UNKNOWN) -> list[Problem]:
    """The patch verification's problems, and labels (unless "unknown") that do not describe what is installed."""
    where = str(report.site / "sglang")
    problems = [Problem(problem, where, _REBUILD) for problem in report.problems]
    for label, expected, actual in (
        ("io.ddtree.sglang.version", engine, report.version),
        ("io.ddtree.patchset.sha256", patchset, report.series_sha256),
    ):
        if expected not in (UNKNOWN, actual):
            what = f"the label {label} would say {expected}, installed is {actual}"
            problems.append(Problem(what, where, "build with scripts/build-image, which computes the labels"))
    return problems


# ELF tables, by binutils, which the compiler brings into the image anyway


def _lines(*command: str) -> list[str]:
    environment = {"PATH": "/usr/bin", "LC_ALL": "C"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode != 0:
        raise ApplianceError(f"{' '.join(command)}: {result.stderr.strip()}", "is the file an ELF library?")
    return result.stdout.splitlines()


def read_needed(library: Path) -> list[str]:
    """The names of the libraries that the dynamic loader is asked to load with `library`."""
    lines = _lines("readelf", "--wide", "--dynamic", str(library))
    return [match[1] for line in lines if (match := re.search(r"\(NEEDED\).*\[(.*)\]", line))]


def _dynamic_symbols(library: Path, which: str) -> list[tuple[str, str]]:
    fields = (line.split() for line in _lines("nm", "--dynamic", which, str(library)))
    return [(line[-2], line[-1].partition("@")[0]) for line in fields if len(line) >= 2]


def read_undefined(library: Path) -> set[str]:
    """The dynamic symbols that must come from elsewhere; weak ones may stay undefined and are left out."""
    return {name for kind, name in _dynamic_symbols(library, "--undefined-only") if kind == "U"}


def read_defined(libraries: Iterable[Path]) -> set[str]:
    """The dynamic symbols that `libraries` export."""
    return {name for library in libraries for _, name in _dynamic_symbols(library, "--defined-only")}


def check_kernels(site: Path) -> list[Problem]:
    """Whether every library of the kernel wheel in `site` fits the torch and CUDA libraries beside it."""
    kernels = sorted((site / "sgl_kernel").rglob("*.so"))
    if not any(library.name.startswith("common_ops") for library in kernels):
        return [Problem("the kernel wheel has no common_ops library", str(site / "sgl_kernel"), _REBUILD)]
    torch = sorted((site / "torch" / "lib").glob("*.so*"))
    folders = [site / "torch" / "lib", *site.glob("nvidia/*/lib"), *map(Path, _SYSTEM_LIBRARIES)]
    # exists() follows links: a link to a library that is not there is none.
    present = {path.name for folder in folders if folder.is_dir() for path in folder.iterdir() if path.exists()}
    defined = read_defined(torch)
    problems = []
    for library in kernels:
        problems += check_needed(str(library), read_needed(library), present)
        problems += check_symbols(str(library), read_undefined(library), defined)
    return problems


def check_image(site: Path, share: Path, lock: str, engine: str = UNKNOWN, patchset: str = UNKNOWN) -> list[Problem]:
    """All problems of the environment `site` against the lock and the patches that the image holds in `share`."""
    locked = parse_lock((share / "locks" / f"{lock}.txt").read_text(encoding="utf-8"))
    installed = [(dist.metadata["Name"], dist.version) for dist in importlib.metadata.distributions(path=[str(site)])]
    version_py = site / "torch" / "version.py"
    problems = compare_with_lock(locked, installed)
    problems += check_torch(version_py.read_text(encoding="utf-8"), str(version_py))
    problems += check_flashinfer(locked, installed)
    # The rehearsal has stand-ins for the kernels, and no lock entry.
    if "sglang-kernel" in locked:
        problems += check_kernels(site)
    folders = sorted((share / "patches").iterdir())
    if not folders:
        problems.append(Problem("the image holds no patch series", str(share / "patches"), _REBUILD))
    for folder in folders:
        problems += check_patches(verify_installed(site, PatchSeries.load(folder)), engine, patchset)
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    """Check the environment that this Python belongs to; print what is wrong; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ddtree_appliance.image_check", description=__doc__)
    parser.add_argument("--lock", required=True, metavar="NAME", help="the lock that was installed, e.g. cu130")
    parser.add_argument("--engine", default=UNKNOWN, metavar="VERSION", help="what the label of the engine will say")
    parser.add_argument("--patchset", default=UNKNOWN, metavar="SHA256", help="what the label of the patches will say")
    args = parser.parse_args(argv)
    site = Path(sysconfig.get_path("purelib"))
    try:
        problems = check_image(site, SHARE, args.lock, args.engine, args.patchset)
    except (ApplianceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    for problem in problems:
        print(f"error: {problem.what} ({problem.where})\nhint: {problem.hint}", file=sys.stderr)
    print(f"image check of {site} against lock {args.lock}: {len(problems)} problems", file=sys.stderr)
    return EXIT_FAILED if problems else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
