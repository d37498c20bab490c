"""DDTREE writes the target's own greedy tokens, and its drafts are the ones the algorithm asks for."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ddtree_appliance.ddtree.start_rules import DEFAULT_TOPK
from ddtree_appliance.rehearsal.server import RehearsalServer
from tests.rehearsal.conftest import CHAIN, NEW_TOKENS, PLAIN, Kind, ServerPool, sabotaged, tree
from tests.rehearsal.reference import Agreement, judge

pytestmark = pytest.mark.rehearsal

BUDGETS = (1, 3, 7, 8, 15, 16, 32, 64)
REFERENCE_BUDGETS = (1, 3, 8, 16, 64)
Runs = list[list[list[int]]]


@pytest.fixture(scope="module", autouse=True)
def servers(pool: ServerPool) -> None:
    pool.start([PLAIN, CHAIN, *map(tree, BUDGETS)])


@pytest.fixture(scope="module")
def streamed(pool: ServerPool, prompts: list[list[int]]) -> dict[Kind, Runs]:
    """Per kind and prompt: the tokens of the prefill and of each verify step."""
    return stream_all(pool, [CHAIN, *map(tree, BUDGETS)], prompts)


def stream_all(pool: ServerPool, kinds: Sequence[Kind], prompts: Sequence[Sequence[int]]) -> dict[Kind, Runs]:
    """One prompt after the other on each server; two servers at a time, one per core."""
    pool.start(kinds)
    with ThreadPoolExecutor(2) as readers:
        runs = readers.map(lambda kind: [pool[kind].stream_runs(prompt, NEW_TOKENS) for prompt in prompts], kinds)
        return dict(zip(kinds, runs, strict=True))


def tokens_of(runs_of: Runs) -> list[list[int]]:
    return [[token for run in runs for token in run] for runs in runs_of]


def accept_length(runs_of: Runs) -> float:
    """Tokens per verify step, the bonus token included; the step that the length limit may have cut is left out."""
    steps = [run for runs in runs_of for run in runs[1:-1]]
    return sum(map(len, steps)) / len(steps)


def together(server: RehearsalServer, prompts: Sequence[Sequence[int]], **parameters: Any) -> list[list[int]]:
    """The tokens for all prompts, 8 requests at a time."""
    with ThreadPoolExecutor(8) as senders:
        answers = senders.map(lambda prompt: server.generate(prompt, NEW_TOKENS, **parameters), prompts)
        return [answer["output_ids"] for answer in answers]


@pytest.mark.parametrize("budget", BUDGETS)
def test_sequential_greedy_tokens_equal_plain_decoding(
    budget: int, streamed: dict[Kind, Runs], plain_tokens: list[list[int]]
) -> None:
    assert tokens_of(streamed[tree(budget)]) == plain_tokens


@pytest.mark.parametrize("budget", BUDGETS)
def test_eight_concurrent_greedy_requests_equal_plain_decoding(
    budget: int, pool: ServerPool, prompts: list[list[int]], plain_tokens: list[list[int]]
) -> None:
    assert together(pool[tree(budget)], prompts) == plain_tokens


def test_the_chain_on_the_patched_wheel_equals_plain_decoding(
    streamed: dict[Kind, Runs], plain_tokens: list[list[int]]
) -> None:
    assert tokens_of(streamed[CHAIN]) == plain_tokens


@pytest.mark.parametrize(("budget", "ratio"), [(16, 1.2), (64, 1.38)])
def test_a_tree_accepts_more_per_step_than_the_chain(budget: int, ratio: float, streamed: dict[Kind, Runs]) -> None:
    assert accept_length(streamed[tree(budget)]) >= ratio * accept_length(streamed[CHAIN])


@pytest.mark.parametrize("budget", REFERENCE_BUDGETS)
def test_each_step_accepts_what_the_engine_free_reference_accepts(
    budget: int, streamed: dict[Kind, Runs], prompts: list[list[int]]
) -> None:
    agreement = judge(prompts, streamed[tree(budget)], budget, DEFAULT_TOPK)
    assert agreement.steps > 300
    assert agreement.share >= 0.99, agreement


def test_every_length_limit_cuts_an_accepted_run_exactly(
    pool: ServerPool, prompts: list[list[int]], plain_tokens: list[list[int]]
) -> None:
    for prompt, expected in zip(prompts[:3], plain_tokens[:3], strict=True):
        for limit in range(1, 21):
            answer = pool[tree(64)].generate(prompt, limit)
            assert answer["output_ids"] == expected[:limit]
            assert answer["meta_info"]["completion_tokens"] == limit
            assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": limit}


# Negative controls: each fault is caught by the comparison that is named for it above.


@pytest.fixture(scope="module")
def sabotage_runs(pool: ServerPool, prompts: list[list[int]], plain_tokens: list[list[int]]) -> dict[str, Runs]:
    faults = {
        "mask_dropped": 16,
        "kv_not_moved": 16,
        "positions_by_index": 16,
        "hidden_in_slot_order": 16,
        "builder_ignores_path": 16,
        "reserve_from_budget_alone": 3,
    }
    pool.stop_all_but([PLAIN, tree(64)])  # memory for the next six
    runs = stream_all(pool, [sabotaged(fault, budget) for fault, budget in faults.items()], prompts)
    pool.stop_all_but([PLAIN, tree(64)])
    return dict(zip(faults, runs.values(), strict=True))


@pytest.mark.parametrize("fault", ["mask_dropped", "kv_not_moved", "positions_by_index"])
def test_a_fault_in_the_verify_step_changes_the_tokens(
    fault: str, sabotage_runs: dict[str, Runs], plain_tokens: list[list[int]]
) -> None:
    assert tokens_of(sabotage_runs[fault]) != plain_tokens


@pytest.mark.parametrize(
    ("fault", "budget"), [("hidden_in_slot_order", 16), ("builder_ignores_path", 16), ("reserve_from_budget_alone", 3)]
)
def test_a_fault_in_the_drafts_leaves_the_tokens_but_not_the_steps(
    fault: str, budget: int, sabotage_runs: dict[str, Runs], prompts: list[list[int]], plain_tokens: list[list[int]]
) -> None:
    runs = sabotage_runs[fault]
    assert tokens_of(runs) == plain_tokens
    agreement: Agreement = judge(prompts, runs, budget, DEFAULT_TOPK)
    assert agreement.share < 0.99, agreement
