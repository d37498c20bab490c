"""DDTREE writes the target's own greedy tokens, and its drafts are the ones the algorithm asks for."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from ddtree_appliance.ddtree.start_rules import DEFAULT_TOPK
from ddtree_appliance.rehearsal.server import RehearsalServer
from tests.rehearsal.conftest import CHAIN, NEW_TOKENS, PLAIN, Kind, ServerPool, sabotaged, tree
from tests.rehearsal.reference import Agreement, judge

pytestmark = pytest.mark.rehearsal

BUDGETS = (1, 3, 7, 8, 15, 16, 32, 64)
REFERENCE_BUDGETS = (1, 3, 8, 16, 64)
# Sums in another order may swap two candidates that are almost equally likely.
SAME_STEPS = 0.01
Runs = list[list[list[int]]]
Answer = dict[str, Any]
T = TypeVar("T")


# Asked again after the records are taken.
KEPT = (PLAIN, CHAIN, tree(64))


@dataclass(frozen=True)
class Record:
    """A server's answers to the prompts. streamed: one by one, the tokens of the prefill and of each verify step;
    together: 8 requests at a time.
    """

    streamed: Runs
    together: list[Answer]

    @property
    def tokens_together(self) -> list[list[int]]:
        return [answer["output_ids"] for answer in self.together]

    @property
    def steps_alone(self) -> int:
        return sum(len(runs) - 1 for runs in self.streamed)

    @property
    def steps_together(self) -> int:
        return sum(int(answer["meta_info"]["spec_verify_ct"]) for answer in self.together)


@pytest.fixture(scope="module")
def records(pool: ServerPool, prompts: list[list[int]]) -> dict[Kind, Record]:
    return ask(pool, [CHAIN, *map(tree, BUDGETS)], lambda server: record(server, prompts))


def ask(pool: ServerPool, kinds: Sequence[Kind], question: Callable[[RehearsalServer], T]) -> dict[Kind, T]:
    """Two servers at a time, one per core; then they make room for the next two."""

    def of(kind: Kind) -> tuple[Kind, T]:
        return kind, question(pool[kind])

    found: dict[Kind, T] = {}
    for first in range(0, len(kinds), 2):
        pair = kinds[first : first + 2]
        pool.start(pair)
        with ThreadPoolExecutor(2) as readers:
            found.update(readers.map(of, pair))
        pool.stop_all_but(KEPT)
    return found


@pytest.fixture(scope="module")
def streamed(records: dict[Kind, Record]) -> dict[Kind, Runs]:
    return {kind: each.streamed for kind, each in records.items()}


def tokens_of(runs_of: Runs) -> list[list[int]]:
    return [[token for run in runs for token in run] for runs in runs_of]


def accept_length(runs_of: Runs) -> float:
    """Tokens per verify step, the bonus token included; the step that the length limit may have cut is left out."""
    steps = [run for runs in runs_of for run in runs[1:-1]]
    return sum(map(len, steps)) / len(steps)


def one_by_one(server: RehearsalServer, prompts: Sequence[Sequence[int]]) -> Runs:
    return [server.stream_runs(prompt, NEW_TOKENS) for prompt in prompts]


def record(server: RehearsalServer, prompts: Sequence[Sequence[int]]) -> Record:
    streamed = one_by_one(server, prompts)
    with ThreadPoolExecutor(8) as senders:
        return Record(streamed, list(senders.map(lambda prompt: server.generate(prompt, NEW_TOKENS), prompts)))


@pytest.mark.parametrize("budget", BUDGETS)
def test_sequential_greedy_tokens_equal_plain_decoding(
    budget: int, streamed: dict[Kind, Runs], plain_tokens: list[list[int]]
) -> None:
    assert tokens_of(streamed[tree(budget)]) == plain_tokens


@pytest.mark.parametrize("budget", BUDGETS)
def test_eight_concurrent_greedy_requests_equal_plain_decoding(
    budget: int, records: dict[Kind, Record], plain_tokens: list[list[int]]
) -> None:
    assert records[tree(budget)].tokens_together == plain_tokens


@pytest.mark.parametrize("kind", [CHAIN, *map(tree, BUDGETS)], ids=lambda kind: f"{kind.algorithm}-{kind.budget}")
def test_eight_concurrent_requests_take_as_many_steps_as_one_at_a_time(kind: Kind, records: dict[Kind, Record]) -> None:
    """Drafts made from another request's hidden states cost steps and no token."""
    found = records[kind]
    print(f"{found.steps_alone} steps alone, {found.steps_together} together")
    assert found.steps_together == pytest.approx(found.steps_alone, rel=SAME_STEPS)


def test_the_chain_on_the_patched_wheel_equals_plain_decoding(
    streamed: dict[Kind, Runs], plain_tokens: list[list[int]]
) -> None:
    assert tokens_of(streamed[CHAIN]) == plain_tokens


@pytest.mark.parametrize(
    "wish",
    [{"frequency_penalty": 0.5}, {"presence_penalty": 1}, {"repetition_penalty": 1.1}, {"min_new_tokens": 4}],
    ids=lambda wish: next(iter(wish)),
)
def test_the_chain_refuses_what_its_verify_step_ignores(
    wish: dict[str, float], pool: ServerPool, prompts: list[list[int]]
) -> None:
    (name,) = wish
    body = {"input_ids": prompts[0], "sampling_params": {"temperature": 0, "max_new_tokens": 8, **wish}}
    answer = pool[CHAIN].post("/generate", body)
    assert answer.status_code == 400
    assert f"DFLASH speculative decoding would ignore {name}" in answer.text


def test_the_chain_refuses_to_answer_sampled_requests_greedily(pool: ServerPool, prompts: list[list[int]]) -> None:
    """On a CPU its sampling kernel is missing."""
    answer = pool[CHAIN].post("/generate", {"input_ids": prompts[0], "sampling_params": {"max_new_tokens": 8}})
    assert answer.status_code == 400
    assert "would ignore sampling" in answer.text


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
    kinds = [sabotaged(fault, budget) for fault, budget in faults.items()]
    runs = ask(pool, kinds, lambda server: one_by_one(server, prompts))
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


def test_a_fault_between_the_requests_of_a_batch_shows_in_its_steps_alone(
    pool: ServerPool, prompts: list[list[int]], plain_tokens: list[list[int]]
) -> None:
    found = record(pool[sabotaged("hidden_of_another_request", 16)], prompts)
    assert tokens_of(found.streamed) == found.tokens_together == plain_tokens
    assert judge(prompts, found.streamed, 16, DEFAULT_TOPK).share >= 0.99
    print(f"{found.steps_alone} steps alone, {found.steps_together} together")
    assert found.steps_together > 1.5 * found.steps_alone
