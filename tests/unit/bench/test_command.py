"""`bench run` and `bench report` from end to end, with servers that are fakes in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ddtree_appliance.bench import run as bench_run
from ddtree_appliance.bench.plan import Plan
from ddtree_appliance.bench.prompts import Prompt
from ddtree_appliance.bench.variants import Variant
from ddtree_appliance.cli import main
from tests.unit.bench.fake_server import FakeServer

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "sglang", "triton", "numpy", "matplotlib", "tqdm", "transformers")


def fake_command(variant: Variant, plan: Plan, port: int, prompts: Sequence[Prompt]) -> list[str]:
    program = [sys.executable, "-m", "tests.unit.bench.fake_server", "--port", str(port)]
    return [*program, *variant.sglang_arguments(plan.drafter), *plan.server_args]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "server_command", fake_command)
    monkeypatch.setattr("ddtree_appliance.bench.servers._POLL_S", 0.05)
    monkeypatch.chdir(ROOT)


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"input_ids": [{number}]}}\n' for number in range(4)))
    return [
        *("bench", "run", "--out", str(tmp_path / "out"), "--model-path", "/t", "--drafter", "/d", "--device", "cpu"),
        *("--variant", "ddtree:budget=8", "--concurrency", "1,2", "--prompts", str(prompts)),
        *("--prompts-per-cell", "4", "--new-tokens", "8"),
    ]


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "results.json").read_text())
    return found


@pytest.mark.usefixtures("fakes")
def test_a_run_measures_everything_and_a_second_one_has_nothing_to_do(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == results(tmp_path)
    rows = printed["results"]
    assert [(row["concurrency"], row["variant"]) for row in rows] == [
        (concurrency, name) for concurrency in (1, 2) for name in ("none", "dflash", "ddtree-8")
    ]
    assert [row["accept_length"] for row in rows] == [None, 2.0, 3.0] * 2
    assert {row["equal_to_none"] for row in rows if row["variant"] != "none"} == {1.0}
    assert printed["missing"] == []
    (session,) = printed["sessions"]
    assert session["servers"]["none"]["command"][1:3] == ["-m", "tests.unit.bench.fake_server"]

    assert main(["bench", "run", "--out", str(tmp_path / "out")]) == 0
    assert len((tmp_path / "out" / "sessions.jsonl").read_text().splitlines()) == 1
    assert "ddtree-8" in capsys.readouterr().out


@pytest.mark.usefixtures("fakes")
def test_a_run_that_is_stopped_is_continued_in_a_new_session(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bench_run.measure_unit
    late = [0.0]

    def slow_unit(*args: Any) -> Any:
        late[0] = 1000.0
        return real(*args)

    monkeypatch.setattr(bench_run, "measure_unit", slow_unit)
    clock = bench_run.run_bench.__defaults__
    assert clock is not None
    monkeypatch.setattr(bench_run.run_bench, "__defaults__", (lambda: time.monotonic() + late[0],))
    assert main([*options, "--stop-after", "500"]) == 0
    captured = capsys.readouterr()
    assert "1 units are still missing" in captured.err
    assert "Still to be measured: group 0 at 2" in (tmp_path / "out" / "results.md").read_text()
    assert {row["concurrency"] for row in results(tmp_path)["results"]} == {1}

    assert main(options) == 0
    rows = results(tmp_path)["results"]
    assert {(row["session"], row["concurrency"]) for row in rows} == {(0, 1), (1, 2)}


@pytest.mark.usefixtures("fakes")
def test_other_conditions_or_prompts_in_the_same_folder_are_refused(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, "--stop-after", "0.000001"]) == 0
    assert main([*options, "--new-tokens", "9"]) == 2
    assert "new_tokens: 8 before, 9 now" in capsys.readouterr().err
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    assert main(["bench", "run", "--out", str(tmp_path / "out")]) == 2
    assert "has changed since this benchmark was begun" in capsys.readouterr().err


@pytest.mark.usefixtures("fakes")
def test_a_server_that_fails_in_the_second_unit_keeps_the_first(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Each server gets 1 + 3 * 4 streamed requests in the first unit, 2 + 4 in the second up to its first repeat; dflash
    # begins the next one.
    assert main([*options, "--server-arg=--fail-at", "--server-arg=20"]) == 1
    error = capsys.readouterr().err
    assert "error: variant dflash: /generate answered 500" in error
    assert "fired up" in error  # the end of the server's log
    assert {row["concurrency"] for row in results(tmp_path)["results"]} == {1}
    assert len((tmp_path / "out" / "cells.jsonl").read_text().splitlines()) == 1


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--speculative-ddtree-budget", "9", "ddtree-8: its server runs speculative_ddtree_budget 9, not 8"),
        ("--pool-tokens", "8191", "none: its KV pool holds 8191 tokens, 8192 are needed"),
        ("--max-running", "1", "none: its server runs 1 requests at once, not 2"),
    ],
)
def test_a_server_that_is_not_what_was_asked_for_is_refused(
    flag: str, value: str, message: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options, f"--server-arg={flag}", f"--server-arg={value}"]) == 1
    assert f"error: variant {message}" in capsys.readouterr().err
    assert not (tmp_path / "out" / "sessions.jsonl").exists()


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_servers_and_exits_130(signum: signal.Signals, options: list[str], tmp_path: Path) -> None:
    program = (
        # A shell that runs this in the background has had SIGINT ignored, and children inherit that.
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from ddtree_appliance.bench import run; from tests.unit.bench.test_command import fake_command;"
        "run.server_command = fake_command; from ddtree_appliance.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, *options, "--server-arg=--delay-s", "--server-arg=30"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    log = tmp_path / "out" / "sessions.jsonl"
    end = time.monotonic() + 60
    while not log.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert log.exists()
    time.sleep(0.3)  # into a request of 30 s
    process.send_signal(signum)
    assert process.wait(timeout=20) == 130
    ports = [server["url"].rpartition(":")[2] for server in json.loads(log.read_text())["servers"].values()]
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert not [port for port in ports if any(b"fake_server\0--port\0" + port.encode() in c for c in commands)]
    assert not (tmp_path / "out" / "cells.jsonl").exists()


def test_attached_servers_are_measured_as_what_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{letter}"}}\n' for letter in "abcd"))
    fakes = {
        "plain": FakeServer(disable_radix_cache=False),
        "chain": FakeServer(accepted=2, algorithm="DFLASH"),
        "tree": FakeServer(accepted=3, algorithm="DDTREE", budget=32),
    }
    with ExitStack() as stack:
        pairs = [f"--attach={name}={stack.enter_context(fake.serving()).url}" for name, fake in fakes.items()]
        command = ["bench", "run", "--out", str(tmp_path / "out"), *pairs, "--prompts", str(prompts)]
        assert main([*command, "--concurrency", "2", "--prompts-per-cell", "4"]) == 0
    rows = {row["variant"]: row for row in results(tmp_path)["results"]}
    assert (rows["tree"]["algorithm"], rows["tree"]["budget"]) == ("DDTREE", 32)
    assert rows["chain"]["ratio_to_dflash"] == 1.0
    assert rows["tree"]["ratio_to_none"] is not None
    # Once before the warm-up and before each repeat; only where there is a cache.
    assert [fake.flushes for fake in fakes.values()] == [4, 0, 0]
    text = (tmp_path / "out" / "results.md").read_text()
    assert "(attached: http://" in text
    assert "attached servers, their GPU and packages are not known" in text
    assert "plain" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1,x"], "--concurrency 1,x: whole numbers"),
        (["--attach", "http://x"], "--attach http://x: not NAME=URL"),
        (["--attach", "a=http://x", "--attach", "a=http://y"], "a is attached twice"),
        (["--attach", "a=http://x", "--drafter", "/d"], "--drafter: attached servers run already"),
        (["--stop-after", "0"], "--stop-after must be a positive number"),
        (["--stop-after", "nan"], "--stop-after must be a positive number"),
        (["--prompts", "/does/not/exist"], "--prompts /does/not/exist: No such file"),
        (["--variant", "dtree:budget=8", "--model-path", "/t"], "'dtree' is not one of"),
        ([], "--model-path is missing"),
    ],
)
def test_bad_usage_is_one_line_and_makes_no_folder(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "run", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_report_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "report", str(tmp_path)]) == 2
    assert "holds no benchmark" in capsys.readouterr().err


def test_the_package_needs_nothing_heavy_at_import() -> None:
    program = (
        "import importlib, pkgutil, sys; import ddtree_appliance.bench as b;"
        "[importlib.import_module('ddtree_appliance.bench.' + m.name) for m in pkgutil.iter_modules(b.__path__)"
        " if m.name != 'plots'];"
        "import ddtree_appliance.commands.bench;"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
