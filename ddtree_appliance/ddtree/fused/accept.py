"""The accept walk, and what follows the accepted path: one program per request, or per row that moves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree_appliance.ddtree.torch_ops import AcceptBatch, TreeBatch

COLUMNS = 1024


@triton.jit
def _accept(
    token_ids, parents, predict, path, num_correct, tokens, bonus, width, max_run,
    ROWS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    inside = row < width
    parent = tl.load(parents + request * width + row, mask=inside, other=-1)
    token = tl.load(token_ids + request * width + row, mask=inside, other=-1)
    at = tl.arange(0, RUN)
    # Past the accepted run the path is the depth itself.
    nodes = at.to(tl.int64)
    node = tl.full((), 0, tl.int64)
    correct = tl.full((), 0, tl.int32)
    walking = tl.full((), 1, tl.int1)
    for depth in range(1, max_run):
        chosen = tl.load(predict + request * width + node)
        # Siblings hold different tokens, so one child at most.
        child = tl.max(tl.where((parent == node) & (token == chosen) & inside, row, -1), axis=0)
        walking = walking & (child >= 0)
        if walking:
            node = child.to(tl.int64)
            correct += 1
            nodes = tl.where(at == depth, node, nodes)
    emitted = tl.load(predict + request * width + nodes, mask=(at <= correct) & (at < max_run), other=0)
    tl.store(path + request * max_run + at, nodes, mask=at < max_run)
    tl.store(tokens + request * max_run + at, emitted, mask=at < max_run)
    tl.store(num_correct + request, correct)
    tl.store(bonus + request, tl.load(predict + request * width + node))


@triton.jit
def _gather_rows(rows, path, gathered, width, run, size, COLUMNS: tl.constexpr):
    request, depth = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    node = tl.load(path + request * run + depth)
    values = tl.load(rows + (request * width + node) * size + column, mask=column < size)
    tl.store(gathered + (request * run + depth) * size + column, values, mask=column < size)


def accept(trees: TreeBatch, target_predict: torch.Tensor, max_run: int) -> AcceptBatch:
    """As `torch_ops.accept`. target_predict: [b, V] int64; max_run: L."""
    batch, width = target_predict.shape
    device = target_predict.device
    # Two tensors, not parts of one, which would be aligned for some batches only (see `trees.build_trees`).
    path, tokens = (torch.empty((batch, max_run), dtype=torch.int64, device=device) for _ in range(2))
    bonus = torch.empty(batch, dtype=torch.int64, device=device)
    num_correct = torch.empty(batch, dtype=torch.int32, device=device)
    _accept[(batch,)](
        trees.token_ids, trees.parents, target_predict.contiguous(), path, num_correct, tokens, bonus,
        width, max_run, ROWS=triton.next_power_of_2(width), RUN=triton.next_power_of_2(max_run), num_warps=1,
    )  # fmt: skip
    return AcceptBatch(path, num_correct, tokens, bonus)


def gather_path(rows: torch.Tensor, accepted: AcceptBatch) -> torch.Tensor:
    """As `torch_ops.gather_path`: [b * V, H] -> [b, L, H]."""
    batch, run = accepted.path.shape
    size = rows.shape[-1]
    rows = rows.contiguous()
    gathered = torch.empty((batch, run, size), dtype=rows.dtype, device=rows.device)
    grid = (batch, run, triton.cdiv(size, COLUMNS))
    _gather_rows[grid](rows, accepted.path, gathered, len(rows) // batch, run, size, COLUMNS=COLUMNS)
    return gathered
