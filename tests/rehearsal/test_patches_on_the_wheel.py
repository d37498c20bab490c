"""The real series on the pinned wheel: every prefix imports, the build repeats, the installed engine is its result."""

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from ddtree_appliance.errors import PatchError
from ddtree_appliance.patching import PatchSeries, build_wheel, read_pinned_wheel, unpack_wheel, verify_installed
from ddtree_appliance.rehearsal.server import rehearsal_environment

pytestmark = pytest.mark.rehearsal

ROOT = Path(__file__).resolve().parents[2]
SERIES = PatchSeries.load(ROOT / "patches" / "sglang-0.5.17")


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The pinned wheel, where scripts/environment has put it."""
    (found,) = (ROOT / "build" / "wheels").glob("sglang-0.5.17-*.whl")
    return found


def module_of(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


# What SGLang imports of others takes twice as long as SGLang: loaded once, then each prefix is imported in a fork.
IMPORTER = """
import os, sys, traceback
import torch, torchvision, transformers, triton, xgrammar, compressed_tensors, fastapi, uvicorn, zmq, openai, IPython
for statement in sys.stdin:
    child = os.fork()
    if not child:
        try:
            exec(statement)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_every_prefix_of_the_series_imports(wheel: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    unpack_wheel(read_pinned_wheel(wheel, SERIES), tree)
    touched = sorted(
        {
            line.split()[-1].removeprefix("b/")
            for patch in SERIES.patches
            for line in patch.path.read_text().splitlines()
            if line.startswith("diff --git ")
        }
    )
    environment = rehearsal_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(tree), environment["PYTHONPATH"]])
    log = tmp_path / "import.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", IMPORTER],
            **{"env": environment, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True},
        ) as importer,
    ):
        assert importer.stdin is not None and importer.stdout is not None
        for patch in (None, *SERIES.patches):
            if patch is not None:
                git = ["git", "apply", str(patch.path)]
                subprocess.run(git, cwd=tree, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)}, check=True)
            # Files that a later patch adds are not there yet. Plugins are left out: they need the whole series.
            present = [module_of(path) for path in touched if (tree / path).exists()]
            where = f"assert sglang.__file__.startswith({str(tree)!r}), sglang.__file__"
            importer.stdin.write(f"import {', '.join(present)}, sglang; {where}\n")
            importer.stdin.flush()
            assert _status(importer.stdout) == 0, (patch, log.read_text()[-2000:])
        # The negative control.
        importer.stdin.write("import sglang.srt.no_such_module\n")
        importer.stdin.close()
        assert _status(importer.stdout) == 1


def _status(lines: IO[str]) -> int:
    """Modules may print while they are imported."""
    line = next(line for line in lines if line.startswith("status "))
    return int(line.split()[1])


def test_the_build_repeats_bit_for_bit_and_is_not_patched_twice(wheel: Path, tmp_path: Path) -> None:
    first = build_wheel(wheel, SERIES, tmp_path / "1")
    second = build_wheel(wheel, SERIES, tmp_path / "2")
    assert first.read_bytes() == second.read_bytes()
    with pytest.raises(PatchError):
        build_wheel(first, SERIES, tmp_path / "3")


def test_the_installed_engine_is_this_series_result() -> None:
    report = verify_installed(series=SERIES)
    assert report.ok, report.problems
    assert report.series_compared
    assert report.version == f"0.5.17+ddtree.{SERIES.revision}"


def test_the_inventory_names_every_patch() -> None:
    inventory = (ROOT / "patches" / "sglang-0.5.17" / "README.md").read_text()
    for patch in SERIES.patches:
        number, words = patch.name.removesuffix(".patch").split("-", 1)
        row = next((line for line in inventory.splitlines() if line.startswith(f"| {number} ")), "")
        assert words.split("-")[0] in row.lower(), patch.name
