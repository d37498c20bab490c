"""The scheduler's corners: paged KV, chunked prefill, radix hits, the context limit, retraction, aborts and leaks."""

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from ddtree_appliance.rehearsal.prompts import heldout_documents
from ddtree_appliance.rehearsal.server import RehearsalServer
from tests.rehearsal.conftest import Kind, ServerPool, tree

pytestmark = pytest.mark.rehearsal

PAGED = ("--page-size", "16", "--chunked-prefill-size", "64")
CONTEXT = 256
# Few slots for eight requests, and a scheduler that trusts them to stay short: it admits too many and must retract.
TIGHT = (
    *("--context-length", str(CONTEXT)),
    *("--max-total-tokens", "1100"),
    *("--schedule-conservativeness", "0.05"),
    "--enable-metrics",
    "--enable-priority-scheduling",
)
PAIRS = {
    "paged, chunked": (Kind(flags=PAGED), tree(64, *PAGED)),
    "paged, chunked, small tree": (Kind(flags=PAGED), tree(3, *PAGED)),
    "tight": (Kind(flags=TIGHT), tree(64, *TIGHT)),
    "tight, small tree": (Kind(flags=TIGHT), tree(3, *TIGHT)),
}


def servers_of(pool: ServerPool, kind: str) -> tuple[RehearsalServer, RehearsalServer]:
    """Plain and DDTREE; the other page size's servers make room."""
    group = {server for name, pair in PAIRS.items() if name.split(",")[0] == kind.split(",")[0] for server in pair}
    pool.stop_all_but(list(group))
    plain, ddtree = PAIRS[kind]
    pool.start([plain, ddtree])
    return pool[plain], pool[ddtree]


def outcome(answer: dict[str, Any]) -> tuple[list[int], dict[str, Any], int]:
    meta = answer["meta_info"]
    return answer["output_ids"], meta["finish_reason"], meta["completion_tokens"]


def together(server: RehearsalServer, requests_: Sequence[tuple[list[int], int]]) -> list[Any]:
    with ThreadPoolExecutor(8) as senders:
        return [outcome(a) for a in senders.map(lambda request: server.generate(*request), requests_)]


def documents(length: int, count: int) -> list[list[int]]:
    return [document[:length] for document in heldout_documents() if len(document) >= length][:count]


@pytest.mark.parametrize("kind", ["paged, chunked", "paged, chunked, small tree"])
def test_paged_kv_and_chunked_prefill_equal_plain_decoding(kind: str, pool: ServerPool) -> None:
    plain, ddtree = servers_of(pool, kind)
    # Lengths around page and chunk borders, far beyond one chunk.
    wanted = [(document[:n], 48) for document in documents(800, 3) for n in (15, 16, 17, 63, 64, 65, 500, 799)]
    expected = [outcome(plain.generate(*request)) for request in wanted]
    assert [outcome(ddtree.generate(*request)) for request in wanted] == expected
    assert together(ddtree, wanted) == expected  # radix hits, batches


@pytest.mark.parametrize("kind", ["paged, chunked", "tight"])
def test_radix_hits_give_the_tokens_of_a_cold_prefill(kind: str, pool: ServerPool) -> None:
    plain, ddtree = servers_of(pool, kind)
    for document in documents(160, 4):
        prompt, extended = document[:128], document[:150]
        ddtree.flush_cache()
        cold = ddtree.generate(prompt, 40)
        again, longer = ddtree.generate(prompt, 40), ddtree.generate(extended, 40)
        assert cold["meta_info"]["cached_tokens"] == 0
        assert again["meta_info"]["cached_tokens"] >= 112
        assert longer["meta_info"]["cached_tokens"] >= 112
        assert outcome(cold) == outcome(again) == outcome(plain.generate(prompt, 40))
        assert outcome(longer) == outcome(plain.generate(extended, 40))


@pytest.mark.parametrize("kind", ["tight", "tight, small tree"])
def test_requests_that_end_at_the_context_limit_equal_plain_decoding(kind: str, pool: ServerPool) -> None:
    """Defect C: near the limit a step's slots used to be written into the next request's row."""
    plain, ddtree = servers_of(pool, kind)
    lengths = (180, 230, 240, 249)
    wanted = [(document[:n], CONTEXT - n) for document in documents(CONTEXT, 4) for n in lengths]
    expected = [outcome(plain.generate(*request)) for request in wanted]
    assert {reason["type"] for _, reason, _ in expected} == {"length"}
    assert [outcome(ddtree.generate(*request)) for request in wanted] == expected
    assert together(ddtree, wanted) == expected


def retracted(server: RehearsalServer) -> float:
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("sglang:num_retracted_requests_total"))


@pytest.mark.parametrize("kind", ["tight", "tight, small tree"])
def test_retracted_requests_equal_plain_decoding(kind: str, pool: ServerPool) -> None:
    plain, ddtree = servers_of(pool, kind)
    wanted = [(document[20:60], 150) for document in documents(64, 16)]
    expected = [outcome(plain.generate(*request)) for request in wanted]
    before = retracted(ddtree)
    assert together(ddtree, wanted) == expected
    assert retracted(ddtree) > before


WISHES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.9, "sampling_seed": 3},
    {"temperature": 0, "frequency_penalty": 0.9, "repetition_penalty": 1.1},
    {"temperature": 1, "sampling_seed": 8, "presence_penalty": 0.5},
    {"temperature": 0, "min_new_tokens": 140, "stop_token_ids": [266], "ignore_eos": False},
    {"temperature": 0, "regex": "[a-z ]{150}", "ignore_eos": False},
]


def test_retracted_requests_keep_their_seeds_counts_and_grammars(pool: ServerPool) -> None:
    """And their priorities: the urgent ones come first, and may push others out."""
    plain, ddtree = servers_of(pool, "tight")
    bodies = [
        {
            "input_ids": document[20:60],
            "sampling_params": {"max_new_tokens": 150, "ignore_eos": True, **WISHES[number % len(WISHES)]},
            "priority": number % 3,
        }
        for number, document in enumerate(documents(64, 18))
    ]
    expected = [outcome(plain.post("/generate", body).json()) for body in bodies]
    before = retracted(ddtree)
    with ThreadPoolExecutor(len(bodies)) as senders:
        answers = list(senders.map(lambda body: outcome(ddtree.post("/generate", body).json()), bodies))
    assert answers == expected
    assert retracted(ddtree) > before


def abort(server: RehearsalServer, body: dict[str, Any], after_s: float) -> None:
    """Send a request and abort it: by its id, or by hanging up."""
    if body["rid"].endswith("0"):
        with requests.post(server.url + "/generate", json={**body, "stream": True}, stream=True, timeout=60) as answer:
            next(answer.iter_lines(), None)
        return
    sender = threading.Thread(target=server.post, args=("/generate", body))
    sender.start()
    time.sleep(after_s)
    server.post("/abort_request", {"rid": body["rid"]})
    sender.join()


def test_five_hundred_mixed_requests_with_aborts_leak_no_slot_and_change_no_token(pool: ServerPool) -> None:
    plain, ddtree = servers_of(pool, "tight")
    random_ = random.Random(0)
    pieces = documents(CONTEXT, 12)

    def send(number: int) -> None:
        prompt = pieces[number % len(pieces)][: 20 + number % 150]
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": 1 + number % 60, "ignore_eos": number % 2 == 0}
        if number % 5 == 0:
            sampling["stop"] = ["\n", "self"]
        if number % 7 == 0:
            sampling |= {"temperature": 1, "frequency_penalty": 0.3}
        if number % 11 == 0:
            sampling |= {"regex": "[a-z ]{5,90}", "ignore_eos": False}
        body = {"rid": f"mixed-{number}", "input_ids": prompt, "sampling_params": sampling}
        if number % 4 == 3:
            abort(ddtree, body, delays[number])
        else:
            assert ddtree.post("/generate", body).status_code == 200

    delays = [random_.random() * 0.1 for _ in range(500)]
    with ThreadPoolExecutor(8) as senders:
        list(senders.map(send, range(500)))

    # SGLang checks its pools whenever it is idle and dies on a leak; flushing needs every slot to be free.
    time.sleep(3)
    assert ddtree.is_alive()
    ddtree.flush_cache()
    used = [line for line in ddtree.get("/metrics").text.splitlines() if line.startswith("sglang:kv_used_tokens")]
    assert used and all(float(line.split()[-1]) == 0 for line in used), used
    wanted = [(piece[:100], 60) for piece in pieces]
    assert together(ddtree, wanted) == [outcome(plain.generate(*request)) for request in wanted]
