"""Servers as child processes: started together, killed with their group, and told apart from what they should be."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from ddtree_appliance.bench.launching import STEP_TIMES_VARIABLE, pool_tokens, server_command, server_environment
from ddtree_appliance.bench.plan import make_plan
from ddtree_appliance.bench.servers import BenchServer, running, variant_of
from ddtree_appliance.bench.variants import parse_variant
from ddtree_appliance.errors import ApplianceError
from tests.unit.bench.fake_server import FakeServer

READY = "import sys, time; print('The server is fired up and ready to roll!', flush=True); time.sleep(60)"
# A child of the child, in the same group, as SGLang's scheduler is.
WITH_CHILD = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    f"print(p.pid, flush=True); {READY}"
)
DIES = "print('no room on the GPU'); raise SystemExit(7)"
NEVER_READY = "import time; time.sleep(60)"


def child(name: str, program: str, folder: Path) -> BenchServer:
    command = [sys.executable, "-S", "-c", program]
    return BenchServer(name, "http://127.0.0.1:1", command, dict(os.environ), folder / "logs" / f"{name}.log")


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_all_are_up_together_and_gone_with_their_children_at_the_end(tmp_path: Path) -> None:
    servers = [child("a", WITH_CHILD, tmp_path), child("b", WITH_CHILD, tmp_path)]
    with running(servers, sleep=lambda s: time.sleep(0.02)):
        pids = [int((tmp_path / "logs" / f"{name}.log").read_text().split()[0]) for name in "ab"]
        assert all(map(is_running, pids))
    assert not any(map(is_running, pids))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_whatever_happens_they_are_stopped(error: type[BaseException], tmp_path: Path) -> None:
    server = child("a", WITH_CHILD, tmp_path)
    with pytest.raises(error), running([server], sleep=lambda s: time.sleep(0.02)):
        pid = int((tmp_path / "logs" / "a.log").read_text().split()[0])
        raise error
    assert not is_running(pid)


def test_a_server_that_exits_is_named_with_the_end_of_its_log_and_the_others_stop(tmp_path: Path) -> None:
    servers = [child("good", WITH_CHILD, tmp_path), child("ddtree-128", DIES, tmp_path)]
    with (
        pytest.raises(ApplianceError, match="variant ddtree-128: its server exited with 7") as caught,
        running(servers, sleep=lambda s: time.sleep(0.2)),
    ):
        raise AssertionError("it was ready")
    assert "no room on the GPU" in str(caught.value.hint)
    log = (tmp_path / "logs" / "good.log").read_text().split()
    assert not log or not is_running(int(log[0]))


def test_a_server_that_is_late_is_named(tmp_path: Path) -> None:
    waits: list[list[str]] = []
    with (
        pytest.raises(ApplianceError, match="variant slow: not ready after 1 s"),
        running(
            [child("slow", NEVER_READY, tmp_path)],
            lambda seconds, names: waits.append(names),
            limit_s=1.0,
            sleep=lambda s: time.sleep(0.05),
        ),
    ):
        raise AssertionError("it was ready")
    assert waits[0] == waits[-1] == ["slow"]


def test_an_attached_server_is_asked_and_left_alone() -> None:
    fake = FakeServer(algorithm="DDTREE", budget=64, disable_radix_cache=False)
    with fake.serving():
        server = BenchServer("tree", fake.url + "/")
        facts = server.facts()
        server.forget_prompts()
        server.stop()
        assert server.facts() == facts
    assert fake.flushes == 1
    variant = variant_of(facts, "tree")
    assert (variant.name, variant.algorithm, variant.budget, variant.backend) == ("tree", "DDTREE", 64, "triton")


def test_an_algorithm_that_is_not_compared_is_refused() -> None:
    with pytest.raises(ApplianceError, match="variant x: its algorithm is EAGLE"):
        variant_of({"speculative_algorithm": "EAGLE"}, "x")


def test_a_server_that_is_not_there_is_named() -> None:
    with FakeServer().serving() as fake:
        url = fake.url
    with pytest.raises(ApplianceError, match=f"variant x: no /server_info at {url}"):
        BenchServer("x", url).facts()


def test_a_command_holds_the_conditions_and_the_operators_flags_come_last() -> None:
    plan = make_plan(
        {
            **{"model_path": "/t", "drafter": "/d", "variants": ["ddtree:budget=64"]},
            **{"concurrency": (1, 32), "server_args": ("--mem-fraction-static", "0.5")},
        }
    )
    command = server_command(parse_variant("ddtree:budget=64"), plan, 1234, [[1] * 96, "x" * 100])
    line = " ".join(command)
    for part in (
        *("-m ddtree_appliance launch -- --model-path /t", "--port 1234", "--device cuda", "--dtype bfloat16"),
        *(
            "--attention-backend triton",
            "--cuda-graph-bs-prefill 128 256 512 1024 2048 4096",
            "--cuda-graph-bs-decode 1 32",
        ),
        *("--max-running-requests 32", "--disable-radix-cache", "--sleep-on-idle", "--speculative-ddtree-budget 64"),
    ):
        assert part in line
    assert command[-2:] == ["--mem-fraction-static", "0.5"]
    assert pool_tokens(plan, [[1] * 96]) >= 32 * (96 + 128 + 2 * 129)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_step_times_go_to_the_variants_own_file_or_nowhere(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STEP_TIMES_VARIABLE, "/of/the/operator")
    path = tmp_path / "t.jsonl"
    assert server_environment(device, path)[STEP_TIMES_VARIABLE] == str(path)
    assert STEP_TIMES_VARIABLE not in server_environment(device, None)
