"""The K most probable tokens per drafted position, from logits to ranked ids.

One matrix product gives the logits. Then per row of logits: statistics of each chunk of the vocabulary (maximum and sum
of exponentials), from them the row's normaliser and the K chunks whose best tokens rank first, which hold all
candidates between them, the K best tokens of each, and the K best of those. Ranks that hold parts of the vocabulary
exchange the statistics and then K keys per row, never logits. Nothing depends on a value on the host, so a CUDA graph
can hold all of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree_appliance.ddtree.head import HeadShard

# Sorted whole where it may hold a candidate, so short; statistics are taken of several at once.
CHUNK = 512
CHUNKS_AT_ONCE = 8
# A key's order is the candidates': the bits of -log-probability's magnitude, then the token id. Bitwise NOT turns "the
# smallest K" into what `tl.topk` selects; this is the NOT of a key that no token has.
NO_KEY = tl.constexpr(-(2**63))
PLACE_BITS = tl.constexpr(31)
PLACE_MASK = tl.constexpr(2**31 - 1)


@triton.jit
def _chunk_statistics(
    logits, maxima, sums, vocabulary, stride, chunks, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    values = tl.load(logits + row * stride + token, mask=token < vocabulary, other=-float("inf")).to(tl.float32)
    top = tl.max(values, axis=1)
    # Without a finite value the differences would be NaN where the sum must be 0.
    shift = tl.where(top == -float("inf"), 0.0, top)
    tl.store(maxima + row * chunks + chunk, top, mask=chunk < chunks)
    tl.store(sums + row * chunks + chunk, tl.sum(tl.exp(values - shift[:, None]), axis=1), mask=chunk < chunks)


@triton.jit
def _key(value, shift, normaliser, place):
    """Sorts last, as a number, what ranks first: a log-probability and the place of its token or chunk."""
    logprob = (value - shift) - normaliser
    logprob = tl.where(logprob != logprob, -float("inf"), tl.minimum(logprob, 0.0)) + 0.0
    bits = logprob.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    return ~((bits << PLACE_BITS) | place.to(tl.int64))


@triton.jit
def _best_chunks(
    maxima, sums, normalisers, best, chunks, parts, first_part, rows,
    PARTS: tl.constexpr, CHUNKS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    # Statistics lie as [ranks, rows, chunks]; `parts` is ranks * chunks of this row, this rank's from `first_part` on.
    part = tl.arange(0, PARTS)
    at = (part // chunks).to(tl.int64) * rows * chunks + row * chunks + part % chunks
    part_max = tl.load(maxima + at, mask=part < parts, other=-float("inf"))
    part_sum = tl.load(sums + at, mask=part < parts, other=0.0)
    top = tl.max(part_max, axis=0)
    shift = tl.where(top == -float("inf"), 0.0, top)
    normaliser = tl.log(tl.sum(part_sum * tl.exp(part_max - shift), axis=0))
    tl.store(normalisers + 2 * row, shift)
    tl.store(normalisers + 2 * row + 1, normaliser)
    # A token of any other chunk has K tokens before it: the best of each of these, for chunks are in order of ids.
    chunk = tl.arange(0, CHUNKS)
    own = tl.load(maxima + first_part * rows + row * chunks + chunk, mask=chunk < chunks, other=-float("inf"))
    key = tl.where(chunk < chunks, _key(own, shift, normaliser, chunk), NO_KEY)
    tl.store(best + row * K + tl.arange(0, K), ((~tl.topk(key, K)) & PLACE_MASK).to(tl.int32))


@triton.jit
def _chunk_candidates(
    logits, best, normalisers, keys, vocabulary, stride, first_id, CHUNK: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    row, rank, kept = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    shift, normaliser = tl.load(normalisers + 2 * row), tl.load(normalisers + 2 * row + 1)
    token = tl.load(best + row * K + rank) * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * stride + token, mask=token < vocabulary, other=0.0).to(tl.float32)
    key = tl.where(token < vocabulary, _key(values, shift, normaliser, token + first_id), NO_KEY)
    tl.store(keys + (row * kept + rank) * K + tl.arange(0, K), tl.topk(key, K))


@triton.jit
def _merged(keys, ranks, per_rank, rows, row, PARTS: tl.constexpr, K: tl.constexpr):
    part = tl.arange(0, PARTS)
    at = (part // per_rank).to(tl.int64) * rows * per_rank + row * per_rank + part % per_rank
    return tl.topk(tl.load(keys + at, mask=part < ranks * per_rank, other=NO_KEY), K)


@triton.jit
def _merge_keys(keys, merged, per_rank, rows, PARTS: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(merged + row * K + tl.arange(0, K), _merged(keys, 1, per_rank, rows, row, PARTS, K))


@triton.jit
def _rank_tokens(
    keys, logprobs, ids, ranks, per_rank, rows, topk, PARTS: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    key = ~_merged(keys, ranks, per_rank, rows, row, PARTS, K)
    value = (key >> PLACE_BITS).to(tl.int32).to(tl.float32, bitcast=True)
    rank = tl.arange(0, K)
    tl.store(logprobs + row * topk + rank, value, mask=rank < topk)
    tl.store(ids + row * topk + rank, key & PLACE_MASK, mask=rank < topk)


def top_candidates(hidden_states: torch.Tensor, head: HeadShard, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `torch_ops.top_candidates`: [b, D, H] -> [b, D, K] fp32 and [b, D, K] int64.

    Log-probabilities may differ from the twin's in the last bits, because sums are taken in another order; the ranking
    is exact for the log-probabilities that are returned.
    """
    batch, depth, _ = hidden_states.shape
    topk = min(topk, head.vocabulary)
    logits = torch.matmul(hidden_states.flatten(0, 1).to(head.weight.dtype), head.weight.T)
    rows, vocabulary = logits.shape
    slots = max(2, triton.next_power_of_2(topk))  # `tl.topk` selects two at least
    chunk = max(CHUNK, slots)
    # Every rank has the same number of chunks, also the one with the short rest of the vocabulary.
    chunks = triton.cdiv(head.largest_shard, chunk)
    device = logits.device

    statistics = torch.empty((2, rows, chunks), dtype=torch.float32, device=device)
    _chunk_statistics[rows, triton.cdiv(chunks, CHUNKS_AT_ONCE)](
        logits, statistics[0], statistics[1], vocabulary, logits.stride(0), chunks, CHUNK=chunk, AT_ONCE=CHUNKS_AT_ONCE
    )
    maxima, sums, ranks, rank = statistics[0], statistics[1], 1, 0
    if head.all_gather is not None:
        gathered = head.all_gather(statistics.view(2 * rows, chunks))
        ranks, rank = len(gathered), head.rank
        maxima, sums = (part.contiguous() for part in gathered.view(ranks, 2, rows, chunks).unbind(1))
    normalisers = torch.empty((rows, 2), dtype=torch.float32, device=device)
    best = torch.empty((rows, slots), dtype=torch.int32, device=device)
    _best_chunks[(rows,)](
        maxima, sums, normalisers, best, chunks, ranks * chunks, rank * chunks, rows,
        PARTS=triton.next_power_of_2(ranks * chunks), CHUNKS=triton.next_power_of_2(max(chunks, slots)), K=slots,
    )  # fmt: skip
    kept = min(slots, chunks)
    keys = torch.empty((rows, kept * slots), dtype=torch.int64, device=device)
    _chunk_candidates[rows, kept](
        logits, best, normalisers, keys, vocabulary, logits.stride(0), head.first_id, CHUNK=chunk, K=slots
    )
    if head.all_gather is not None:
        merged = torch.empty((rows, slots), dtype=torch.int64, device=device)
        parts = triton.next_power_of_2(kept * slots)
        _merge_keys[(rows,)](keys, merged, kept * slots, rows, PARTS=parts, K=slots)
        keys = head.all_gather(merged)

    logprobs = torch.empty((batch, depth, topk), dtype=torch.float32, device=device)
    ids = torch.empty((batch, depth, topk), dtype=torch.int64, device=device)
    per_rank = keys.shape[-1]
    _rank_tokens[(rows,)](
        keys, logprobs, ids, ranks, per_rank, rows, topk, PARTS=triton.next_power_of_2(ranks * per_rank), K=slots
    )
    return logprobs, ids
