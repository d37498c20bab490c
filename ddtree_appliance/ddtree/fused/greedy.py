"""The most probable token per node: every block of the vocabulary's best at once, then the best of those.

`torch.argmax` reduces a row of a small batch in few programs, which leaves most of a GPU idle.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 8192, 8


@triton.jit
def _best_of_blocks(logits, tops, top_ids, vocabulary, stride, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocabulary
    values = tl.load(logits + row * stride + token, mask=inside).to(tl.float32)
    values = tl.where(inside, values, -float("inf"))
    # A comparison with what is no number is false: the place of the maximum would be any.
    values = tl.where(values == values, values, float("inf"))
    top, top_at = tl.max(values, axis=0, return_indices=True)
    at = row * tl.num_programs(1) + block
    tl.store(tops + at, top)
    tl.store(top_ids + at, block * BLOCK + top_at)


@triton.jit
def _best_of_row(tops, top_ids, chosen, blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    block_tops = tl.load(tops + row * blocks + block, mask=block < blocks, other=-float("inf"))
    _, best = tl.max(block_tops, axis=0, return_indices=True)
    tl.store(chosen + row, tl.load(top_ids + row * blocks + best).to(tl.int64))


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """As `torch_ops.best_tokens`; what is no number counts as infinite."""
    batch, width, vocabulary = logits.shape
    rows, blocks = batch * width, triton.cdiv(vocabulary, BLOCK)
    chosen = torch.empty((batch, width), dtype=torch.int64, device=logits.device)
    tops = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    top_ids = torch.empty((rows, blocks), dtype=torch.int32, device=logits.device)
    flat = logits.view(rows, vocabulary)
    _best_of_blocks[(rows, blocks)](flat, tops, top_ids, vocabulary, flat.stride(0), BLOCK=BLOCK, num_warps=WARPS)
    _best_of_row[(rows,)](tops, top_ids, chosen, blocks, BLOCKS=max(2, triton.next_power_of_2(blocks)), num_warps=1)
    return chosen
