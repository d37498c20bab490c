"""The K most probable tokens per drafted position, from logits to ranked ids.

One matrix product gives the logits. Then per row of logits: statistics of each chunk of the vocabulary (maximum and sum
of exponentials), from them the row's normaliser and a log-probability that K chunks reach, the K best tokens of each
chunk that reaches it, and the K best of those. Ranks that hold parts of the vocabulary exchange the statistics and then
K keys per row, never logits. Nothing depends on a value on the host, so a CUDA graph can hold all of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree_appliance.ddtree.head import HeadShard

CHUNK = 2048
# A key's order is the candidates': the bits of -log-probability's magnitude, then the token id. Bitwise NOT turns "the
# smallest K" into what `tl.topk` selects; this is the NOT of a key that no token has.
NO_KEY = tl.constexpr(-(2**63))
ID_BITS = tl.constexpr(31)
ID_MASK = tl.constexpr(2**31 - 1)


@triton.jit
def _chunk_statistics(logits, maxima, sums, vocabulary, stride, chunks, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * stride + token, mask=token < vocabulary, other=-float("inf")).to(tl.float32)
    top = tl.max(values, axis=0)
    # Without a finite value the differences would be NaN where the sum must be 0.
    shift = tl.where(top == -float("inf"), 0.0, top)
    tl.store(maxima + row * chunks + chunk, top)
    tl.store(sums + row * chunks + chunk, tl.sum(tl.exp(values - shift), axis=0))


@triton.jit
def _clipped(logprob):
    return tl.where(logprob != logprob, -float("inf"), tl.minimum(logprob, 0.0)) + 0.0


@triton.jit
def _row_normaliser(
    maxima, sums, normalisers, chunks, parts, first_part, rows,
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
    # K chunks hold a token at least this probable, so a chunk whose best is less probable holds no candidate.
    chunk = tl.arange(0, CHUNKS)
    own = tl.load(maxima + first_part * rows + row * chunks + chunk, mask=chunk < chunks, other=-float("inf"))
    reached = tl.min(tl.topk(_clipped((own - shift) - normaliser), K), axis=0)
    tl.store(normalisers + 3 * row, shift)
    tl.store(normalisers + 3 * row + 1, normaliser)
    tl.store(normalisers + 3 * row + 2, reached)


@triton.jit
def _chunk_candidates(
    logits, maxima, normalisers, keys, vocabulary, stride, first_id, first_part, rows,
    CHUNK: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    shift, normaliser = tl.load(normalisers + 3 * row), tl.load(normalisers + 3 * row + 1)
    best = _clipped((tl.load(maxima + first_part * rows + row * chunks + chunk) - shift) - normaliser)
    target = keys + (row * chunks + chunk) * K + tl.arange(0, K)
    if best < tl.load(normalisers + 3 * row + 2):
        tl.store(target, tl.full((K,), NO_KEY, tl.int64))
    else:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        values = tl.load(logits + row * stride + token, mask=token < vocabulary, other=0.0).to(tl.float32)
        logprobs = _clipped((values - shift) - normaliser)
        key = (logprobs.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) << ID_BITS
        key = tl.where(token < vocabulary, ~(key | (token + first_id).to(tl.int64)), NO_KEY)
        tl.store(target, tl.topk(key, K))


@triton.jit
def _merge_keys(keys, merged, ranks, per_rank, rows, PARTS: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    at = (part // per_rank).to(tl.int64) * rows * per_rank + row * per_rank + part % per_rank
    key = tl.load(keys + at, mask=part < ranks * per_rank, other=NO_KEY)
    tl.store(merged + row * K + tl.arange(0, K), tl.topk(key, K))


@triton.jit
def _decode_keys(keys, logprobs, ids, topk, K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, K)
    key = ~tl.load(keys + row * K + rank)
    value = (key >> ID_BITS).to(tl.int32).to(tl.float32, bitcast=True)
    tl.store(logprobs + row * topk + rank, value, mask=rank < topk)
    tl.store(ids + row * topk + rank, key & ID_MASK, mask=rank < topk)


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
    grid = (rows, chunks)
    _chunk_statistics[grid](logits, statistics[0], statistics[1], vocabulary, logits.stride(0), chunks, CHUNK=chunk)
    maxima, sums, ranks, rank = statistics[0], statistics[1], 1, 0
    if head.all_gather is not None:
        gathered = head.all_gather(statistics.view(2 * rows, chunks))
        ranks, rank = len(gathered), head.rank
        maxima, sums = (part.contiguous() for part in gathered.view(ranks, 2, rows, chunks).unbind(1))
    normalisers = torch.empty((rows, 3), dtype=torch.float32, device=device)
    _row_normaliser[(rows,)](
        maxima, sums, normalisers, chunks, ranks * chunks, rank * chunks, rows,
        PARTS=triton.next_power_of_2(ranks * chunks), CHUNKS=triton.next_power_of_2(max(chunks, slots)), K=slots,
    )  # fmt: skip
    keys = torch.empty((rows, chunks, slots), dtype=torch.int64, device=device)
    _chunk_candidates[grid](
        logits, maxima, normalisers, keys, vocabulary, logits.stride(0), head.first_id, rank * chunks, rows,
        CHUNK=chunk, K=slots,
    )  # fmt: skip
    merged = _merged(keys.view(1, rows, -1), slots)
    if head.all_gather is not None:
        merged = _merged(head.all_gather(merged), slots)

    logprobs = torch.empty((batch, depth, topk), dtype=torch.float32, device=device)
    ids = torch.empty((batch, depth, topk), dtype=torch.int64, device=device)
    _decode_keys[(rows,)](merged, logprobs, ids, topk, K=slots)
    return logprobs, ids


def _merged(keys: torch.Tensor, slots: int) -> torch.Tensor:
    """The `slots` best keys of each row: [ranks, rows, n] -> [rows, slots]."""
    ranks, rows, per_rank = keys.shape
    merged = torch.empty((rows, slots), dtype=torch.int64, device=keys.device)
    parts = triton.next_power_of_2(max(ranks * per_rank, slots))
    _merge_keys[(rows,)](keys, merged, ranks, per_rank, rows, PARTS=parts, K=slots)
    return merged
