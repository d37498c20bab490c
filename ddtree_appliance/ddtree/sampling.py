"""One draw per node from the target's distribution, with noise that depends on the request alone.

A draw is an exponential race (Gumbel-max in another form): token t gets E_t / p_t with independent E_t ~ Exp(1), and
the smallest wins, with probability p_t. E_t is a hash of (request seed, position, t). Nodes of equal depth share a
position and therefore noise: exact, because one of them at most is on the accepted path. And since nothing else enters,
a request's tokens are the same alone, in any batch, under any tree and without speculation.

The hash is MurmurHash3 (x86, 32 bit, by Austin Appleby) over the words seed low, seed high, position, token: the one
that SGLang's deterministic inference uses, so that seeds mean the same there wherever nothing is filtered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Of the largest intermediates, whatever the batch: draws lie outside SGLang's memory plan.
DRAW_BYTES = 640 << 20
# While a GPU sorts: probabilities, noise, race, sorted values and indices, and as much again and more of its own.
BYTES_PER_PROBABILITY = 56


@dataclass(frozen=True)
class Sampling:
    """What the requests of a batch ask of their distribution; every tensor lies on the logits' device.

    temperatures: [b, 1] fp32; top_ks: [b] int32, 1 for a greedy request; top_ps, min_ps: [b] fp32; seeds: [b] int64.
    is_filtered: whether any request has top-k, top-p or min-p; if False, these three are not read for sampled requests.
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    seeds: torch.Tensor
    is_filtered: bool

    def part(self, rows: slice) -> Sampling:
        """Some of the requests."""
        return Sampling(
            self.temperatures[rows],
            self.top_ks[rows],
            self.top_ps[rows],
            self.min_ps[rows],
            self.seeds[rows],
            self.is_filtered,
        )


def rows_at_once(vocabulary: int) -> int:
    """How many rows of a vocabulary the memory for draws holds."""
    return max(1, DRAW_BYTES // (BYTES_PER_PROBABILITY * vocabulary))


def sample_nodes(
    logits: torch.Tensor, depths: torch.Tensor, prefix_lens: torch.Tensor, max_depth: int, sampling: Sampling
) -> torch.Tensor:
    """The token that the target chooses after each node: a draw, or the argmax for a greedy request.

    logits: [b, V, vocabulary] fp32, with every penalty, bias and mask applied; depths: [b, V] int64, at most max_depth;
    prefix_lens: [b], the committed tokens, so that a node's input is at position prefix + depth.
    Returns [b, V] int64. Waits for nothing on the host.
    """
    at_once = rows_at_once(logits.shape[-1])
    width = depths.shape[1]
    nodes_at_once = min(width, at_once)
    levels = prefix_lens.to(torch.int64).unsqueeze(1) + torch.arange(max_depth + 1, device=logits.device)
    states = hashed_positions(sampling.seeds, levels)
    chosen = torch.empty_like(depths)
    for begin in range(0, len(logits), step := max(1, at_once // width)):
        requests = slice(begin, begin + step)
        asked = sampling.part(requests)
        noise = exponentials(states[requests], logits.shape[-1])
        is_greedy = (asked.top_ks <= 1).unsqueeze(1)
        for first in range(0, width, nodes_at_once):
            cell = requests, slice(first, first + nodes_at_once)
            probabilities = torch.softmax(logits[cell] / asked.temperatures.unsqueeze(1), dim=-1)
            drawn = draw(probabilities, torch.take_along_dim(noise, depths[cell].unsqueeze(2), dim=1), asked)
            chosen[cell] = torch.where(is_greedy, torch.argmax(logits[cell], dim=-1), drawn)
    return chosen


def draw(probabilities: torch.Tensor, noise: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The winners of the race. probabilities, noise: [b, n, vocabulary] fp32. Returns [b, n] int64."""
    race = noise / probabilities
    if sampling.is_filtered:
        ranked = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        # Back in the order of tokens, so that a tie ends as it does without filters.
        kept = torch.zeros_like(probabilities, dtype=torch.bool)
        kept.scatter_(-1, ranked.indices, _kept(ranked.values, sampling))
        race.masked_fill_(~kept, float("inf"))
    return torch.argmin(race, dim=-1)


def _kept(ranked: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Which of the probabilities, sorted downwards, top-k, top-p and min-p leave; each judges the whole distribution.

    Joint, as SGLang does by default, and not one after another on what the last has left. The first token whose
    predecessors hold more than top_p goes, so that the most probable token always stays; top_p = 1 takes nothing away,
    whatever rounding makes of the sum.
    """
    # In float64: how a GPU cuts a sum depends on the batch, and a request's tokens must not.
    before = torch.cumsum(ranked, dim=-1, dtype=torch.float64) - ranked
    top_ps, min_ps = sampling.top_ps.view(-1, 1, 1), sampling.min_ps.view(-1, 1, 1)
    kept = torch.arange(ranked.shape[-1], device=ranked.device) < sampling.top_ks.view(-1, 1, 1)
    kept = kept & ((before <= top_ps) | (top_ps >= 1))
    return kept & (ranked >= ranked[..., :1] * min_ps)


def hashed_positions(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What the noise of a position depends on. seeds: [b] int64; positions: [b, n] int64. Returns [b, n] int32."""
    state = torch.zeros_like(positions, dtype=torch.int32)
    for word in (seeds.unsqueeze(1), (seeds >> 32).unsqueeze(1), positions):
        state = _mix(state, _word(word))
    return state


def exponentials(states: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Independent Exp(1) variates. states: [b, n], of `hashed_positions`. Returns [b, n, vocabulary] fp32, > 0.

    A 32-bit hash h stands for the middle of its 1/2^32 of the unit interval, so that neither end is ever reached: at
    h = 2^32 - 1 the formula h / (2^32 - 1) would give 0, which beats every probability. Both halves of the interval
    are measured from their own end, where float32 is exact: small variates decide races, and no large one is infinite.
    """
    tokens = torch.arange(vocabulary, device=states.device, dtype=torch.int32)
    hashed = _finish(_mix(states.unsqueeze(2), tokens) ^ 16)  # 16: the key's bytes
    # h, or 2^32 - 1 - h in the upper half, where the signed number is negative: the distance to the nearer end.
    distance = (hashed ^ (hashed >> 31)).to(torch.float32).add_(0.5).mul_(2.0**-32)
    return torch.where(hashed < 0, torch.log1p(-distance), torch.log(distance)).neg_()


# 32-bit arithmetic in int32, whose products and left shifts wrap; a right shift needs its copies of the sign removed.


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


_C1, _C2 = _signed(0xCC9E2D51), _signed(0x1B873593)
_ADD = _signed(0xE6546B64)
_F1, _F2 = _signed(0x85EBCA6B), _signed(0xC2B2AE35)


def _word(value: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 values."""
    return (((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _shifted_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value >> bits) & ((1 << (32 - bits)) - 1)


def _rotated(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value << bits) | _shifted_right(value, 32 - bits)


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    return _rotated(state ^ (_rotated(word * _C1, 15) * _C2), 13) * 5 + _ADD


def _finish(state: torch.Tensor) -> torch.Tensor:
    state = (state ^ _shifted_right(state, 16)) * _F1
    state = (state ^ _shifted_right(state, 13)) * _F2
    return state ^ _shifted_right(state, 16)
