"""What the two forwards read, in one launch each: the drafter's block, and the trees' rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree_appliance.ddtree.inputs import DraftInputs, VerifyInputs
from ddtree_appliance.ddtree.limits import BITS_PER_WORD, words_for
from ddtree_appliance.ddtree.torch_ops import TreeBatch

# Prefix lengths that are summed at once: a constant, so that every batch runs the same compiled kernel.
REQUESTS = 128
# Slots of a request's row that one program copies.
COPIED = 2048


@triton.jit
def _write_draft_inputs(
    bonus_tokens, prefix_lens, requests, req_to_token, block_ids, positions, slots, rows, mask_token, block_size,
    step_slots, request_stride, row_stride, SLOTS: tl.constexpr, COPIED: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    at, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    prefix = tl.load(prefix_lens + at).to(tl.int64)
    own_row = req_to_token + tl.load(requests + at).to(tl.int64) * request_stride
    if HAS_ROWS:
        place = part * COPIED + tl.arange(0, COPIED)
        is_known = (place < prefix + step_slots) & (place < row_stride)
        tl.store(rows + at * row_stride + place, tl.load(own_row + place, mask=is_known, other=0), mask=is_known)
    if part == 0:
        bonus = tl.load(bonus_tokens + at).to(tl.int64)
        step = tl.arange(0, SLOTS)
        inside = step < step_slots
        position = prefix + step
        slot = tl.load(own_row + position, mask=inside, other=0)
        tl.store(positions + at * step_slots + step, position, mask=inside)
        tl.store(slots + at * step_slots + step, slot.to(tl.int64), mask=inside)
        token = tl.where(step == 0, bonus, mask_token)
        tl.store(block_ids + at * block_size + step, token, mask=step < block_size)


@triton.jit
def _write_verify_inputs(
    tree_tokens, depths, ancestors, bonus_tokens, prefix_lens, token_ids, positions, mask, bits, width,
    REQUESTS: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr, HAS_BITS: tl.constexpr,
    BITS_PER_WORD: tl.constexpr,
):  # fmt: skip
    request, row = tl.program_id(0), tl.program_id(1)
    start = request.to(tl.int64) * width
    at = start + row
    for first in range(0, request, REQUESTS):
        before = first + tl.arange(0, REQUESTS)
        start += tl.sum(tl.load(prefix_lens + before, mask=before < request, other=0).to(tl.int64), axis=0)
    start *= width
    prefix = tl.load(prefix_lens + request).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < width
    allowed = tl.load(ancestors + at * width + column, mask=inside, other=0)
    tl.store(mask + start + row * (prefix + width) + prefix + column, allowed, mask=inside)
    if HAS_BITS:
        bit = column - 1
        for word in tl.static_range(WORDS):
            is_set = (allowed != 0) & (bit >= word * BITS_PER_WORD) & (bit < (word + 1) * BITS_PER_WORD)
            # Bits of different columns: their sum is what or-ing them gives.
            value = tl.sum(tl.where(is_set, 1 << (bit & (BITS_PER_WORD - 1)), 0), axis=0)
            tl.store(bits + at * WORDS + word, value)
    tree_token = tl.load(tree_tokens + at)
    bonus = tl.load(bonus_tokens + request).to(tl.int64)
    tl.store(token_ids + at, tl.where(row == 0, bonus, tl.maximum(tree_token, 0)))
    tl.store(positions + at, prefix + tl.load(depths + at))


def _check_rows(name: str, out: torch.Tensor, batch: int) -> None:
    if batch > len(out):
        raise ValueError(f"{name} has rows for {len(out)} requests, not for {batch}")


def draft_inputs(
    bonus_tokens: torch.Tensor,
    prefix_lens: torch.Tensor,
    requests: torch.Tensor,
    req_to_token: torch.Tensor,
    mask_token: int,
    block_size: int,
    step_slots: int,
    rows_out: torch.Tensor | None = None,
) -> DraftInputs:
    """As `inputs.draft_inputs`. Raises ValueError for more requests than rows_out has rows."""
    batch, device = len(prefix_lens), prefix_lens.device
    block_ids = torch.empty((batch, block_size), dtype=torch.int64, device=device)
    positions, slots = (torch.empty((batch, step_slots), dtype=torch.int64, device=device) for _ in range(2))
    parts, rows = 1, slots
    if rows_out is not None:
        _check_rows("rows_out", rows_out, batch)
        parts, rows = triton.cdiv(rows_out.shape[1], COPIED), rows_out
    _write_draft_inputs[(batch, parts)](
        bonus_tokens, prefix_lens, requests, req_to_token, block_ids, positions, slots, rows, mask_token, block_size,
        step_slots, req_to_token.stride(0), rows.stride(0), SLOTS=triton.next_power_of_2(step_slots), COPIED=COPIED,
        HAS_ROWS=rows_out is not None, num_warps=4,
    )  # fmt: skip
    return DraftInputs(block_ids, positions, slots)


def verify_inputs(
    trees: TreeBatch,
    bonus_tokens: torch.Tensor,
    prefix_lens: torch.Tensor,
    prefix_lens_bound: int,
    mask_out: torch.Tensor | None = None,
    bits_out: torch.Tensor | None = None,
) -> VerifyInputs:
    """As `inputs.verify_inputs`. bits_out: contiguous. Raises ValueError for more requests than it has rows."""
    batch, width = trees.token_ids.shape
    if bits_out is not None:
        _check_rows("bits_out", bits_out, batch)
    device = trees.token_ids.device
    if mask_out is None:
        size = width * (prefix_lens_bound + batch * width)
        mask_out = torch.ones(size, dtype=torch.bool, device=device)
    # Two tensors, not parts of one, which would be aligned for some batches only (see `trees.build_trees`).
    token_ids, positions = (torch.empty((batch, width), dtype=torch.int64, device=device) for _ in range(2))
    _write_verify_inputs[(batch, width)](
        trees.token_ids, trees.depths, trees.ancestors.view(torch.uint8), bonus_tokens, prefix_lens, token_ids,
        positions, mask_out.view(torch.uint8), token_ids if bits_out is None else bits_out, width,
        REQUESTS=REQUESTS, COLUMNS=triton.next_power_of_2(width), WORDS=words_for(width),
        HAS_BITS=bits_out is not None, BITS_PER_WORD=BITS_PER_WORD, num_warps=1,
    )  # fmt: skip
    return VerifyInputs(token_ids, positions, mask_out)
