"""The servers of one comparison group: started together, or found running; asked what they really are."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import requests

from ddtree_appliance.bench.variants import Variant
from ddtree_appliance.errors import ApplianceError

START_LIMIT_S = 900.0
READY_LINE = b"The server is fired up"
_POLL_S = 0.5
_STOP_LIMIT_S = 30.0
_STOP_POLL_S = 0.05
_INFO_LIMITS_S = (10.0, 60.0)
# Resolved arguments that explain a result; what a server does not name is left out.
FACTS = (
    "version",
    "model_path",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_draft_tokens",
    "speculative_dflash_block_size",
    "speculative_ddtree_budget",
    "speculative_ddtree_topk",
    "attention_backend",
    "speculative_draft_attention_backend",
    "dtype",
    "kv_cache_dtype",
    "page_size",
    "tp_size",
    "device",
    "max_running_requests",
    "max_total_num_tokens",
    "disable_radix_cache",
    "disable_overlap_schedule",
    "disable_cuda_graph",
    "disable_decode_cuda_graph",
    "cuda_graph_backend_decode",
)


class BenchServer:
    """A server that answers at `url`. step_times: where it writes the times of its steps, None if it does not.

    With a command it is a child with its own process group and log; without one it was found running and is left so.
    """

    def __init__(
        self,
        name: str,
        url: str,
        command: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        step_times: Path | None = None,
    ) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.command = None if command is None else list(command)
        self.step_times = step_times
        self.has_prefix_cache = False
        self._environment = environment
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

    def spawn(self) -> None:
        """Start the process without waiting for it."""
        assert self.command is not None and self._log_path is not None
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )

    def is_ready(self) -> bool:
        """Whether it has answered its own warm-up request. Raises ApplianceError if it has exited instead."""
        assert self._process is not None and self._log_path is not None
        if (code := self._process.poll()) is not None:
            raise ApplianceError(f"variant {self.name}: its server exited with {code}", self.log_tail())
        # The log line costs the server nothing; /health would run a generation per poll.
        return READY_LINE in self._log_path.read_bytes()

    def stop(self) -> None:
        """Kill the process group: a benchmark has nothing to save. Attached servers go on."""
        if self._process is None:
            return
        group = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait()
        self._process = None
        # The scheduler gives its GPU memory back only when it is gone, and the next servers need it.
        end = time.monotonic() + _STOP_LIMIT_S
        while _has_living(group) and time.monotonic() < end:
            time.sleep(_STOP_POLL_S)

    def log_tail(self, lines: int = 30) -> str | None:
        """The end of the log for an error's hint, None if the server was not started here."""
        if self._log_path is None or not self._log_path.exists():
            return None
        text = self._log_path.read_text(errors="replace").splitlines()
        return f"end of {self._log_path}:\n" + "\n".join(text[-lines:])

    def facts(self) -> dict[str, Any]:
        """Its resolved arguments (`FACTS`). Raises ApplianceError if it does not tell them."""
        info = self._info()
        self.has_prefix_cache = not info.get("disable_radix_cache", False)
        return {name: info[name] for name in FACTS if name in info}

    def forget_prompts(self) -> None:
        """Empty its prefix cache, if it has one. Raises ApplianceError if the server refuses."""
        if not self.has_prefix_cache:
            return
        try:
            # It waits until the last request is quite gone, which may be after its answer.
            answer = requests.post(f"{self.url}/flush_cache?timeout=10", timeout=_INFO_LIMITS_S)
            answer.raise_for_status()
        except requests.RequestException as error:
            raise ApplianceError(f"variant {self.name}: its prefix cache cannot be flushed: {error}") from error

    def _info(self) -> dict[str, Any]:
        try:
            answer = requests.get(f"{self.url}/server_info", timeout=_INFO_LIMITS_S)
            answer.raise_for_status()
            info = answer.json()
        except (requests.RequestException, ValueError) as error:
            raise ApplianceError(f"variant {self.name}: no /server_info at {self.url}: {error}") from error
        if not isinstance(info, dict):
            raise ApplianceError(f"variant {self.name}: /server_info at {self.url} is not an object")
        return info


@contextmanager
def running(
    servers: Sequence[BenchServer],
    on_wait: Callable[[float, list[str]], None] | None = None,
    limit_s: float = START_LIMIT_S,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Start all of them side by side, wait until each is ready, and stop them whatever happens.

    on_wait is called with the seconds waited and the names of those that are not ready. Raises ApplianceError with the
    end of the log of the first that exits or is late.
    """
    begin = time.monotonic()
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.spawn()
        waiting = list(servers)
        while waiting := [server for server in waiting if not server.is_ready()]:
            waited_s = time.monotonic() - begin
            if waited_s > limit_s:
                late = waiting[0]
                raise ApplianceError(f"variant {late.name}: not ready after {limit_s:.0f} s", late.log_tail())
            if on_wait is not None:
                on_wait(waited_s, [server.name for server in waiting])
            sleep(_POLL_S)
        yield


def _has_living(group: int) -> bool:
    """Whether a process of the group is more than a zombie, which a container's PID 1 may never reap."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, its_group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def variant_of(facts: Mapping[str, Any], name: str) -> Variant:
    """What a running server with these facts is, under the name that the operator gave it. Raises ApplianceError."""
    algorithm = facts.get("speculative_algorithm") or "none"
    if algorithm not in ("none", "DFLASH", "DDTREE"):
        raise ApplianceError(f"variant {name}: its algorithm is {algorithm}", "none, DFLASH and DDTREE are compared")
    return Variant(
        algorithm=algorithm,
        budget=facts.get("speculative_ddtree_budget"),
        topk=facts.get("speculative_ddtree_topk"),
        backend=facts.get("attention_backend"),
        label=name,
    )
