"""Best-first trees in one program per request, and their ancestors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree_appliance.ddtree import tree
from ddtree_appliance.ddtree.torch_ops import TreeBatch

NO_TOKEN = tl.constexpr(tree.NO_TOKEN)
NO_PARENT = tl.constexpr(tree.NO_PARENT)
# A frontier entry is two int32 that sort as best-first takes nodes, without ties: a score, then depth, parent, rank and
# slot in 8 + 8 + 7 + 8 bits. Without the sign, the bits of a non-positive float grow as it falls. An empty slot sorts
# last. Two numbers and not one of 64 bits: a warp finds the smallest int32 in one instruction.
EMPTY = tl.constexpr(2**31 - 1)
MINUS_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _clipped(logprob):
    return tl.where(logprob != logprob, -float("inf"), tl.minimum(logprob, 0.0))


@triton.jit
def _bits(score):
    return score.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _place(depth, parent, rank, slot):
    return (depth << 23) | (parent << 15) | (rank << 8) | slot


@triton.jit
def _build_tree(logprobs, ids, token_ids, parents, depths, max_depth, topk, budget, SLOTS: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    logprobs += request * max_depth * topk
    ids += request * max_depth * topk
    row = request * (budget + 1)
    tl.store(token_ids + row, NO_TOKEN)
    tl.store(parents + row, NO_PARENT)
    tl.store(depths + row, 0)

    # The frontier: the next sibling of every taken node (in the slot the node was taken from) and its first child (in
    # a new slot, which the last node does not need). A sibling or child never sorts before the node, so the smallest
    # entry is the next node overall.
    zero = tl.full((), 0, tl.int32)
    slots = tl.arange(0, SLOTS)
    scores = tl.full((SLOTS,), EMPTY, tl.int32)
    places = tl.full((SLOTS,), EMPTY, tl.int32)
    # Of the node in each slot's entry, the bits of its parent's score, without the sign.
    parent_scores = tl.zeros((SLOTS,), tl.int32)
    if (max_depth > 0) & (topk > 0):
        scores = tl.where(slots == 0, _bits(_clipped(tl.load(logprobs))), scores)
        places = tl.where(slots == 0, _place(zero + 1, zero, zero, zero), places)

    for node in range(1, budget + 1):
        bits = tl.min(scores, axis=0)
        if bits < MINUS_INFINITY_BITS:
            place = tl.min(tl.where(scores == bits, places, EMPTY), axis=0)
            depth, parent, rank, slot = place >> 23, (place >> 15) & 0xFF, (place >> 8) & 0x7F, place & 0xFF
            score = -bits.to(tl.float32, bitcast=True)
            parent_bits = tl.max(tl.where(slots == slot, parent_scores, 0), axis=0)
            parent_score = -parent_bits.to(tl.float32, bitcast=True)
            at = (depth - 1) * topk + rank
            tl.store(token_ids + row + node, tl.load(ids + at))
            tl.store(parents + row + node, parent.to(tl.int64))
            tl.store(depths + row + node, depth.to(tl.int64))

            has_sibling = rank + 1 < topk
            sibling_lp = _clipped(tl.load(logprobs + at + 1, mask=has_sibling, other=0.0))
            has_child = depth < max_depth
            child_lp = _clipped(tl.load(logprobs + depth * topk, mask=has_child, other=0.0))
            sibling = tl.where(has_sibling, _bits(parent_score + sibling_lp), EMPTY)
            child = tl.where(has_child, _bits(score + child_lp), EMPTY)
            scores = tl.where(slots == slot, sibling, tl.where(slots == node, child, scores))
            sibling_place = _place(depth, parent, rank + 1, slot)
            child_place = _place(depth + 1, zero + node, zero, zero + node)
            places = tl.where(slots == slot, sibling_place, tl.where(slots == node, child_place, places))
            parent_scores = tl.where(slots == node, bits, parent_scores)
        else:
            tl.store(token_ids + row + node, NO_TOKEN)
            tl.store(parents + row + node, NO_PARENT)
            tl.store(depths + row + node, 0)


@triton.jit
def _mark_ancestors(parents, ancestors, width, max_depth, COLUMNS: tl.constexpr):
    request, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    seen = column == row
    node = row.to(tl.int64)
    for _ in range(max_depth):
        parent = tl.load(parents + request * width + node)
        # A row without a parent stays where it is.
        node = tl.where(parent >= 0, parent, node)
        seen |= column == node
    tl.store(ancestors + (request * width + row) * width + column, seen, mask=column < width)


def build_trees(topk_logprobs: torch.Tensor, topk_ids: torch.Tensor, budget: int) -> TreeBatch:
    """As `torch_ops.build_trees`: [b, D, K] fp32 and int64 -> trees of `budget` nodes and a root."""
    batch, max_depth, topk = topk_logprobs.shape
    device = topk_logprobs.device
    width = budget + 1
    # Each begins where memory is aligned, whatever the batch: for what is not Triton compiles anew, while serving.
    token_ids, parents, depths = (torch.empty((batch, width), dtype=torch.int64, device=device) for _ in range(3))
    ancestors = torch.empty((batch, width, width), dtype=torch.bool, device=device)
    # One warp: a reduction over the frontier is then a few shuffles, without a barrier.
    _build_tree[(batch,)](
        topk_logprobs.contiguous(), topk_ids.contiguous(), token_ids, parents, depths, max_depth, topk, budget,
        SLOTS=triton.next_power_of_2(budget), num_warps=1,
    )  # fmt: skip
    _mark_ancestors[(batch, width)](
        parents, ancestors.view(torch.uint8), width, min(max_depth, budget),
        COLUMNS=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return TreeBatch(token_ids, parents, depths, ancestors)
