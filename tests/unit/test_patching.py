"""Patching proved on a synthetic wheel and series, small enough to build in milliseconds."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ddtree_appliance import cli
from ddtree_appliance.commands import patches as patches_command
from ddtree_appliance.errors import HostError, PatchError
from ddtree_appliance.patch_series import PatchSeries
from ddtree_appliance.patching import MANIFEST, build_wheel, verify_installed

WHEEL = "sglang-0.5.17-cp311-cp311-manylinux_2_34_x86_64.whl"
BUILT = "sglang-0.5.17+ddtree.3-cp311-cp311-manylinux_2_34_x86_64.whl"
FILES = {
    "sglang/__init__.py": "",
    "sglang/core.py": "STEPS = 1\nNAME = 'chain'\n",
    "sglang/tool.sh": "#!/bin/sh\n",
    "sglang-0.5.17.dist-info/METADATA": (
        "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.17\n"
        "License:    Apache\n        \n          1. A folded licence.\n\nAbout.\n"
    ),
    "sglang-0.5.17.dist-info/WHEEL": (
        "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: cp311-cp311-manylinux_2_34_x86_64\n"
    ),
}

HEADER = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: DDTree appliance <ddtree-appliance@localhost.invalid>
Date: Thu, 1 Jan 2026 00:00:00 +0000
Subject: [PATCH] {subject}

---
"""
NAME_TREE = (
    "0001-name-tree.patch",
    HEADER.format(subject="Name the tree in a subject so long\n that git folds it")
    + """\
diff --git a/sglang/core.py b/sglang/core.py
--- a/sglang/core.py
+++ b/sglang/core.py
@@ -1,2 +1,3 @@
+# Modified by the DDTree appliance: NAME.
 STEPS = 1
-NAME = 'chain'
+NAME = 'tree'
""",
)
ADD_TREE = (
    "0002-add-tree.patch",
    HEADER.format(subject="Add a module")
    + """\
diff --git a/sglang/tree.py b/sglang/tree.py
new file mode 100644
--- /dev/null
+++ b/sglang/tree.py
@@ -0,0 +1 @@
+BUDGET = 64
""",
)
USE_TREE = (
    "0003-use-tree.patch",
    HEADER.format(subject="Use the module")
    + """\
diff --git a/sglang/core.py b/sglang/core.py
--- a/sglang/core.py
+++ b/sglang/core.py
@@ -1,3 +1,4 @@
 # Modified by the DDTree appliance: NAME.
-STEPS = 1
+from sglang.tree import BUDGET
+STEPS = BUDGET
 NAME = 'tree'
""",
)
# Written for another release: its context is not in our tree.
STALE = (
    "0002-change-steps.patch",
    HEADER.format(subject="Change what is not there")
    + """\
diff --git a/sglang/core.py b/sglang/core.py
--- a/sglang/core.py
+++ b/sglang/core.py
@@ -1,2 +1,2 @@
-STEPS = 5
+STEPS = 6
 NAME = 'tree'
""",
)
NO_NOTICE = (
    "0001-name-tree.patch",
    NAME_TREE[1].replace("+# Modified by the DDTree appliance: NAME.\n", "").replace("+1,3", "+1,2"),
)
OUTSIDE = ("0001-add-setup.patch", ADD_TREE[1].replace("sglang/tree.py", "setup.py"))
# Applies, but the content stays: what a silently skipped file looks like.
MODE_ONLY = (
    "0001-change-mode.patch",
    HEADER.format(subject="Change a mode")
    + "diff --git a/sglang/core.py b/sglang/core.py\nold mode 100644\nnew mode 100755\n",
)
NO_DIFF = ("0001-change-nothing.patch", HEADER.format(subject="Change nothing"))

ALL = (NAME_TREE, ADD_TREE, USE_TREE)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(path: Path, files: dict[str, str] = FILES) -> Path:
    record = "sglang-0.5.17.dist-info/RECORD"
    with zipfile.ZipFile(path, "w") as archive:
        rows = []
        for name, text in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o100755 if name.endswith(".sh") else 0o100644) << 16
            archive.writestr(info, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
            rows.append(f"{name},sha256={digest},{len(text)}\n")
        archive.writestr(record, "".join([*rows, f"{record},,\n"]))
    return path


def make_series(directory: Path, wheel: Path, *patches: tuple[str, str]) -> Path:
    directory.mkdir(exist_ok=True)
    sums = [f"{sha256(wheel.read_bytes())}  {wheel.name}\n"]
    for name, text in patches:
        (directory / name).write_text(text)
        sums.append(f"{sha256(text.encode())}  {name}\n")
    (directory / "SHA256SUMS").write_text("".join(sums))
    (directory / "series").write_text("".join(["# A series.\n# revision: 3\n", *(f"{name}\n" for name, _ in patches)]))
    return directory


def install(wheel: Path, site: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(tmp_path / WHEEL)


@pytest.fixture
def series_dir(tmp_path: Path, wheel: Path) -> Path:
    return make_series(tmp_path / "patches", wheel, *ALL)


@pytest.fixture
def site(tmp_path: Path, wheel: Path, series_dir: Path) -> Path:
    """A site-packages directory with the fully patched engine."""
    return install(build_wheel(wheel, PatchSeries.load(series_dir), tmp_path / "out"), tmp_path / "site")


# The series


def test_series_keeps_order_revision_and_unfolded_subjects(series_dir: Path) -> None:
    series = PatchSeries.load(series_dir)
    assert series.revision == 3
    assert [patch.name for patch in series.patches] == [name for name, _ in ALL]
    assert series.patches[0].subject == "Name the tree in a subject so long that git folds it"
    lines = "".join(f"{name} {sha256(text.encode())}\n" for name, text in ALL)
    assert series.sha256 == sha256(lines.encode())


def test_empty_series_is_accepted(tmp_path: Path, wheel: Path) -> None:
    assert PatchSeries.load(make_series(tmp_path / "patches", wheel)).patches == ()


def test_series_of_this_project_loads_and_pins_both_wheels() -> None:
    series = PatchSeries.load(Path(__file__).parents[2] / "patches" / "sglang-0.5.17")
    tags = [name.removeprefix("sglang-0.5.17-") for name in sorted(series.wheels)]
    assert tags == ["cp311-cp311-manylinux_2_34_x86_64.whl", "cp312-cp312-manylinux_2_34_x86_64.whl"]


def replace_in(name: str, old: str, new: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        text = (directory / name).read_text()
        assert old in text
        (directory / name).write_text(text.replace(old, new))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "series").unlink(), r"series does not exist"),
        (lambda d: (d / "SHA256SUMS").unlink(), r"SHA256SUMS does not exist"),
        (lambda d: (d / "0002-add-tree.patch").unlink(), r"series names 0002-add-tree\.patch, which is not in the"),
        (lambda d: (d / "0004-x-y.patch").write_text(""), r"0004-x-y\.patch is not listed in .*series"),
        (replace_in("0002-add-tree.patch", "64", "65"), r"0002-add-tree\.patch has sha256 \w{64}, SHA256SUMS says"),
        (replace_in("0003-use-tree.patch", "[PATCH]", "[RFC]"), r"0003-use-tree\.patch has sha256"),
        (replace_in("series", "0002-add-tree.patch\n", ""), r"0003-use-tree\.patch stands where number 0002 is due"),
        (replace_in("series", "0001-name", "001-name"), r"'001-name-tree\.patch' is not of the form NNNN-verb-object"),
        (replace_in("series", "0001-name-tree", "0001-Name-tree"), r"is not of the form NNNN-verb-object"),
        (replace_in("series", "# revision: 3\n", ""), r"series has no `# revision: N` line"),
        (replace_in("series", "revision: 3", "revision: three"), r"revision 'three' is not a positive whole number"),
        (replace_in("series", "revision: 3", "revision: 0"), r"revision '0' is not a positive whole number"),
        (replace_in("series", "# A series.", "# revision: 2"), r"series has 2 `# revision: N` lines"),
        (replace_in("SHA256SUMS", "  0001", "   0001"), r"SHA256SUMS:2: not a line of sha256sum"),
        (replace_in("SHA256SUMS", "0001-name", "0009-name"), r"SHA256SUMS has a line for 0009-name-tree\.patch"),
        (replace_in("SHA256SUMS", "0002-add", "0001-name"), r"SHA256SUMS:3: a second line for 0001-name-tree\.patch"),
        (replace_in("SHA256SUMS", ".whl", ".tar"), r"SHA256SUMS pins no wheel"),
    ],
)
def test_damaged_series_is_refused_by_name(series_dir: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(series_dir)
    with pytest.raises(PatchError, match=message):
        PatchSeries.load(series_dir)


def test_patch_without_subject_is_refused(tmp_path: Path, wheel: Path) -> None:
    bare = (ADD_TREE[0].replace("0002", "0001"), ADD_TREE[1].partition("---\n")[2])
    with pytest.raises(PatchError, match=r"0001-add-tree\.patch has no `Subject: "):
        PatchSeries.load(make_series(tmp_path / "patches", wheel, bare))


# Building


def test_built_wheel_verifies_clean_and_says_what_changed(series_dir: Path, wheel: Path, site: Path) -> None:
    series = PatchSeries.load(series_dir)
    report = verify_installed(site, series)
    assert report.problems == ()
    assert (report.version, report.files_checked, report.series_compared) == ("0.5.17+ddtree.3", 2, True)

    manifest = json.loads((site / MANIFEST).read_text())
    after = {name: sha256((site / name).read_bytes()) for name in ("sglang/core.py", "sglang/tree.py")}
    assert manifest["files"] == {
        "sglang/core.py": {"before": sha256(FILES["sglang/core.py"].encode()), "after": after["sglang/core.py"]},
        "sglang/tree.py": {"before": None, "after": after["sglang/tree.py"]},
    }
    base = {"name": "sglang", "version": "0.5.17", "wheel": WHEEL, "sha256": sha256(wheel.read_bytes())}
    assert manifest["base"] == base
    assert manifest["series_sha256"] == series.sha256
    assert [patch["subject"] for patch in manifest["patches"]] == [patch.subject for patch in series.patches]


def test_built_wheel_has_its_own_version_and_keeps_executable_bits(
    tmp_path: Path, wheel: Path, series_dir: Path
) -> None:
    built = build_wheel(wheel, PatchSeries.load(series_dir), tmp_path / "out")
    assert built == tmp_path / "out" / BUILT
    with zipfile.ZipFile(built) as archive:
        modes = {info.filename: info.external_attr >> 16 & 0o777 for info in archive.infolist()}
        metadata = archive.read("sglang-0.5.17+ddtree.3.dist-info/METADATA").decode()
    pristine = FILES["sglang-0.5.17.dist-info/METADATA"]
    assert metadata == pristine.replace("\nVersion: 0.5.17\n", "\nVersion: 0.5.17+ddtree.3\n")
    assert (modes["sglang/tool.sh"], modes["sglang/core.py"], modes["sglang/tree.py"]) == (0o755, 0o644, 0o644)
    assert not [name for name in modes if name.startswith("sglang-0.5.17.dist-info")]


def test_built_wheel_is_bit_identical_whatever_the_umask(tmp_path: Path, wheel: Path, series_dir: Path) -> None:
    series = PatchSeries.load(series_dir)
    first = build_wheel(wheel, series, tmp_path / "first").read_bytes()
    umask = os.umask(0o077)
    try:
        second = build_wheel(wheel, series, tmp_path / "second").read_bytes()
    finally:
        os.umask(umask)
    assert first == second
    with zipfile.ZipFile(tmp_path / "first" / BUILT) as archive:
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


@pytest.mark.parametrize("upto", range(len(ALL) + 1))
def test_every_prefix_of_the_series_imports(tmp_path: Path, wheel: Path, series_dir: Path, upto: int) -> None:
    built = build_wheel(wheel, PatchSeries.load(series_dir), tmp_path / "out", upto=upto)
    program = "import sys; sys.path.insert(0, sys.argv[1]); from sglang import core; print(core.STEPS, core.NAME)"
    result = subprocess.run([sys.executable, "-I", "-c", program, built], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [["1", "chain"], ["1", "tree"], ["1", "tree"], ["64", "tree"]][upto]


def test_wheel_with_another_hash_is_refused_naming_both(tmp_path: Path, wheel: Path, series_dir: Path) -> None:
    pinned = sha256(wheel.read_bytes())
    make_wheel(wheel, {**FILES, "sglang/core.py": "STEPS = 2\n"})
    with pytest.raises(PatchError) as error:
        build_wheel(wheel, PatchSeries.load(series_dir), tmp_path / "out")
    assert pinned in error.value.message and sha256(wheel.read_bytes()) in error.value.message


def test_wheel_with_another_name_is_refused_naming_both_hashes(tmp_path: Path, wheel: Path, series_dir: Path) -> None:
    other = make_wheel(tmp_path / WHEEL.replace("0.5.17", "0.5.18"), {**FILES, "sglang/core.py": ""})
    with pytest.raises(PatchError, match="is not a pinned wheel") as error:
        build_wheel(other, PatchSeries.load(series_dir), tmp_path / "out")
    assert sha256(other.read_bytes()) in error.value.message and sha256(wheel.read_bytes()) in error.value.message


def test_missing_wheel_is_an_error_with_a_hint(tmp_path: Path, series_dir: Path) -> None:
    with pytest.raises(PatchError, match=r"nowhere\.whl does not exist") as error:
        build_wheel(tmp_path / "nowhere.whl", PatchSeries.load(series_dir), tmp_path / "out")
    assert error.value.hint is not None and "pip download" in error.value.hint


def test_already_patched_wheel_is_refused(tmp_path: Path) -> None:
    patched = make_wheel(tmp_path / WHEEL, {**FILES, MANIFEST: "{}"})
    series = PatchSeries.load(make_series(tmp_path / "patches", patched, *ALL))
    with pytest.raises(PatchError, match="is already patched"):
        build_wheel(patched, series, tmp_path / "out")


@pytest.mark.parametrize(
    ("patches", "message"),
    [
        ((NAME_TREE, STALE), r"0002-change-steps\.patch does not apply: error: patch failed: sglang/core\.py:1"),
        ((NO_NOTICE,), r"sglang/core\.py is modified but does not say 'Modified by the DDTree appliance'"),
        ((OUTSIDE,), r"0001-add-setup\.patch touches setup\.py, which is outside sglang/"),
        ((MODE_ONLY,), r"0001-change-mode\.patch was applied but left sglang/core\.py unchanged"),
        ((NO_DIFF,), r"0001-change-nothing\.patch cannot be read by git"),
    ],
)
def test_bad_patch_is_named_and_leaves_no_wheel(
    tmp_path: Path, wheel: Path, patches: tuple[tuple[str, str], ...], message: str
) -> None:
    series = PatchSeries.load(make_series(tmp_path / "patches", wheel, *patches))
    with pytest.raises(PatchError, match=message):
        build_wheel(wheel, series, tmp_path / "out")
    assert list(tmp_path.rglob("*ddtree*")) == []


def test_builds_inside_a_git_work_tree(
    tmp_path: Path, wheel: Path, series_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There a plain `git apply` skips every file of a git-style patch and returns 0.
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    built = build_wheel(wheel, PatchSeries.load(series_dir), tmp_path / "out")
    assert "tree" in (install(built, tmp_path / "site") / "sglang/core.py").read_text()


def test_settings_of_the_user_do_not_reach_the_tools(
    tmp_path: Path, wheel: Path, series_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".gitconfig").write_text("[core]\n\tautocrlf = true\n[apply]\n\twhitespace = error\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in {"COUNT": "1", "KEY_0": "core.autocrlf", "VALUE_0": "true"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    (tmp_path / "wheel.py").write_text("raise SystemExit('not the wheel package')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    built = build_wheel(wheel, PatchSeries.load(series_dir), tmp_path / "out")
    assert b"\r" not in (install(built, tmp_path / "site") / "sglang/core.py").read_bytes()


def test_missing_git_is_a_host_error(
    tmp_path: Path, wheel: Path, series_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError, match="git is missing"):
        build_wheel(wheel, PatchSeries.load(series_dir), tmp_path / "out")


# Verifying


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


def drop_from_record(site: Path) -> None:
    replace_in("sglang-0.5.17+ddtree.3.dist-info/RECORD", "sglang/tree.py,", "sglang/other.py,")(site)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda s: flip_byte(s / "sglang/core.py"), "sglang/core.py: differs from the build (expected sha256 "),
        (lambda s: (s / "sglang/tree.py").unlink(), "sglang/tree.py: missing"),
        (drop_from_record, "sglang/tree.py: RECORD says None, expected sha256="),
        (lambda s: replace_in(MANIFEST, "Add a module", "Add one")(s), f"{MANIFEST}: RECORD says sha256="),
        (lambda s: (s / MANIFEST).write_text("{"), f"{MANIFEST} cannot be read: "),
        (lambda s: (s / MANIFEST).write_text("[]"), f"{MANIFEST} cannot be read: "),
        (lambda s: (s / MANIFEST).write_text('{"format": 9}'), f"{MANIFEST} has format 9"),
        (lambda s: (s / MANIFEST).unlink(), "sglang 0.5.17+ddtree.3 is installed but not patched"),
        (
            replace_in("sglang-0.5.17+ddtree.3.dist-info/METADATA", "ddtree.3", "ddtree.2"),
            "sglang 0.5.17+ddtree.2 is installed, but its manifest is that of 0.5.17+ddtree.3",
        ),
    ],
)
def test_damaged_install_is_found_and_named(site: Path, damage: Callable[[Path], None], problem: str) -> None:
    damage(site)
    report = verify_installed(site)
    assert not report.ok
    assert [text for text in report.problems if text.startswith(problem)] == list(report.problems)


def test_unpatched_install_says_so(tmp_path: Path, wheel: Path) -> None:
    report = verify_installed(install(wheel, tmp_path / "site"))
    assert report.problems == (f"sglang 0.5.17 is installed but not patched ({MANIFEST} is missing)",)


def test_two_installed_versions_are_a_problem(site: Path, wheel: Path) -> None:
    shutil.copytree(site / "sglang-0.5.17+ddtree.3.dist-info", site / "sglang-0.5.17.dist-info")
    replace_in("sglang-0.5.17.dist-info/METADATA", "+ddtree.3", "")(site)
    assert any("holds several versions of sglang" in problem for problem in verify_installed(site).problems)


def test_install_from_another_series_is_found(tmp_path: Path, wheel: Path, site: Path, series_dir: Path) -> None:
    other = PatchSeries.load(make_series(tmp_path / "other", wheel, NAME_TREE))
    (problem,) = verify_installed(site, other).problems
    assert problem.startswith(f"the installed patches are not those of {tmp_path / 'other'}")

    replace_in("series", "revision: 3", "revision: 4")(series_dir)
    (problem,) = verify_installed(site, PatchSeries.load(series_dir)).problems
    assert problem == f"sglang 0.5.17+ddtree.3 is installed, {series_dir} is revision 4"


def test_file_deleted_by_a_patch_must_stay_deleted(tmp_path: Path, wheel: Path) -> None:
    delete = """\
diff --git a/sglang/tool.sh b/sglang/tool.sh
deleted file mode 100755
--- a/sglang/tool.sh
+++ /dev/null
@@ -1 +0,0 @@
-#!/bin/sh
"""
    patch = ("0001-delete-tool.patch", HEADER.format(subject="Delete the tool") + delete)
    series = PatchSeries.load(make_series(tmp_path / "patches", wheel, patch))
    site = install(build_wheel(wheel, series, tmp_path / "out"), tmp_path / "site")
    assert verify_installed(site, series).ok
    (site / "sglang/tool.sh").write_text("")
    assert verify_installed(site).problems == ("sglang/tool.sh: present, but the patches delete it",)


def test_search_path_is_used_and_a_shadowing_package_found(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sys.modules.get("sglang")
    monkeypatch.syspath_prepend(site)
    assert verify_installed().ok
    (tmp_path / "shadow/sglang").mkdir(parents=True)
    (tmp_path / "shadow/sglang/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "shadow")
    (problem,) = verify_installed().problems
    assert problem.startswith(f"`import sglang` would load {tmp_path / 'shadow/sglang/__init__.py'}")
    assert sys.modules.get("sglang") is before


# The command line


def test_list_prints_a_table_or_json(series_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["patches", "list", "--patches", str(series_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "PATCH                 SUBJECT"
    assert lines[2] == "0002-add-tree.patch   Add a module"
    assert cli.main(["patches", "list", "--patches", str(series_dir), "--json"]) == 0
    assert [patch["name"] for patch in json.loads(capsys.readouterr().out)["patches"]] == [name for name, _ in ALL]


def test_apply_prints_the_path_of_the_wheel(
    tmp_path: Path, wheel: Path, series_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--patches", str(series_dir), "--wheel", str(wheel), "--out", str(tmp_path / "out")]
    assert cli.main(["patches", "apply", *arguments]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out' / BUILT}\n"


def test_verify_reports_as_json_and_by_exit_code(
    site: Path, series_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["patches", "verify", "--json", "--site", str(site), "--patches", str(series_dir)]
    assert cli.main(arguments) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["ok"], facts["problems"], facts["version"]) == (True, [], "0.5.17+ddtree.3")

    flip_byte(site / "sglang/core.py")
    assert cli.main(arguments) == 1
    output = capsys.readouterr()
    assert json.loads(output.out)["problems"][0].startswith("sglang/core.py: differs")
    assert output.err.splitlines()[0] == "error: the installed sglang is not what was built (1 problem)"
    assert output.err.splitlines()[1].startswith("hint: ")


def test_verify_without_a_series_says_that_none_was_compared(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patches_command, "_CHECKOUT_PATCHES", tmp_path / "none")
    assert cli.main(["patches", "verify", "--site", str(site)]) == 0
    assert "3 patches, 2 files verified, not compared with a series" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "error", "hint"),
    [
        ([], 2, "the following arguments are required: COMMAND", "see `ddtree-appliance --help`"),
        (["patches"], 2, "the following arguments are required: ACTION", "see `ddtree-appliance patches --help`"),
        (["patches", "aply"], 2, "argument ACTION: invalid choice: 'aply'", "see `ddtree-appliance patches --help`"),
        (["patches", "list"], 2, "there is no patch series at ", "name one with --patches DIR"),
        (["patches", "list", "--patches", "/nonexistent"], 1, "/nonexistent/series does not exist", "name a patch"),
        (["patches", "verify", "--site", "/nonexistent"], 3, "sglang is not installed in /nonexistent", "install"),
    ],
)
def test_failures_are_one_error_line_a_hint_and_an_exit_code(
    arguments: list[str],
    code: int,
    error: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(patches_command, "_CHECKOUT_PATCHES", tmp_path / "none")
    assert cli.main(arguments) == code
    output = capsys.readouterr()
    assert output.out == ""
    first, second = output.err.splitlines()
    assert first.startswith(f"error: {error}")
    assert second.startswith(f"hint: {hint}")


def test_debug_shows_the_traceback_before_or_after_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    leaf = ["patches", "list", "--patches", "/nonexistent"]
    for arguments, shown in [(leaf, False), (["--debug", *leaf], True), ([*leaf, "--debug"], True)]:
        assert cli.main(arguments) == 1
        assert ("Traceback" in capsys.readouterr().err) is shown


def test_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_directory: Path | None) -> PatchSeries:
        raise KeyboardInterrupt

    monkeypatch.setattr(patches_command, "_load_series", interrupt)
    assert cli.main(["patches", "list"]) == 130


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["patches", "--help"], ["patches", "apply", "--help"]]
)
def test_help_works_without_any_third_party_package(arguments: list[str]) -> None:
    # -S leaves site-packages out, -I everything else but the standard library.
    program = "import sys; sys.path.insert(0, sys.argv.pop(1)); from ddtree_appliance import __main__"
    root = str(Path(__file__).parents[2])
    result = subprocess.run([sys.executable, "-I", "-S", "-c", program, root, *arguments], capture_output=True)
    assert (result.returncode, result.stderr) == (0, b"")
