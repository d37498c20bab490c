"""Penalties, exact for every node: a node's distribution sees the outputs so far and the tokens of its own path.

SGLang counts one output token per step on the host; here an accepted run is counted on the device, right after it is
known, and each node's ancestors are added for that node only. The arithmetic per token is SGLang's: frequency and
presence are subtracted, then repetition divides positive logits and multiplies others; and below `min_new_tokens` the
stop tokens are impossible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddtree_appliance.ddtree.torch_ops import AcceptBatch, TreeBatch, from_host
from ddtree_appliance.ddtree.tree import NO_PARENT

# Of the largest intermediates, whatever the batch: they lie outside SGLang's memory plan.
PENALTY_BYTES = 512 << 20
BYTES_PER_LOGIT = 24


def asks_for_penalties(request: Any) -> bool:
    """request: SGLang's Req."""
    params = request.sampling_params
    counted = params.frequency_penalty != 0 or params.presence_penalty != 0 or params.repetition_penalty != 1
    return bool(counted or params.min_new_tokens > 0)


@dataclass(frozen=True)
class Penalties:
    """What r requests of a batch ask. rows: [r] int64, their places in the batch; the rest on the device too.

    frequency, presence, repetition: [r, 1, 1] fp32. min_new_tokens, prompt_lens: [r, 1] int64. stops: [r, vocabulary]
    bool, the tokens that end a request, or None if no request sets a minimum.
    """

    rows: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor
    min_new_tokens: torch.Tensor
    prompt_lens: torch.Tensor
    stops: torch.Tensor | None

    @classmethod
    def of(cls, requests: Sequence[Any], vocabulary: int, device: torch.device) -> Penalties | None:
        """requests: SGLang's Reqs of a batch, in order. None if none of them asks."""
        asking = [index for index, request in enumerate(requests) if asks_for_penalties(request)]
        if not asking:
            return None
        params = [requests[index].sampling_params for index in asking]
        coefficients = from_host(
            [[each.frequency_penalty, each.presence_penalty, each.repetition_penalty] for each in params],
            torch.float32,
            device,
        )
        numbers = from_host(
            [
                [index, each.min_new_tokens, len(requests[index].origin_input_ids)]
                for index, each in zip(asking, params, strict=True)
            ],
            torch.int64,
            device,
        )
        stops = None
        if any(each.min_new_tokens > 0 for each in params):
            stops = torch.zeros((len(asking), vocabulary), dtype=torch.bool, device=device)
            cells = [
                [row, token]
                for row, index in enumerate(asking)
                for token in sorted(stop_tokens(requests[index]))
                if 0 <= token < vocabulary
            ]
            if cells:
                where = from_host(cells, torch.int64, device)
                # A number assigned through indices is copied from the host, which waits.
                stops.index_put_((where[:, 0], where[:, 1]), torch.ones_like(where[:, 0], dtype=torch.bool))
        frequency, presence, repetition = (column.view(-1, 1, 1) for column in coefficients.unbind(1))
        rows, min_new_tokens, prompt_lens = numbers.unbind(1)
        return cls(rows, frequency, presence, repetition, min_new_tokens.unsqueeze(1), prompt_lens.unsqueeze(1), stops)

    def apply(
        self, logits: torch.Tensor, counts: torch.Tensor, trees: TreeBatch, prefix_lens: torch.Tensor, max_depth: int
    ) -> None:
        """Penalise the asking requests' rows of `logits` in place.

        logits: [b, V, vocabulary]; counts: [r, vocabulary] int32, each request's outputs so far, the root's token
        included; trees: of the whole batch, with nodes no deeper than max_depth; prefix_lens: [b], committed tokens
        without the root's.
        """
        step = max(1, PENALTY_BYTES // (BYTES_PER_LOGIT * logits[0].numel()))
        for begin in range(0, len(self.rows), step):
            part = slice(begin, begin + step)
            rows = self.rows[part]
            raw = logits[rows]
            tokens, is_there = path_tokens(trees.token_ids[rows], trees.parents[rows], max_depth)
            occurrences = torch.gather(counts[part], 1, tokens.flatten(1)).view(tokens.shape)
            # A token may stand twice on a path. A filler is counted like any token, so that it rewrites what is right.
            equal = (tokens.unsqueeze(3) == tokens.unsqueeze(2)) & is_there.unsqueeze(2)
            on_path = self._penalised(torch.gather(raw, 2, tokens), occurrences + equal.sum(dim=3), part)
            penalised = self._penalised(raw, counts[part].unsqueeze(1), part).scatter_(2, tokens, on_path)
            if self.stops is not None:
                outputs = (prefix_lens[rows].unsqueeze(1) + 1 - self.prompt_lens[part]) + trees.depths[rows]
                too_early = (outputs < self.min_new_tokens[part]).unsqueeze(2)
                penalised.masked_fill_(too_early & self.stops[part].unsqueeze(1), float("-inf"))
            logits[rows] = penalised

    def _penalised(self, logits: torch.Tensor, occurrences: torch.Tensor, part: slice) -> torch.Tensor:
        occurred = occurrences > 0
        shifted = logits - self.frequency[part] * occurrences - self.presence[part] * occurred
        scaled = torch.where(shifted < 0, shifted * self.repetition[part], shifted / self.repetition[part])
        return torch.where(occurred, scaled, shifted)


def path_tokens(token_ids: torch.Tensor, parents: torch.Tensor, max_depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The drafted tokens on the way from each node up to the root, which is not one of them.

    token_ids, parents: [r, V] int64 as in `TreeBatch`. Returns tokens [r, V, max_depth] int64, some valid token where
    there is none, and is_there [r, V, max_depth] bool.
    """
    token_ids = token_ids.clamp(min=0)
    node = torch.arange(parents.shape[1], device=parents.device).expand_as(parents)
    tokens, is_there = [], []
    for _ in range(max_depth):
        parent = torch.gather(parents, 1, node)
        tokens.append(torch.gather(token_ids, 1, node))
        is_there.append(parent != NO_PARENT)
        node = torch.where(parent == NO_PARENT, node, parent)
    return torch.stack(tokens, dim=2), torch.stack(is_there, dim=2)


def stop_tokens(request: Any) -> set[int]:
    """What SGLang's own min_new_tokens makes impossible. request: SGLang's Req."""
    tokens = set(request.sampling_params.stop_token_ids or ())
    tokenizer = request.tokenizer
    if tokenizer is not None:
        tokens |= set(getattr(tokenizer, "additional_stop_token_ids", None) or ())
        if tokenizer.eos_token_id is not None:
            tokens.add(tokenizer.eos_token_id)
    return tokens


class OutputCounts:
    """How often each request that asks has put out each token: [slots, vocabulary] int32, by the request's slot.

    Made when the first request asks; a server that is never asked pays nothing.
    """

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self._counts = torch.zeros((slots, vocabulary), dtype=torch.int32, device=device)

    def start(self, slots: torch.Tensor, outputs: Sequence[Sequence[int]], first: torch.Tensor) -> None:
        """Begin after a prefill. slots: [r] int64; outputs: what a retracted request had put out; first: [r]."""
        self._counts.index_fill_(0, slots, 0)
        cells = [[row, token] for row, tokens in enumerate(outputs) for token in tokens]
        if cells:
            where = from_host(cells, torch.int64, self._counts.device)
            self._add(slots[where[:, 0]], where[:, 1], torch.ones(len(cells), dtype=torch.bool, device=slots.device))
        self._add(slots, first.to(torch.int64), torch.ones_like(slots, dtype=torch.bool))

    def add(self, slots: torch.Tensor, accepted: AcceptBatch, rows: torch.Tensor) -> None:
        """Count accepted runs, bonus included. slots: [r]; rows: [r] int64, the requests' places in `accepted`."""
        tokens = accepted.tokens[rows]
        depth = torch.arange(tokens.shape[1], device=tokens.device)
        within = depth <= accepted.num_correct[rows].unsqueeze(1)
        self._add(slots.unsqueeze(1).expand_as(tokens).flatten(), tokens.flatten(), within.flatten())

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """[r, vocabulary] int32."""
        return self._counts[slots]

    def _add(self, slots: torch.Tensor, tokens: torch.Tensor, counted: torch.Tensor) -> None:
        self._counts.index_put_((slots, tokens), counted.to(torch.int32), accumulate=True)
