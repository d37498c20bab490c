"""Two tensor-parallel ranks on the CPU: the vocabulary in two shards, and one rank's word for what was accepted.

Run with real SGLang over gloo. tests/gpu/test_ranks_on_gpus.py does the same over NCCL, with CUDA graphs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import requests

from ddtree_appliance.ddtree.start_rules import DEFAULT_TOPK
from ddtree_appliance.errors import ApplianceError
from ddtree_appliance.rehearsal.prompts import heldout_prompts
from ddtree_appliance.rehearsal.server import STAND_INS, RehearsalServer
from tests.rehearsal.conftest import PLAIN, SABOTAGE, ServerPool
from tests.rehearsal.reference import judge

pytestmark = pytest.mark.rehearsal

BUDGET, NEW_TOKENS = 16, 48
# One core for each rank, whatever the machine's NUMA nodes.
RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def two_ranks(log: Path, fault: str | None = None) -> RehearsalServer:
    environment = dict(RANKS)
    if fault is not None:
        environment |= {"PYTHONPATH": os.pathsep.join([str(STAND_INS), str(SABOTAGE)]), "DDTREE_SABOTAGE": fault}
    return RehearsalServer("DDTREE", log, ("--tp-size", "2", "--speculative-ddtree-budget", str(BUDGET)), environment)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return heldout_prompts(12, 96)


@pytest.fixture(scope="module")
def plain_tokens(pool: ServerPool, prompts: list[list[int]]) -> list[list[int]]:
    return [pool[PLAIN].generate(prompt, NEW_TOKENS)["output_ids"] for prompt in prompts]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RehearsalServer]:
    with two_ranks(tmp_path_factory.mktemp("ranks") / "server.log") as running:
        yield running


def test_tokens_equal_plain_decoding_and_steps_the_reference(
    server: RehearsalServer, prompts: list[list[int]], plain_tokens: list[list[int]]
) -> None:
    runs = [server.stream_runs(prompt, NEW_TOKENS) for prompt in prompts]
    assert [list(chain.from_iterable(run)) for run in runs] == plain_tokens
    agreement = judge(prompts, runs, BUDGET, DEFAULT_TOPK)
    assert agreement.share >= 0.99, f"{agreement.equal} of {agreement.steps} steps"


def test_eight_concurrent_requests_equal_plain_decoding(
    server: RehearsalServer, prompts: list[list[int]], plain_tokens: list[list[int]]
) -> None:
    with ThreadPoolExecutor(8) as senders:
        answers = list(senders.map(lambda prompt: server.generate(prompt, NEW_TOKENS), prompts))
    assert [answer["output_ids"] for answer in answers] == plain_tokens


WISHES: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_p": 0.9, "sampling_seed": 3},
    {"temperature": 1, "sampling_seed": -4, "frequency_penalty": 0.8, "repetition_penalty": 1.2},
    {"temperature": 0, "presence_penalty": 1.0, "min_new_tokens": 20, "stop_token_ids": [266]},
    {"temperature": 0, "regex": "[a-z]{3,8}( = [0-9]{1,3}\\n[a-z]{2,5}){2,4}", "ignore_eos": False},
]


def test_whatever_shapes_the_distribution_is_served_by_two_ranks(
    server: RehearsalServer, pool: ServerPool, prompts: list[list[int]]
) -> None:
    asked = [(prompts[number], WISHES[number % len(WISHES)]) for number in range(8)]

    def tokens(each: RehearsalServer, prompt: list[int], wish: dict[str, Any]) -> list[int]:
        result: list[int] = each.generate(prompt, NEW_TOKENS, **wish)["output_ids"]
        return result

    with ThreadPoolExecutor(8) as senders:
        answers = list(senders.map(lambda each: tokens(server, *each), asked))
    assert answers == [tokens(pool[PLAIN], *each) for each in asked]


def test_a_rank_that_decides_otherwise_is_overruled(
    tmp_path: Path, prompts: list[list[int]], plain_tokens: list[list[int]]
) -> None:
    """Rank 1 accepts nothing and takes another token, as rounding might make it. Rank 0's word counts for both."""
    with two_ranks(tmp_path / "server.log", "rank_1_disagrees") as server:
        assert [server.generate(prompt, NEW_TOKENS)["output_ids"] for prompt in prompts[:4]] == plain_tokens[:4]


def test_without_the_broadcast_such_a_rank_would_be_noticed(
    tmp_path: Path, prompts: list[list[int]], plain_tokens: list[list[int]]
) -> None:
    """The negative control: the ranks' lengths part, and the answer is wrong, late or missing."""
    with two_ranks(tmp_path / "server.log", "rank_1_disagrees_unheard") as server:
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        try:
            answer = server.post("/generate", {"input_ids": prompts[0], "sampling_params": sampling}, timeout_s=20)
            tokens = answer.json().get("output_ids")
        except (ApplianceError, requests.RequestException):
            tokens = None
        assert tokens != plain_tokens[0]
