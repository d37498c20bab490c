"""Log-probabilities of accepted runs, by SGLang's own code, for no more rows at once than memory is planned for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_v2_logprobs

from ddtree_appliance.ddtree.sampling import DRAW_BYTES

# The rows' logits, the same over the temperature, and their log-probabilities; after the draws, in their place.
BYTES_PER_LOGIT = 12


def add_logprobs(batch: Any, logits_output: Any, choice: torch.Tensor, rows: torch.Tensor) -> None:
    """Fill SGLang's logits output with what the batch's requests ask: of the token put out after each row.

    batch: SGLang's ScheduleBatch; logits_output: its [b * V, vocabulary] logits, as the choice was made from them;
    choice: [b * V] int64, the token chosen after each node; rows: [b, L] int64, the accepted path in the flat logits.
    """
    run = rows.shape[1]
    logits = logits_output.next_token_logits
    at_once = max(1, DRAW_BYTES // (BYTES_PER_LOGIT * logits.shape[-1] * run))
    parts = [
        _part(batch, logits, choice, rows, slice(begin, begin + at_once)) for begin in range(0, len(rows), at_once)
    ]
    logits_output.next_token_logprobs = torch.cat([part.next_token_logprobs for part in parts])
    # A part in which nobody asks has no such lists; nobody reads its places either.
    nothing = logits.new_empty(0)
    for kind in ("top", "token_ids"):
        names = [f"next_token_{kind}_logprobs_{column}" for column in ("val", "idx")]
        if any(hasattr(part, names[0]) for part in parts):
            for name in names:
                filled = [getattr(part, name, [nothing] * part.next_token_logprobs.numel()) for part in parts]
                setattr(logits_output, name, [row for column in filled for row in column])


def _part(batch: Any, logits: torch.Tensor, choice: torch.Tensor, rows: torch.Tensor, requests: slice) -> Any:
    info = batch.sampling_info
    part = SimpleNamespace(
        seq_lens=batch.seq_lens[requests],
        sampling_info=SimpleNamespace(is_all_greedy=info.is_all_greedy, temperatures=info.temperatures[requests]),
        top_logprobs_nums=(batch.top_logprobs_nums or [])[requests],
        token_ids_logprobs=(batch.token_ids_logprobs or [])[requests],
    )
    output = SimpleNamespace(next_token_logits=logits)
    compute_spec_v2_logprobs(part, output, choice, rows[requests], rows.shape[1] - 1)
    return output
