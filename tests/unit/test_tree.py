"""The specification of the draft tree, held against brute force and against its own promises."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_appliance.ddtree.limits import MAX_BUDGET
from ddtree_appliance.ddtree.tree import NO_PARENT, NO_TOKEN, ROOT, Tree, build_tree

Row = list[float]
Rows = tuple[list[Row], list[list[int]]]  # log-probabilities and token ids
Input = tuple[list[Row], list[list[int]], int]  # and the budget
Ranks = tuple[int, ...]

INF = math.inf
NAN = math.nan
# Few distinct values, so that almost every comparison is a tie; all are exact in fp32.
LEVELS = (0.0, -0.0, -0.5, -1.0, -1.5, -2.0, 0.25, -INF, NAN)
PROPERTY = settings(derandomize=True, deadline=None, max_examples=150)


def clean(logprob: float) -> np.float32:
    """A log-probability as the contract reads it."""
    return np.float32(-INF) if math.isnan(logprob) else np.float32(min(logprob, 0.0))


def ordered(row: Row, ids: list[int]) -> tuple[Row, list[int]]:
    pairs = sorted(zip(row, ids, strict=True), key=lambda pair: (-clean(pair[0]), pair[1]))
    return [logprob for logprob, _ in pairs], [token for _, token in pairs]


def random_input(seed: int, depth: int, topk: int, levels: tuple[float, ...] = ()) -> Rows:
    """Rows in the builder's order; each draws its ids from one small vocabulary, so that depths share some."""
    random = np.random.default_rng(seed)
    rows, ids = [], []
    for _ in range(depth):
        values = random.choice(levels, topk) if levels else -random.exponential(2.0, topk)
        row, row_ids = ordered(
            np.asarray(values, dtype=np.float32).tolist(), random.choice(2 * topk + 1, topk, replace=False).tolist()
        )
        rows.append(row)
        ids.append(row_ids)
    return rows, ids


@st.composite
def inputs(draw: st.DrawFn) -> Input:
    depth, topk = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    value = draw(st.sampled_from([st.sampled_from(LEVELS), st.floats(-30.0, 1.0, width=32)]))
    rows, ids = [], []
    for _ in range(depth):
        row, row_ids = ordered(
            draw(st.lists(value, min_size=topk, max_size=topk)),
            draw(st.lists(st.integers(0, 9), min_size=topk, max_size=topk, unique=True)),
        )
        rows.append(row)
        ids.append(row_ids)
    return rows, ids, draw(st.integers(1, 40))


def all_scores(rows: list[Row]) -> dict[Ranks, np.float32]:
    """The score of every path of ranks, added up from the root in fp32."""
    scores: dict[Ranks, np.float32] = {(): np.float32(0)}
    with np.errstate(over="ignore"):
        for depth in range(1, len(rows) + 1):
            for ranks in itertools.product(range(len(rows[0])), repeat=depth):
                scores[ranks] = np.float32(scores[ranks[:-1]] + clean(rows[depth - 1][ranks[-1]]))
    return scores


def expected_paths(rows: list[Row], budget: int) -> list[Ranks]:
    """The same order without a search: sort every path. Parents compare as their own keys do, recursively."""
    scores = all_scores(rows)

    def key(ranks: Ranks) -> tuple[object, ...]:
        return (float(-scores[ranks]), len(ranks), key(ranks[:-1]), ranks[-1]) if ranks else ()

    return [(), *sorted((ranks for ranks in scores if ranks and np.isfinite(scores[ranks])), key=key)[:budget]]


def paths_of(tree: Tree, ids: list[list[int]]) -> list[Ranks]:
    """The rank path of every node, read back from its tokens."""
    paths: list[Ranks] = []
    for node in range(len(tree)):
        nodes = tree.ancestors(node)[-2::-1]
        paths.append(tuple(ids[depth].index(tree.token_ids[each]) for depth, each in enumerate(nodes)))
    return paths


def sum_of_probabilities(scores: dict[Ranks, np.float32], paths: list[Ranks] | tuple[Ranks, ...]) -> float:
    return math.fsum(math.exp(scores[path]) for path in paths)


# Against brute force


@pytest.mark.parametrize("levels", [(), LEVELS, (-1.0,), (0.0, -INF), (0.0,)])
@pytest.mark.parametrize("topk", [1, 2, 3, 4])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_nodes_come_in_the_order_of_the_sorted_keys(depth: int, topk: int, levels: tuple[float, ...]) -> None:
    for seed in range(3):
        rows, ids = random_input(seed, depth, topk, levels)
        order = expected_paths(rows, MAX_BUDGET)
        for budget in (1, 2, 3, 5, 8, 13, 21, 34, MAX_BUDGET):
            assert paths_of(build_tree(rows, ids, budget), ids) == order[: budget + 1]


@pytest.mark.parametrize("depth,topk,budget", [(2, 2, 3), (3, 2, 4), (2, 4, 4), (3, 3, 4), (4, 4, 3), (4, 2, 5)])
def test_no_closed_set_of_the_same_size_holds_more_probability(depth: int, topk: int, budget: int) -> None:
    for seed, levels in itertools.product(range(3), [(), (-0.25, -0.5, -1.0, -1.5)]):
        rows, ids = random_input(seed, depth, topk, levels)
        scores = all_scores(rows)
        # Every set closed under parents, grown one node at a time.
        sets: set[frozenset[Ranks]] = {frozenset({()})}
        for _ in range(budget):
            sets = {
                grown | {path} for grown in sets for path in scores if path and path not in grown and path[:-1] in grown
            }
        best = max(sum_of_probabilities(scores, tuple(each)) for each in sets)
        paths = paths_of(build_tree(rows, ids, budget), ids)
        assert frozenset(paths) in sets
        assert math.isclose(sum_of_probabilities(scores, paths), best, rel_tol=1e-12)


# Promises about every tree


@PROPERTY
@given(inputs())
def test_every_tree_is_closed_ordered_and_within_its_limits(given_input: Input) -> None:
    rows, ids, budget = given_input
    tree = build_tree(rows, ids, budget)

    assert len(tree) == len(tree.parents) == len(tree.depths) == len(tree.scores) <= budget + 1
    assert (tree.token_ids[ROOT], tree.parents[ROOT]) == (NO_TOKEN, NO_PARENT)
    assert (tree.depths[ROOT], tree.scores[ROOT]) == (0, 0)
    for node in range(1, len(tree)):
        assert 0 <= tree.parents[node] < node
        assert tree.depths[node] == tree.depths[tree.parents[node]] + 1 <= len(rows)
        assert tree.depths[node] <= node
        assert tree.token_ids[node] in ids[tree.depths[node] - 1]
    siblings = list(zip(tree.parents, tree.token_ids, strict=True))
    assert len(siblings) == len(set(siblings))


@PROPERTY
@given(inputs())
def test_scores_are_fp32_sums_from_the_root_and_never_grow(given_input: Input) -> None:
    rows, ids, budget = given_input
    tree = build_tree(rows, ids, budget)

    for node, path in enumerate(paths_of(tree, ids)):
        score = np.float32(0)
        for depth, rank in enumerate(path):
            score = np.float32(score + clean(rows[depth][rank]))
        assert tree.scores[node] == float(score) > -INF
    assert list(tree.scores) == sorted(tree.scores, reverse=True)


@PROPERTY
@given(inputs())
def test_what_is_left_out_is_not_better_than_what_is_taken(given_input: Input) -> None:
    rows, ids, budget = given_input
    tree = build_tree(rows, ids, budget)
    taken = set(paths_of(tree, ids))
    # A path left out with a parent that was taken; anything deeper is no better than that one.
    left_out = [
        np.float32(tree.scores[node]) + clean(rows[depth][rank])
        for node, path in enumerate(paths_of(tree, ids))
        for depth in [len(path)]
        if depth < len(rows)
        for rank in range(len(rows[depth]))
        if (*path, rank) not in taken
    ]

    if len(tree) <= budget:
        assert not np.isfinite(left_out).any()
    elif left_out:
        assert max(left_out) <= tree.scores[-1]


@PROPERTY
@given(inputs())
def test_the_same_input_gives_the_same_tree_and_is_not_changed(given_input: Input) -> None:
    rows, ids, budget = given_input
    array: Any = np.array(rows, dtype=np.float32)
    before = array.tobytes()

    assert build_tree(array, ids, budget) == build_tree(array, ids, budget) == build_tree(rows, ids, budget)
    assert array.tobytes() == before


def test_a_smaller_budget_gives_the_first_nodes_of_the_largest_tree() -> None:
    random = np.random.default_rng(20)
    logits = random.normal(0.0, 7.0, (15, 4096)).astype(np.float32)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :16]
    rows = np.take_along_axis(logprobs, ids, axis=1)
    whole = build_tree(rows.tolist(), ids.tolist(), MAX_BUDGET)

    assert len(whole) == MAX_BUDGET + 1
    assert max(whole.depths) >= 6  # neither a chain nor a star
    for budget in range(1, MAX_BUDGET + 1):
        tree = build_tree(rows.tolist(), ids.tolist(), budget)
        assert tree == Tree(
            whole.token_ids[: budget + 1],
            whole.parents[: budget + 1],
            whole.depths[: budget + 1],
            whole.scores[: budget + 1],
        )


# Ties, rounding and values that are no log-probabilities: the whole tree is given, the root left out

BIG = -16777216.0  # 2**24: fp32 steps of 1 below it, of 2 beyond


@pytest.mark.parametrize(
    "rows,ids,tokens,parents,scores",
    [
        # equal scores at one depth: parent index, then rank; token ids of different parents do not matter
        ([[-1, -1], [-1, -1]], [[8, 9], [1, 2]], [8, 9, 1, 2, 1, 2], [0, 0, 1, 1, 2, 2], [-1, -1, -2, -2, -2, -2]),
        # equal scores at two depths: the shallower node, although its parent comes later or its rank is larger
        ([[-1, -2], [-1, -9]], [[5, 6], [3, 4]], [5, 6, 3, 3, 4, 4], [0, 0, 1, 2, 1, 2], [-1, -2, -2, -3, -10, -11]),
        # equal scores and depths, the parent with the smaller index has the larger rank
        ([[-1, -2], [-1, -2]], [[5, 6], [3, 4]], [5, 6, 3, 4, 3, 4], [0, 0, 1, 1, 2, 2], [-1, -2, -2, -3, -3, -4]),
        # a certain child ties with its parent and comes after it, before anything less likely
        (
            [[0, -1], [0, -1], [0, -INF]],
            [[1, 2], [3, 4], [5, 6]],
            [1, 3, 5, 2, 4, 3, 5, 5, 4, 5],
            [0, 1, 2, 0, 1, 4, 5, 6, 4, 9],
            [0, 0, 0, -1, -1, -1, -1, -1, -2, -2],
        ),
        # minus zero is zero
        ([[0.0, -0.0], [-0.0, 0.0]], [[1, 2], [3, 4]], [1, 2, 3, 4, 3, 4], [0, 0, 1, 1, 2, 2], [0] * 6),
        # positive values are clipped, so they cannot lift a child above its parent
        ([[-1, -2], [0.75, 0.5]], [[1, 2], [3, 4]], [1, 3, 4, 2, 3, 4], [0, 1, 1, 0, 4, 4], [-1, -1, -1, -2, -2, -2]),
        ([[0.5, 0.5]], [[1, 2]], [1, 2], [0, 0], [0, 0]),
        # differences that fp32 rounds away are ties
        ([[BIG, -INF], [-0.5, -1.0]], [[1, 9], [2, 3]], [1, 2, 3], [0, 1, 1], [BIG, BIG, BIG]),
        # the sum is rounded at every step, from the root on: two steps of -1 vanish, -2 at once would not
        ([[BIG], [-1.0], [-1.0]], [[1], [2], [3]], [1, 2, 3], [0, 1, 2], [BIG, BIG, BIG]),
        ([[BIG], [-2.0]], [[1], [2]], [1, 2], [0, 1], [BIG, BIG - 2]),
        # minus infinity and NaN are never taken, nor anything below them
        ([[-1, -INF], [-1, NAN]], [[1, 2], [3, 4]], [1, 3], [0, 1], [-1, -2]),
        ([[-1, NAN], [NAN, -INF], [-1, -1]], [[1, 2], [3, 4], [5, 6]], [1], [0], [-1]),
        ([[NAN, NAN], [-1, -1]], [[1, 2], [3, 4]], [], [], []),
        ([[-INF]], [[1]], [], [], []),
        # no positions, or no candidates
        ([], [], [], [], []),
        ([[], []], [[], []], [], [], []),
    ],
)
def test_ties_and_odd_values_are_resolved_as_specified(
    rows: list[Row], ids: list[list[int]], tokens: list[int], parents: list[int], scores: list[float]
) -> None:
    whole = build_tree(rows, ids, MAX_BUDGET)

    assert whole.token_ids[1:] == tuple(tokens)
    assert whole.parents[1:] == tuple(parents)
    assert whole.scores[1:] == tuple(scores)
    for budget in range(1, len(tokens) + 1):
        assert build_tree(rows, ids, budget).token_ids[1:] == tuple(tokens[:budget])


def test_a_tree_ends_early_when_finite_candidates_run_out() -> None:
    tree = build_tree([[-1.0, -2.0], [-1.0, -INF]], [[1, 2], [3, 4]], 100)
    assert len(tree) == 5
    assert all(map(math.isfinite, tree.scores))


def test_a_score_that_leaves_fp32_is_not_finite() -> None:
    with np.errstate(over="ignore"):
        tree = build_tree([[-3e38], [-3e38]], [[1], [2]], 4)
    assert tree.token_ids == (NO_TOKEN, 1)


def test_a_budget_below_the_depth_is_no_special_case() -> None:
    tree = build_tree([[-0.1]] * 15, [[token] for token in range(15)], 3)
    assert tree.parents == (NO_PARENT, 0, 1, 2)
    assert tree.depths == (0, 1, 2, 3)


@pytest.mark.parametrize("depth,topk", [(0, 0), (0, 4), (3, 0)])
def test_a_tree_without_candidates_is_the_root_alone(depth: int, topk: int) -> None:
    tree = build_tree([[-1.0] * topk] * depth, [list(range(topk))] * depth, 5)
    assert tree == Tree((NO_TOKEN,), (NO_PARENT,), (0,), (0.0,))


# Bad input


@pytest.mark.parametrize("budget", [-1, 0, MAX_BUDGET + 1])
def test_a_budget_out_of_range_is_refused_with_its_value_and_the_range(budget: int) -> None:
    with pytest.raises(ValueError, match=rf"^node budget {budget} is outside 1\.\.{MAX_BUDGET}$"):
        build_tree([[-1.0]], [[1]], budget)


@pytest.mark.parametrize("budget", [1, MAX_BUDGET])
def test_the_ends_of_the_budget_range_are_accepted(budget: int) -> None:
    assert len(build_tree([[-1.0]], [[1]], budget)) == 2


GOOD_ROW = ([-1.0, -1.0, -2.0], [4, 5, 3])


@pytest.mark.parametrize("good_rows", [0, 1, 2])
@pytest.mark.parametrize(
    "row,ids",
    [
        ([-2.0, -1.0, -3.0], [1, 2, 3]),  # a better candidate later
        ([-1.0, -2.0, -1.5], [1, 2, 3]),
        ([-1.0, -1.0, -2.0], [2, 1, 3]),  # a tie with ids falling
        ([NAN, -1.0, -2.0], [1, 2, 3]),
        ([-1.0, NAN, -2.0], [1, 2, 3]),
        ([-1.0, -INF, -2.0], [1, 2, 3]),
        ([-1.0, -INF, NAN], [1, 3, 2]),  # NaN ties with minus infinity
        ([0.5, 0.25, -1.0], [2, 1, 3]),  # clipped, the first two tie
    ],
)
def test_a_row_out_of_order_is_refused_with_its_depth(row: Row, ids: list[int], good_rows: int) -> None:
    rows = [GOOD_ROW] * good_rows + [(row, ids), GOOD_ROW]
    with pytest.raises(ValueError, match=rf"^candidates at depth {good_rows + 1} are not ordered"):
        build_tree([each for each, _ in rows], [each for _, each in rows], 4)


# Reading a tree

#        0
#      /   \
#     1     2
#    / \     \
#   3   5     4
READ = Tree((NO_TOKEN, 7, 8, 9, 9, 6), (NO_PARENT, 0, 0, 1, 2, 1), (0, 1, 1, 2, 2, 2), (0.0, -1, -1, -2, -2, -2))


@pytest.mark.parametrize(
    "node,nodes", [(0, [0]), (1, [1, 0]), (2, [2, 0]), (3, [3, 1, 0]), (4, [4, 2, 0]), (5, [5, 1, 0])]
)
def test_ancestors_run_from_the_node_to_the_root(node: int, nodes: list[int]) -> None:
    assert READ.ancestors(node) == nodes


@pytest.mark.parametrize(
    "node,token,child",
    [
        # good
        *((0, 7, 1), (0, 8, 2), (1, 9, 3), (1, 6, 5), (2, 9, 4)),
        # bad: a grandchild's token, a cousin's, a leaf, a token nowhere in the tree, the root's own
        *((0, 9, None), (2, 6, None), (3, 9, None), (0, 5, None), (0, NO_TOKEN, None)),
    ],
)
def test_child_finds_the_token_below_that_node_only(node: int, token: int, child: int | None) -> None:
    assert READ.child(node, token) == child


def test_length_counts_the_root() -> None:
    assert len(READ) == 6


def test_the_specification_needs_numpy_alone() -> None:
    check = "import sys, ddtree_appliance.ddtree.tree; sys.exit(bool({'torch', 'sglang'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
