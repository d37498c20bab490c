"""Attention over paged KV of a tree's nodes, which see their prefix and ancestors, or of a whole block of tokens.

Flash-decoding's scheme (Dao et al. 2023) for short queries: the keys of a request are cut into parts that run side by
side and are combined by their log-sum-exp, so that a step costs the latency of one part and not of the whole prefix.
The query heads that share a KV head are rows of one tile, so its keys are read once for all of them. Tiles hold keys of
the prefix or of the tree, never both: only the tree's need a mask. How many parts a request has is decided on the
device, where its length is known; the program that ends last combines them, which spares a second launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Tiling:
    """How the work is cut: rows (node, head) and keys of a tile, Triton's warps and stages, least tiles of a part.

    programs: as many as the GPU should run at once; with fewer blocks of rows, each request's keys are cut into parts.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    part_tiles: int
    programs: int = 132


# By the number of 16-row blocks in a batch up to which each serves; chosen among those measured on an H200 for speed at
# prefixes of 300 tokens that is not paid for at 16,000. With heads of 128 in 16 bits they need no more shared memory
# than every served GPU has. Larger heads do not fit everywhere, see `serves`.
TILINGS = (
    (66, Tiling(rows=16, keys=128, warps=4, stages=2, part_tiles=1, programs=264)),
    (255, Tiling(rows=32, keys=128, warps=4, stages=2, part_tiles=1, programs=264)),
)
MANY_ROWS = Tiling(rows=64, keys=64, warps=4, stages=3, part_tiles=2)
SMALLEST_HEAD, LARGEST_HEAD = 16, 128
MOST_PARTS = 16
LOG2_E = 1.4426950408889634


@triton.jit
def _add_tile(q, key_tile, value_tile, keys_inside, allowed, scale, top, weight, mixed, dims_inside, value_dims_inside,
              PRECISION: tl.constexpr):  # fmt: skip
    keys = tl.load(key_tile, mask=keys_inside[None, :] & dims_inside[:, None], other=0.0)
    score = tl.dot(q.to(keys.dtype), keys, input_precision=PRECISION) * scale
    score = tl.where(allowed, score, -float("inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1))
    shift = tl.where(new_top == -float("inf"), 0.0, new_top)
    probability = tl.exp2(score - shift[:, None])
    keep = tl.exp2(top - shift)
    weight = weight * keep + tl.sum(probability, axis=1)
    values = tl.load(value_tile, mask=keys_inside[:, None] & value_dims_inside[None, :], other=0.0)
    mixed = mixed * keep[:, None] + tl.dot(probability.to(values.dtype), values, input_precision=PRECISION)
    return new_top, weight, mixed


@triton.jit
def _combined(
    parts, part_lse, out_row, value_dim, inside, kept, used_parts, VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, VALUE_DIMS), tl.float32)
    for first in range(0, used_parts, AT_ONCE):
        # Unrolled: the loads of several parts are under way together.
        for step in tl.static_range(AT_ONCE):
            part = first + step
            is_used = part < used_parts
            row = out_row * PARTS + part
            # Not from the first-level cache, which other programs' stores do not reach.
            lse = tl.load(part_lse + row, mask=inside & is_used, other=-float("inf"), cache_modifier=".cg")
            values = tl.load(
                parts + row[:, None] * VALUE_DIM + value_dim[None, :], mask=kept & is_used, other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            new_top = tl.maximum(top, lse)
            # A part in which a row sees nothing weighs nothing; before the first that counts, nothing has been summed.
            shift = tl.where(new_top == -float("inf"), 0.0, new_top)
            keep, share = tl.exp2(top - shift), tl.exp2(lse - shift)
            weight = weight * keep + share
            mixed = mixed * keep[:, None] + share[:, None] * values
            top = new_top
    return mixed / tl.where(weight == 0.0, 1.0, weight)[:, None]


@triton.jit
def _attend(
    query, key_pool, value_pool, prefix_indptr, prefix_slots, node_slots, mask, mask_indptr, output, parts, part_lse,
    arrivals, scale, width, query_stride, key_stride, value_stride, heads,
    MASKED: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr, PARTS: tl.constexpr, PART_TILES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    request, part = tl.program_id(0), tl.program_id(2)
    kv_heads = heads // GROUP
    kv_head, block = tl.program_id(1) % kv_heads, tl.program_id(1) // kv_heads
    prefix_start = tl.load(prefix_indptr + request)
    prefix = (tl.load(prefix_indptr + request + 1) - prefix_start).to(tl.int32)
    prefix_tiles = tl.cdiv(prefix, KEYS)
    tiles = prefix_tiles + tl.cdiv(width, KEYS)
    part_tiles = tl.maximum(tl.cdiv(tiles, PARTS), PART_TILES)
    used_parts = tl.cdiv(tiles, part_tiles)
    mask_start = 0
    if MASKED:
        mask_start = tl.load(mask_indptr + request) + prefix
    if part < used_parts:
        begin = part * part_tiles
        end = tl.minimum(begin + part_tiles, tiles)

        row = block * ROWS + tl.arange(0, ROWS)
        inside = row < width * GROUP
        node, head = row // GROUP, kv_head * GROUP + row % GROUP
        token = request.to(tl.int64) * width + node
        dim, value_dim = tl.arange(0, DIMS), tl.arange(0, VALUE_DIMS)
        dims_inside, value_dims_inside = dim < DIM, value_dim < VALUE_DIM
        q = tl.load(
            query + token[:, None] * query_stride + head[:, None] * DIM + dim[None, :],
            mask=inside[:, None] & dims_inside[None, :], other=0.0,
        )  # fmt: skip
        mask_row = mask + mask_start + node.to(tl.int64) * (prefix + width)
        column = tl.arange(0, KEYS)
        top = tl.full((ROWS,), -float("inf"), tl.float32)
        weight = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, VALUE_DIMS), tl.float32)
        key_head = key_pool + kv_head * DIM + dim[:, None]
        value_head = value_pool + kv_head * VALUE_DIM + value_dim[None, :]
        for tile in range(begin, tl.minimum(end, prefix_tiles)):
            at = tile * KEYS + column
            is_key = at < prefix
            slot = tl.load(prefix_slots + prefix_start + at, mask=is_key, other=0).to(tl.int64)
            top, weight, mixed = _add_tile(
                q, key_head + slot[None, :] * key_stride, value_head + slot[:, None] * value_stride, is_key,
                is_key[None, :], scale, top, weight, mixed, dims_inside, value_dims_inside, PRECISION,
            )  # fmt: skip
        for tile in range(tl.maximum(begin, prefix_tiles), end):
            at = (tile - prefix_tiles) * KEYS + column
            is_key = at < width
            slot = tl.load(node_slots + request * width + at, mask=is_key, other=0).to(tl.int64)
            allowed = is_key[None, :] & inside[:, None]
            if MASKED:
                allowed = tl.load(mask_row[:, None] + at[None, :], mask=allowed, other=0) != 0
            top, weight, mixed = _add_tile(
                q, key_head + slot[None, :] * key_stride, value_head + slot[:, None] * value_stride, is_key,
                allowed, scale, top, weight, mixed, dims_inside, value_dims_inside, PRECISION,
            )  # fmt: skip

        mixed = mixed / tl.where(weight == 0.0, 1.0, weight)[:, None]
        out_row = token * heads + head
        kept = inside[:, None] & value_dims_inside[None, :]
        if PARTS > 1:
            if used_parts > 1:
                part_row = out_row * PARTS + part
                tl.store(part_lse + part_row, top + tl.log2(weight), mask=inside)
                tl.store(parts + part_row[:, None] * VALUE_DIM + value_dim[None, :], mixed, mask=kept)
                # All threads have stored before this program is counted; the count itself releases and acquires.
                tl.debug_barrier()
                arrival = arrivals + (request * tl.num_programs(1) + tl.program_id(1))
                is_last = tl.atomic_add(arrival, 1) == used_parts - 1
                if is_last:
                    tl.store(arrival, 0)
                    mixed = _combined(
                        parts, part_lse, out_row, value_dim, inside, kept, used_parts, VALUE_DIM, VALUE_DIMS, PARTS,
                        ROWS, AT_ONCE=4 if PARTS > 4 else PARTS,
                    )  # fmt: skip
                kept = kept & is_last
        tl.store(
            output + out_row[:, None] * VALUE_DIM + value_dim[None, :], mixed.to(output.dtype.element_ty), mask=kept
        )


def serves(head_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Whether `VerifyAttention` runs such heads on every GPU that SGLang supports. dtype: of the KV pool."""
    sizes = (head_dim, value_dim)
    return dtype.itemsize == 2 and min(sizes) >= SMALLEST_HEAD and max(sizes) <= LARGEST_HEAD


def tiling_for(batch: int, rows: int, kv_heads: int) -> Tiling:
    """rows: of one request and one KV head, (nodes, heads of the group)."""
    blocks = batch * kv_heads * triton.cdiv(rows, 16)
    return next((tiling for most, tiling in TILINGS if blocks <= most), MANY_ROWS)


def parts_for(blocks: int, programs: int) -> int:
    """Into how many parts the keys are cut, a power of two: enough programs to fill a GPU, whatever the lengths.

    blocks: of rows, of the whole batch. Known when a graph is captured, unlike the lengths.
    """
    wanted = max(1, programs // blocks)
    return min(MOST_PARTS, 1 << (wanted.bit_length() - 1))


class VerifyAttention:
    """Attention of TARGET_VERIFY forwards on one device: trees, and drafters' blocks. Calls share one stream."""

    def __init__(self, device: torch.device | str, tiling: Tiling | None = None) -> None:
        """tiling: None for `tiling_for`'s."""
        self._tiling = tiling
        # How many parts of a block of rows are done; zero between calls. Where there are parts, blocks are fewer.
        programs = max(each.programs for each in (*dict(TILINGS).values(), MANY_ROWS, tiling) if each is not None)
        self._arrivals = torch.zeros(programs, dtype=torch.int32, device=device)

    def __call__(
        self,
        query: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        prefix_indptr: torch.Tensor,
        prefix_slots: torch.Tensor,
        node_slots: torch.Tensor,
        mask: torch.Tensor | None,
        mask_indptr: torch.Tensor | None,
        scale: float,
        width: int,
        output: torch.Tensor,
    ) -> None:
        """Attention of b * V tokens into `output`; their own keys and values are in the pool already.

        query: [b * V, heads, dim] (any row stride); key_pool, value_pool: [slots, kv_heads, dim]; prefix_indptr:
        [b + 1]; prefix_slots: the prefixes' slots, one request after another; node_slots: [b * V]; mask: SGLang's flat
        allow-mask, whose prefix columns are not read, None if every token sees all V of its request; mask_indptr:
        [b + 1], where each request's mask begins; scale: of the scores; width: V; output: [b * V, heads, dim],
        contiguous. bf16, fp16 or fp32 (exact fp32 products).
        """
        tokens, heads, dim = query.shape
        kv_heads, value_dim = value_pool.shape[1:]
        batch, group = tokens // width, heads // kv_heads
        tiling = self._tiling or tiling_for(batch, width * group, kv_heads)
        blocks = kv_heads * triton.cdiv(width * group, tiling.rows)
        parts = parts_for(batch * blocks, tiling.programs)
        values, lse = output, output
        if parts > 1:
            values = torch.empty((tokens, heads, parts, value_dim), dtype=torch.float32, device=query.device)
            lse = torch.empty((tokens, heads, parts), dtype=torch.float32, device=query.device)
        masks = (node_slots, node_slots) if mask is None else (mask, mask_indptr)
        _attend[(batch, blocks, parts)](
            query, key_pool, value_pool, prefix_indptr, prefix_slots, node_slots, *masks, output, values, lse,
            self._arrivals, scale * LOG2_E, width, query.stride(0), key_pool.stride(0), value_pool.stride(0), heads,
            MASKED=mask is not None, GROUP=group, DIM=dim, VALUE_DIM=value_dim, DIMS=triton.next_power_of_2(dim),
            VALUE_DIMS=triton.next_power_of_2(value_dim), PARTS=parts, PART_TILES=tiling.part_tiles,
            ROWS=tiling.rows, KEYS=tiling.keys, PRECISION="ieee",
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
