"""Move accepted KV rows in every layer's buffers with one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree_appliance.ddtree.kv_buffers import KVBuffers

# Of a row that one program moves for a whole path: with 16 rows of 32-bit words, 64 registers a thread.
WORDS = 128


@triton.jit
def _move_rows(
    pointers, slots, path, words, run, slot_stride, RUN: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    request, buffer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    at = tl.arange(0, RUN)
    base = tl.load(pointers + buffer).to(tl.pointer_type(tl.int32))
    node = tl.load(path + request * run + at, mask=at < run, other=0)
    from_slot = tl.load(slots + request * slot_stride + node, mask=at < run, other=0)
    to_slot = tl.load(slots + request * slot_stride + at, mask=at < run, other=0)
    inside = ((at < run) & (from_slot != to_slot))[:, None] & (column < words)[None, :]
    rows = tl.load(base + from_slot[:, None] * words + column[None, :], mask=inside)
    # The target of one depth may be the source of another, held by another warp.
    tl.debug_barrier()
    tl.store(base + to_slot[:, None] * words + column[None, :], rows, mask=inside)


def move_kv(buffers: KVBuffers, slots: torch.Tensor, path: torch.Tensor) -> None:
    """As `torch_ops.move_kv`. slots: [b, >= V] int64, its rows contiguous; path: [b, L] int64."""
    batch, run = path.shape
    grid = (batch, len(buffers.tensors), triton.cdiv(buffers.words_per_row, WORDS))
    _move_rows[grid](
        buffers.pointers, slots, path, buffers.words_per_row, run, slots.stride(0),
        RUN=triton.next_power_of_2(run), WORDS=WORDS,
    )  # fmt: skip
