"""Attention over paged KV of a tree's nodes, which see their prefix and ancestors, or of a whole block of tokens.

Flash-decoding's scheme (Dao et al. 2023) for short queries: the keys of a request are cut into parts that run side by
side and are combined by their log-sum-exp, so that a step costs the latency of one part and not of the whole prefix.
The query heads that share a KV head are rows of one tile, so its keys are read once for all of them. How many parts a
request has is decided on the device, where its length is known; the program that ends last combines them, which spares
a second launch. To write and combine parts takes longer than to walk over a few tiles of keys: with a short prefix,
where that is so, the same programs take fewer rows each and all keys.

What a node sees of its tree is read as bits, a register or two per row: a mask of bytes is waited for in every tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ddtree_appliance.ddtree.limits import BITS_PER_WORD, words_for


@dataclass(frozen=True)
class Tiling:
    """How the work is cut: rows (node, head) and keys of a tile, Triton's warps and stages, least tiles of a part.

    programs: as many as the GPU should run at once; with fewer blocks of rows, each request's keys are cut into parts.
    short_tiles: up to so many tiles of keys, blocks have SHORT_ROWS rows instead and keys are not cut, if there are
    parts enough for the blocks.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    part_tiles: int = 1
    programs: int = 132
    short_tiles: int = 0


SHORT_ROWS = 16
# By the number of 16-row blocks in a batch up to which each serves; chosen among those measured on an H200 for speed at
# prefixes of 300 tokens that is not paid for at 2,000. With heads of 128 in 16 bits they need no more shared memory
# than every served GPU has. Larger heads do not fit everywhere, see `serves`.
TILINGS = (
    (66, Tiling(rows=16, keys=128, warps=4, stages=3, programs=264)),
    (256, Tiling(rows=32, keys=128, warps=4, stages=3, programs=264, short_tiles=5)),
)
MANY_ROWS = Tiling(rows=64, keys=64, warps=4, stages=3, part_tiles=2)
SMALLEST_HEAD, LARGEST_HEAD = 16, 128
MOST_PARTS = 16
# Of `inputs.ancestor_bits` per node; the kernel names each.
MOST_WORDS = 4
LOG2_E = 1.4426950408889634


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
def _ancestor_word(bits, row, inside, WORD: tl.constexpr, WORDS: tl.constexpr):
    if WORD < WORDS:
        return tl.load(bits + row * WORDS + WORD, mask=inside, other=0)
    else:
        return tl.zeros(row.shape, tl.int32)


@triton.jit
def _attend_rows(
    query, key_pool, value_pool, slots, bits, output, parts, part_lse, arrival, scale, width, query_stride, key_stride,
    value_stride, heads, request, kv_head, prefix, tiles, block, part, used_parts,
    IN_PARTS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DIMS: tl.constexpr, VALUE_DIMS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of the keys for one block of ROWS rows. slots: of the request's tokens."""
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
    if WORDS > 0:
        word0 = _ancestor_word(bits, token, inside, 0, WORDS)
        word1 = _ancestor_word(bits, token, inside, 1, WORDS)
        word2 = _ancestor_word(bits, token, inside, 2, WORDS)
        word3 = _ancestor_word(bits, token, inside, 3, WORDS)
    column = tl.arange(0, KEYS)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, VALUE_DIMS), tl.float32)
    key_head = key_pool + kv_head * DIM + dim[:, None]
    value_head = value_pool + kv_head * VALUE_DIM + value_dim[None, :]
    for tile in range(part, tiles, used_parts):
        at = tile * KEYS + column
        is_key = at < prefix + width
        slot = tl.load(slots + at, mask=is_key, other=0).to(tl.int64)
        keys = tl.load(
            key_head + slot[None, :] * key_stride, mask=is_key[None, :] & dims_inside[:, None], other=0.0
        )  # fmt: skip
        values = tl.load(
            value_head + slot[:, None] * value_stride, mask=is_key[:, None] & value_dims_inside[None, :], other=0.0
        )  # fmt: skip
        score = tl.dot(q.to(keys.dtype), keys, input_precision=PRECISION) * scale
        if tile * KEYS + KEYS > prefix:
            allowed = is_key[None, :]
            if WORDS > 0:
                # The prefix and the root are seen by all.
                bit = at - prefix - 1
                place = (bit >> 5)[None, :]
                word = word0[:, None]
                if WORDS > 1:
                    word = tl.where(place == 1, word1[:, None], word)
                if WORDS > 2:
                    word = tl.where(place == 2, word2[:, None], tl.where(place == 3, word3[:, None], word))
                allowed = allowed & ((bit < 0)[None, :] | (((word >> (bit & 31)[None, :]) & 1) != 0))
            score = tl.where(allowed, score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        shift = tl.where(new_top == -float("inf"), 0.0, new_top)
        probability = tl.exp2(score - shift[:, None])
        keep = tl.exp2(top - shift)
        weight = weight * keep + tl.sum(probability, axis=1)
        mixed = mixed * keep[:, None] + tl.dot(probability.to(values.dtype), values, input_precision=PRECISION)
        top = new_top

    mixed = mixed / tl.where(weight == 0.0, 1.0, weight)[:, None]
    out_row = token * heads + head
    kept = inside[:, None] & value_dims_inside[None, :]
    if IN_PARTS:
        if used_parts > 1:
            part_row = out_row * PARTS + part
            tl.store(part_lse + part_row, top + tl.log2(weight), mask=inside)
            tl.store(parts + part_row[:, None] * VALUE_DIM + value_dim[None, :], mixed, mask=kept)
            # All threads have stored before this program is counted; the count itself releases and acquires.
            tl.debug_barrier()
            is_last = tl.atomic_add(arrival, 1) == used_parts - 1
            if is_last:
                tl.store(arrival, 0)
                mixed = _combined(
                    parts, part_lse, out_row, value_dim, inside, kept, used_parts, VALUE_DIM, VALUE_DIMS, PARTS,
                    ROWS, AT_ONCE=4 if PARTS > 4 else PARTS,
                )  # fmt: skip
            kept = kept & is_last
    tl.store(output + out_row[:, None] * VALUE_DIM + value_dim[None, :], mixed.to(output.dtype.element_ty), mask=kept)


# Inlined, a loop over tiles of 64 rows is given so much shared memory on an H200 that one program is left on a
# multiprocessor: 31 instead of 21 us for 32 requests x 16 tokens.
@triton.jit(noinline=True)
def _attend_rows_apart(
    query, key_pool, value_pool, slots, bits, output, parts, part_lse, arrival, scale, width, query_stride, key_stride,
    value_stride, heads, request, kv_head, prefix, tiles, block, part, used_parts,
    IN_PARTS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DIMS: tl.constexpr, VALUE_DIMS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    _attend_rows(
        query, key_pool, value_pool, slots, bits, output, parts, part_lse, arrival, scale, width, query_stride,
        key_stride, value_stride, heads, request, kv_head, prefix, tiles, block, part, used_parts, IN_PARTS,
        WORDS, GROUP, DIM, VALUE_DIM, DIMS, VALUE_DIMS, PARTS, ROWS, KEYS, PRECISION,
    )  # fmt: skip


@triton.jit
def _attend(
    query, key_pool, value_pool, step_slots, prefix_lens, bits, output, parts, part_lse, arrivals, scale, width,
    query_stride, key_stride, value_stride, slots_stride, heads,
    WORDS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr, PARTS: tl.constexpr, PART_TILES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SHORT_ROWS: tl.constexpr, SHORT_TILES: tl.constexpr, PRECISION: tl.constexpr, ATTEND_ROWS: tl.constexpr,
):  # fmt: skip
    request, part = tl.program_id(0), tl.program_id(2)
    kv_heads = heads // GROUP
    kv_head, block = tl.program_id(1) % kv_heads, tl.program_id(1) // kv_heads
    slots = step_slots + request.to(tl.int64) * slots_stride
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    tiles = tl.cdiv(prefix + width, KEYS)
    used_parts = tl.minimum(tl.cdiv(tiles, PART_TILES), PARTS)
    arrival = arrivals + request * tl.num_programs(1) + tl.program_id(1)
    if SHORT_TILES > 0:
        if tiles <= SHORT_TILES:
            if part < ROWS // SHORT_ROWS:
                ATTEND_ROWS(
                    query, key_pool, value_pool, slots, bits, output, parts, part_lse, arrival, scale, width,
                    query_stride, key_stride, value_stride, heads, request, kv_head, prefix, tiles,
                    block * (ROWS // SHORT_ROWS) + part, 0, 1,
                    False, WORDS, GROUP, DIM, VALUE_DIM, DIMS, VALUE_DIMS, PARTS, SHORT_ROWS, KEYS, PRECISION,
                )  # fmt: skip
            part += PARTS  # there is no other part
    if part < used_parts:
        ATTEND_ROWS(
            query, key_pool, value_pool, slots, bits, output, parts, part_lse, arrival, scale, width, query_stride,
            key_stride, value_stride, heads, request, kv_head, prefix, tiles, block, part, used_parts,
            PARTS > 1, WORDS, GROUP, DIM, VALUE_DIM, DIMS, VALUE_DIMS, PARTS, ROWS, KEYS, PRECISION,
        )  # fmt: skip


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


def attend_rows_on(major: int) -> triton.JITFunction[Any]:
    """A function that Triton can compile. major: of the GPU's compute capability.

    On Blackwell's data centre GPUs (10, 11) products go through a memory of their own, which Triton 3.6 gives to
    kernels only, not to functions that are called.
    """
    return _attend_rows if major in (10, 11) else _attend_rows_apart


class VerifyAttention:
    """Attention of TARGET_VERIFY forwards on one device: trees, and drafters' blocks. Calls share one stream."""

    def __init__(
        self,
        device: torch.device | str,
        slots: torch.Tensor,
        bits: torch.Tensor | None = None,
        tiling: Tiling | None = None,
    ) -> None:
        """Buffers on the device, filled before a step's forwards, their row i for the batch's request i.

        slots: [most requests, longest] int32, where the keys of a request's tokens are, those of the step included;
        bits: [most requests, V, words] int32, `inputs.ancestor_bits` of the step's trees, None for drafters' blocks;
        tiling: None for `tiling_for`'s.
        """
        self.bits = bits
        self.slots = slots
        self._tiling = tiling
        is_cuda = torch.device(device).type == "cuda"
        self._attend_rows = attend_rows_on(torch.cuda.get_device_capability(device)[0] if is_cuda else 0)
        # How many parts of a block of rows are done; zero between calls. Where there are parts, blocks are fewer.
        programs = max(each.programs for each in (*dict(TILINGS).values(), MANY_ROWS, tiling) if each is not None)
        self._arrivals = torch.zeros(programs, dtype=torch.int32, device=device)

    def __call__(
        self,
        query: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        prefix_lens: torch.Tensor,
        is_tree: bool,
        scale: float,
        width: int,
        output: torch.Tensor,
    ) -> None:
        """Attention of b * V tokens into `output`; their own keys and values are in the pool already.

        query: [b * V, heads, dim] (any row stride); key_pool, value_pool: [slots, kv_heads, dim]; prefix_lens: [b];
        is_tree: tokens see their prefix and their ancestors by `bits`, not all V of their request; scale: of the
        scores; width: V, at most 129; output: [b * V, heads, dim], contiguous. bf16, fp16 or fp32 (exact fp32
        products). Raises ValueError for more requests than `slots` has rows, and for trees without bits of their width.
        """
        if is_tree and (self.bits is None or self.bits.shape[1:] != (width, words_for(width))):
            known = None if self.bits is None else list(self.bits.shape)
            raise ValueError(f"the attention of trees of {width} nodes needs their ancestor bits, and has {known}")
        if is_tree and words_for(width) > MOST_WORDS:
            raise ValueError(f"the attention of trees takes up to {BITS_PER_WORD * MOST_WORDS + 1} nodes, not {width}")
        rows = min(len(each) for each in (self.slots, self.bits) if each is not None)
        if len(query) > rows * width:
            raise ValueError(f"the attention has slots or bits of {rows} requests, not of {len(query) // width}")
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
        bits, words = (self.bits, words_for(width)) if is_tree else (self.slots, 0)
        is_cut_short = tiling.rows <= SHORT_ROWS * parts
        _attend[(batch, blocks, parts)](
            query, key_pool, value_pool, self.slots, prefix_lens, bits, output, values, lse, self._arrivals,
            scale * LOG2_E, width, query.stride(0), key_pool.stride(0), value_pool.stride(0), self.slots.stride(0),
            heads,
            WORDS=words, GROUP=group, DIM=dim, VALUE_DIM=value_dim, DIMS=triton.next_power_of_2(dim),
            VALUE_DIMS=triton.next_power_of_2(value_dim), PARTS=parts, PART_TILES=tiling.part_tiles, ROWS=tiling.rows,
            KEYS=tiling.keys, SHORT_ROWS=SHORT_ROWS, SHORT_TILES=tiling.short_tiles if is_cut_short else 0,
            PRECISION="ieee", ATTEND_ROWS=self._attend_rows, num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
