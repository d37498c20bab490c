"""`serve` on this host: everything checked, a real engine started with keys, and stopped while it answers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import yaml

from ddtree_appliance.checkpoint import read_checkpoint, with_local_models
from ddtree_appliance.config_source import load_config
from ddtree_appliance.memory import gib, plan_memory
from ddtree_appliance.ports import reserve_port
from ddtree_appliance.rehearsal.prompts import heldout_prompts
from ddtree_appliance.render import config_digest
from tests.rehearsal.conftest import ServerPool

pytestmark = pytest.mark.rehearsal

PROFILE = Path(__file__).parents[2] / "config" / "profiles" / "rehearsal.yaml"
KEY = "rehearsal-api-key-7d41"
STOP_LIMIT_S = 60
START_LIMIT_S = 300
NEW_TOKENS = 900
# The container's fixed places: its port, its secrets and its tmpfs. Everything else is what the image runs.
SERVE = """
import functools, sys
from pathlib import Path
from ddtree_appliance import engine_args, serve
from ddtree_appliance.checks import host

config, digest, port, secrets, key_file = sys.argv[1:]
engine_args.ENGINE_PORT = host.ENGINE_PORT = int(port)
serve.write_key_file = functools.partial(serve.write_key_file, secrets=Path(secrets), target=Path(key_file))
serve.serve(Path(config), digest)
"""


@dataclass
class Service:
    config: Path
    key_file: Path
    log: Path
    url: str
    process: subprocess.Popen[bytes]
    key_file_was_seen: bool = False

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while b"The server is fired up" not in self.log.read_bytes():
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
            assert time.monotonic() < deadline, self.log.read_text(errors="replace")[-4000:]
            self.key_file_was_seen = self.key_file_was_seen or self.key_file.exists()
            time.sleep(0.05)

    def get(self, path: str, key: str | None = KEY) -> requests.Response:
        return requests.get(self.url + path, headers=bearer(key), timeout=30)

    def generate(self, prompt: list[int], new_tokens: int) -> requests.Response:
        parameters = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": parameters}
        return requests.post(f"{self.url}/generate", json=body, headers=bearer(KEY), timeout=120)


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def service(pool: ServerPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    pool.stop_all_but([])
    folder, port = tmp_path_factory.mktemp("serve"), reserve_port()
    sections = yaml.safe_load(PROFILE.read_text())
    sections["server"] = {"host": "127.0.0.1", "port": port}
    sections["unit"] |= {"stop_timeout_s": STOP_LIMIT_S}
    (folder / "appliance.yaml").write_text(yaml.safe_dump(sections))
    (folder / "secrets").mkdir()
    (folder / "secrets" / "ddtree-api-key").write_text(f"{KEY}\n")
    digest = config_digest(load_config(folder / "appliance.yaml"))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, (folder / "log").open("wb") as log:
        key_file = Path(memory) / "keys.yaml"
        arguments = [folder / "appliance.yaml", digest, port, folder / "secrets", key_file]
        command = [sys.executable, "-W", "ignore", "-c", SERVE, *map(str, arguments)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=environment)
        running = Service(folder / "appliance.yaml", key_file, folder / "log", f"http://127.0.0.1:{port}", process)
        try:
            running.wait_ready()
            yield running
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_preflight_is_in_the_log_before_the_engine(service: Service) -> None:
    lines = service.log.read_text(errors="replace").splitlines()
    names = [line.split()[1] for line in lines if line.startswith("preflight ")]
    assert names == [
        f"check={name}"
        for name in ("models", "pair", "shape", "environment", "keys", "folders", "shm", "port", "gpus", "memory")
    ]
    assert lines[len(names)].startswith("starting sglang --model-path ")


def test_the_key_file_was_there_and_is_gone(service: Service) -> None:
    assert service.key_file_was_seen
    assert not service.key_file.exists()


def test_the_key_is_in_force_and_nowhere_to_be_read(service: Service) -> None:
    assert service.get("/health", None).status_code == 200
    assert service.get("/v1/models", None).status_code == 401
    assert service.get("/v1/models", "another-key-altogether").status_code == 401
    assert service.get("/v1/models").json()["data"][0]["id"] == "tiny-code"
    launcher = psutil.Process(service.process.pid)
    for process in (launcher, *launcher.children(recursive=True)):
        assert KEY not in " ".join(process.cmdline())
        assert KEY not in str(process.environ())
    assert KEY not in service.log.read_text(errors="replace")
    assert KEY not in service.get("/server_info").text


def test_it_speculates(service: Service) -> None:
    answer = service.generate(heldout_prompts(1, 96)[0], 64).json()
    assert answer["meta_info"]["completion_tokens"] == 64
    assert answer["meta_info"]["spec_accept_length"] > 2


def test_the_pools_are_as_large_as_planned(service: Service) -> None:
    config = with_local_models(load_config(service.config))
    pair = (read_checkpoint(Path(config.engine.model), True), read_checkpoint(Path(config.engine.drafter), False))
    plan = plan_memory(config, *pair, psutil.virtual_memory().available)
    assert service.get("/server_info").json()["max_total_num_tokens"] == plan.pool_tokens == config.engine.kv_tokens
    allocated = re.findall(
        r"KV Cache is allocated\..*#tokens: (\d+), K size: ([\d.]+) GB, V size: ([\d.]+) GB",
        service.log.read_text(errors="replace"),
    )
    assert [int(tokens) for tokens, _, _ in allocated] == [plan.pool_tokens] * 2  # target and drafter
    shown = sum(float(size) for _, *sizes in allocated for size in sizes)
    # SGLang prints two decimals, four times.
    assert shown == pytest.approx(float(gib(plan.pool_tokens * plan.kv_bytes_per_token).split()[0]), abs=0.025)


def test_a_stop_answers_what_is_running_and_ends_in_time(service: Service) -> None:
    """Last: the engine is gone afterwards."""
    answers: list[dict[str, Any]] = []

    def ask() -> None:
        response = service.generate(heldout_prompts(1, 96)[0], NEW_TOKENS)
        answers.append({"status": response.status_code, **response.json()})

    request = threading.Thread(target=ask)
    request.start()
    while not running_requests(service):
        assert request.is_alive(), answers
        time.sleep(0.05)
    begin = time.monotonic()
    service.process.send_signal(signal.SIGTERM)
    refused = None
    while request.is_alive():
        with contextlib.suppress(requests.ConnectionError):
            refused = refused or service.generate([1, 2, 3], 1).status_code == 503
        time.sleep(0.2)
    assert service.process.wait(timeout=STOP_LIMIT_S + 30) == 0
    assert time.monotonic() - begin < STOP_LIMIT_S
    assert refused
    assert [answer["status"] for answer in answers] == [200]
    assert answers[0]["meta_info"]["completion_tokens"] == NEW_TOKENS
    assert len(answers[0]["output_ids"]) == NEW_TOKENS
    assert not psutil.pid_exists(service.process.pid)
    assert KEY not in service.log.read_text(errors="replace")


def running_requests(service: Service) -> float:
    found = re.findall(r"^sglang:num_running_reqs\{.*\} ([\d.]+)$", service.get("/metrics").text, re.MULTILINE)
    return sum(map(float, found))
