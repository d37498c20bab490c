"""The container's entry point: what is checked in which order, and with what SGLang is started."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from ddtree_appliance import launch, serve
from ddtree_appliance.checks import Facts
from ddtree_appliance.config import Config
from ddtree_appliance.config_source import load_config
from ddtree_appliance.errors import EXIT_HOST, EXIT_USAGE, ApplianceError, HostError, PatchError, UsageError
from ddtree_appliance.gpus import Driver, Gpu
from ddtree_appliance.launch import KEY_FILE_VARIABLE
from ddtree_appliance.preflight import Finding
from ddtree_appliance.rehearsal.server import DRAFTER, STAND_INS, TARGET
from ddtree_appliance.render import config_digest
from ddtree_appliance.serve import cache_key, engine_environment

KEY = "a-key-that-nobody-may-see"
REHEARSAL = """
engine:
  device: cpu
  model: bundled:target
  drafter: bundled:drafter
  dtype: float32
  context_length: 1024
  kv_tokens: 16384
gpus: []
paths:
  models: null
unit:
  stop_timeout_s: 7
"""


class Started(Exception):
    """What would have become SGLang."""

    def __init__(self, program: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self.program, self.arguments, self.environment = program, list(arguments), environment
        self.printed = ""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "appliance.yaml"
    path.write_text(REHEARSAL)
    return path


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The steps that were taken; every one of them succeeds."""
    taken: list[str] = []
    key_file = tmp_path / "run" / "keys.yaml"

    def run_preflight(config: Config) -> tuple[list[Finding], Facts]:
        taken.append("preflight")
        located = {"model": str(TARGET), "drafter": str(DRAFTER)}
        local = config.model_copy(update={"engine": config.engine.model_copy(update=located)})
        return [Finding("models", "complete"), Finding("port", "free")], Facts(local)

    def write_key_file(config: Config) -> Path:
        taken.append("key file")
        key_file.parent.mkdir()
        key_file.write_text(f"api-key: {KEY}\n")
        return key_file

    def execve(program: str, arguments: Sequence[str], environment: dict[str, str]) -> NoReturn:
        taken.append("sglang")
        raise Started(program, arguments, environment)

    monkeypatch.setattr(serve, "check_patched", lambda: taken.append("patches"))
    monkeypatch.setattr(serve, "run_preflight", run_preflight)
    monkeypatch.setattr(serve, "write_key_file", write_key_file)
    monkeypatch.setattr(os, "execve", execve)
    return taken


def refusal(config_file: Path, rendered_for: str | None = None) -> ApplianceError:
    with pytest.raises(ApplianceError) as caught:
        serve.serve(config_file, rendered_for)
    return caught.value


# Order


def test_everything_is_checked_before_a_key_is_read_and_sglang_started(config_file: Path, steps: list[str]) -> None:
    with pytest.raises(Started):
        serve.serve(config_file, config_digest(load_config(config_file)))
    assert steps == ["patches", "preflight", "key file", "sglang"]


def test_a_wrong_configuration_stops_before_everything_else(config_file: Path, steps: list[str]) -> None:
    config_file.write_text(REHEARSAL.replace("kv_tokens", "kv_token"))
    error = refusal(config_file)
    assert error.exit_code == EXIT_USAGE
    assert "did you mean kv_tokens?" in error.message
    assert steps == []


def test_a_missing_configuration_is_a_usage_error(tmp_path: Path, steps: list[str]) -> None:
    assert refusal(tmp_path / "nowhere.yaml").exit_code == EXIT_USAGE
    assert steps == []


def test_units_of_another_configuration_stop_before_everything_else(config_file: Path, steps: list[str]) -> None:
    rendered_for = config_digest(load_config(config_file))
    config_file.write_text(REHEARSAL.replace("1024", "512"))
    error = refusal(config_file, rendered_for)
    assert (error.exit_code, error.message) == (
        EXIT_USAGE,
        f"{config_file} has changed since the units were made from it",
    )
    assert error.hint == f"ddtree-appliance install {config_file}, then start again"
    assert steps == []


@pytest.mark.parametrize(
    "rewritten",
    [
        "# a comment\n" + REHEARSAL,
        REHEARSAL.replace("unit:\n", "server:\n  port: 30000\nunit:\n"),
        REHEARSAL.replace("1024", "1024   # tokens"),
    ],
)
def test_a_rewording_is_no_other_configuration(rewritten: str, config_file: Path, steps: list[str]) -> None:
    rendered_for = config_digest(load_config(config_file))
    config_file.write_text(rewritten)
    with pytest.raises(Started):
        serve.serve(config_file, rendered_for)


def test_an_unpatched_engine_is_a_damaged_image_and_stops_before_preflight(
    config_file: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_patched() -> None:
        raise PatchError("the installed SGLang is not the patched one: a.py: differs", "build a wheel")

    monkeypatch.setattr(serve, "check_patched", check_patched)
    error = refusal(config_file)
    assert (type(error), error.exit_code) == (HostError, EXIT_HOST)
    assert error.message == "the installed SGLang is not the patched one: a.py: differs"
    assert error.hint == "the image is damaged: build or pull it again"
    assert steps == []


@pytest.mark.parametrize(
    "failed,code", [(UsageError("too large", "smaller"), EXIT_USAGE), (HostError("no GPU"), EXIT_HOST)]
)
def test_a_failed_preflight_stops_before_the_key_file_and_shows_what_passed(
    failed: ApplianceError,
    code: int,
    config_file: Path,
    steps: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    findings = [Finding("models", "complete"), Finding("memory", failed.message, failed)]
    monkeypatch.setattr(serve, "run_preflight", lambda config: (findings, Facts(config)))
    error = refusal(config_file)
    assert (error.exit_code, error.message) == (code, f"preflight: memory: {failed.message}")
    assert steps == ["patches"]
    assert capsys.readouterr().out == "preflight check=models complete\n"


def test_an_unusable_key_stops_the_start(config_file: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def write_key_file(config: Config) -> Path:
        raise HostError("the secret is too short")

    monkeypatch.setattr(serve, "write_key_file", write_key_file)
    assert refusal(config_file).exit_code == EXIT_HOST
    assert steps == ["patches", "preflight"]


# What is started


@pytest.fixture
def started(config_file: Path, steps: list[str], capsys: pytest.CaptureFixture[str]) -> Started:
    with pytest.raises(Started) as caught:
        serve.serve(config_file, None)
    caught.value.printed = "".join(capsys.readouterr())
    return caught.value


def test_this_python_becomes_launch_with_the_located_models(started: Started) -> None:
    assert started.program == sys.executable
    assert started.arguments[:5] == [sys.executable, "-m", "ddtree_appliance", "launch", "--"]
    given = started.arguments[5:]
    assert given[given.index("--model-path") + 1] == str(TARGET)
    assert given[given.index("--speculative-draft-model-path") + 1] == str(DRAFTER)
    assert given[given.index("--speculative-algorithm") + 1] == "DDTREE"
    assert given[given.index("--max-total-tokens") + 1] == "16384"


def test_the_key_is_in_the_file_alone(started: Started, tmp_path: Path) -> None:
    key_file = str(tmp_path / "run" / "keys.yaml")
    assert started.arguments[-2:] == ["--config", key_file]
    assert started.environment[KEY_FILE_VARIABLE] == key_file
    for text in (*started.arguments, *started.environment.values(), started.printed):
        assert KEY not in text


def test_the_log_shows_what_passed_and_what_is_started(started: Started) -> None:
    assert started.printed.splitlines() == [
        "preflight check=models complete",
        "preflight check=port free",
        f"starting sglang {' '.join(started.arguments[5:])}",
    ]


def test_without_keys_no_file_is_named(config_file: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "write_key_file", lambda config: None)
    monkeypatch.delenv(KEY_FILE_VARIABLE, raising=False)
    with pytest.raises(Started) as caught:
        serve.serve(config_file, None)
    assert "--config" not in caught.value.arguments
    assert KEY_FILE_VARIABLE not in caught.value.environment


def test_sigterm_is_held_back_exactly_while_this_process_becomes_another(
    config_file: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_held() -> bool:
        return signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])

    held: list[bool] = []

    def execve(*arguments: object) -> NoReturn:
        held.append(is_held())
        raise OSError("argument list too long")

    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(OSError, match="too long"):
        serve.serve(config_file, None)
    assert held == [True] and not is_held()


# Its environment


def gpu(capability: tuple[int, int]) -> Gpu:
    return Gpu("0", "GPU-a", "x", capability, 1, 1)


def configured(device: str = "cuda", **unit: Any) -> Config:
    engine = {"model": "/m/target", "drafter": "/m/drafter", "device": device}
    return Config.model_validate({"engine": engine, "unit": unit, "gpus": ["0"] if device == "cuda" else []})


def facts(driver: str = "580.1", *capabilities: tuple[int, int]) -> Facts:
    found = [gpu(capability) for capability in capabilities or ((9, 0),)]
    return Facts(configured(), gpus=found, driver=Driver(driver, (13, 0)))


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(serve, "CACHE", folder)
    return folder


def test_every_kernel_cache_lies_in_the_volume_below_its_key(cache: Path) -> None:
    environment = engine_environment(configured(), facts(), {"PATH": "/bin", "TRITON_CACHE_DIR": "/elsewhere"})
    own = cache / cache_key(facts())
    assert environment["PATH"] == "/bin"
    assert environment["TRITON_CACHE_DIR"] == str(own / "triton")
    names = {name for name, value in environment.items() if value.startswith(str(own))}
    assert names == {
        "XDG_CACHE_HOME",
        "SGLANG_CACHE_DIR",
        "SGLANG_DG_CACHE_DIR",
        "TVM_FFI_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "CUDA_CACHE_PATH",
    }
    assert len({environment[name] for name in names}) == len(names)


def test_without_the_volume_caches_stay_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(serve, "CACHE", tmp_path / "nowhere")
    environment = engine_environment(configured(), facts(), {"XDG_CACHE_HOME": "/home/x/.cache"})
    assert environment["XDG_CACHE_HOME"] == "/home/x/.cache"
    assert "TRITON_CACHE_DIR" not in environment


@pytest.mark.parametrize("limit_s", [1, 60, 600])
def test_a_stop_drains_as_long_as_the_configuration_says(limit_s: int) -> None:
    environment = engine_environment(configured(stop_timeout_s=limit_s), facts(), {"SGLANG_DRAIN_TIMEOUT": "5"})
    assert environment["SGLANG_DRAIN_TIMEOUT"] == str(limit_s)


def test_the_drain_limit_is_one_that_sglang_knows() -> None:
    from tests.unit.engine import import_sglang

    envs = import_sglang("sglang.srt.environ").envs
    for name, value in engine_environment(configured(), facts(), {}).items():
        if name.startswith("SGLANG_") and not name.endswith("_DIR"):
            assert getattr(envs, name).name == name
            getattr(envs, name).parse(value)


def test_the_engine_asks_no_hub_and_counts_gpus_as_the_configuration_does() -> None:
    environment = engine_environment(
        configured(), facts(), {"HF_HUB_OFFLINE": "0", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    )
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert "SGLANG_USE_CPU_ENGINE" not in environment


def test_a_rehearsal_serves_with_the_stand_ins() -> None:
    environment = engine_environment(
        configured("cpu"), Facts(configured("cpu")), {"PATH": "/bin", "PYTHONPATH": "/mine"}
    )
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert environment["PYTHONPATH"] == f"{STAND_INS}{os.pathsep}/mine"
    assert environment["PATH"] == "/bin"
    assert environment["SGLANG_DRAIN_TIMEOUT"] == "60"


# The cache's key


def packages(monkeypatch: pytest.MonkeyPatch, *versions: str) -> None:
    found = [
        SimpleNamespace(metadata={"Name": name}, version=version)
        for name, version in (each.split("==") for each in versions)
    ]
    monkeypatch.setattr(metadata, "distributions", lambda: found)


def test_the_key_names_driver_and_architectures() -> None:
    digest = cache_key(Facts(configured("cpu"))).removesuffix("-cpu")
    assert len(digest) == 12
    assert cache_key(facts("580.159.04")) == f"{digest}-580.159.04-sm90"
    assert cache_key(facts("580.159.04", (12, 0), (10, 0), (12, 0))) == f"{digest}-580.159.04-sm100-sm120"


def test_another_driver_architecture_or_package_set_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {cache_key(facts()), cache_key(facts("580.2")), cache_key(facts("580.1", (12, 0)))}
    for versions in (["a==1", "b==2"], ["a==1", "b==3"], ["a==1"], ["a==1", "b==2", "c==1"]):
        packages(monkeypatch, *versions)
        keys.add(cache_key(facts()))
    assert len(keys) == 7
    assert all("/" not in key and " " not in key for key in keys)


def test_the_order_in_which_packages_are_found_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    packages(monkeypatch, "a==1", "b==2")
    first = cache_key(facts())
    packages(monkeypatch, "b==2", "a==1")
    assert cache_key(facts()) == first


# The key file ends with the parsing


@pytest.fixture
def key_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(f"api-key: {KEY}\n")
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(path))
    return path


def test_the_key_file_is_read_and_then_gone(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def prepare(arguments: Sequence[str]) -> NoReturn:
        seen.append(key_file.read_text())
        raise UsageError("enough seen")

    monkeypatch.setattr(launch, "check_patched", lambda: None)
    monkeypatch.setattr(launch, "prepare", prepare)
    with pytest.raises(UsageError, match="enough seen"):
        launch.launch(["--config", str(key_file)])
    assert seen == [f"api-key: {KEY}\n"]
    assert not key_file.exists()
    assert KEY_FILE_VARIABLE not in os.environ


@pytest.mark.parametrize("failing", ["check_model_paths", "check_patched", "prepare"])
@pytest.mark.parametrize("error", [UsageError("no"), SystemExit(0), KeyboardInterrupt(), RuntimeError("bug")])
def test_the_key_file_is_gone_also_if_the_start_fails(
    failing: str, error: BaseException, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> NoReturn:
        raise error

    monkeypatch.setattr(launch, "check_patched", lambda: None)
    monkeypatch.setattr(launch, failing, fail)
    with pytest.raises(type(error)):
        launch.launch([])
    assert not key_file.exists()
    assert KEY_FILE_VARIABLE not in os.environ


def test_a_key_file_that_is_gone_already_is_no_error(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key_file.unlink()
    monkeypatch.setattr(launch, "check_patched", lambda: None)
    monkeypatch.setattr(launch, "prepare", lambda arguments: pytest.fail("reached"))
    with pytest.raises(UsageError, match="is not a folder"):
        launch.launch(["--model-path", "/nowhere/at/all"])
