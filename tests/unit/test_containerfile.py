"""Mistakes in the Containerfile and scripts/build-image that a build would not show, or only after 10 GB."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8")
BUILD_IMAGE = ROOT / "scripts" / "build-image"


@dataclass
class Stage:
    base: str
    name: str
    lines: list[tuple[str, str]] = field(default_factory=list)

    def of(self, keyword: str) -> list[str]:
        return [rest for found, rest in self.lines if found == keyword]

    def args(self) -> set[str]:
        return {rest.partition("=")[0] for rest in self.of("ARG")}


def _instructions() -> list[tuple[str, str]]:
    joined = re.sub(r"\\\n(?:\s*#.*\n)*\s*", " ", TEXT)
    lines = [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def _stages() -> tuple[set[str], list[Stage]]:
    """The ARGs before the first FROM, and the stages."""
    before: set[str] = set()
    stages: list[Stage] = []
    for keyword, rest in _instructions():
        if keyword == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(base, name))
        elif stages:
            stages[-1].lines.append((keyword, rest))
        else:
            assert keyword == "ARG"
            before.add(rest.partition("=")[0])
    return before, stages


GLOBAL_ARGS, STAGES = _stages()
LAST = STAGES[-1]
ENV = dict(re.findall(r"(\w+)=(\S+)", " ".join(LAST.of("ENV"))))


def test_every_base_is_the_argument_or_an_earlier_stage() -> None:
    for number, stage in enumerate(STAGES):
        assert stage.base == "${BASE_IMAGE}" or stage.base in {earlier.name for earlier in STAGES[:number]}
    # A host name would bypass the builder's own registry settings; `latest` would change what is built.
    assert re.search(r"^ARG BASE_IMAGE=[a-z]+:(?!latest)[a-z0-9.-]+$", TEXT, re.MULTILINE)


def test_the_runtime_is_not_made_from_a_stage_that_holds_the_tools() -> None:
    parents = {stage.name: stage.base for stage in STAGES}
    chain = [LAST.name]
    while chain[-1] in parents:
        chain.append(parents[chain[-1]])
    assert chain == ["runtime", "deps", "system", "${BASE_IMAGE}"]
    # Tools and wheels are mounted; a copy of them would stay.
    assert not [rest for rest in LAST.of("COPY") if "/opt/" in rest or "/wheels" in rest]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_arguments_are_declared_where_they_are_used_and_used_where_declared(stage: Stage) -> None:
    # An ARG of another stage, or one before the first FROM, is silently empty here.
    text = "\n".join(rest for keyword, rest in stage.lines if keyword != "ARG")
    used = {name for name in re.findall(r"\$\{([A-Z_0-9]+)\}", text)}
    assert used == stage.args() - {"SOURCE_DATE_EPOCH"}  # read by scripts/write-sbom from its environment


def test_runs_as_a_numeric_user_who_owns_the_cache() -> None:
    (user,) = LAST.of("USER")
    uid, gid = user.split(":")
    assert uid.isdigit() and int(uid) != 0
    created = " ".join(LAST.of("RUN"))
    assert f"'ddtree:x:{uid}:{gid}::/var/cache/ddtree:" in created
    assert f"--owner={uid} --group={gid}" in created
    keywords = [keyword for keyword, _ in LAST.lines]
    assert "RUN" not in keywords[keywords.index("USER") :]


def test_pid_1_is_an_init_that_passes_sigterm_on_to_the_command() -> None:
    # The shell form would put sh between them, which passes no signal on.
    assert [json.loads(rest) for rest in LAST.of("ENTRYPOINT")] == [["/usr/bin/tini", "--", "ddtree-appliance"]]
    (system,) = (stage for stage in STAGES if stage.name == "system")
    assert re.search(r"apt-get install .*\btini\b", " ".join(system.of("RUN")))
    assert [json.loads(rest) for rest in LAST.of("CMD")] == [["--help"]]
    assert LAST.of("STOPSIGNAL") == ["SIGTERM"]


def test_every_cache_is_below_the_one_that_is_mounted() -> None:
    caches = {name: path for name, path in ENV.items() if re.search(r"CACHE|HOME|WORKSPACE", name)}
    assert {
        path for name, path in caches.items() if name != "CUDA_HOME" and not path.startswith("/var/cache/ddtree")
    } == set()
    assert caches.keys() >= {"HOME", "XDG_CACHE_HOME", "HF_HOME", "SGLANG_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"}


def test_bytecode_is_written_at_build_and_valid_whatever_the_times() -> None:
    # A pinned build timestamp changes the sources' times, and nobody can write bytecode to a read-only root.
    assert "PYTHONDONTWRITEBYTECODE" not in TEXT
    for stage in STAGES[STAGES.index(next(s for s in STAGES if s.name == "deps")) :]:
        for run in stage.of("RUN"):
            if re.search(r"\buv pip install\b", run):
                assert "--compile-bytecode" in run and "PYC_INVALIDATION_MODE=UNCHECKED_HASH" in run
            elif re.search(r"\bpip\b.* install\b", run):
                assert "--no-compile" in run and "compileall -q" in run and "unchecked-hash" in run


def test_every_run_has_a_comment_that_says_why() -> None:
    lines = TEXT.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("RUN "):
            above = number - 1
            while not lines[above].startswith(("#", "COPY", "RUN", "FROM", " ")):
                above -= 1
            assert lines[above].startswith("#"), f"Containerfile:{number + 1}"


def test_downloads_are_checked_by_hash_or_by_the_patcher() -> None:
    for stage in STAGES:
        for run in stage.of("RUN"):
            if re.search(r"\bpip\b.* install\b", run):
                assert "--require-hashes" in run or "--no-index" in run


def _ignored(path: str) -> bool:
    rules = [line for line in (ROOT / ".containerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    parents = [path, *(str(parent) for parent in Path(path).parents)]
    return not any(fnmatch.fnmatch(parent, rule[1:]) for rule in rules if rule.startswith("!") for parent in parents)


def test_what_is_copied_exists_and_is_in_the_build_context() -> None:
    for stage in STAGES:
        for rest in stage.of("COPY"):
            if rest.startswith("--from="):
                continue
            for source in rest.split()[:-1]:
                for value in ("cu130", "rehearsal"):
                    path = source.replace("${LOCK}", value).replace("${SGLANG_VERSION}", "0.5.17")
                    assert (ROOT / path).exists(), path
                    assert not _ignored(path), path


def test_the_patcher_runs_with_nothing_but_what_its_stage_copies(tmp_path: Path) -> None:
    (stage,) = [stage for stage in STAGES if stage.name == "engine-wheel"]
    (copied,) = [rest.split()[:-1] for rest in stage.of("COPY") if rest.startswith("ddtree_appliance/")]
    for source in copied:
        (tmp_path / source).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / source, tmp_path / source)
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); "
        "from ddtree_appliance import patching; print(len(patching.PatchSeries.load(Path(sys.argv[2])).patches))"
    )
    # Isolated: neither this checkout nor its environment's own copy of the package may help out.
    command = [sys.executable, "-I", "-S", "-c", code, str(tmp_path), str(ROOT / "patches" / "sglang-0.5.17")]
    assert int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) > 0


def test_the_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    (stage,) = [stage for stage in STAGES if stage.name == "appliance-wheel"]
    for rest in stage.of("COPY"):
        *sources, target = rest.split()
        for source in sources:
            into = tmp_path / target.removeprefix("/build").strip("/")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, into, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, into)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([*command, "--wheel-dir", str(tmp_path / "out"), str(tmp_path)], check=True, env=environment)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("ddtree_appliance/")}
    walked = os.walk(tmp_path / "ddtree_appliance", followlinks=True)
    files = {os.path.relpath(os.path.join(folder, name), tmp_path) for folder, _, names in walked for name in names}
    assert files - packed == set()


# scripts/build-image, with a podman that writes down its arguments

FAKE_PODMAN = """#!/bin/sh
case "$1 $2" in
    'image exists') exit 0 ;;
    'image inspect') echo sha256:base ;;
    *) printf '%s\\n' "$@" > "$PODMAN_ARGUMENTS" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A committed repository with what the script reads, and a fake podman on its PATH."""
    repository = tmp_path / "repository"
    for source in ("Containerfile", "scripts/build-image", "ddtree_appliance/__init__.py"):
        (repository / source).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, repository / source)
    shutil.copytree(ROOT / "patches", repository / "patches")
    for command in (["init"], ["add", "--all"], ["commit", "--message", "x"]):
        _git(repository, *command)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "podman").write_text(FAKE_PODMAN)
    (tmp_path / "bin" / "podman").chmod(0o755)
    return repository


def _git(repository: Path, *arguments: str, date: str = "2026-01-01T00:00:00Z") -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@localhost.invalid"]
    command = ["git", "-C", str(repository), *identity, *arguments]
    environment = {**os.environ, "GIT_COMMITTER_DATE": date}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()


def _build(checkout: Path, *options: str) -> list[str]:
    arguments = checkout.parent / "arguments"
    environment = {
        **os.environ,
        "PATH": f"{checkout.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PODMAN_ARGUMENTS": str(arguments),
        "SSL_CERT_FILE": str(checkout / "Containerfile"),
    }
    subprocess.run([checkout / "scripts" / "build-image", *options], check=True, env=environment)
    return arguments.read_text().splitlines()


def test_build_image_gives_every_argument_that_has_no_value_of_its_own(checkout: Path) -> None:
    given = dict(line.split("=", 1) for line in _build(checkout) if re.match(r"[A-Z_0-9]+=", line))
    unknown = set(re.findall(r"^ARG ([A-Z_0-9]+)(?:=unknown)?$", TEXT, re.MULTILINE))
    assert given.keys() == unknown | GLOBAL_ARGS
    assert "" not in given.values()
    assert given["BASE_DIGEST"] == "sha256:base"
    assert given["REVISION"] == _git(checkout, "rev-parse", "HEAD")


def test_build_image_computes_the_labels_of_the_series_as_the_patcher_does(checkout: Path) -> None:
    from ddtree_appliance.patch_series import PatchSeries

    series = PatchSeries.load(checkout / "patches" / "sglang-0.5.17")
    arguments = _build(checkout, "--rehearsal")
    assert f"PATCHSET_SHA256={series.sha256}" in arguments
    assert f"ENGINE_VERSION=0.5.17+{series.local_version}" in arguments


def test_a_dirty_tree_is_not_labelled_as_its_revision(checkout: Path) -> None:
    (checkout / "patches" / "stray").write_text("x")
    assert f"REVISION={_git(checkout, 'rev-parse', 'HEAD')}-dirty" in _build(checkout)


def test_options_choose_lock_tags_and_base_and_the_rest_goes_to_podman(checkout: Path) -> None:
    full = _build(checkout, "--base", "debian@sha256:00", "--network=host")
    assert {"LOCK=cu130", "BASE_IMAGE=debian@sha256:00", "--network=host"} <= set(full)
    assert {line for line in full if line.startswith("--tag=")} == {
        "--tag=localhost/ddtree-sglang:0.1.0",
        "--tag=localhost/ddtree-sglang:latest",
    }
    assert f"id=ca,src={checkout / 'Containerfile'}" in full
    rehearsal = _build(checkout, "--rehearsal")
    assert "LOCK=rehearsal" in rehearsal and "--tag=localhost/ddtree-sglang:rehearsal" in rehearsal
    assert [line for line in _build(checkout, "--tag", "a:b") if line.startswith("--tag=")] == ["--tag=a:b"]


def _epoch(checkout: Path) -> str:
    arguments = _build(checkout)
    epoch = arguments[arguments.index("--timestamp") + 1]
    assert f"SOURCE_DATE_EPOCH={epoch}" in arguments
    return epoch


@pytest.mark.parametrize(
    ("changed", "kept"), [("ddtree_appliance/__init__.py", True), ("patches/sglang-0.5.17/README.md", False)]
)
def test_a_change_of_the_appliance_alone_keeps_the_times_of_the_stack(checkout: Path, changed: str, kept: bool) -> None:
    before = _epoch(checkout)
    with (checkout / changed).open("a") as file:
        file.write("\n")
    _git(checkout, "commit", "--all", "--message", "y", date="2030-01-01T00:00:00Z")
    assert (_epoch(checkout) == before) is kept


def test_a_missing_podman_is_named_with_what_to_do(tmp_path: Path) -> None:
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    result = subprocess.run([BUILD_IMAGE], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert result.returncode == 3
    assert re.fullmatch(r"error: podman is missing\nhint: .+\n", result.stderr)
