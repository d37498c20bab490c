"""Run a server with the bundled pair as a child process and talk to it.

The child is `ddtree-appliance launch`, the same entry point as in production; only the environment (CPU engine,
stand-in kernels) and the flags (device, backend, dtype) are the rehearsal's. With device "cuda" the same pair runs on a
GPU, with the real kernels: that is what tests/gpu does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import requests

from ddtree_appliance.errors import ApplianceError
from ddtree_appliance.ports import reserve_port

STAND_INS = Path(__file__).parent / "stand_ins"
MODELS = Path(__file__).parent / "models" / "tiny-code"
TARGET = MODELS / "target"
DRAFTER = MODELS / "dflash"
START_LIMIT_S = 300.0
FLUSH_LIMIT_S = 60.0
DEATH_LIMIT_S = 5.0
STREAM_TRIES = 8
DEVICE_FLAGS = {
    "cpu": (
        *("--dtype", "float32"),
        *("--attention-backend", "torch_native"),
        "--disable-cuda-graph",
        # Only --max-total-tokens limits the pool; SGLang takes this share of what several servers leave free.
        *("--mem-fraction-static", "0.9"),
        *("--max-running-requests", "8"),
        "--sleep-on-idle",
    ),
    "cuda": (
        *("--attention-backend", "triton"),
        *("--mem-fraction-static", "0.15"),
        *("--max-running-requests", "32"),
        # 58 shapes, over a minute: nothing here measures prefill.
        "--disable-prefill-cuda-graph",
    ),
}


def rehearsal_environment(
    extra: Mapping[str, str] | None = None, inherited: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment in which SGLang serves on a CPU with the stand-in kernels first on PYTHONPATH.

    inherited: what it is made from; None: this process's own.
    """
    inherited = os.environ if inherited is None else inherited
    path = inherited.get("PYTHONPATH")
    environment = {
        **inherited,
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": os.pathsep.join([str(STAND_INS), *([path] if path else [])]),
        # Spinning OpenMP threads on two cores cost more than they bring to matrices this small.
        "OMP_NUM_THREADS": "1",
        # Nor does compiling: the first penalty would wait for a C++ compiler.
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        **(extra or {}),
    }
    # Without cached bytecode each of a server's three processes compiles thousands of modules at every start.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def server_arguments(algorithm: str | None, port: int, extra: Sequence[str] = (), device: str = "cpu") -> list[str]:
    """SGLang's arguments for the bundled pair. algorithm: None (no speculation), "DFLASH" or "DDTREE"."""
    arguments = [
        *("--model-path", str(TARGET)),
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
        *("--device", device),
        *DEVICE_FLAGS[device],
    ]
    if "--max-total-tokens" not in extra:
        arguments += ["--max-total-tokens", "16384"]
    if algorithm is not None:
        arguments += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(DRAFTER)]
    return [*arguments, *extra]


class RehearsalServer:
    """A running server; a context manager that stops it with its whole process group.

    log_path receives everything the server prints. `url` is its base address once `start` has returned.
    """

    def __init__(
        self,
        algorithm: str | None,
        log_path: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        device: str = "cpu",
    ) -> None:
        self.port = reserve_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path
        self._command = [
            *(sys.executable, "-W", "ignore", "-m", "ddtree_appliance", "launch", "--"),
            *server_arguments(algorithm, self.port, arguments, device),
        ]
        self._environment = (
            rehearsal_environment(environment) if device == "cpu" else {**os.environ, **(environment or {})}
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._session = requests.Session()

    def spawn(self) -> None:
        """Start the process without waiting for it."""
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )

    def wait_ready(self, on_wait: Callable[[float], None] | None = None) -> None:
        """Wait until the server has answered its own warm-up request.

        on_wait is called about twice a second with the seconds waited. Raises ApplianceError with the end of the log
        if the server exits or is not ready within `START_LIMIT_S`.
        """
        assert self._process is not None
        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < START_LIMIT_S:
            if self._process.poll() is not None:
                raise ApplianceError(f"the server exited with {self._process.returncode}", self.log_tail())
            # The log line costs the server nothing; /health would run a generation per poll.
            if b"The server is fired up" in self.log_path.read_bytes():
                return
            if on_wait is not None:
                on_wait(waited)
            time.sleep(0.5)
        raise ApplianceError(f"the server is not ready after {START_LIMIT_S:.0f} s", self.log_tail())

    def __enter__(self) -> RehearsalServer:
        self.spawn()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill the process group: a rehearsal has nothing to save, and SGLang's drain takes 5 s."""
        self._session.close()
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def is_alive(self) -> bool:
        """Whether the launcher process is still running."""
        return self._process is not None and self._process.poll() is None

    def log_tail(self, lines: int = 30) -> str:
        """The end of the log, for an error's hint."""
        text = self.log_path.read_text(errors="replace").splitlines()
        return "end of its log:\n" + "\n".join(text[-lines:])

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 300.0) -> requests.Response:
        """POST JSON; the response, whatever its status. Safe to call from several threads.

        Raises ApplianceError with the end of the log if the server dies instead of answering.
        """
        try:
            return requests.post(self.url + path, json=body, timeout=(10.0, timeout_s))
        except requests.ConnectionError as error:
            if self._process is None:
                raise
            try:
                status = self._process.wait(DEATH_LIMIT_S)
            except subprocess.TimeoutExpired:
                raise error from None
            raise ApplianceError(f"the server exited with {status} instead of an answer", self.log_tail(60)) from error

    def get(self, path: str, timeout_s: float = 60.0) -> requests.Response:
        """GET; the response, whatever its status."""
        return self._session.get(self.url + path, timeout=(10.0, timeout_s))

    def flush_cache(self) -> None:
        """Empty the prefix cache, once the server is idle: for a moment after its last answer it is not.

        Raises ApplianceError if it is not idle within `FLUSH_LIMIT_S`, as with a request that never ended.
        """
        answer = self.post(f"/flush_cache?timeout={FLUSH_LIMIT_S:.0f}", {})
        if answer.status_code != 200:
            raise ApplianceError(f"/flush_cache answered {answer.status_code}: {answer.text[:400]}")

    def generate(self, input_ids: Sequence[int], max_new_tokens: int, **parameters: Any) -> dict[str, Any]:
        """Greedy native /generate of one prompt given as token ids; EOS is ignored unless `ignore_eos` says otherwise.

        Raises ApplianceError with the answer's text if the status is not 200.
        """
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **parameters}
        answer = self.post("/generate", {"input_ids": list(input_ids), "sampling_params": sampling})
        if answer.status_code != 200:
            raise ApplianceError(f"/generate answered {answer.status_code}: {answer.text[:400]}")
        result: dict[str, Any] = answer.json()
        return result

    def stream_runs(self, input_ids: Sequence[int], max_new_tokens: int, **parameters: Any) -> list[list[int]]:
        """As `generate`, but streamed: the tokens of the prefill and of each verify step.

        SGLang merges events that a busy reader has not taken yet; as greedy answers repeat, the request is sent again
        until its events are its verify steps. Raises ApplianceError if they never are.
        """
        for _ in range(STREAM_TRIES):
            runs, verify_steps = self.stream(input_ids, max_new_tokens, **parameters)
            if len(runs) == 1 + verify_steps:
                return runs
        raise ApplianceError(f"{STREAM_TRIES} streamed answers had merged events", "is the machine overloaded?")

    def stream(self, input_ids: Sequence[int], max_new_tokens: int, **parameters: Any) -> tuple[list[list[int]], int]:
        """As `generate`, but streamed: the tokens of each event, and the request's verify steps."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **parameters}
        body = {"input_ids": list(input_ids), "sampling_params": sampling, "stream": True}
        runs: list[list[int]] = []
        seen, verify_steps = 0, 0
        with requests.post(self.url + "/generate", json=body, stream=True, timeout=(10.0, 300.0)) as answer:
            if answer.status_code != 200:
                raise ApplianceError(f"/generate answered {answer.status_code}: {answer.text[:400]}")
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    event = json.loads(line[len(b"data: ") :])
                    runs.append(event["output_ids"][seen:])
                    seen = len(event["output_ids"])
                    verify_steps = event["meta_info"].get("spec_verify_ct", 0)
        return runs, verify_steps
