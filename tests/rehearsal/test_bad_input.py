"""A start that cannot work ends with one clear line and exit code 2, before weights are read."""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ddtree_appliance.rehearsal.server import DRAFTER, rehearsal_environment, server_arguments

pytestmark = pytest.mark.rehearsal


def drafter_with(change: dict[str, Any]) -> Callable[[Path], list[str]]:
    """Arguments that name a copy of the drafter whose config.json is changed; its weights are left out on purpose."""

    def make(folder: Path) -> list[str]:
        copy = folder / "dflash"
        copy.mkdir()
        config = json.loads((DRAFTER / "config.json").read_text())
        dflash = {**config["dflash_config"], **change.pop("dflash_config", {})}
        (copy / "config.json").write_text(json.dumps({**config, **change, "dflash_config": dflash}))
        return ["--speculative-draft-model-path", str(copy)]

    return make


def flags(*arguments: str) -> Callable[[Path], list[str]]:
    return lambda folder: list(arguments)


BAD_STARTS: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "hidden size": (drafter_with({"hidden_size": 512}), "hidden_size differs: target 256, drafter 512"),
    "vocabulary": (drafter_with({"vocab_size": 8192}), "vocab_size differs: target 4096, drafter 8192"),
    "layer ids": (
        drafter_with({"dflash_config": {"target_layer_ids": [0, 9]}}),
        "target_layer_ids [0, 9] are outside the target's 4 layers",
    ),
    "block size": (
        flags("--speculative-dflash-block-size", "8"),
        "--speculative-dflash-block-size = 8: the drafter's block size is 16",
    ),
    "budget 0": (flags("--speculative-ddtree-budget", "0"), "--speculative-ddtree-budget = 0"),
    "budget 129": (flags("--speculative-ddtree-budget", "129"), "the node budget must be 1 to 128"),
    "budget text": (flags("--speculative-ddtree-budget", "many"), "invalid int value: 'many'"),
    "topk": (flags("--speculative-ddtree-topk", "65"), "the candidates per position must be 1 to 64"),
    "missing model": (flags("--model-path", "/nowhere/model"), "--model-path: /nowhere/model is not a folder"),
    "missing drafter": (flags("--speculative-draft-model-path", "./nowhere"), "./nowhere is not a folder"),
    "pipeline parallel": (flags("--pp-size", "2"), "--pp-size = 2"),
    "backend": (flags("--attention-backend", "flashinfer"), "trees are verified by torch_native"),
    "flag of DDTREE without it": (
        flags("--speculative-algorithm", "DFLASH", "--speculative-ddtree-budget", "8"),
        "--speculative-ddtree-budget needs --speculative-algorithm DDTREE",
    ),
}


def start(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    make, _ = BAD_STARTS[name]
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", "-m", "ddtree_appliance", "launch", "--"]
    command += [*server_arguments("DDTREE", 1), *make(folder)]
    return subprocess.run(command, env=rehearsal_environment(), capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("bad")
    with ThreadPoolExecutor(2) as starters:
        names = list(BAD_STARTS)
        done = starters.map(lambda name: start(name, folder / name.replace(" ", "-")), names)
        return dict(zip(names, done, strict=True))


@pytest.mark.parametrize("name", BAD_STARTS)
def test_a_bad_start_is_refused_with_one_clear_line(
    name: str, results: dict[str, subprocess.CompletedProcess[str]]
) -> None:
    result = results[name]
    assert result.returncode == 2, result.stderr[-2000:]
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert BAD_STARTS[name][1] in errors[0]
    assert "Traceback" not in result.stderr
    assert "Load weight" not in result.stderr + result.stdout


def test_an_engine_with_a_flipped_byte_is_not_started(tmp_path: Path) -> None:
    """The launcher verifies the files it is about to run."""
    import sglang

    installed = Path(sglang.__file__).parent.parent
    site = tmp_path / "site"
    site.mkdir()
    for item in [installed / "sglang", *installed.glob("sglang-*.dist-info")]:
        shutil.copytree(item, site / item.name, ignore=shutil.ignore_patterns("__pycache__"))
    victim = site / "sglang/srt/mem_cache/allocation_sizing.py"
    victim.write_bytes(victim.read_bytes().replace(b"2 *", b"1 *"))
    environment = rehearsal_environment({"PYTHONPATH": str(site)})
    command = [sys.executable, "-W", "ignore", "-m", "ddtree_appliance", "launch", "--", *server_arguments("DDTREE", 1)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "sglang/srt/mem_cache/allocation_sizing.py" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_that_is_taken_is_told_before_the_weights_are_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, "-W", "ignore", "-m", "ddtree_appliance", "launch", "--"]
        command += server_arguments("DDTREE", port)
        result = subprocess.run(command, env=rehearsal_environment(), capture_output=True, text=True, timeout=120)
    assert result.returncode == 3, result.stderr[-2000:]
    assert f"error: port {port} on 127.0.0.1 is not free: Address already in use" in result.stderr
    assert "Load weight" not in result.stderr + result.stdout
