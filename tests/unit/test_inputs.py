"""What the two forwards read, against slow, obvious loops."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")

from ddtree_appliance.ddtree.inputs import (  # noqa: E402
    ancestor_bits,
    draft_inputs,
    node_positions,
    verify_inputs,
    verify_mask,
)
from ddtree_appliance.ddtree.limits import words_for  # noqa: E402
from ddtree_appliance.ddtree.torch_ops import build_trees  # noqa: E402
from ddtree_appliance.ddtree.tree import NO_TOKEN  # noqa: E402
from tests.unit.test_torch_ops import LEVELS, candidates, reference_trees  # noqa: E402

# node_positions


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_node_stands_at_its_depth_behind_the_prefix_and_padding_at_the_prefix(dtype: Any) -> None:
    logprobs, ids = candidates(3, (3, 4, 3), LEVELS["with minus infinity"])
    trees = reference_trees(logprobs, ids, 60)
    prefixes = [0, 7, 2**31 - 1]

    positions = node_positions(build_trees(logprobs, ids, 60).depths, torch.tensor(prefixes, dtype=dtype))

    assert positions.dtype == torch.int64
    assert any(len(tree) < 61 for tree in trees)
    for row, prefix, tree in zip(positions.tolist(), prefixes, trees, strict=True):
        assert row == [prefix + depth for depth in tree.depths] + [prefix] * (61 - len(tree))


# verify_mask


@pytest.mark.parametrize("slack", [0, 1, 50])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("prefixes", [[0], [5], [0, 0], [3, 0, 7], [1, 12, 4, 4]])
def test_the_mask_equals_one_built_request_by_request(prefixes: list[int], dtype: Any, slack: int) -> None:
    logprobs, ids = candidates(1, (len(prefixes), 5, 3), LEVELS["with minus infinity"])
    ancestors = build_trees(logprobs, ids, 9).ancestors
    cells: list[bool] = []
    for prefix, request in zip(prefixes, ancestors.tolist(), strict=True):
        for row in request:
            cells += [True] * prefix + row

    mask = verify_mask(ancestors, torch.tensor(prefixes, dtype=dtype), sum(prefixes) + slack)

    assert mask.dtype == torch.bool
    assert mask.tolist() == cells + [True] * (10 * slack)


# draft_inputs, ancestor_bits, verify_inputs


def test_a_drafter_reads_the_bonus_token_and_masks_at_the_places_after_the_prefix() -> None:
    req_to_token = (torch.arange(3).unsqueeze(1) * 100 + torch.arange(20)).to(torch.int32)

    rows = torch.full((3, 20), -7, dtype=torch.int32)

    inputs = draft_inputs(torch.tensor([5, 6]), torch.tensor([0, 7]), torch.tensor([2, 1]), req_to_token, 9, 3, 4, rows)

    assert inputs.block_ids.tolist() == [[5, 9, 9], [6, 9, 9]]
    assert inputs.positions.tolist() == [[0, 1, 2, 3], [7, 8, 9, 10]]
    assert inputs.slots.tolist() == [[200, 201, 202, 203], [107, 108, 109, 110]]
    assert rows.tolist() == [
        [200, 201, 202, 203, *[-7] * 16],
        [*range(100, 111), *[-7] * 9],
        [-7] * 20,
    ]
    assert {each.dtype for each in (inputs.block_ids, inputs.positions, inputs.slots)} == {torch.int64}


@pytest.mark.parametrize("width", [1, 2, 32, 33, 34, 64, 65, 66, 97, 98, 129])
def test_the_bits_are_the_nodes_that_a_node_sees_without_the_root(width: int) -> None:
    ancestors = torch.rand((2, width, width), generator=torch.Generator().manual_seed(width)) < 0.5

    bits = ancestor_bits(ancestors)

    assert bits.dtype == torch.int32
    assert bits.shape == (2, width, words_for(width)) and words_for(width) == max(1, math.ceil((width - 1) / 32))
    for row, words in zip(ancestors.flatten(0, 1).tolist(), bits.flatten(0, 1).tolist(), strict=True):
        seen = [words[node // 32] >> node % 32 & 1 for node in range(32 * words_for(width))]
        assert seen[: width - 1] == row[1:] and not any(seen[width - 1 :])


def test_a_verify_reads_the_trees_tokens_with_the_bonus_token_at_the_root() -> None:
    logprobs, ids = candidates(2, (2, 2, 3), LEVELS["with minus infinity"])
    trees = build_trees(logprobs, ids, 40)
    assert (trees.token_ids[:, 1:] == NO_TOKEN).any(), "no padding"
    bonus, lens = torch.tensor([70, 80]), torch.tensor([3, 9])
    bits = torch.full((3, 41, 2), 5, dtype=torch.int32)

    inputs = verify_inputs(trees, bonus, lens, 12, bits_out=bits)

    assert inputs.token_ids[:, 0].tolist() == [70, 80]
    assert torch.equal(inputs.token_ids[:, 1:], trees.token_ids[:, 1:].clamp(min=0))
    assert torch.equal(inputs.positions, node_positions(trees.depths, lens))
    assert torch.equal(inputs.mask, verify_mask(trees.ancestors, lens, 12))
    assert torch.equal(bits[:2], ancestor_bits(trees.ancestors)) and (bits[2] == 5).all()
