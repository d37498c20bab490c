"""Attention of a verify step over paged KV: every node sees its prefix and its ancestors.

Flash-decoding's scheme (Dao et al. 2023) for short queries: the keys of a request are cut into parts that run side by
side and are combined by their log-sum-exp, so that a step costs the latency of one part and not of the whole prefix.
The query heads that share a KV head are rows of one tile, so its keys are read once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Tiling:
    """How the work is cut: rows (node, head) and keys of a tile, and Triton's warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


# The fastest of ten on an H200. With heads of 128 in 16 bits it needs 160 KiB of shared memory there, and 96 KiB on
# sm120, which has 99. Larger heads do not fit everywhere, so they are left to SGLang's kernel (`serves`).
TILING = Tiling(rows=64, keys=128, warps=8, stages=2)
SMALLEST_HEAD, LARGEST_HEAD = 16, 128
PROGRAMS = 512
LOG2_E = 1.4426950408889634


@triton.jit
def _attend_part(
    query, key_pool, value_pool, prefix_indptr, prefix_slots, node_slots, mask, mask_indptr, output, part_lse,
    scale, width, query_stride, key_stride, value_stride, heads,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIMS: tl.constexpr, VALUE_DIMS: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    request, part = tl.program_id(0), tl.program_id(2)
    kv_heads = heads // GROUP
    kv_head, block = tl.program_id(1) % kv_heads, tl.program_id(1) // kv_heads
    prefix_start = tl.load(prefix_indptr + request)
    prefix = (tl.load(prefix_indptr + request + 1) - prefix_start).to(tl.int32)
    total = prefix + width
    # As many parts as there are tiles of keys, as long as there are programs for them; the others have nothing to do.
    per_part = tl.cdiv(tl.cdiv(total, KEYS), PARTS) * KEYS
    begin = part * per_part
    end = tl.minimum(begin + per_part, total)

    row = block * ROWS + tl.arange(0, ROWS)
    inside = row < width * GROUP
    node, head = row // GROUP, kv_head * GROUP + row % GROUP
    token = request.to(tl.int64) * width + node
    dim, value_dim = tl.arange(0, DIMS), tl.arange(0, VALUE_DIMS)
    q = tl.load(
        query + token[:, None] * query_stride + head[:, None] * DIM + dim[None, :],
        mask=inside[:, None] & (dim < DIM)[None, :], other=0.0,
    )  # fmt: skip
    mask_row = mask + tl.load(mask_indptr + request) + node.to(tl.int64) * total

    top = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, VALUE_DIMS), tl.float32)
    for start in range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        is_prefix, is_key = at < prefix, at < end
        slot = tl.load(prefix_slots + prefix_start + at, mask=is_prefix & is_key, other=0).to(tl.int64)
        is_node = is_key & (at >= prefix)
        slot += tl.load(node_slots + request * width + at - prefix, mask=is_node, other=0).to(tl.int64)
        keys = tl.load(
            key_pool + slot[None, :] * key_stride + kv_head * DIM + dim[:, None],
            mask=is_key[None, :] & (dim < DIM)[:, None], other=0.0,
        )  # fmt: skip
        score = tl.dot(q.to(keys.dtype), keys, input_precision=PRECISION) * scale
        allowed = is_prefix[None, :] | (
            tl.load(mask_row[:, None] + at[None, :], mask=inside[:, None] & is_node[None, :], other=0) != 0
        )
        score = tl.where(allowed & is_key[None, :], score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        probability = tl.exp2(score - shift[:, None])
        keep = tl.exp2(top - shift)
        weight = weight * keep + tl.sum(probability, axis=1)
        values = tl.load(
            value_pool + slot[:, None] * value_stride + kv_head * VALUE_DIM + value_dim[None, :],
            mask=is_key[:, None] & (value_dim < VALUE_DIM)[None, :], other=0.0,
        )  # fmt: skip
        mixed = mixed * keep[:, None] + tl.dot(probability.to(values.dtype), values, input_precision=PRECISION)
        top = new_top

    mixed = mixed / tl.where(weight == 0.0, 1.0, weight)[:, None]
    out_row = (token * heads + head) * PARTS + part
    kept = inside[:, None] & (value_dim < VALUE_DIM)[None, :]
    if PARTS > 1:
        tl.store(part_lse + out_row, top + tl.log2(weight), mask=inside)
        kept = kept & (begin < total)
    tl.store(output + out_row[:, None] * VALUE_DIM + value_dim[None, :], mixed.to(output.dtype.element_ty), mask=kept)


@triton.jit
def _combine_parts(
    parts, part_lse, output, rows, VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, VALUE_DIMS)
    inside = row < rows
    part = tl.arange(0, PARTS)
    lse = tl.load(part_lse + row[:, None] * PARTS + part[None, :], mask=inside[:, None], other=0.0)
    top = tl.max(lse, axis=1)
    total = tl.sum(tl.exp2(lse - top[:, None]), axis=1)
    mixed = tl.zeros((ROWS, VALUE_DIMS), tl.float32)
    for at in range(PARTS):
        lse_at = tl.load(part_lse + row * PARTS + at, mask=inside, other=-float("inf"))
        share = tl.exp2(lse_at - top) / total
        # A part without keys has written nothing.
        kept = (share > 0.0)[:, None] & (dim < VALUE_DIM)[None, :]
        mixed += share[:, None] * tl.load(
            parts + (row[:, None] * PARTS + at) * VALUE_DIM + dim[None, :], mask=kept, other=0.0
        )
    tl.store(output + row[:, None] * VALUE_DIM + dim[None, :], mixed.to(output.dtype.element_ty),
             mask=inside[:, None] & (dim < VALUE_DIM)[None, :])  # fmt: skip


def serves(head_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Whether `verify_attention` runs such heads on every GPU that SGLang supports. dtype: of the KV pool."""
    sizes = (head_dim, value_dim)
    return dtype.itemsize == 2 and min(sizes) >= SMALLEST_HEAD and max(sizes) <= LARGEST_HEAD


def parts_for(batch: int, tiles: int) -> int:
    """Into how many parts the keys are cut, a power of two: enough programs to fill a GPU, whatever the lengths.

    batch: requests; tiles: programs of one request and one part. Known when a graph is captured, unlike the lengths.
    """
    wanted = max(1, PROGRAMS // (batch * tiles))
    return min(16, 1 << (wanted.bit_length() - 1))


def verify_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    prefix_indptr: torch.Tensor,
    prefix_slots: torch.Tensor,
    node_slots: torch.Tensor,
    mask: torch.Tensor,
    mask_indptr: torch.Tensor,
    scale: float,
    width: int,
    output: torch.Tensor,
    tiling: Tiling = TILING,
) -> None:
    """Attention of b * V nodes into `output`; the nodes' own keys and values are in the pool already.

    query: [b * V, heads, dim] (any row stride); key_pool, value_pool: [slots, kv_heads, dim]; prefix_indptr: [b + 1];
    prefix_slots: the prefixes' slots, one request after another; node_slots: [b * V]; mask: SGLang's flat allow-mask,
    whose prefix columns are not read; mask_indptr: [b + 1], where each request's mask begins; scale: of the scores;
    width: V; output: [b * V, heads, dim], contiguous. bf16, fp16 or fp32 (exact fp32 products).
    """
    tokens, heads, dim = query.shape
    kv_heads, value_dim = value_pool.shape[1:]
    batch, group = tokens // width, heads // kv_heads
    tiles = kv_heads * triton.cdiv(width * group, tiling.rows)
    parts = parts_for(batch, tiles)
    target, lse = output, output
    if parts > 1:
        target = torch.empty((tokens, heads, parts, value_dim), dtype=torch.float32, device=query.device)
        lse = torch.empty((tokens, heads, parts), dtype=torch.float32, device=query.device)
    _attend_part[(batch, tiles, parts)](
        query, key_pool, value_pool, prefix_indptr, prefix_slots, node_slots, mask, mask_indptr, target, lse,
        scale * LOG2_E, width, query.stride(0), key_pool.stride(0), value_pool.stride(0), heads,
        GROUP=group, DIM=dim, VALUE_DIM=value_dim, DIMS=triton.next_power_of_2(dim),
        VALUE_DIMS=triton.next_power_of_2(value_dim), PARTS=parts, ROWS=tiling.rows, KEYS=tiling.keys,
        PRECISION="ieee", num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    if parts > 1:
        rows = tokens * heads
        _combine_parts[(triton.cdiv(rows, 8),)](
            target, lse, output, rows, VALUE_DIM=value_dim, VALUE_DIMS=triton.next_power_of_2(value_dim), PARTS=parts,
            ROWS=8, num_warps=4,
        )  # fmt: skip
