"""What `launch` refuses before it imports SGLang."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddtree_appliance import launch, patching
from ddtree_appliance.errors import EXIT_USAGE, HostError, PatchError, UsageError
from ddtree_appliance.launch import check_model_paths, check_patched
from ddtree_appliance.patching import VerifyReport

FLAGS = [
    ("--model-path", "--model-path"),
    ("--model", "--model-path"),
    ("--speculative-draft-model-path", "--speculative-draft-model-path"),
    ("--speculative-draft-model", "--speculative-draft-model-path"),
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def in_both_forms(flag: str, value: object) -> list[list[str]]:
    return [[flag, str(value)], [f"{flag}={value}"]]


# Model folders


@pytest.mark.parametrize("flag", [flag for flag, _ in FLAGS])
def test_a_folder_with_a_configuration_is_accepted(flag: str, checkpoint: Path) -> None:
    for arguments in in_both_forms(flag, checkpoint):
        check_model_paths(arguments)


@pytest.mark.parametrize("flag,name", FLAGS)
def test_a_missing_folder_is_refused_with_flag_and_path(flag: str, name: str, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    for arguments in in_both_forms(flag, missing):
        with pytest.raises(UsageError) as caught:
            check_model_paths(["--port", "1", *arguments, "--device", "cpu"])
        assert caught.value.message == f"{name}: {missing} is not a folder"
        assert caught.value.hint


@pytest.mark.parametrize("flag,name", FLAGS)
def test_a_folder_without_a_configuration_is_refused(flag: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()  # a folder of that name is no configuration
    for arguments in in_both_forms(flag, tmp_path):
        with pytest.raises(UsageError) as caught:
            check_model_paths(arguments)
        assert caught.value.message == f"{name}: {tmp_path} holds no config.json"


def test_a_file_is_no_model_folder(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        check_model_paths(["--model-path", str(checkpoint / "config.json")])


@pytest.mark.parametrize("value", ["./nowhere", "../nowhere", "~/nowhere", "."])
def test_a_relative_path_is_a_path(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"^--model-path: "):
        check_model_paths(["--model-path", value])


def test_target_and_drafter_are_both_checked(checkpoint: Path, tmp_path: Path) -> None:
    good, bad = str(checkpoint), str(tmp_path / "nowhere")
    check_model_paths(["--model-path", good, "--speculative-draft-model-path", good])
    with pytest.raises(UsageError, match=r"^--speculative-draft-model-path: "):
        check_model_paths(["--model-path", good, "--speculative-draft-model-path", bad])
    with pytest.raises(UsageError, match=r"^--model-path: "):
        check_model_paths(["--speculative-draft-model-path", good, "--model-path", bad])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        # ids on a model hub are SGLang's business
        ["--model-path", "Qwen/Qwen3-8B"],
        ["--model=Qwen/Qwen3-8B", "--speculative-draft-model=z-lab/Qwen3-8B-DFlash"],
        # flags that only look alike
        ["--model-loader-extra-config", "/nowhere"],
        ["--model-impl", "/nowhere", "--served-model-name", "/nowhere"],
        ["--speculative-draft-model-revision", "/nowhere"],
        ["--tokenizer-path", "/nowhere", "positional", "/nowhere"],
    ],
)
def test_what_names_no_model_folder_is_left_alone(arguments: list[str]) -> None:
    before = list(arguments)
    check_model_paths(arguments)
    assert arguments == before


# The installed engine


def report(*problems: str) -> VerifyReport:
    return VerifyReport(Path("/site"), "0.5.17", None, (), 0, False, problems)


def test_a_patched_engine_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "verify_installed", report)
    check_patched()


def test_an_unpatched_engine_is_refused_with_every_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = ("sglang 0.5.17 is installed but not patched (manifest is missing)", "a.py: differs")
    monkeypatch.setattr(patching, "verify_installed", lambda: report(*problems))
    with pytest.raises(PatchError) as caught:
        check_patched()
    assert caught.value.message == f"the installed SGLang is not the patched one: {problems[0]}; {problems[1]}"
    assert "patches apply" in (caught.value.hint or "")


def test_nothing_is_started_when_a_check_fails(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def verify_installed() -> VerifyReport:
        asked.append("patched")
        return report("not patched")

    monkeypatch.setattr(patching, "verify_installed", verify_installed)
    monkeypatch.setattr(launch, "prepare", lambda arguments: asked.append("prepared"))
    with pytest.raises(UsageError):
        launch.launch(["--model-path", str(checkpoint / "nowhere")])
    assert asked == []
    with pytest.raises(PatchError):
        launch.launch(["--model-path", str(checkpoint)])
    assert asked == ["patched"]


# The command line

RUN = """
import sys
from ddtree_appliance.cli import main
code = main(sys.argv[1:])
assert "sglang" not in sys.modules and "torch" not in sys.modules, "the engine was imported"
sys.exit(code)
"""


def test_a_missing_model_folder_is_one_error_line_and_no_engine(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    arguments = ["launch", "--", "--model-path", str(missing), "--port", "1"]
    done = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_USAGE
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"error: --model-path: {missing} is not a folder",
        "hint: mount it, or correct the path",
    ]


@pytest.mark.parametrize(
    "raised,expected",
    [
        (ValueError("bad\n value"), UsageError),
        (NotImplementedError("no"), UsageError),
        (RuntimeError("no GPU"), HostError),
    ],
)
def test_what_sglang_raises_for_its_arguments_is_one_line(
    raised: Exception, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: list[str]) -> None:
        raise raised

    names = {"load_plugins": lambda: None, "prepare_server_args": fail}
    algorithm = SimpleNamespace(SpeculativeAlgorithm=SimpleNamespace(from_string=lambda name: None))
    for module in ("plugins", "server_args"):
        monkeypatch.setitem(sys.modules, f"sglang.srt.{module}", SimpleNamespace(**names))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.spec_info", algorithm)  # type: ignore[arg-type]
    with pytest.raises(expected) as refusal:
        launch.prepare([])
    assert "\n" not in str(refusal.value)


def test_a_stop_before_sglang_drains_ends_the_tree_with_143(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time; from ddtree_appliance.launch import end_on_sigterm; end_on_sigterm();"
        "child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        child = int(process.stdout.readline())
        process.terminate()
        assert process.wait(timeout=30) == 143
    # A killed process may need a moment to get the signal, on a machine where others compute.
    deadline = time.monotonic() + 20
    while runs(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not runs(child)


def runs(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_stop_while_serve_becomes_launch_is_not_lost(tmp_path: Path) -> None:
    """The new interpreter is sent SIGTERM before it has run a line of this package."""
    (tmp_path / "sitecustomize.py").write_text(
        "import signal, time\n"
        "print('executed', flush=True)\n"
        "while signal.SIGTERM not in signal.sigpending():\n"
        "    time.sleep(0.01)\n"
    )
    script = (
        "import os, sys; from ddtree_appliance.launch import end_on_sigterm, sigterm_held; end_on_sigterm()\n"
        "with sigterm_held():\n"
        "    os.execve(sys.executable, [sys.executable, '-m', 'ddtree_appliance', 'launch', '--',"
        " '--model-path', '/nowhere/at/all'], {**os.environ, 'PYTHONPATH': sys.argv[1]})"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "executed\n"
        process.terminate()
        try:
            assert process.wait(timeout=30) == 143
        finally:
            process.kill()


def test_after_the_handler_is_installed_threads_and_children_can_be_terminated() -> None:
    script = (
        "import signal; from ddtree_appliance.launch import end_on_sigterm, sigterm_held\n"
        "with sigterm_held():\n"
        "    end_on_sigterm()\n"
        "    print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_a_host_without_psutil_is_told_what_else_is_missing(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    script = "import sys; sys.modules['psutil'] = None" + RUN
    arguments = ["launch", "--", "--model-path", str(missing)]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        EXIT_USAGE,
        f"error: --model-path: {missing} is not a folder",
    )


def test_a_stop_under_uvicorn_does_not_wait_for_its_shutdown() -> None:
    script = (
        "import asyncio, uvicorn; from ddtree_appliance.launch import end_on_sigterm, keep_ending_under_uvicorn\n"
        "async def app(scope, receive, send):\n"
        "    await receive()\n"
        "    await send({'type': 'lifespan.startup.complete'})\n"
        "    print('up', flush=True)\n"
        "    await receive()\n"
        "    await asyncio.sleep(60)\n"  # SGLang waits for its warm-up
        "end_on_sigterm(); keep_ending_under_uvicorn()\n"
        "uvicorn.run(app, host='127.0.0.1', port=0, lifespan='on', log_level='info')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "up\n"
        while "Uvicorn running" not in process.stderr.readline():
            pass
        process.terminate()
        try:
            assert process.wait(timeout=20) == 143
        finally:
            process.kill()
