"""The draw per node without a sort: one pass over the logits, then a search for the winner that the filters keep.

What top-k, top-p and min-p keep are the most probable tokens down to some rank. So if the winner of the race over all
tokens is not kept, neither is any token after it in rank, and the race goes on among those before it, until a winner is
kept: the one that would have won among the kept tokens alone. The idea of narrowing by rejected samples is FlashInfer's
(its sampling kernels, 2025); there each round draws anew, here all rounds read the same noise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ddtree_appliance.ddtree.sampling import Sampling

# Tokens that a program reads at once.
BLOCK, WARPS = 2048, 4
SMALL_DISTANCE = tl.constexpr(0.0625)


@triton.jit
def _mixed(state, word):
    word = word * 0xCC9E2D51
    word = (word << 15) | (word >> 17)
    state = state ^ (word * 0x1B873593)
    state = (state << 13) | (state >> 19)
    return state * 5 + 0xE6546B64


@triton.jit
def _log_exponential(state, token):
    """The logarithm of `sampling.exponentials` for each token. state: uint32, of seed and position."""
    hashed = _mixed(state, token.to(tl.uint32)) ^ 16
    hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B
    hashed = (hashed ^ (hashed >> 13)) * 0xC2B2AE35
    hashed = (hashed ^ (hashed >> 16)).to(tl.int32, bitcast=True)
    distance = ((hashed ^ (hashed >> 31)).to(tl.float32) + 0.5) * (2.0**-32)
    is_upper = hashed < 0
    exponential = -tl.log(tl.where(is_upper, 1 - distance, distance))
    # -log(1 - distance) as a series where the difference would round: these are the variates that win.
    series = 1 / 5 + distance * (1 / 6 + distance * (1 / 7))
    series = distance * (1 + distance * (1 / 2 + distance * (1 / 3 + distance * (1 / 4 + distance * series))))
    return tl.log(tl.where(is_upper & (distance < SMALL_DISTANCE), series, exponential))


@triton.jit
def _state_of(seeds, prefix_lens, depths, row, request):
    seed = tl.load(seeds + request)
    position = tl.load(prefix_lens + request).to(tl.int64) + tl.load(depths + row)
    state = _mixed(tl.full((), 0, tl.uint32), (seed & 0xFFFFFFFF).to(tl.uint32))
    state = _mixed(state, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    return _mixed(state, (position & 0xFFFFFFFF).to(tl.uint32))


@triton.jit
def _load_row(logits, row, token, vocabulary):
    # What is no number would upset the search for a maximum: its place is then any, and may be beyond the row.
    values = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=-float("inf"))
    return tl.where(values == values, values, -float("inf"))


@triton.jit
def _race_blocks(
    logits, seeds, prefix_lens, depths, temperatures, tops, top_ids, sums, times, winners, width, vocabulary,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = row // width
    token = block * BLOCK + tl.arange(0, BLOCK)
    values = _load_row(logits, row, token, vocabulary)
    # Of the logits themselves: a quotient rounds, and may make a tie of two that were none.
    top, top_at = tl.max(values, axis=0, return_indices=True)
    temperature = tl.load(temperatures + request)
    # Rounded as IEEE 754 has it, so that the order stays.
    scaled = tl.div_rn(values, temperature)
    shift = tl.where(top == -float("inf"), 0.0, tl.div_rn(top, temperature))
    time = _log_exponential(_state_of(seeds, prefix_lens, depths, row, request), token) - scaled
    first, first_at = tl.min(time, axis=0, return_indices=True)
    at = row * tl.num_programs(1) + block
    tl.store(tops + at, top)
    tl.store(top_ids + at, block * BLOCK + top_at)
    tl.store(sums + at, tl.sum(tl.exp(scaled - shift), axis=0))
    tl.store(times + at, first)
    tl.store(winners + at, block * BLOCK + first_at)


@triton.jit
def _settle(
    logits, seeds, prefix_lens, depths, temperatures, top_ks, top_ps, min_ps, tops, top_ids, sums, times, winners,
    chosen, width, vocabulary, blocks,
    FILTERED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    request = row // width
    index = tl.arange(0, BLOCKS)
    inside = index < blocks
    at = row * blocks + index
    block_tops = tl.load(tops + at, mask=inside, other=-float("inf"))
    top_k = tl.load(top_ks + request)
    _, best = tl.max(block_tops, axis=0, return_indices=True)
    if top_k <= 1:
        tl.store(chosen + row, tl.load(top_ids + row * blocks + best).to(tl.int64))
        return
    _, best = tl.min(tl.load(times + at, mask=inside, other=float("inf")), axis=0, return_indices=True)
    winner = tl.load(winners + row * blocks + best)
    if FILTERED:
        temperature = tl.load(temperatures + request)
        block_tops = tl.div_rn(block_tops, temperature)
        top = tl.max(block_tops, axis=0)
        block_sums = tl.load(sums + at, mask=inside, other=0.0)
        shares = tl.where(block_tops == -float("inf"), 0.0, block_sums * tl.exp(block_tops - top))
        total = tl.sum(shares.to(tl.float64), axis=0)
        top_p, min_p = tl.load(top_ps + request), tl.load(min_ps + request)
        state = _state_of(seeds, prefix_lens, depths, row, request)
        is_settled = (top_k >= vocabulary) & (top_p >= 1.0) & (min_p <= 0.0)
        while not is_settled:
            pivot = tl.div_rn(_load_row(logits, row, winner, vocabulary), temperature)
            ahead = tl.full((), 0, tl.int32)
            mass = tl.full((), 0.0, tl.float64)
            time = tl.full((), float("inf"), tl.float32)
            next_winner = winner
            # Only blocks that hold a token as probable as the winner.
            block = tl.min(tl.where(block_tops >= pivot, index, BLOCKS), axis=0)
            while block < blocks:
                token = block * BLOCK + tl.arange(0, BLOCK)
                scaled = tl.div_rn(_load_row(logits, row, token, vocabulary), temperature)
                is_ahead = (scaled > pivot) | ((scaled == pivot) & (token < winner) & (scaled > -float("inf")))
                ahead += tl.sum(is_ahead.to(tl.int32), axis=0)
                mass += tl.sum(tl.where(is_ahead, tl.exp(scaled - top), 0.0), axis=0).to(tl.float64)
                block_times = tl.where(is_ahead, _log_exponential(state, token) - scaled, float("inf"))
                first, first_at = tl.min(block_times, axis=0, return_indices=True)
                if first < time:
                    time = first
                    next_winner = block * BLOCK + first_at
                block = tl.min(tl.where((block_tops >= pivot) & (index > block), index, BLOCKS), axis=0)
            is_kept = (ahead < top_k) & ((mass / total <= top_p) | (top_p >= 1.0)) & (tl.exp(pivot - top) >= min_p)
            # Every round leaves fewer, also of logits that are no numbers.
            is_settled = is_kept | (ahead == 0)
            winner = tl.where(is_settled, winner, next_winner)
    tl.store(chosen + row, winner.to(tl.int64))


def sample_nodes(
    logits: torch.Tensor, depths: torch.Tensor, prefix_lens: torch.Tensor, max_depth: int, sampling: Sampling
) -> torch.Tensor:
    """As `sampling.sample_nodes`.

    A sum that lies within rounding of top_p, and two tokens whose times are within rounding of each other, may be
    judged otherwise than by the twin: by the same rule for every batch.
    """
    batch, width, vocabulary = logits.shape
    rows, blocks, device = batch * width, triton.cdiv(vocabulary, BLOCK), logits.device
    chosen = torch.empty((batch, width), dtype=torch.int64, device=device)
    if rows == 0:
        return chosen
    # Each aligned, whatever the batch (see `trees.build_trees`).
    tops, sums, times = (torch.empty((rows, blocks), dtype=torch.float32, device=device) for _ in range(3))
    top_ids, winners = (torch.empty((rows, blocks), dtype=torch.int32, device=device) for _ in range(2))
    given = logits.contiguous(), sampling.seeds, prefix_lens, depths, sampling.temperatures
    _race_blocks[(rows, blocks)](
        *given, tops, top_ids, sums, times, winners, width, vocabulary, BLOCK=BLOCK, num_warps=WARPS
    )
    _settle[(rows,)](
        *given, sampling.top_ks, sampling.top_ps, sampling.min_ps, tops, top_ids, sums, times, winners,
        chosen, width, vocabulary, blocks,
        FILTERED=sampling.is_filtered, BLOCKS=triton.next_power_of_2(blocks), BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return chosen
