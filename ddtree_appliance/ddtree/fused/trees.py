"""Best-first trees in one program per request, their ancestors, and the verify mask written where it is read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree_appliance.ddtree import tree
from ddtree_appliance.ddtree.torch_ops import TreeBatch

NO_TOKEN = tl.constexpr(tree.NO_TOKEN)
NO_PARENT = tl.constexpr(tree.NO_PARENT)
# A frontier entry is one int64 that sorts as best-first takes nodes, without ties: score, depth, parent, rank, slot in
# 32 + 8 + 8 + 7 + 8 bits. The bits of a non-positive float grow as the float falls. An empty slot sorts last.
EMPTY = tl.constexpr(2**63 - 1)
MINUS_INFINITY_BITS = tl.constexpr(0xFF800000)
# Prefix lengths that are summed at once: a constant, so that every batch runs the same compiled kernel.
REQUESTS = 128


@triton.jit
def _clipped(logprob):
    return tl.where(logprob != logprob, -float("inf"), tl.minimum(logprob, 0.0))


@triton.jit
def _entry(score, depth, parent, rank, slot):
    bits = (score + 0.0).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    place = (depth.to(tl.int64) << 23) | (parent.to(tl.int64) << 15) | (rank.to(tl.int64) << 8) | slot.to(tl.int64)
    return (bits << 31) | place


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
    frontier = tl.full((SLOTS,), EMPTY, tl.int64)
    parent_scores = tl.zeros((SLOTS,), tl.float32)
    if (max_depth > 0) & (topk > 0):
        first = _entry(_clipped(tl.load(logprobs)), zero + 1, zero, zero, zero)
        frontier = tl.where(slots == 0, first, frontier)

    for node in range(1, budget + 1):
        best = tl.min(frontier, axis=0)
        bits = best >> 31
        if bits < MINUS_INFINITY_BITS:
            depth = ((best >> 23) & 0xFF).to(tl.int32)
            parent = ((best >> 15) & 0xFF).to(tl.int32)
            rank = ((best >> 8) & 0x7F).to(tl.int32)
            slot = (best & 0xFF).to(tl.int32)
            score = bits.to(tl.int32).to(tl.float32, bitcast=True)
            parent_score = tl.sum(tl.where(slots == slot, parent_scores, 0.0), axis=0)
            at = (depth - 1) * topk + rank
            tl.store(token_ids + row + node, tl.load(ids + at))
            tl.store(parents + row + node, parent.to(tl.int64))
            tl.store(depths + row + node, depth.to(tl.int64))

            has_sibling = rank + 1 < topk
            sibling_lp = _clipped(tl.load(logprobs + at + 1, mask=has_sibling, other=0.0))
            sibling = tl.where(has_sibling, _entry(parent_score + sibling_lp, depth, parent, rank + 1, slot), EMPTY)
            has_child = depth < max_depth
            child_lp = _clipped(tl.load(logprobs + depth * topk, mask=has_child, other=0.0))
            child = tl.where(has_child, _entry(score + child_lp, depth + 1, zero + node, zero, zero + node), EMPTY)
            frontier = tl.where(slots == slot, sibling, tl.where(slots == node, child, frontier))
            parent_scores = tl.where(slots == node, score, parent_scores)
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


@triton.jit
def _write_mask(ancestors, prefix_lens, mask, width, REQUESTS: tl.constexpr, COLUMNS: tl.constexpr):
    request, row = tl.program_id(0), tl.program_id(1)
    start = request.to(tl.int64) * width
    for first in range(0, request, REQUESTS):
        before = first + tl.arange(0, REQUESTS)
        start += tl.sum(tl.load(prefix_lens + before, mask=before < request, other=0).to(tl.int64), axis=0)
    start *= width
    prefix = tl.load(prefix_lens + request).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < width
    allowed = tl.load(ancestors + (request.to(tl.int64) * width + row) * width + column, mask=inside, other=0)
    tl.store(mask + start + row * (prefix + width) + prefix + column, allowed, mask=inside)


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


def verify_mask(
    ancestors: torch.Tensor, prefix_lens: torch.Tensor, prefix_lens_bound: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `torch_ops.verify_mask`, `out` included: only its tree columns are written."""
    batch, width, _ = ancestors.shape
    if out is None:
        size = width * (prefix_lens_bound + batch * width)
        out = torch.ones(size, dtype=torch.bool, device=ancestors.device)
    _write_mask[(batch, width)](
        ancestors.view(torch.uint8), prefix_lens, out.view(torch.uint8), width,
        REQUESTS=REQUESTS, COLUMNS=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return out
