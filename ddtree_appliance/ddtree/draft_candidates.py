"""The candidates of a drafter pass: made inside its CUDA graph where one is captured, after the pass elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from ddtree_appliance.ddtree.head import HeadShard
from ddtree_appliance.ddtree.kernels import Kernels


class DraftCandidates:
    """Ranks the K most probable tokens per position of a block from the drafter's hidden states.

    As SGLang's capture hook it runs at the end of the captured pass and leaves its results in buffers of fixed address,
    for up to `max_batch` requests.
    """

    def __init__(self, kernels: Kernels, head: HeadShard, topk: int, block_size: int, max_batch: int) -> None:
        self._kernels = kernels
        self._head = head
        self._topk = topk
        self._block_size = block_size
        shape = (max_batch, block_size - 1, min(topk, head.vocabulary))
        device = head.weight.device
        self._logprobs = torch.empty(shape, dtype=torch.float32, device=device)
        self._ids = torch.empty(shape, dtype=torch.int64, device=device)

    def rank(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states: [b * B, H], row d of a block at depth d. Returns what `Kernels.top_candidates` does."""
        per_request = hidden_states.view(-1, self._block_size, hidden_states.shape[-1])
        return self._kernels.top_candidates(per_request[:, 1:], self._head, self._topk)

    def __call__(self, hidden_states: torch.Tensor, input_ids: Any = None) -> None:
        """The capture hook: `rank` into the buffers."""
        logprobs, ids = self.rank(hidden_states)
        self._logprobs[: len(logprobs)].copy_(logprobs)
        self._ids[: len(ids)].copy_(ids)

    def captured(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last replay left for its first `batch` requests."""
        return self._logprobs[:batch], self._ids[:batch]
