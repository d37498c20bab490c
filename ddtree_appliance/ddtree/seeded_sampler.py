"""SGLang's sampling backend "seeded": what DDTREE draws with, for prefill and for decoding without speculation.

SGLang's other backends honour a seed in deterministic inference only, give a request other tokens beside requests that
filter, and know no min-p with seeds. This one needs neither and depends on no neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from ddtree_appliance.ddtree.sampling import Sampling, draw, exponentials, hashed_positions, rows_at_once


def sampling_of(info: Any, requests: Sequence[Any] | None = None) -> Sampling:
    """info: SGLang's SamplingBatchInfo, made by a server whose sampling backend is `SeededSampler`'s.

    requests: the batch's Reqs, if they are known: the greedy ones among them, whose top_k is 1, sort nothing then.
    """
    is_filtered = info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling
    if is_filtered and requests is not None:
        is_filtered = any(_filters(request.sampling_params) for request in requests)
    return Sampling(
        temperatures=info.temperatures,
        top_ks=info.top_ks,
        top_ps=info.top_ps,
        min_ps=info.min_ps,
        seeds=info.sampling_seed,
        is_filtered=is_filtered,
    )


def is_sampled(params: Any) -> bool:
    """Whether a request asks for draws. params: SGLang's SamplingParams, whose top_k is 1 for a greedy one."""
    return bool(params.top_k > 1)


def _filters(params: Any) -> bool:
    return is_sampled(params) and bool(params.top_k != TOP_K_ALL or params.top_p != 1 or params.min_p > 0)


class SeededSampler(Sampler):  # type: ignore[misc]  # SGLang ships no type information
    """One token per request. Everything around the draw (log-probabilities, masks, ranks) is SGLang's."""

    def _preprocess_logits(self, logits: torch.Tensor, sampling_info: Any) -> torch.Tensor:
        logits = super()._preprocess_logits(logits, sampling_info)
        # Of the logits: softmax rounds, and may make a tie of two that were none.
        self._greedy = torch.argmax(logits, dim=-1) if sampling_info.is_any_greedy else None
        return logits

    def _sample_from_probs(
        self, probs: torch.Tensor, sampling_info: Any, positions: torch.Tensor, simple_sampling_case: bool
    ) -> torch.Tensor:
        asked = sampling_of(sampling_info)
        states = hashed_positions(asked.seeds, positions.to(torch.int64).view(-1, 1))
        tokens = torch.empty(len(probs), dtype=torch.int64, device=probs.device)
        for begin in range(0, len(probs), step := rows_at_once(probs.shape[-1])):
            rows = slice(begin, begin + step)
            noise = exponentials(states[rows], probs.shape[-1])
            tokens[rows] = draw(probs[rows].unsqueeze(1), noise, asked.part(rows)).squeeze(1)
        if self._greedy is not None:
            tokens = torch.where(asked.top_ks <= 1, self._greedy, tokens)
        return tokens.to(torch.int32)
