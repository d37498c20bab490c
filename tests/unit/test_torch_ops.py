"""The batched torch steps against the specification and against slow, obvious loops."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import astuple, fields
from itertools import product
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from ddtree_appliance.ddtree import inputs, kernels, sampling, torch_ops  # noqa: E402
from ddtree_appliance.ddtree.head import HeadShard  # noqa: E402
from ddtree_appliance.ddtree.kv_buffers import KVBuffers  # noqa: E402
from ddtree_appliance.ddtree.penalties import OutputCounts, Penalties  # noqa: E402
from ddtree_appliance.ddtree.sampling import Sampling  # noqa: E402
from ddtree_appliance.ddtree.torch_ops import (  # noqa: E402
    AcceptBatch,
    TreeBatch,
    accept,
    build_trees,
    gather_path,
    path_slots,
    top_candidates,
)
from ddtree_appliance.ddtree.tree import NO_PARENT, NO_TOKEN, Tree, build_tree  # noqa: E402

Tensor = Any  # torch may be missing where these annotations are read

INF = float("inf")
NAN = float("nan")
# (b, D, K)
SHAPES = [(1, 1, 1), (1, 15, 16), (2, 15, 4), (4, 7, 8), (3, 3, 2), (2, 1, 16), (4, 15, 1), (3, 2, 3)]
BUDGETS = [1, 2, 7, 15, 16, 32, 64, 128]
LEVELS = {
    "continuous": None,
    "few levels": [-0.5, -1.0, -1.5],
    "one level": [-1.0],
    "zeros": [0.0, -0.0],
    "with minus infinity": [0.0, -0.5, -1.0, -INF],
    "mostly minus infinity": [-1.0, -INF, -INF, -INF],
    "levels that fp32 rounds away": [-16777216.0, -1.0, -0.5, -2.0],
}


def candidates(seed: int, shape: tuple[int, int, int], levels: list[float] | None) -> tuple[Tensor, Tensor]:
    """Random log-probabilities and ids, ordered as `top_candidates` returns them; depths share some ids."""
    source = np.random.default_rng(seed)
    values = -source.exponential(2.0, shape) if levels is None else source.choice(levels, shape)
    ids = np.argsort(source.random((*shape[:2], 2 * shape[2] + 1)), axis=-1)[..., : shape[2]]
    order = np.lexsort((ids, -values), axis=-1)
    values, ids = np.take_along_axis(values, order, -1), np.take_along_axis(ids, order, -1)
    return torch.from_numpy(values.astype(np.float32)), torch.from_numpy(ids.astype(np.int64))


def reference_trees(logprobs: Tensor, ids: Tensor, budget: int) -> list[Tree]:
    return [build_tree(row, row_ids, budget) for row, row_ids in zip(logprobs.tolist(), ids.tolist(), strict=True)]


def padded(tree: Tree, width: int) -> tuple[list[int], list[int], list[int], list[list[bool]]]:
    """What one row of a TreeBatch must hold, padding included."""
    padding = width - len(tree)
    sees = [set(tree.ancestors(node)) for node in range(len(tree))] + [{row} for row in range(len(tree), width)]
    return (
        [*tree.token_ids, *[NO_TOKEN] * padding],
        [*tree.parents, *[NO_PARENT] * padding],
        [*tree.depths, *[0] * padding],
        [[column in row for column in range(width)] for row in sees],
    )


def path_of(trees: TreeBatch, row: int, node: int) -> list[int]:
    """The drafted tokens from the root, which is not one of them, to the node."""
    path = []
    while (parent := int(trees.parents[row, node])) != NO_PARENT:
        path.append(int(trees.token_ids[row, node]))
        node = parent
    return path[::-1]


def as_bits(logits: Tensor) -> Tensor:
    """To compare NaN, and zeros of both signs."""
    return logits.view(torch.int32)


def assert_trees_equal(trees: TreeBatch, expected: list[Tree], budget: int) -> None:
    width = budget + 1
    for field in ("token_ids", "parents", "depths"):
        values = getattr(trees, field)
        assert (values.shape, values.dtype) == ((len(expected), width), torch.int64)
    assert (trees.ancestors.shape, trees.ancestors.dtype) == ((len(expected), width, width), torch.bool)
    assert trees.ancestors.is_contiguous()
    for row, tree in enumerate(expected):
        token_ids, parents, depths, ancestors = padded(tree, width)
        assert trees.token_ids[row].tolist() == token_ids
        assert trees.parents[row].tolist() == parents
        assert trees.depths[row].tolist() == depths
        assert trees.ancestors[row].tolist() == ancestors


# build_trees


@pytest.mark.parametrize("kind", LEVELS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_batch_of_trees_equals_the_specification(budget: int, kind: str) -> None:
    for seed, shape in enumerate(SHAPES):
        logprobs, ids = candidates(seed, shape, LEVELS[kind])
        assert_trees_equal(build_trees(logprobs, ids, budget), reference_trees(logprobs, ids, budget), budget)


def test_many_small_trees_equal_the_specification() -> None:
    source = random.Random(5)
    for seed in range(300):
        shape = (source.randint(1, 4), source.randint(1, 5), source.randint(1, 5))
        budget = source.randint(1, 24)
        logprobs, ids = candidates(seed, shape, source.choice(list(LEVELS.values())))
        assert_trees_equal(build_trees(logprobs, ids, budget), reference_trees(logprobs, ids, budget), budget)


def test_requests_of_one_batch_do_not_influence_each_other() -> None:
    parts = [candidates(seed, (1, 6, 4), LEVELS[kind]) for seed, kind in enumerate(LEVELS)]
    together = build_trees(torch.cat([part for part, _ in parts]), torch.cat([part for _, part in parts]), 20)
    assert_trees_equal(together, [tree for part in parts for tree in reference_trees(*part, 20)], 20)


def test_padding_sees_itself_only_and_has_no_parent() -> None:
    trees = build_trees(torch.tensor([[[-1.0, -INF]]]), torch.tensor([[[7, 9]]]), 3)
    assert trees.token_ids.tolist() == [[-1, 7, -1, -1]]
    assert trees.parents.tolist() == [[-1, 0, -1, -1]]
    assert trees.depths.tolist() == [[0, 1, 0, 0]]
    assert trees.ancestors.int().tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]]


@pytest.mark.parametrize("depth,topk", [(0, 0), (0, 4), (3, 0)])
def test_a_batch_without_candidates_is_padding_behind_the_roots(depth: int, topk: int) -> None:
    trees = build_trees(torch.zeros(2, depth, topk), torch.zeros(2, depth, topk, dtype=torch.int64), 4)
    assert_trees_equal(trees, [Tree((NO_TOKEN,), (NO_PARENT,), (0,), (0.0,))] * 2, 4)


def test_a_score_that_leaves_fp32_is_padding() -> None:
    trees = build_trees(torch.full((1, 2, 1), -3e38), torch.tensor([[[1], [2]]]), 2)
    assert trees.token_ids.tolist() == [[NO_TOKEN, 1, NO_TOKEN]]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 15, 16, 17])
def test_the_ancestors_of_a_long_chain_are_complete(length: int) -> None:
    logprobs, ids = candidates(length, (1, length, 1), [-0.1])
    trees = build_trees(logprobs, ids, length)
    assert trees.ancestors[0].int().tolist() == torch.ones(length + 1, length + 1).tril().int().tolist()


# top_candidates


def ranked(logprobs: list[float], topk: int) -> list[int]:
    return sorted(range(len(logprobs)), key=lambda token: (-logprobs[token], token))[:topk]


def check_candidates(hidden: Tensor, weight: Tensor, topk: int) -> None:
    logits = torch.matmul(hidden.to(weight.dtype), weight.T).float()
    expected = torch.log_softmax(logits, dim=-1)
    values, ids = top_candidates(hidden, HeadShard.whole(weight), topk)

    assert (values.dtype, ids.dtype) == (torch.float32, torch.int64)
    assert values.shape == ids.shape == (*hidden.shape[:2], min(topk, len(weight)))
    for request, position in product(range(hidden.shape[0]), range(hidden.shape[1])):
        row = [-INF if value != value else min(value, 0.0) for value in expected[request, position].tolist()]
        order = ranked(row, topk)
        assert ids[request, position].tolist() == order
        assert values[request, position].tolist() == [row[token] for token in order]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("topk", [1, 2, 16, 40, 41, 64])
def test_candidates_come_in_the_order_of_a_plain_sort(topk: int, dtype: Any) -> None:
    generator = torch.Generator().manual_seed(topk)
    for hidden_scale, vocabulary in ((0.1, 300), (3.0, 40)):
        hidden = torch.randn(2, 3, 8, generator=generator) * hidden_scale
        check_candidates(hidden, torch.randn(vocabulary, 8, generator=generator).to(dtype), topk)


@pytest.mark.parametrize("topk", [1, 3, 16, 64])
def test_exact_ties_are_cut_by_token_id(topk: int) -> None:
    generator = torch.Generator().manual_seed(1)
    # Small whole numbers: logits of 600 tokens take about ten values, exactly.
    hidden = torch.randint(-1, 2, (3, 4, 6), generator=generator).float()
    weight = torch.randint(-1, 2, (600, 6), generator=generator).float()
    logits = torch.matmul(hidden, weight.T)
    assert len(logits.unique()) < 14
    check_candidates(hidden, weight, topk)


def test_equal_logits_give_the_smallest_ids() -> None:
    values, ids = top_candidates(torch.ones(1, 2, 4), HeadShard.whole(torch.ones(1000, 4)), 5)
    assert ids.tolist() == [[[0, 1, 2, 3, 4]] * 2]
    assert values.unique().numel() == 1


@pytest.mark.parametrize("vocabulary", [1, 2, 7])
def test_a_vocabulary_smaller_than_k_is_returned_whole(vocabulary: int) -> None:
    check_candidates(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(3)), torch.randn(vocabulary, 4), 16)


def test_log_probabilities_are_those_of_the_full_vocabulary() -> None:
    generator = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(1, 2, 8, generator=generator), torch.randn(50, 8, generator=generator)
    values, ids = top_candidates(hidden, HeadShard.whole(weight), 4)
    logits = hidden.double() @ weight.double().T
    exact = (logits - logits.exp().sum(-1, keepdim=True).log()).gather(-1, ids)
    assert torch.allclose(values.double(), exact, atol=1e-5)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_position_without_a_distribution_has_no_finite_candidate(bad: float) -> None:
    hidden = torch.ones(1, 3, 2)
    hidden[0, 1, 0] = bad
    values, ids = top_candidates(hidden, HeadShard.whole(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])), 2)
    assert values[0, 1].tolist() == [-INF, -INF]
    assert ids[0, 1].tolist() == [0, 1]
    assert values[0, [0, 2]].isfinite().all()
    assert ids[0, [0, 2]].tolist() == [[1, 0]] * 2


@pytest.mark.parametrize(
    "logprobs,ids,values",
    [
        ([-1.0, -0.0, 0.0, -0.0], [1, 2, 3, 0], [0.0, 0.0, 0.0, -1.0]),  # minus zero ties with zero
        ([0.0, -0.0, 0.0, -1e-45], [0, 1, 2, 3], [0.0, 0.0, 0.0, -1e-45]),  # and the smallest number does not
        ([-0.5, 0.25, 0.5, 0.0], [1, 2, 3, 0], [0.0, 0.0, 0.0, -0.5]),  # positive values are clipped before ranking
        ([NAN, -2.0, -INF, -1.0], [3, 1, 0, 2], [-1.0, -2.0, -INF, -INF]),  # NaN is minus infinity
        ([NAN, NAN, -3e38, -INF], [2, 0, 1, 3], [-3e38, -INF, -INF, -INF]),
    ],
)
def test_odd_log_probabilities_are_ranked_as_specified(
    logprobs: list[float], ids: list[int], values: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    # No real softmax gives these rows; a kernel that rounds differently might.
    given = torch.tensor([[logprobs]], dtype=torch.float32)
    monkeypatch.setattr(torch, "log_softmax", lambda logits, dim: given)
    got_values, got_ids = top_candidates(torch.zeros(1, 1, 2), HeadShard.whole(torch.zeros(4, 2)), 4)
    assert got_ids.tolist() == [[ids]]
    assert got_values.tolist() == torch.tensor([[values]]).tolist()


def test_candidates_are_what_the_builder_accepts() -> None:
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randint(-1, 2, (2, 5, 6), generator=generator).float()
    hidden[1, 2] = NAN
    weight = torch.randint(-1, 2, (90, 6), generator=generator).float()
    logprobs, ids = top_candidates(hidden, HeadShard.whole(weight), 8)
    assert_trees_equal(build_trees(logprobs, ids, 30), reference_trees(logprobs, ids, 30), 30)


# accept


def walk(tree: Tree, predict: list[int], max_run: int) -> tuple[list[int], int, list[int], int]:
    """Path, number of correct drafts, tokens and bonus token of one request."""
    node, path = 0, [0]
    while (child := tree.child(node, predict[node])) is not None:
        node = child
        path.append(node)
    tokens = [predict[each] for each in path]
    correct = len(path) - 1
    return (
        path + list(range(len(path), max_run)),
        correct,
        tokens + [0] * (max_run - len(tokens)),
        tokens[correct],
    )


def predictions(source: random.Random, tree: Tree, width: int, follow: float) -> list[int]:
    """After each node a token: with probability `follow` one of its children's, else any, also of other branches."""
    tokens = []
    for node in range(width):
        children = [child for child in range(len(tree)) if tree.parents[child] == node and node < len(tree)]
        if children and source.random() < follow:
            tokens.append(tree.token_ids[source.choice(children)])
        else:
            tokens.append(source.choice([*tree.token_ids[1:], source.randrange(40)]))
    return tokens


def check_accept(trees: list[Tree], batch: TreeBatch, predict: list[list[int]], max_run: int) -> list[int]:
    accepted = accept(batch, torch.tensor(predict), max_run)
    expected = [walk(tree, row, max_run) for tree, row in zip(trees, predict, strict=True)]
    assert accepted.path.tolist() == [path for path, _, _, _ in expected]
    assert accepted.num_correct.tolist() == [correct for _, correct, _, _ in expected]
    assert accepted.tokens.tolist() == [tokens for _, _, tokens, _ in expected]
    assert accepted.bonus.tolist() == [bonus for _, _, _, bonus in expected]
    types = [getattr(accepted, field.name).dtype for field in fields(accepted)]
    assert types == [torch.int64, torch.int32, torch.int64, torch.int64]
    return [correct for _, correct, _, _ in expected]


@pytest.mark.parametrize("follow", [0.0, 0.5, 0.9, 1.0])
def test_the_accepted_run_equals_a_walk_through_the_tree(follow: float) -> None:
    source = random.Random(7)
    runs: list[tuple[int, int]] = []
    for seed, (shape, budget) in enumerate(product(SHAPES, [1, 2, 7, 15, 32])):
        logprobs, ids = candidates(seed, shape, source.choice(list(LEVELS.values())))
        trees = reference_trees(logprobs, ids, budget)
        batch = build_trees(logprobs, ids, budget)
        max_run = min(shape[1], budget) + 1
        predict = [predictions(source, tree, budget + 1, follow) for tree in trees]
        runs += [(correct, shape[1]) for correct in check_accept(trees, batch, predict, max_run)]
    # The table is worth its name only if it holds short, long and full runs.
    if follow == 0.0:
        assert any(correct == 0 for correct, _ in runs)
    if follow == 1.0:
        assert any(correct == depth == 15 for correct, depth in runs)
        assert any(0 < correct < depth for correct, depth in runs)


#        0
#      /   \
#     1:7   2:8        8 is also the token of node 3, 9 that of nodes 4 and 5
#    /  \     \
#   3:8  5:9   4:9
FORK = TreeBatch(
    token_ids=torch.tensor([[NO_TOKEN, 7, 8, 8, 9, 9, NO_TOKEN]]),
    parents=torch.tensor([[NO_PARENT, 0, 0, 1, 2, 1, NO_PARENT]]),
    depths=torch.tensor([[0, 1, 1, 2, 2, 2, 0]]),
    ancestors=torch.tensor(
        [
            [
                [1, 0, 0, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0, 0],
                [1, 0, 1, 0, 0, 0, 0],
                [1, 1, 0, 1, 0, 0, 0],
                [1, 0, 1, 0, 1, 0, 0],
                [1, 1, 0, 0, 0, 1, 0],
                [0, 0, 0, 0, 0, 0, 1],
            ]
        ]
    ).bool(),
)


@pytest.mark.parametrize(
    "predict,path,tokens",
    [
        # nothing accepted: the bonus token alone
        ([5, 8, 9, 0, 0, 0, 0], [0, 1, 2], [5, 0, 0]),
        # one step, then a token that the tree holds under another parent only
        ([8, 7, 7, 0, 0, 0, 0], [0, 2, 2], [8, 7, 0]),
        ([8, 0, 8, 0, 0, 0, 0], [0, 2, 2], [8, 8, 0]),
        # the root's choice is a grandchild's token
        ([9, 9, 9, 0, 0, 0, 0], [0, 1, 2], [9, 0, 0]),
        # children chosen below a parent that was not
        ([5, 8, 9, 1, 1, 1, 1], [0, 1, 2], [5, 0, 0]),
        # full depth, through either branch; both nodes that hold 9 stand at depth 2
        ([7, 8, 9, 3, 4, 5, 6], [0, 1, 3], [7, 8, 3]),
        ([7, 9, 9, 3, 4, 5, 6], [0, 1, 5], [7, 9, 5]),
        ([8, 9, 9, 3, 4, 5, 6], [0, 2, 4], [8, 9, 4]),
        # a target that predicts the padding's token follows nothing
        ([NO_TOKEN] * 7, [0, 1, 2], [NO_TOKEN, 0, 0]),
        ([7, NO_TOKEN, 0, 0, 0, 0, NO_TOKEN], [0, 1, 2], [7, NO_TOKEN, 0]),
    ],
)
def test_a_run_ends_where_the_tree_does_not_hold_the_choice(
    predict: list[int], path: list[int], tokens: list[int]
) -> None:
    accepted = accept(FORK, torch.tensor([predict]), 3)
    assert accepted.path.tolist() == [path]
    assert accepted.tokens.tolist() == [tokens]
    correct = int(accepted.num_correct)
    assert accepted.bonus.tolist() == [tokens[correct]]
    assert tokens[correct + 1 :] == [0] * (2 - correct)


def test_a_tree_of_padding_accepts_nothing() -> None:
    trees = build_trees(torch.full((2, 3, 2), -INF), torch.tensor([[[0, 1]] * 3] * 2), 4)
    for token in (NO_TOKEN, 0, 1):
        accepted = accept(trees, torch.full((2, 5), token), 4)
        assert accepted.num_correct.tolist() == [0, 0]
        assert accepted.bonus.tolist() == [token, token]
        assert accepted.path.tolist() == [[0, 1, 2, 3]] * 2


# path_slots, gather_path


def accepted_runs() -> list[tuple[AcceptBatch, int]]:
    """Accepted runs through random trees, each with the verify width."""
    source = random.Random(11)
    runs = []
    for seed, (budget, follow) in enumerate(product([1, 7, 16, 40], [0.0, 0.8, 1.0])):
        logprobs, ids = candidates(seed, (4, 8, 4), LEVELS["few levels"] if seed % 2 else None)
        predict = [predictions(source, tree, budget + 1, follow) for tree in reference_trees(logprobs, ids, budget)]
        batch = build_trees(logprobs, ids, budget)
        runs.append((accept(batch, torch.tensor(predict), min(8, budget) + 1), budget + 1))
    return runs


def move_row_by_row(memory: Tensor, source: Tensor, target: Tensor, depths: range) -> Tensor:
    moved = memory.clone()
    for request, depth in product(range(source.shape[0]), depths):
        moved[target[request, depth]] = moved[source[request, depth]]
    return moved


@pytest.mark.parametrize("spare", [0, 5])
def test_moving_kv_row_by_row_in_depth_order_equals_moving_it_at_once(spare: int) -> None:
    generator = torch.Generator().manual_seed(12)
    backwards_differs = False
    for accepted, width in accepted_runs():
        batch, run = accepted.path.shape
        slots = torch.randperm(batch * (width + spare) + 9, generator=generator)[: batch * (width + spare)]
        slots = slots.view(batch, width + spare)
        memory = torch.randn(batch * (width + spare) + 9, 3, generator=generator)

        source, target = path_slots(slots, accepted.path)

        assert source.shape == target.shape == (batch, run)
        at_once = memory.clone()
        at_once[target.flatten()] = memory[source.flatten()]
        assert torch.equal(move_row_by_row(memory, source, target, range(run)), at_once)
        for request in range(batch):
            length = int(accepted.num_correct[request]) + 1
            path = accepted.path[request, :length].tolist()
            # The path's KV stands right behind the prefix, and nothing else was touched.
            assert torch.equal(at_once[slots[request, :length]], memory[slots[request, path]])
            assert torch.equal(at_once[slots[request, length:]], memory[slots[request, length:]])
            # No target is read later; past the run a slot is moved onto itself.
            for depth in range(run):
                assert target[request, depth] not in source[request, depth + 1 :]
            assert source[request, length:].tolist() == target[request, length:].tolist()
        backwards_differs |= not torch.equal(move_row_by_row(memory, source, target, range(run)[::-1]), at_once)
    assert backwards_differs, "no run of this test overlaps, so it shows nothing about the order"


def test_gathered_rows_are_those_of_the_path() -> None:
    generator = torch.Generator().manual_seed(13)
    for accepted, width in accepted_runs():
        batch, run = accepted.path.shape
        rows = torch.randn(batch * width, 5, generator=generator)
        gathered = gather_path(rows, accepted)
        assert gathered.shape == (batch, run, 5)
        for request, depth in product(range(batch), range(run)):
            assert torch.equal(gathered[request, depth], rows[request * width + int(accepted.path[request, depth])])


# No function waits for the device


class HostRead(Exception):
    """A function asked for a device value on the host."""


class NoHostRead(TorchDispatchMode):
    """Refuses the operations whose result, or its shape, the host must wait for.

    Meta tensors have no values, so reading one fails by itself; this mode adds what they let pass, such as writing
    through a boolean mask, which looks for the True entries first on a real device.
    """

    FORBIDDEN = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "bincount")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.lstrip("_").startswith(tuple(each.lstrip("_") for each in self.FORBIDDEN)):
            raise HostRead(name)
        if name.startswith(("index", "_index", "_unsafe_index")):
            indices = [each for arg in args if isinstance(arg, (list, tuple)) for each in arg]
            if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
                raise HostRead(f"{name} with a mask")
        return func(*args, **(kwargs or {}))


def example_arguments(device: str) -> dict[str, tuple[Any, ...]]:
    """Arguments for every step, b = 2, D = 5, K = 3, budget 9."""
    logprobs, ids = candidates(2, (2, 5, 3), LEVELS["with minus infinity"])
    trees = build_trees(logprobs, ids, 9)
    predict = torch.full((2, 10), 3)
    accepted = accept(trees, predict, 6)
    generator = torch.Generator().manual_seed(8)
    rows = torch.randn(20, 4, generator=generator).to(device)
    slots = torch.arange(24).view(2, 12).to(device)
    on_device = TreeBatch(*(value.to(device) for value in astuple(trees)))
    accepted_on_device = AcceptBatch(*(value.to(device) for value in astuple(accepted)))
    return {
        "top_candidates": (
            rows.view(2, 10, 4),
            HeadShard.whole(torch.randn(30, 4, generator=generator).to(device)),
            5,
        ),
        "build_trees": (logprobs.to(device), ids.to(device), 9),
        "draft_inputs": (
            *(each.to(device) for each in (torch.tensor([7, 8]), torch.tensor([4, 2]), torch.tensor([1, 0]))),
            torch.arange(40, dtype=torch.int32).view(2, 20).to(device),
            3,
            6,
            10,
        ),
        "verify_inputs": (on_device, torch.tensor([7, 8]).to(device), torch.tensor([4, 2]).to(device), 9),
        "best_tokens": (torch.randn((2, 10, 30), generator=torch.Generator().manual_seed(1)).to(device),),
        "sample_nodes": (
            torch.randn(2, 10, 30, generator=generator).to(device),
            on_device.depths,
            torch.tensor([4, 2]).to(device),
            5,
            sampling_for(device),
        ),
        "accept": (on_device, predict.to(device), 6),
        "move_kv": (KVBuffers.of([torch.randn(24, 2, 2).to(device)]), slots, accepted_on_device.path),
        "gather_path": (rows, accepted_on_device),
    }


def sampling_for(device: str) -> Sampling:
    columns = [torch.ones(2, 1), torch.tensor([1, 9]), torch.full((2,), 0.9), torch.full((2,), 0.1), torch.arange(2)]
    return Sampling(*(column.to(device) for column in columns), is_filtered=True)


def test_a_move_of_all_rows_reads_every_source_before_it_writes() -> None:
    """Each target but the first is a later source."""
    before = [torch.randn(8, 2, 3), torch.randn(8, 1, 6)]
    after = [buffer.clone() for buffer in before]
    torch_ops.move_kv(KVBuffers.of(after), torch.arange(8).unsqueeze(0), torch.tensor([[0, 2, 3, 5]]))
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[:4], old[[0, 2, 3, 5]])
        assert torch.equal(new[4:], old[4:])


def test_candidates_found_in_chunks_are_those_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whole numbers: a product of other shapes rounds otherwise.
    hidden, weight = torch.randint(-3, 4, (3, 5, 4)).float(), torch.randint(-3, 4, (30, 4)).float()
    at_once = torch_ops.top_candidates(hidden, HeadShard.whole(weight), 6)
    monkeypatch.setattr(torch_ops, "CANDIDATE_BYTES", 2 * torch_ops.BYTES_PER_LOGIT * len(weight))
    for whole, chunked in zip(at_once, torch_ops.top_candidates(hidden, HeadShard.whole(weight), 6), strict=True):
        assert torch.equal(whole, chunked)


def outputs(result: Any) -> list[Any]:
    if result is None:  # works in place
        return []
    if isinstance(result, torch.Tensor):
        return [result]
    return list(result) if isinstance(result, tuple) else [getattr(result, field.name) for field in fields(result)]


@pytest.mark.parametrize("name", [field.name for field in fields(kernels.Kernels)])
def test_no_step_reads_a_device_value_on_the_host(name: str) -> None:
    step = getattr(kernels.TORCH, name)
    arguments = example_arguments("meta")[name]
    with NoHostRead():
        without_values = outputs(step(*arguments))
    # The same shapes and types as with values: none depends on them.
    real = outputs(step(*example_arguments("cpu")[name]))
    assert [(out.shape, out.dtype) for out in without_values] == [(out.shape, out.dtype) for out in real]
    assert all(out.device.type == "meta" for out in without_values)


def test_penalties_read_no_device_value_on_the_host() -> None:
    """What a step does for requests that ask; what they ask is known on the host."""
    trees, *_ = example_arguments("meta")["accept"]
    accepted = example_arguments("meta")["gather_path"][1]
    rows = torch.zeros(1, dtype=torch.int64, device="meta")
    column = torch.ones((1, 1, 1), device="meta")
    stops = torch.zeros((1, 30), dtype=torch.bool, device="meta")
    asked = Penalties(rows, column, column, column, rows.unsqueeze(1), rows.unsqueeze(1), stops)
    counts = OutputCounts(4, 30, torch.device("meta"))
    prefix_lens = torch.zeros(2, dtype=torch.int64, device="meta")
    with NoHostRead():
        asked.apply(torch.zeros((2, 10, 30), device="meta"), counts.of(rows), trees, prefix_lens, 5)
        counts.add(rows, accepted, rows)


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t[0].item(),
        lambda t: int(t[0]),
        lambda t: bool(t[0] > 0),
        lambda t: t.tolist(),
        lambda t: t.cpu(),
        lambda t: t.numpy(),
        lambda t: t[t > 0],
        lambda t: t.__setitem__(t > 0, torch.ones(2, device=t.device)),
        lambda t: t.__setitem__(t > 0, 0.0),
        lambda t: t.nonzero(),
        lambda t: torch.where(t > 0),
        lambda t: t.unique(),
        lambda t: t.masked_select(t > 0),
        lambda t: torch.equal(t, t),
        lambda t: torch.arange(t[0]),
        lambda t: t[: t[0].long()],
        lambda t: torch.repeat_interleave(t, t.long()),
    ],
)
def test_reading_a_device_value_would_be_noticed(read: Callable[[Any], Any]) -> None:
    with pytest.raises((HostRead, RuntimeError, NotImplementedError, TypeError)), NoHostRead():
        read(torch.ones(4, device="meta"))


# kernels


MODULES = {"draft_inputs": inputs, "verify_inputs": inputs, "sample_nodes": sampling}


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0", "cuda:7"])
def test_every_step_has_an_implementation_on_every_served_device(device: str) -> None:
    table = kernels.kernels_for(device)
    for field in fields(table):
        step = getattr(table, field.name)
        fused = device != "cpu"
        assert step.__name__ == field.name
        in_torch = MODULES.get(field.name, torch_ops).__name__
        assert step.__module__.startswith("ddtree_appliance.ddtree.fused" if fused else in_torch)


def test_a_device_type_without_a_table_is_an_error() -> None:
    with pytest.raises(KeyError, match="meta"):
        kernels.kernels_for("meta")


# AcceptBatch


@pytest.mark.parametrize("run", [1, 2, 7])
@pytest.mark.parametrize("batch", [1, 3])
def test_what_was_accepted_survives_being_packed_for_an_exchange(batch: int, run: int) -> None:
    numbers = torch.arange(batch * (2 * run + 2)) + 2**40  # no two alike, so that none can take another's place
    path, tokens, bonus = numbers.split([batch * run, batch * run, 2 * batch])
    num_correct = torch.arange(batch, dtype=torch.int32)
    accepted = AcceptBatch(path.view(batch, run), num_correct, tokens.view(batch, run), bonus[:batch])

    packed = accepted.packed()

    assert (packed.shape, packed.dtype, packed.is_contiguous()) == ((batch, 2 * run + 2), torch.int64, True)
    unpacked = AcceptBatch.unpacked(packed)
    for field in fields(AcceptBatch):
        got, expected = getattr(unpacked, field.name), getattr(accepted, field.name)
        assert (got.dtype, got.tolist()) == (expected.dtype, expected.tolist()), field.name
    # Kernels read them as they lie.
    assert unpacked.path.is_contiguous() and unpacked.tokens.is_contiguous()
