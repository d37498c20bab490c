"""Penalties of every node against SGLang's own penalizers, fed one token at a time."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")

from ddtree_appliance.ddtree import penalties  # noqa: E402
from ddtree_appliance.ddtree.penalties import (  # noqa: E402
    BYTES_PER_LOGIT,
    OutputCounts,
    Penalties,
    asks_for_penalties,
    path_tokens,
    stop_tokens,
)
from ddtree_appliance.ddtree.torch_ops import AcceptBatch, TreeBatch, build_trees  # noqa: E402
from ddtree_appliance.ddtree.tree import NO_PARENT, ROOT  # noqa: E402
from tests.unit.engine import import_sglang  # noqa: E402
from tests.unit.test_torch_ops import LEVELS, as_bits, candidates, path_of  # noqa: E402

Tensor = Any  # torch may be missing where these annotations are read

CPU = torch.device("cpu")
INF = float("inf")
EOS = 3
VOCABULARY = 23


@dataclass
class Tokenizer:
    eos_token_id: int | None = EOS
    additional_stop_token_ids: set[int] | None = None


@dataclass
class Request:
    """What penalties read of SGLang's Req."""

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: set[int] | None = None
    prompt_len: int = 5
    outputs: list[int] = field(default_factory=lambda: [1])
    tokenizer: Any = field(default_factory=Tokenizer)

    @property
    def sampling_params(self) -> Request:
        return self

    @property
    def origin_input_ids(self) -> list[int]:
        return [7] * self.prompt_len

    @property
    def output_ids(self) -> array[int]:
        return array("q")  # the penalizers count what they are fed, nothing before


class Batch:
    """What an orchestrator reads of SGLang's ScheduleBatch, which it refers to weakly."""

    def __init__(self, request: Request) -> None:
        self.reqs = [request]
        self.device = "cpu"


@pytest.fixture(scope="module", autouse=True)
def eager() -> Iterator[None]:
    """SGLang compiles its repetition penalty: the first call would wait for a C++ compiler."""
    with torch.compiler.set_stance("force_eager"):
        yield


def random_trees(seed: int, batch: int, depth: int, topk: int, budget: int) -> TreeBatch:
    """Trees over the tokens 0 to 2 * topk, with tokens that stand twice on a path, and padding."""
    source = random.Random(seed)
    return build_trees(*candidates(seed, (batch, depth, topk), source.choice(list(LEVELS.values()))), budget)


def by_sglang(request: Request, path: Sequence[int], logits: Tensor) -> Tensor:
    """One node's logits [vocabulary], as plain decoding would penalise them after the outputs and the path."""
    library = import_sglang("sglang.srt.sampling.penaltylib")
    batch = Batch(request)
    in_order = [
        library.BatchedFrequencyPenalizer,
        library.BatchedPresencePenalizer,
        library.BatchedRepetitionPenalizer,
        library.BatchedMinNewTokensPenalizer,
    ]
    orchestrator = library.BatchedPenalizerOrchestrator(len(logits), batch, in_order)
    for token in [*request.outputs, *path]:
        orchestrator.cumulate_output_tokens(torch.tensor([token]))
    result = logits.clone().unsqueeze(0)
    orchestrator.apply(result)
    return result[0]


def by_nodes(requests: Sequence[Request], trees: TreeBatch, logits: Tensor) -> Tensor:
    """Padding rows as if they were roots."""
    result = logits.clone()
    for row, request in enumerate(requests):
        if asks_for_penalties(request):
            for node in range(logits.shape[1]):
                result[row, node] = by_sglang(request, path_of(trees, row, node), logits[row, node])
    return result


def penalised(
    requests: Sequence[Request], trees: TreeBatch, logits: Tensor, max_depth: int, lens_type: Any = torch.int64
) -> Tensor:
    asked = Penalties.of(requests, logits.shape[-1], CPU)
    assert asked is not None
    counts = torch.zeros(len(asked.rows), logits.shape[-1], dtype=torch.int32)
    for row, index in enumerate(asked.rows.tolist()):
        for token in requests[index].outputs:
            counts[row, token] += 1
    before = counts.clone()
    prefix_lens = torch.tensor([each.prompt_len + len(each.outputs) - 1 for each in requests], dtype=lens_type)
    result = logits.clone()
    asked.apply(result, counts, trees, prefix_lens, max_depth)
    assert torch.equal(counts, before)
    return result


def random_request(source: random.Random, step: float) -> Request:
    """Coefficients are whole multiples of `step`, so that a sum of sixty-fourths is exact."""

    def coefficient(low: float, high: float) -> float:
        return source.randint(round(low / step), round(high / step)) * step

    asks = source.sample(["frequency", "presence", "repetition", "minimum"], source.randint(0, 4))
    return Request(
        frequency_penalty=coefficient(-2, 2) if "frequency" in asks else 0.0,
        presence_penalty=coefficient(-2, 2) if "presence" in asks else 0.0,
        repetition_penalty=coefficient(0.25, 2) if "repetition" in asks else 1.0,
        min_new_tokens=source.randint(1, 14) if "minimum" in asks else 0,
        stop_token_ids=source.choice([None, set(), {0}, {5, 9}, set(range(VOCABULARY))]),
        prompt_len=source.randint(1, 9),
        outputs=[source.randrange(VOCABULARY) for _ in range(source.randint(1, 10))],
        tokenizer=Tokenizer(source.choice([None, EOS]), source.choice([None, {11}])),
    )


def random_case(seed: int, step: float) -> tuple[list[Request], TreeBatch, Tensor, int]:
    source = random.Random(seed)
    batch, depth = source.randint(1, 4), source.randint(1, 6)
    requests = [random_request(source, step) for _ in range(batch)]
    # Which request asks is left to chance; that one does is not.
    requests[source.randrange(batch)].frequency_penalty = step
    trees = random_trees(seed, batch, depth, source.randint(1, 5), source.randint(1, 12))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, trees.parents.shape[1], VOCABULARY, generator=generator) * 3
    return requests, trees, logits, min(depth, trees.parents.shape[1] - 1)


# Penalties


@pytest.mark.parametrize("part", range(4))
def test_every_node_sees_the_outputs_and_its_own_path_as_plain_decoding_would(part: int) -> None:
    for seed in range(part * 25, part * 25 + 25):
        requests, trees, logits, max_depth = random_case(seed, 1 / 64)
        expected = by_nodes(requests, trees, logits)
        assert torch.equal(penalised(requests, trees, logits, max_depth), expected), seed


def test_coefficients_that_are_no_binary_fractions_differ_by_rounding_alone() -> None:
    for seed in range(100, 130):
        requests, trees, logits, max_depth = random_case(seed, 0.0137)
        result = penalised(requests, trees, logits, max_depth)
        # SGLang adds a coefficient once per token, this multiplies it.
        torch.testing.assert_close(result, by_nodes(requests, trees, logits), atol=1e-5, rtol=1e-5)


def test_the_random_trees_hold_what_is_hard() -> None:
    repeated = zeros = padding = forks = 0
    for seed in range(100):
        _, trees, _, _ = random_case(seed, 1 / 64)
        for row in range(len(trees.parents)):
            paths = [path_of(trees, row, node) for node in range(trees.parents.shape[1])]
            repeated += any(len(set(path)) < len(path) for path in paths)
            zeros += any(0 in path for path in paths)
            padding += trees.parents[row, 1:].eq(NO_PARENT).any().item()
            forks += trees.parents[row].tolist().count(ROOT) > 1
    assert min(repeated, zeros, padding, forks) > 20


CHAIN_TOKENS = [-1, 0, 4, 0, 0, -1]
CHAIN_PARENTS = [-1, 0, 1, 2, 3, -1]


def chain() -> TreeBatch:
    """0, 4, 0, 0 below each other, and one row of padding."""
    return TreeBatch(
        token_ids=torch.tensor([CHAIN_TOKENS]),
        parents=torch.tensor([CHAIN_PARENTS]),
        depths=torch.tensor([[0, 1, 2, 3, 4, 0]]),
        ancestors=torch.zeros(1, 6, 6, dtype=torch.bool),
    )


def test_a_token_that_stands_several_times_on_a_path_counts_as_often() -> None:
    request = Request(frequency_penalty=0.5, presence_penalty=0.25, outputs=[2, 2])
    result = penalised([request], chain(), torch.zeros(1, 6, VOCABULARY), 4)[0]
    assert result[:, 0].tolist() == [0, -0.75, -0.75, -1.25, -1.75, 0]
    assert result[:, 4].tolist() == [0, 0, -0.75, -0.75, -0.75, 0]
    assert result[:, 2].tolist() == [-1.25] * 6
    assert result[:, [1, *range(5, VOCABULARY)]].eq(0).all()


def test_repetition_divides_positive_and_multiplies_other_logits_after_the_rest() -> None:
    request = Request(presence_penalty=1.0, repetition_penalty=2.0, outputs=[2])
    logits = torch.tensor([3.0, 0.5, 0.5, 1.0, -4.0]).repeat(1, 6, 1)
    result = penalised([request], chain(), logits, 4)[0]
    assert result[0].tolist() == [3.0, 0.5, -1.0, 1.0, -4.0]
    assert result[4].tolist() == [1.0, 0.5, -1.0, 1.0, -10.0]


def test_token_zero_on_no_path_is_not_counted() -> None:
    """Where there is no token the filler is token 0."""
    trees = chain()
    trees.token_ids[0] = torch.tensor([-1, 5, 4, 5, 5, -1])
    request = Request(frequency_penalty=0.5, presence_penalty=-1.0, repetition_penalty=1.5, outputs=[2])
    logits = torch.randn(1, 6, VOCABULARY)
    result = penalised([request], trees, logits, 4)
    assert torch.equal(as_bits(result[..., 0]), as_bits(logits[..., 0]))
    assert torch.equal(result, by_nodes([request], trees, logits))


@pytest.mark.parametrize("deeper", [0, 1, 7])
def test_a_bound_of_the_depth_above_the_deepest_node_changes_nothing(deeper: int) -> None:
    request = Request(frequency_penalty=0.5, repetition_penalty=1.5, outputs=[0, 4])
    logits = torch.randn(1, 6, VOCABULARY)
    assert torch.equal(penalised([request], chain(), logits, 4 + deeper), by_nodes([request], chain(), logits))


@pytest.mark.parametrize("lens_type", [torch.int32, torch.int64])
def test_requests_of_one_batch_get_what_each_asks_and_the_others_keep_their_bits(lens_type: Any) -> None:
    requests = [
        Request(outputs=[4, 4]),
        Request(frequency_penalty=-1.5, outputs=[0, 0, 4]),
        Request(outputs=[1], stop_token_ids={4}),
        Request(presence_penalty=-0.5, prompt_len=90, outputs=[6]),
        Request(repetition_penalty=0.5, outputs=[2, 0]),
        Request(min_new_tokens=5, prompt_len=1, outputs=[1, 2]),
        Request(frequency_penalty=1.0, min_new_tokens=3, stop_token_ids={0, 4}, prompt_len=40, outputs=[4]),
    ]
    trees = random_trees(3, len(requests), 5, 4, 11)
    logits = torch.randn(len(requests), 12, VOCABULARY)
    logits[0, 1, 4], logits[0, 2, 0], logits[2, 0, 4], logits[2, 3, 4] = float("nan"), -0.0, INF, -INF

    result = penalised(requests, trees, logits, 5, lens_type)

    for row in (0, 2):
        assert torch.equal(as_bits(result[row]), as_bits(logits[row]))
    asking = [1, 3, 4, 5, 6]
    assert torch.equal(result[asking], by_nodes(requests, trees, logits)[asking])
    for row in asking:
        assert not torch.equal(result[row], logits[row])


@pytest.mark.parametrize("rows_at_once", [1, 2, 3, 100])
def test_chunks_give_what_the_whole_batch_gives(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(11)
    requests = [random_request(source, 1 / 64) for _ in range(9)]
    requests[2] = Request()
    trees = random_trees(12, 9, 5, 4, 10)
    logits = torch.randn(9, 11, VOCABULARY)
    whole = penalised(requests, trees, logits, 5)
    assert torch.equal(whole, by_nodes(requests, trees, logits))

    calls = []
    real = penalties.path_tokens
    monkeypatch.setattr(penalties, "path_tokens", lambda *arguments: calls.append(1) or real(*arguments))
    monkeypatch.setattr(penalties, "PENALTY_BYTES", rows_at_once * BYTES_PER_LOGIT * 11 * VOCABULARY + 1)
    assert torch.equal(penalised(requests, trees, logits, 5), whole)
    asking = sum(map(asks_for_penalties, requests))
    assert len(calls) == -(-asking // rows_at_once)


def test_a_limit_smaller_than_one_row_still_takes_one_row_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalties, "PENALTY_BYTES", 1)
    requests = [Request(frequency_penalty=1.0), Request(min_new_tokens=9)]
    trees, logits = random_trees(1, 2, 3, 3, 6), torch.randn(2, 7, VOCABULARY)
    assert torch.equal(penalised(requests, trees, logits, 3), by_nodes(requests, trees, logits))


@pytest.mark.parametrize("outputs", range(1, 9))
def test_stop_tokens_are_impossible_exactly_below_the_minimum(outputs: int) -> None:
    trees = chain()
    for minimum in range(1, 15):
        request = Request(min_new_tokens=minimum, stop_token_ids={8}, prompt_len=6, outputs=[1] * outputs)
        logits = torch.randn(1, 6, VOCABULARY)
        result = penalised([request], trees, logits, 4)[0]
        for node, depth in enumerate(trees.depths[0].tolist()):
            is_too_early = outputs + depth < minimum
            assert result[node].isneginf().nonzero().flatten().tolist() == ([EOS, 8] if is_too_early else [])
            others = [token for token in range(VOCABULARY) if token not in (EOS, 8)]
            assert torch.equal(as_bits(result[node, others]), as_bits(logits[0, node, others]))
        assert torch.equal(result, by_nodes([request], trees, logits)[0])


def test_a_minimum_of_one_request_does_not_hold_another_back() -> None:
    requests = [Request(min_new_tokens=20), Request(frequency_penalty=1.0)]
    trees, logits = random_trees(5, 2, 4, 3, 8), torch.zeros(2, 9, VOCABULARY)
    result = penalised(requests, trees, logits, 4)
    assert result[0, :, EOS].isneginf().all()
    assert result[1].isfinite().all()


@pytest.mark.parametrize(
    ("stops", "tokenizer", "expected"),
    [
        (None, Tokenizer(), {EOS}),
        ({5}, Tokenizer(), {EOS, 5}),
        ({5}, Tokenizer(None, {6, 7}), {5, 6, 7}),
        ({5}, SimpleNamespace(eos_token_id=2), {2, 5}),  # SGLang adds the other attribute to its own tokenizers only
        ({5}, None, {5}),  # --skip-tokenizer-init
        (None, None, set()),
    ],
)
def test_stop_tokens_are_the_requests_and_the_tokenizers(
    stops: set[int] | None, tokenizer: Any, expected: set[int]
) -> None:
    request = Request(min_new_tokens=2, stop_token_ids=stops, tokenizer=tokenizer)
    assert stop_tokens(request) == expected
    logits = torch.zeros(1, 6, VOCABULARY)
    result = penalised([request], chain(), logits, 4)[0, ROOT]
    assert set(result.isneginf().nonzero().flatten().tolist()) == expected


def test_a_stop_token_outside_the_vocabulary_is_nothing_to_hold_back() -> None:
    request = Request(min_new_tokens=2, stop_token_ids={-1, VOCABULARY, 10**6}, tokenizer=None)
    logits = torch.randn(1, 6, VOCABULARY)
    assert torch.equal(penalised([request], chain(), logits, 4), logits)


@pytest.mark.parametrize(
    ("request_", "asks"),
    [
        (Request(), False),
        (Request(stop_token_ids={5}), False),
        (Request(frequency_penalty=-0.1), True),
        (Request(presence_penalty=0.1), True),
        (Request(repetition_penalty=0.9), True),
        (Request(min_new_tokens=1), True),
    ],
)
def test_only_requests_that_ask_are_penalised(request_: Request, asks: bool) -> None:
    assert asks_for_penalties(request_) is asks
    found = Penalties.of([Request(), request_], VOCABULARY, CPU)
    assert (found is not None) is asks
    if found is not None:
        assert found.rows.tolist() == [1]
        assert (found.stops is not None) is (request_.min_new_tokens > 0)


def test_the_tokens_of_a_path_lead_from_the_node_to_the_root() -> None:
    for seed in range(20):
        trees = random_trees(seed, 3, 5, 3, 9)
        tokens, is_there = path_tokens(trees.token_ids, trees.parents, 5)
        for row in range(3):
            for node in range(10):
                path = path_of(trees, row, node)
                assert tokens[row, node, is_there[row, node]].tolist() == path[::-1]
                assert is_there[row, node].tolist() == [True] * len(path) + [False] * (5 - len(path))
        assert tokens.min() >= 0


# OutputCounts


def counted(counts: OutputCounts, slots: Sequence[int]) -> list[Counter[int]]:
    return [
        Counter({token: count for token, count in enumerate(row) if count})
        for row in counts.of(torch.tensor(slots)).tolist()
    ]


def accepted_runs(runs: Sequence[Sequence[int]], width: int, filler: int) -> AcceptBatch:
    """runs: accepted tokens and the bonus token; what follows them must not matter."""
    tokens = torch.tensor([[*run, *[filler] * (width - len(run))] for run in runs])
    return AcceptBatch(
        path=torch.zeros_like(tokens),
        num_correct=torch.tensor([len(run) - 1 for run in runs], dtype=torch.int32),
        tokens=tokens,
        bonus=torch.tensor([run[-1] for run in runs]),
    )


def test_a_start_counts_the_first_token() -> None:
    counts = OutputCounts(6, VOCABULARY, CPU)
    counts.start(torch.tensor([4, 1]), [[], []], torch.tensor([7, 0]))
    assert counted(counts, [4, 1]) == [Counter([7]), Counter([0])]
    assert counted(counts, [0, 2, 3, 5]) == [Counter()] * 4


def test_a_start_after_a_retraction_counts_what_was_put_out_before() -> None:
    counts = OutputCounts(6, VOCABULARY, CPU)
    outputs = [array("q", [7, 7, 0, 3]), array("q"), array("q", [0])]
    counts.start(torch.tensor([2, 5, 0]), outputs, torch.tensor([7, 1, 0], dtype=torch.int32))
    assert counted(counts, [2, 5, 0]) == [Counter([7, 7, 0, 3, 7]), Counter([1]), Counter([0, 0])]


def test_a_slot_that_is_used_again_begins_anew() -> None:
    counts = OutputCounts(3, VOCABULARY, CPU)
    counts.start(torch.tensor([0, 1]), [[9, 9], [9]], torch.tensor([8, 8]))
    counts.start(torch.tensor([1]), [[]], torch.tensor([5]))
    assert counted(counts, [0, 1, 2]) == [Counter([9, 9, 8]), Counter([5]), Counter()]


@pytest.mark.parametrize("filler", [0, 4])
def test_an_accepted_run_is_counted_with_its_bonus_and_nothing_after_it(filler: int) -> None:
    counts = OutputCounts(4, VOCABULARY, CPU)
    counts.start(torch.tensor([3, 0]), [[], []], torch.tensor([1, 1]))
    runs = [[4, 4, 2], [9], [0, 0, 0, 4]]
    counts.add(torch.tensor([3, 0]), accepted_runs(runs, 4, filler), torch.tensor([0, 2]))
    assert counted(counts, [3, 0, 1, 2]) == [Counter([1, 4, 4, 2]), Counter([1, 0, 0, 0, 4]), Counter(), Counter()]


def test_counts_follow_many_steps_of_requests_that_come_and_go() -> None:
    source = random.Random(8)
    slots_in_all, width = 7, 5
    counts = OutputCounts(slots_in_all, VOCABULARY, CPU)
    model: dict[int, Counter[int]] = {}
    for _ in range(120):
        for slot in [slot for slot in model if source.random() < 0.1]:
            del model[slot]
        free = [slot for slot in range(slots_in_all) if slot not in model]
        starting = source.sample(free, source.randint(0, len(free)))
        if starting:
            before = [[source.randrange(VOCABULARY) for _ in range(source.choice([0, 0, 6]))] for _ in starting]
            first = [source.randrange(VOCABULARY) for _ in starting]
            counts.start(torch.tensor(starting), before, torch.tensor(first))
            model.update({s: Counter([*b, f]) for s, b, f in zip(starting, before, first, strict=True)})
        running = source.sample(list(model), len(model))
        if running:
            # Some requests of the batch ask for nothing and have no counts.
            asking = sorted(source.sample(range(len(running)), source.randint(1, len(running))))
            runs = [[source.randrange(VOCABULARY) for _ in range(source.randint(1, width))] for _ in running]
            slots = torch.tensor([running[row] for row in asking])
            counts.add(slots, accepted_runs(runs, width, source.choice([0, 5])), torch.tensor(asking))
            for row in asking:
                model[running[row]].update(runs[row])
        assert counted(counts, list(model)) == list(model.values())
