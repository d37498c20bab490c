"""Sampled requests: the tokens of plain decoding for every seed, in any company, and the target's distribution."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ddtree_appliance.rehearsal.prompts import heldout_prompts
from ddtree_appliance.rehearsal.server import MODELS, RehearsalServer
from tests.rehearsal.conftest import PLAIN, Kind, ServerPool, sabotaged, tree
from tests.rehearsal.reference import load
from tests.unit.test_sampled_distribution import chi_square, moved

pytestmark = pytest.mark.rehearsal

BUDGETS = (4, 16, 64)
LENGTH = 24
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8, "sampling_seed": 7},
    "hot": {"temperature": 1.5, "sampling_seed": 8},
    "top-p": {"temperature": 1.1, "top_p": 0.8, "sampling_seed": 9},
    "top-k": {"temperature": 1.3, "top_k": 6, "sampling_seed": 10},
    "min-p": {"temperature": 1.2, "min_p": 0.1, "sampling_seed": 11},
    "all filters": {"temperature": 1.2, "top_p": 0.95, "top_k": 20, "min_p": 0.02, "sampling_seed": 12},
    "negative seed": {"temperature": 1.0, "sampling_seed": -3},
    "62-bit seed": {"temperature": 1.0, "top_p": 0.9, "sampling_seed": 2**62 + 2**33 + 1},
    "lowest seed": {"temperature": 1.0, "top_k": 30, "sampling_seed": 1 - 2**63},
}


@pytest.fixture(scope="module", autouse=True)
def servers(pool: ServerPool) -> None:
    kinds = [PLAIN, *map(tree, BUDGETS)]
    pool.start(kinds)


def tokens_of(server: RehearsalServer, prompt: Sequence[int], asked: dict[str, Any]) -> list[int]:
    tokens: list[int] = server.generate(prompt, LENGTH, **asked)["output_ids"]
    return tokens


@pytest.fixture(scope="module")
def plain(pool: ServerPool, prompts: list[list[int]]) -> dict[tuple[str, int], list[int]]:
    """What plain decoding writes for each sampled request, alone, after the first two prompts; and greedy."""
    return {
        (name, index): tokens_of(pool[PLAIN], prompts[index], asked)
        for name, asked in {**SAMPLED, "greedy": GREEDY}.items()
        for index in (0, 1)
    }


# The tokens of a seed


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_seed_gives_the_tokens_of_plain_decoding(
    budget: int, pool: ServerPool, prompts: list[list[int]], plain: dict[tuple[str, int], list[int]]
) -> None:
    for number, (name, asked) in enumerate(SAMPLED.items()):
        index = number % 2
        assert tokens_of(pool[tree(budget)], prompts[index], asked) == plain[name, index], name


@pytest.mark.parametrize("budget", BUDGETS)
def test_requests_of_a_batch_give_the_tokens_they_give_alone(
    budget: int, pool: ServerPool, prompts: list[list[int]], plain: dict[tuple[str, int], list[int]]
) -> None:
    """Eight at a time: sampled ones with and without filters, and greedy ones, which get their greedy tokens."""
    wishes = list(plain)
    random.Random(budget).shuffle(wishes)

    def ask(wish: tuple[str, int]) -> list[int]:
        name, index = wish
        return tokens_of(pool[tree(budget)], prompts[index], SAMPLED.get(name, GREEDY))

    with ThreadPoolExecutor(8) as senders:
        assert list(senders.map(ask, wishes)) == [plain[wish] for wish in wishes]


def test_sampled_requests_are_sampled_and_accept_drafts(
    pool: ServerPool, prompts: list[list[int]], plain: dict[tuple[str, int], list[int]]
) -> None:
    """Without this, servers that ignore all of it would equal each other, and so would one that never speculates."""
    assert len({tuple(tokens) for tokens in plain.values()}) == len(plain)
    meta = pool[tree(16)].generate(prompts[0], LENGTH, **SAMPLED["top-k"])["meta_info"]
    assert meta["spec_verify_ct"] < 0.8 * meta["completion_tokens"]


def test_an_unset_seed_is_fresh(pool: ServerPool, prompts: list[list[int]]) -> None:
    answers = {tuple(tokens_of(pool[tree(16)], prompts[0], {"temperature": 1.2})) for _ in range(5)}
    assert len(answers) == 5


def test_each_of_n_samples_has_its_own_reproducible_tokens(pool: ServerPool, prompts: list[list[int]]) -> None:
    def samples(kind: Kind, count: int) -> list[list[int]]:
        sampling = {"temperature": 1.0, "sampling_seed": 21, "n": count, "max_new_tokens": LENGTH, "ignore_eos": True}
        answer = pool[kind].post("/generate", {"input_ids": prompts[2], "sampling_params": sampling})
        assert answer.status_code == 200, answer.text
        answers = answer.json() if count > 1 else [answer.json()]
        return [sample["output_ids"] for sample in answers]

    three = samples(tree(16), 3)
    assert len({tuple(sample) for sample in three}) == 3
    assert three[:1] == samples(tree(16), 1)
    assert three == samples(tree(16), 3) == samples(tree(64), 3) == samples(PLAIN, 3)


def test_a_seed_of_the_openai_api_gives_the_text_of_plain_decoding(pool: ServerPool, prompts: list[list[int]]) -> None:
    body = {"model": "x", "prompt": prompts[3], "max_tokens": 24, "temperature": 0.9, "top_p": 0.9, "seed": 4}
    texts = []
    for kind in (PLAIN, tree(4), tree(64)):
        answer = pool[kind].post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["text"])
    assert texts[0] and len(set(texts)) == 1


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 2**80])
def test_a_seed_beyond_64_bits_is_refused_and_the_server_lives(
    seed: int, pool: ServerPool, prompts: list[list[int]], plain: dict[tuple[str, int], list[int]]
) -> None:
    body = {"input_ids": prompts[0], "sampling_params": {"sampling_seed": seed, "max_new_tokens": 4}}
    answer = pool[tree(16)].post("/generate", body)
    assert answer.status_code == 400
    assert "sampling_seed" in answer.json()["error"]["message"]
    assert tokens_of(pool[tree(16)], prompts[0], SAMPLED["hot"]) == plain["hot", 0]


def test_a_prompt_from_the_cache_gives_the_same_tokens(pool: ServerPool) -> None:
    prompt = heldout_prompts(1, 150, skip=30)[0]
    for asked in (SAMPLED["hot"], SAMPLED["all filters"]):
        expected = tokens_of(pool[PLAIN], prompt, asked)
        for kind in (tree(4), tree(64)):
            first, second = (pool[kind].generate(prompt, LENGTH, **asked) for _ in range(2))
            assert first["output_ids"] == second["output_ids"] == expected
            assert second["meta_info"]["cached_tokens"] > 100


# Negative control


def test_noise_of_the_node_instead_of_its_depth_changes_the_tokens(
    pool: ServerPool, prompts: list[list[int]], plain: dict[tuple[str, int], list[int]]
) -> None:
    pool.stop_all_but([PLAIN, tree(16)])  # memory for one more
    broken = sabotaged("noise_of_the_node", 16)
    assert tokens_of(pool[broken], prompts[0], GREEDY) == plain["greedy", 0]
    differing = [
        name for name, asked in SAMPLED.items() if tokens_of(pool[broken], prompts[0], asked) != plain[name, 0]
    ]
    pool.stop_all_but([PLAIN, tree(16)])
    assert len(differing) > len(SAMPLED) / 2, differing


# The distribution of unseeded answers

SAMPLES = 2000
TOP_K, TEMPERATURE = 8, 1.2
ALPHA = 1e-4
LEAST_VISITS = 50
SHIFT = 0.2


@pytest.fixture(scope="module")
def answers(pool: ServerPool, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """Four tokens each: the first by the prefill, the others by verify steps."""
    body = {
        "input_ids": prompts[6],
        "sampling_params": {"temperature": TEMPERATURE, "top_k": TOP_K, "max_new_tokens": 4, "ignore_eos": True},
    }

    def ask(_: int) -> tuple[tuple[int, ...], int]:
        result = pool[tree(16)].post("/generate", body).json()
        return tuple(result["output_ids"]), result["meta_info"]["spec_verify_ct"]

    with ThreadPoolExecutor(8) as senders:
        results = list(senders.map(ask, range(SAMPLES)))
    steps = [verify_steps for _, verify_steps in results]
    assert min(steps) == 1 and sum(steps) < 2.6 * SAMPLES, "hardly a draft was accepted"
    return [tokens for tokens, _ in results]


def exact_distributions(prompt: Sequence[int], prefixes: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """[prefixes, vocabulary] float64: the target's after the prompt and each prefix (all of one length)."""
    target = load(MODELS).target
    rows = torch.tensor([[*prompt, *prefix] for prefix in prefixes])
    with torch.no_grad():
        logits = torch.cat([target.logits(target(chunk)[0][:, -1]) for chunk in rows.split(64)]).double()
    best = logits.topk(TOP_K, dim=1)
    return torch.zeros_like(logits).scatter_(1, best.indices, torch.softmax(best.values / TEMPERATURE, dim=1))


def least_p_value(counts: torch.Tensor, exact: torch.Tensor) -> float:
    """Of all tests at one position, times their number. counts, exact: [prefixes, vocabulary].

    Each frequent prefix is one test. One more takes all prefixes together, by the rank of the token in its own prefix's
    distribution: a sum of unlike multinomials spreads less than one, so that this errs towards no alarm.
    """
    visits = counts.sum(dim=1)
    ranked = exact.sort(dim=1, descending=True)
    observed = torch.gather(counts, 1, ranked.indices).sum(dim=0)
    p_values = [chi_square(observed, (visits.unsqueeze(1) * ranked.values).sum(dim=0) / visits.sum())]
    for row, own in zip(counts[visits >= LEAST_VISITS], exact[visits >= LEAST_VISITS], strict=True):
        p_values.append(chi_square(row, own))
    print(f"{len(p_values)} tests, least p {min(p_values):.3g}, of all prefixes together {p_values[0]:.3g}")
    return min(1.0, min(p_values) * len(p_values))


@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_unseeded_answers_have_the_targets_distribution_after_their_own_prefix(
    position: int, answers: list[tuple[int, ...]], prompts: list[list[int]]
) -> None:
    """And the same test rejects a target that has a fifth of the mass moved from its best token to its second."""
    assert all(len(answer) == 4 for answer in answers)
    seen = Counter(answer[: position + 1] for answer in answers)
    prefixes = sorted({answer[:position] for answer in answers})
    exact = exact_distributions(prompts[6], prefixes)
    counts = torch.zeros_like(exact)
    for answer, count in seen.items():
        counts[prefixes.index(answer[:position]), answer[position]] += count
    print(f"\nposition {position}, {len(prefixes)} prefixes:")
    assert least_p_value(counts, exact) > ALPHA / 4
    assert least_p_value(counts, moved(exact, SHIFT)) < ALPHA / 4


def test_unseeded_answers_do_not_repeat_in_order(answers: list[tuple[int, ...]]) -> None:
    """A seed used twice would show as an answer that equals the one before more often than chance allows."""
    frequencies = Counter(answers)
    chance = sum((count / SAMPLES) ** 2 for count in frequencies.values())
    repeats = sum(first == second for first, second in itertools.pairwise(answers))
    assert repeats < SAMPLES * chance + 5 * (SAMPLES * chance) ** 0.5
