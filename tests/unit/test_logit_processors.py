"""Custom logit processors: each node's request has the outputs that it would have there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")

from ddtree_appliance.ddtree.logit_processors import RequestAtNode, apply_processors  # noqa: E402
from ddtree_appliance.ddtree.torch_ops import TreeBatch, build_trees  # noqa: E402
from ddtree_appliance.ddtree.tree import NO_PARENT, ROOT  # noqa: E402
from tests.unit.engine import import_sglang  # noqa: E402
from tests.unit.test_torch_ops import LEVELS, as_bits, candidates, path_of  # noqa: E402

Tensor = Any  # torch may be missing where these annotations are read
Params = dict[str, Any] | None

VOCABULARY = 31
WIDTH = 9


def request(outputs: Sequence[int], prompt: Sequence[int] = (1, 2)) -> Any:
    """What processors read of SGLang's Req, whose token lists are arrays."""
    return SimpleNamespace(origin_input_ids=array("q", prompt), output_ids=array("q", outputs), rid="x")


def sampling_info(params: Sequence[Params], *processors: tuple[Any, list[bool]]) -> Any:
    """As SGLang's: processors by the hash of their text, each with a mask of the requests that ask for it."""
    merged = {key: (processor, torch.tensor(asking)) for key, (processor, asking) in enumerate(processors)}
    return SimpleNamespace(custom_logit_processor=merged, custom_params=list(params))


def random_trees(batch: int, seed: int = 1) -> TreeBatch:
    """With padding in many trees: some candidates are impossible."""
    return build_trees(*candidates(seed, (batch, 3, 2), LEVELS["with minus infinity"]), WIDTH - 1)


def nodes_of(trees: TreeBatch, row: int) -> list[int]:
    return [ROOT, *(node for node in range(1, WIDTH) if int(trees.parents[row, node]) != NO_PARENT)]


class Writes:
    """Writes a code of prompt, outputs and parameters over each row, and keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], list[Params]]] = []

    def __call__(self, logits: Tensor, params: list[Params]) -> Tensor:
        self.calls.append((tuple(logits.shape), params))
        assert len(logits) == len(params)
        return torch.stack([self.code(each) for each in params])

    @staticmethod
    def code(params: Params) -> Tensor:
        if params is None:
            return torch.full((VOCABULARY,), 7.0)
        asked = params["__req__"]
        ids = [*asked.origin_input_ids, *asked.output_ids, params["x"]]
        return torch.tensor([float(hash((tuple(ids), token)) % 1000) for token in range(VOCABULARY)])


class Adds:
    def __init__(self, amount: float) -> None:
        self.amount = amount

    def __call__(self, logits: Tensor, params: list[Params]) -> Tensor:
        return logits + self.amount


def logits_of(batch: int) -> Tensor:
    return torch.randn(batch, WIDTH, VOCABULARY, generator=torch.Generator().manual_seed(batch))


@pytest.mark.parametrize("seed", range(12))
def test_each_node_sees_its_request_with_the_outputs_and_its_path(seed: int) -> None:
    requests = [request([5, 6]), request([3] * seed, prompt=range(seed)), request([9])]
    params: list[Params] = [{"x": 1}, {"x": 2, "__req__": "stale"}, {"x": 3}]
    trees, before = random_trees(3, seed), logits_of(3)
    logits, processor = before.clone(), Writes()

    apply_processors(logits, sampling_info(params, (processor, [True] * 3)), requests, trees)

    for row in range(3):
        nodes = nodes_of(trees, row)
        for node in range(WIDTH):
            outputs = [*requests[row].output_ids, *path_of(trees, row, node)]
            there = {**params[row], "__req__": request(outputs, requests[row].origin_input_ids)}  # type: ignore[dict-item]
            expected = Writes.code(there) if node in nodes else before[row, node]
            assert torch.equal(logits[row, node], expected)
    assert [shape for shape, _ in processor.calls] == [(len(nodes_of(trees, row)), VOCABULARY) for row in range(3)]


def test_the_trees_hold_branches_padding_and_more_than_one_level() -> None:
    padding = branches = deep = 0
    for seed in range(12):
        trees = random_trees(3, seed)
        padding += any(len(nodes_of(trees, row)) < WIDTH for row in range(3))
        branches += any(trees.parents[row].tolist().count(ROOT) > 1 for row in range(3))
        deep += int(trees.depths.max()) > 1
    assert min(padding, branches, deep) > 3


def test_padding_rows_and_other_requests_keep_their_bits() -> None:
    trees = random_trees(4, 3)
    before = logits_of(4)
    before[0, 1, 2], before[2, 3, 4], before[3, 0, 0] = float("nan"), -0.0, float("inf")
    logits = before.clone()
    info = sampling_info([None, {"x": 1}, None, {"x": 2}], (Writes(), [False, True, False, False]))
    apply_processors(logits, info, [request([row]) for row in range(4)], trees)
    for row in (0, 2, 3):
        assert torch.equal(as_bits(logits[row]), as_bits(before[row]))
    for node in range(WIDTH):
        unchanged = torch.equal(as_bits(logits[1, node]), as_bits(before[1, node]))
        assert unchanged is (node not in nodes_of(trees, 1))


def test_a_request_without_parameters_is_passed_none() -> None:
    trees, processor = random_trees(2), Writes()
    logits = logits_of(2)
    apply_processors(
        logits, sampling_info([None, {"x": 5}], (processor, [True, True])), [request([]), request([])], trees
    )
    assert processor.calls[0][1] == [None] * len(nodes_of(trees, 0))
    assert all(params is not None for params in processor.calls[1][1])
    assert logits[0, nodes_of(trees, 0)].eq(7.0).all()


def test_parameters_and_requests_are_left_as_they_were() -> None:
    requests, params = [request([5, 6])], [{"x": 1}]

    class Spoils:
        def __call__(self, logits: Tensor, given: list[Params]) -> Tensor:
            for each in given:
                assert each is not None
                each["x"] = 99
                each["__req__"].output_ids.append(77)
            return logits

    apply_processors(logits_of(1), sampling_info(params, (Spoils(), [True])), requests, random_trees(1))
    assert params == [{"x": 1}]
    assert requests[0].output_ids == array("q", [5, 6])


def test_two_processors_act_one_after_the_other_on_their_own_requests() -> None:
    trees, before = random_trees(3), logits_of(3)
    logits = before.clone()
    info = sampling_info([{}, {}, {}], (Adds(1.0), [True, True, False]), (Adds(0.25), [False, True, False]))
    apply_processors(logits, info, [request([1])] * 3, trees)
    for row, amounts in enumerate([[1.0], [1.0, 0.25], []]):
        expected = before[row].clone()
        for amount in amounts:
            expected[nodes_of(trees, row)] += amount
        assert torch.equal(logits[row], expected)


def test_a_processor_may_change_its_rows_in_place() -> None:
    class Zeros:
        def __call__(self, logits: Tensor, params: list[Params]) -> Tensor:
            logits[:] = 0.0
            return logits

    trees, logits = random_trees(2), logits_of(2)
    apply_processors(logits, sampling_info([{}, {}], (Zeros(), [False, True])), [request([])] * 2, trees)
    assert logits[1, nodes_of(trees, 1)].eq(0).all()
    assert logits[0].ne(0).all()


def test_a_request_at_a_node_is_the_request_in_everything_else() -> None:
    whole = request([5], prompt=[1, 2, 3])
    there = RequestAtNode(whole, [6, 7])
    assert there.output_ids == array("q", [5, 6, 7])
    assert there.origin_input_ids is whole.origin_input_ids
    assert there.rid == "x"
    with pytest.raises(AttributeError):
        _ = there.nothing
    # The n-gram processor adds both.
    assert there.origin_input_ids + there.output_ids == array("q", [1, 2, 3, 5, 6, 7])


# SGLang's own processors


def processors() -> Any:
    return import_sglang("sglang.srt.sampling.custom_logit_processor")


def test_sglangs_disallowed_tokens_are_impossible_at_every_node_of_their_request() -> None:
    """Two requests with different lists: for one call over both, SGLang's processor raises."""
    trees, before = random_trees(3), logits_of(3)
    logits = before.clone()
    info = sampling_info(
        [{"token_ids": [4, 5]}, None, {"token_ids": [0]}],
        (processors().DisallowedTokensLogitsProcessor(), [True, False, True]),
    )
    apply_processors(logits, info, [request([])] * 3, trees)
    for row, tokens in enumerate([[4, 5], [], [0]]):
        expected = before[row].clone()
        for node in nodes_of(trees, row):
            expected[node, tokens] = float("-inf")
        assert torch.equal(logits[row], expected)


START, END, NEWLINE = 10, 11, 12
# Root - a - a - newline - a, root - END - a
THOUGHTS = TreeBatch(
    token_ids=torch.tensor([[-1, 3, 3, NEWLINE, 3, END, 3, -1, -1]]),
    parents=torch.tensor([[-1, 0, 1, 2, 3, 0, 5, -1, -1]]),
    depths=torch.tensor([[0, 1, 2, 3, 4, 1, 2, 0, 0]]),
    ancestors=torch.zeros(1, WIDTH, WIDTH, dtype=torch.bool),
)


def allowed(row: Tensor, before: Tensor) -> list[int] | None:
    """The only tokens left, or None if nothing was changed."""
    return None if torch.equal(row, before) else row.isfinite().nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("budget", "outputs", "expected"),
    [
        # Nodes 0 to 6: the root, its branch of 3, 3, newline, 3, its branch of END, 3.
        (None, [START, 4], [None] * 7),
        (9, [START, 4], [None] * 7),
        (3, [START, 4], [None, None, [NEWLINE], [END], [NEWLINE], None, None]),
        (1, [START, 4], [[NEWLINE], [NEWLINE], [NEWLINE], [END], [NEWLINE], None, None]),
        (0, [START], [[NEWLINE], [NEWLINE], [NEWLINE], [END], [NEWLINE], None, None]),
        (1, [START, NEWLINE], [[END], [NEWLINE], [NEWLINE], [END], [NEWLINE], None, None]),
        (0, [4, 4], [None] * 7),
        (0, [START, 4, END], [None] * 7),
    ],
)
def test_a_thinking_budget_counts_the_tokens_of_the_path(
    budget: int | None, outputs: list[int], expected: list[list[int] | None]
) -> None:
    class Budget(processors().ThinkingBudgetLogitProcessor):  # type: ignore[misc]  # SGLang's, known at run time
        THINKING_START_TOKEN_ID = START
        THINKING_END_TOKEN_ID = END
        NEW_LINE_TOKEN_ID = NEWLINE

    before = logits_of(1)
    logits = before.clone()
    info = sampling_info([{"thinking_budget": budget}], (Budget(), [True]))
    apply_processors(logits, info, [request(outputs)], THOUGHTS)
    assert [allowed(logits[0, node], before[0, node]) for node in range(7)] == expected
    assert torch.equal(logits[0, 7:], before[0, 7:])


def test_no_repeated_ngrams_are_those_of_outputs_and_path() -> None:
    before = logits_of(1)
    logits = before.clone()
    processor = processors().DeepseekOCRNoRepeatNGramLogitProcessor()
    info = sampling_info([{"ngram_size": 2, "window_size": 50}], (processor, [True]))
    apply_processors(logits, info, [request([5, 3, 8, 3])], THOUGHTS)
    banned = [logits[0, node].isneginf().nonzero().flatten().tolist() for node in range(7)]
    # After 3: 8 for the root, 3 as well below it, the newline too once that has followed 3.
    assert banned == [[8], [3, 8], [3, 8], [], [3, 8, NEWLINE], [], [8, END]]
