"""The proof that sampled DDTREE is exact: accepted tokens against the target's own distribution, token by token.

Real trees of the bundled pair, and the target's logits after every node, recomputed path by path. The first three
tokens of an accepted run, the bonus among them, are each judged after the sample's own prefix: all samples that
accepted the same prefix, a node, must be spread as that node's exact distribution, in float64, says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")
pytest.importorskip("safetensors", reason="needs the rehearsal environment (safetensors)")

from ddtree_appliance.ddtree import sampling  # noqa: E402
from ddtree_appliance.ddtree.sampling import Sampling, sample_nodes  # noqa: E402
from ddtree_appliance.ddtree.torch_ops import AcceptBatch, TreeBatch, accept, build_trees  # noqa: E402
from ddtree_appliance.ddtree.tree import NO_PARENT  # noqa: E402
from ddtree_appliance.rehearsal.prompts import heldout_prompts  # noqa: E402
from ddtree_appliance.rehearsal.server import MODELS  # noqa: E402
from ddtree_appliance.rehearsal.training.export import load_pair  # noqa: E402
from ddtree_appliance.rehearsal.training.report import drafts_along, ordered_top  # noqa: E402

Tensor = Any  # torch may be missing where these annotations are read

SAMPLES = 40_000
ALPHA = 1e-4  # of a case, shared by its tests
LEAST_EXPECTED = 5.0  # of a cell; smaller ones are pooled
LEAST_VISITS = 50  # of a prefix: with fewer nearly everything is pooled
POSITIONS = 3
TOPK, VOCABULARY, SUPPORT = 16, 32, 16


@pytest.fixture(scope="module", autouse=True)
def small_steps() -> Iterator[None]:
    """Neither threads nor large chunks: on a busy machine both cost more than they bring, up to ten times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "DRAW_BYTES", 64 << 20)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


# The trees and the target's logits


@dataclass(frozen=True)
class Drafted:
    """One tree and the target's logits after its nodes, both over a vocabulary of the 32 tokens that matter.

    logits: [V, 32] fp32; draft_logprobs: [V, 32], of the drafter for what follows each node.
    """

    tree: TreeBatch
    logits: Tensor
    draft_logprobs: Tensor
    prefix: int


load = cache(load_pair)


@cache
def drafted(prompt: int, budget: int) -> Drafted:
    pair, tokens = load(MODELS), torch.tensor(heldout_prompts(prompt + 1, 96)[prompt])
    anchor = len(tokens) - 1
    with torch.no_grad():
        drafts = drafts_along(pair.target, pair.drafter, tokens, anchor, anchor + 1)
        tree = build_trees(*ordered_top(drafts, TOPK), budget)
        paths = [path_to(tree, node) for node in range(budget + 1)]
        longest = max(map(len, paths))
        # Causal: what stands after a path changes nothing.
        rows = [[*tokens.tolist(), *path, *[0] * (longest - len(path))] for path in paths]
        hidden, _ = pair.target(torch.tensor(rows))
        ends = hidden[torch.arange(len(paths)), torch.tensor([anchor + len(path) for path in paths])]
        logits = pair.target.logits(ends).float()
    # The tree's tokens, then the target's best after the root and on.
    best = logits.argsort(dim=-1, descending=True).T.flatten().tolist()
    kept = list(dict.fromkeys([*tree.token_ids[0, 1:].tolist(), *best]))[:VOCABULARY]
    name = {token: index for index, token in enumerate(kept)}
    assert name.keys() >= set(tree.token_ids[0, 1:].tolist())
    renamed = torch.tensor([[name.get(token, -1) for token in tree.token_ids[0].tolist()]])
    draft_logprobs = drafts[0, tree.depths[0].clamp(max=drafts.shape[1] - 1)][:, kept]
    return Drafted(replace(tree, token_ids=renamed), logits[:, kept], draft_logprobs, anchor)


def path_to(tree: TreeBatch, node: int) -> list[int]:
    path = []
    while tree.parents[0, node] != NO_PARENT:
        path.append(int(tree.token_ids[0, node]))
        node = int(tree.parents[0, node])
    return path[::-1]


# What is asked, and the exact distribution of it


@dataclass(frozen=True)
class Asked:
    temperature: float = 1.0
    top_k: int = VOCABULARY
    top_p: float = 1.0
    min_p: float = 0.0
    is_biased: bool = False

    @property
    def is_filtered(self) -> bool:
        return (self.top_k, self.top_p, self.min_p) != (VOCABULARY, 1.0, 0.0)

    def biased(self, logits: Tensor) -> Tensor:
        """-100 on all but every node's 16 best tokens; on request, something for the others too."""
        best = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, logits.topk(SUPPORT, dim=1).indices, True)
        bias = torch.where(best, 0.0, -100.0)
        if self.is_biased:
            bias += torch.linspace(-2.0, 2.0, logits.shape[1]).roll(7)
        return logits + bias

    def exact(self, logits: Tensor) -> Tensor:
        """[V, 32] float64: softmax, then joint top-k, top-p and min-p, each of the whole distribution."""
        probabilities = torch.softmax(self.biased(logits).double() / self.temperature, dim=1)
        for row in probabilities:
            order = sorted(range(len(row)), key=lambda token: (-row[token].item(), token))
            before, top = 0.0, row[order[0]].item()
            for rank, token in enumerate(order):
                probability = row[token].item()
                if rank >= self.top_k or before > self.top_p or probability < top * self.min_p:
                    row[token] = 0.0
                before += probability
        return probabilities / probabilities.sum(dim=1, keepdim=True)

    def sampling(self, seeds: Tensor) -> Sampling:
        def column(value: float, dtype: Any) -> Tensor:
            return torch.full((len(seeds),), value, dtype=dtype)

        return Sampling(
            column(self.temperature, torch.float32).unsqueeze(1),
            column(self.top_k, torch.int32),
            column(self.top_p, torch.float32),
            column(self.min_p, torch.float32),
            seeds,
            self.is_filtered,
        )


ASKED = {
    "temperature": Asked(temperature=1.4),
    "top-k": Asked(temperature=1.6, top_k=6),
    "top-p": Asked(temperature=1.3, top_p=0.85),
    "min-p": Asked(temperature=1.5, min_p=0.04),
    "bias": Asked(is_biased=True),
    "all": Asked(temperature=1.5, top_k=10, top_p=0.95, min_p=0.01, is_biased=True),
}
# And the prompt whose tree it is: one whose target wavers, and whose tree holds much of what it wavers between.
BUDGETS = {2: 6, 8: 4, 64: 6}


def accepted_by(case: Drafted, choices: Tensor) -> AcceptBatch:
    """choices: [n, V], what the target chose after each node."""
    trees = TreeBatch(*(field.expand(len(choices), *field.shape[1:]) for field in vars(case.tree).values()))
    return accept(trees, choices, min(15, choices.shape[1] - 1) + 1)


def seeded_choices(case: Drafted, asked: Asked, depths: Tensor | None = None) -> Tensor:
    """[n, V]: what DDTREE draws, one seed per sample. depths: those that the noise depends on."""
    seeds = torch.arange(SAMPLES) * 0x1E3779B97F4A7C15 + 11  # anything; it wraps and uses all 64 bits
    depths = (case.tree.depths if depths is None else depths).expand(SAMPLES, -1)
    logits = asked.biased(case.logits).expand(SAMPLES, -1, -1)
    prefixes = torch.full((SAMPLES,), case.prefix)
    return sample_nodes(logits, depths, prefixes, 15, asked.sampling(seeds))


# The judge


@dataclass(frozen=True)
class Verdict:
    """One chi-square test: of the tokens at a position of the run, after one accepted prefix."""

    position: int
    node: int
    samples: int
    p_value: float


def chi_square(observed: Tensor, probabilities: Tensor) -> float:
    """The p-value. observed, probabilities: [32]."""
    expected = probabilities * observed.sum()
    if (observed[expected == 0] > 0).any():
        return 0.0
    small = expected < LEAST_EXPECTED
    expected = torch.cat([expected[~small], expected[small].sum().view(1)])
    observed = torch.cat([observed[~small], observed[small].sum().view(1)]).double()
    if expected[-1] < LEAST_EXPECTED:  # the pool itself is too small: to the next cell
        smallest = expected[:-1].argmin()
        expected[smallest] += expected[-1]
        observed[smallest] += observed[-1]
        expected, observed = expected[:-1], observed[:-1]
    if len(expected) < 2:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2).item()


def judge(case: Drafted, accepted: AcceptBatch, exact: Tensor) -> list[Verdict]:
    """exact: [V, 32] float64, the distribution after each node."""
    tests = []
    for position in range(min(POSITIONS, accepted.path.shape[1])):
        reached = accepted.num_correct >= position
        prefixes, tokens = accepted.path[reached, position], accepted.tokens[reached, position]
        counts = torch.zeros(exact.shape).index_put_((prefixes, tokens), torch.tensor(1.0), accumulate=True)
        for node in torch.nonzero(counts.sum(dim=1) >= LEAST_VISITS).flatten().tolist():
            assert case.tree.depths[0, node] == position
            p_value = chi_square(counts[node], exact[node])
            tests.append(Verdict(position + 1, node, int(counts[node].sum()), p_value))
    return tests


def least(tests: list[Verdict], position: int | None = None) -> float:
    """The smallest p-value times the number of tests: Bonferroni's, to be held against ALPHA."""
    p_values = [test.p_value for test in tests if position in (None, test.position)]
    return min(1.0, min(p_values) * len(tests))


def report(title: str, tests: list[Verdict]) -> None:
    corrected = ", ".join(f"{least(tests, position):.2g}" for position in (1, 2, 3))
    print(f"\n{title}: {len(tests)} tests; Bonferroni's p at positions 1, 2, 3: {corrected}")


def moved(exact: Tensor, mass: float) -> Tensor:
    """`exact` with `mass` of probability moved from each node's most probable token to its second."""
    best = exact.topk(2, dim=1)
    mass = torch.minimum(torch.full_like(best.values[:, :1], mass), best.values[:, :1])
    return exact.scatter_add(1, best.indices, torch.cat([-mass, mass], dim=1))


# Exactness

CASES = list(product(ASKED, BUDGETS))


@cache
def sampled(name: str, budget: int) -> tuple[Drafted, AcceptBatch, Tensor]:
    case, asked = drafted(BUDGETS[budget], budget), ASKED[name]
    return case, accepted_by(case, seeded_choices(case, asked)), asked.exact(case.logits)


@pytest.mark.parametrize(("name", "budget"), CASES)
def test_every_accepted_token_has_the_targets_distribution_after_its_prefix(name: str, budget: int) -> None:
    case, accepted, exact = sampled(name, budget)
    tests = judge(case, accepted, exact)
    report(f"{name}, {budget} nodes", tests)
    assert {test.position for test in tests} == {1, 2, 3}
    assert ((exact > 1e-9).sum(dim=1) <= SUPPORT).all()
    assert least(tests) > ALPHA, tests


def test_the_p_values_of_all_cases_are_uniform() -> None:
    p_values = torch.tensor([test.p_value for case in CASES for test in judge(*sampled(*case))]).double()
    count = len(p_values)
    assert count > 100
    steps = torch.arange(count) / count
    distance = (p_values.sort().values - steps - 0.5 / count).abs().max().item()
    print(f"\n{count} p-values, at most {distance:.3f} from uniform")
    # Kolmogorov's limit for 1e-4, tests on one tree counted as independent.
    assert distance < 2.23 / count**0.5


# The test's power


@pytest.mark.parametrize(("name", "budget"), CASES)
def test_three_percent_of_mass_at_the_wrong_token_would_be_noticed_at_each_position(name: str, budget: int) -> None:
    """The most probable token of each node has 0.03 less, and the second 0.03 more."""
    case, accepted, exact = sampled(name, budget)
    tests = judge(case, accepted, moved(exact, 0.03))
    report(f"{name}, {budget} nodes, moved", tests)
    assert max(least(tests, position) for position in (1, 2, 3)) < ALPHA


# Rules that are not exact, and one that is

Rule = Callable[[Tensor, Tensor, list[int], torch.Generator], Tensor]
"""(target's distribution, drafter's, drafted children, chance) -> one token per sample, after one node."""


def coins(chance: torch.Generator) -> Tensor:
    return torch.rand(SAMPLES, generator=chance, dtype=torch.float64)


def inverse_cdf(probabilities: Tensor, coin: Tensor) -> Tensor:
    sums = (probabilities / probabilities.sum()).cumsum(0)
    sums[-1] = 1.0
    return torch.searchsorted(sums, coin, right=True).clamp(max=len(sums) - 1)


def top_k_as_if_drawn(target: Tensor, draft: Tensor, children: list[int], chance: torch.Generator) -> Tensor:
    """min(1, p / q) and the residual, exact for children drawn from q; these are q's most probable, always."""
    chosen = torch.full((SAMPLES,), -1)
    for child in children:
        takes = (chosen < 0) & (coins(chance) * draft[child] < target[child])
        chosen[takes] = child
        residual = (target - draft).clamp(min=0)
        target = residual / residual.sum()
        draft = draft.index_fill(0, torch.tensor(child), 0.0)
        draft = draft / draft.sum()
    return torch.where(chosen < 0, inverse_cdf(target, coins(chance)), chosen)


def first_child_or_another(is_coin_shared: bool) -> Rule:
    """The first child with its probability, else a draw from the other tokens: exact with a coin for each."""

    def rule(target: Tensor, draft: Tensor, children: list[int], chance: torch.Generator) -> Tensor:
        if not children:
            return inverse_cdf(target, coins(chance))
        coin = coins(chance)
        others = target.index_fill(0, torch.tensor(children[0]), 0.0)
        if others.sum() < 1e-12:
            return torch.full((SAMPLES,), children[0])
        drawn = inverse_cdf(others, coin if is_coin_shared else coins(chance))
        return torch.where(coin < target[children[0]], children[0], drawn)

    return rule


def judged_by_rule(rule: Rule, budget: int) -> list[Verdict]:
    asked, case = ASKED["temperature"], drafted(BUDGETS[budget], budget)
    exact, draft = asked.exact(case.logits), torch.softmax(case.draft_logprobs.double(), dim=1)
    chance = torch.Generator().manual_seed(budget)
    choices = torch.empty((SAMPLES, budget + 1), dtype=torch.int64)
    for node in range(budget + 1):
        children = case.tree.token_ids[0, case.tree.parents[0] == node].tolist()
        choices[:, node] = rule(exact[node], draft[node], children, chance)
    return judge(case, accepted_by(case, choices), exact)


@pytest.mark.parametrize("budget", BUDGETS)
def test_accepting_a_fixed_draft_as_if_it_were_drawn_is_noticed(budget: int) -> None:
    tests = judged_by_rule(top_k_as_if_drawn, budget)
    report(f"min(1, p / q), {budget} nodes", tests)
    assert least(tests, 1) < ALPHA


@pytest.mark.parametrize("budget", BUDGETS)
def test_one_coin_for_acceptance_and_draw_is_noticed(budget: int) -> None:
    tests = judged_by_rule(first_child_or_another(is_coin_shared=True), budget)
    report(f"one coin, {budget} nodes", tests)
    assert least(tests, 1) < ALPHA


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_same_rule_with_two_coins_is_exact(budget: int) -> None:
    tests = judged_by_rule(first_child_or_another(is_coin_shared=False), budget)
    report(f"two coins, {budget} nodes", tests)
    assert least(tests) > ALPHA, tests


# Not of two nodes: what follows this chain's token has other likely tokens than what competed with it.
@pytest.mark.parametrize("budget", [8, 64])
def test_noise_that_forgets_the_depth_is_noticed_from_the_second_token_on(budget: int) -> None:
    asked, case = ASKED["temperature"], drafted(BUDGETS[budget], budget)
    choices = seeded_choices(case, asked, depths=torch.zeros_like(case.tree.depths))
    tests = judge(case, accepted_by(case, choices), asked.exact(case.logits))
    report(f"noise without depth, {budget} nodes", tests)
    assert least(tests, 1) > ALPHA > least(tests, 2)
