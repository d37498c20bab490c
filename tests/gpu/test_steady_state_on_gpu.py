"""A long mixed load on a real GPU: no wait for the host, no leak, no error, and the same tokens afterwards.

Run by anyone with a GPU host: pytest -m gpu tests/gpu/test_steady_state_on_gpu.py -s. Not part of CI.
"""

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ddtree_appliance.errors import ApplianceError
from ddtree_appliance.rehearsal.prompts import heldout_prompts
from ddtree_appliance.rehearsal.server import RehearsalServer
from tests.rehearsal.test_scheduling import abort

torch = pytest.importorskip("torch", reason="needs torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

VERIFY_STEPS = 20_000
LIMIT_S = 300.0
# What requests ask for costs the host time for each of a batch, and steps are counted by the batch.
SENDERS = 8
SYNC_CHECK = Path(__file__).parent / "sync_check"
FLAGS = ("--speculative-ddtree-budget", "32", "--enable-metrics")
BAD_WORDS = ("Traceback", "illegal memory access", "memory leak", "CUDA error", "nan")


def start(folder: Path, name: str, fault: bool = False) -> RehearsalServer:
    path = os.pathsep.join([str(SYNC_CHECK), os.environ.get("PYTHONPATH", "")])
    environment = {
        "PYTHONPATH": path,
        "DDTREE_SYNC_COUNT": str(folder / f"{name}.steps"),
        **({"DDTREE_SYNC_FAULT": "1"} if fault else {}),
    }
    server = RehearsalServer("DDTREE", folder / f"{name}.log", FLAGS, environment, device="cuda")
    server.spawn()
    return server


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RehearsalServer]]:
    folder = tmp_path_factory.mktemp("steady")
    running = {"checked": start(folder, "checked"), "fault": start(folder, "fault", fault=True)}
    try:
        for server in running.values():
            server.wait_ready()
        yield running
    finally:
        for server in running.values():
            server.stop()


def checked_steps(server: RehearsalServer) -> int:
    """Of whole batches, so far."""
    count = server.log_path.with_suffix(".steps")
    return int(count.read_text() or 0) if count.exists() else 0


def used_tokens(server: RehearsalServer) -> list[float]:
    lines = server.get("/metrics").text.splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith("sglang:kv_used_tokens")]


def test_a_wait_for_the_device_in_a_step_ends_the_server(servers: dict[str, RehearsalServer]) -> None:
    """The negative control of the test below."""
    with pytest.raises((ApplianceError, OSError)):
        servers["fault"].generate(heldout_prompts(1, 96)[0], 400)


def test_twenty_thousand_mixed_verify_steps_wait_for_nothing_and_change_nothing(
    servers: dict[str, RehearsalServer],
) -> None:
    """Every kind of request but grammars and processors, which do wait; aborts, stops, long and short prompts."""
    server = servers["checked"]
    pieces = heldout_prompts(24, 200)

    def answers() -> list[Any]:
        return [server.generate(piece[:100], 64)["output_ids"] for piece in pieces[:8]]

    before = answers()
    begin = time.monotonic()

    def send_many(sender: int) -> int:
        chance = random.Random(sender)
        sent = 0
        while time.monotonic() - begin < LIMIT_S:
            number = sender * 100_000 + sent
            # Few documents cut at many places: most prompts share a prefix with an earlier one.
            prompt = pieces[chance.randrange(len(pieces))][: chance.choice([1, 7, 60, 150, 200])]
            sampling: dict[str, Any] = {
                "temperature": 0,
                # Mostly long: a prefill costs the host as much as several steps.
                "max_new_tokens": chance.choice([1, 5, 300, 600]),
                "ignore_eos": chance.random() < 0.7,
            }
            if chance.random() < 0.2:
                sampling["stop"] = ["\n\n", "self"]
            if chance.random() < 0.5:
                sampling |= {"temperature": 0.9, **chance.choice([{}, {"top_p": 0.9}, {"top_k": 40, "min_p": 0.02}])}
            if chance.random() < 0.1:
                sampling |= {"frequency_penalty": 0.3, "repetition_penalty": 1.1, "min_new_tokens": 1}
            if chance.random() < 0.2:
                sampling["logit_bias"] = {"266": -3.0, "13": 1.5}
            body = {"rid": f"soak-{number}", "input_ids": prompt, "sampling_params": sampling}
            if chance.random() < 0.1:
                body |= {"return_logprob": True, "top_logprobs_num": chance.choice([0, 2])}
            if chance.random() < 0.1:
                abort(server, body, chance.random() * 0.05)
            else:
                assert server.post("/generate", body).status_code == 200
            sent += 1
            if sent % 20 == 0 and checked_steps(server) >= VERIFY_STEPS:
                break
        return sent

    with ThreadPoolExecutor(SENDERS) as senders:
        requests_sent = sum(senders.map(send_many, range(SENDERS)))
    steps = checked_steps(server)
    print(f"\n{steps} verify steps, {requests_sent} requests, {time.monotonic() - begin:.0f} s")
    assert steps >= VERIFY_STEPS

    time.sleep(3)  # SGLang checks its pools when it is idle, and dies on a leak
    assert server.is_alive()
    server.flush_cache()
    assert used_tokens(server) and not any(used_tokens(server))
    found = [line for line in server.log_path.read_text(errors="replace").splitlines() if line_is_bad(line)]
    assert not found, found[:5]
    assert answers() == before


def line_is_bad(line: str) -> bool:
    words = line.lower().replace("=", " ").replace(",", " ").split()
    return any(bad.lower() in line.lower() if " " in bad or bad == "Traceback" else bad in words for bad in BAD_WORDS)
