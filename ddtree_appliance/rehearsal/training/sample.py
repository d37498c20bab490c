"""Text that the target itself writes: the drafter's training text and the report's greedy continuations."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree_appliance.rehearsal.training.model import Target


@torch.no_grad()
def continue_text(
    target: Target, prompts: Tensor, length: int, temperatures: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Extend `prompts` [B, P] int64 to [B, length] int64, one token per step for all rows, past any end of text.

    `temperatures` [B] float32, 0 = greedy. argmax(logits + t * gumbel) samples softmax(logits / t) and is the plain
    argmax at t = 0, so that one formula serves both.
    """
    batch, prompt_length = prompts.shape
    ids = torch.empty(batch, length, dtype=torch.int64, device=prompts.device)
    ids[:, :prompt_length] = prompts
    autocast = torch.is_autocast_enabled(prompts.device.type)
    dtype = torch.get_autocast_dtype(prompts.device.type) if autocast else torch.float32
    cache = target.new_cache(batch, length, dtype)
    greedy = not bool(temperatures.any())
    hidden, _ = target(prompts, cache=cache)
    for position in range(prompt_length, length):
        logits = target.logits(hidden[:, -1]).float()
        if not greedy:
            noise = torch.empty_like(logits).exponential_(generator=generator).log_().neg_()
            logits = torch.addcmul(logits, temperatures.unsqueeze(-1), noise)
        ids[:, position] = logits.argmax(dim=-1)
        if position + 1 < length:
            hidden, _ = target(ids[:, position : position + 1], start=position, cache=cache)
    return ids
