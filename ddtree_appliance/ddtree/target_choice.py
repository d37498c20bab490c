"""The token that the target chooses after each node, once everything that a request asked for has had its say.

The order is SGLang's: penalties, grammar, logit bias, custom processors, then the argmax or a draw. A batch that asks
for none of it goes straight to the argmax.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.utils.async_probe import sanitize_nan_logits

from ddtree_appliance.ddtree.constrained import NodeMasks
from ddtree_appliance.ddtree.kernels import Kernels
from ddtree_appliance.ddtree.logit_processors import apply_processors
from ddtree_appliance.ddtree.penalties import OutputCounts, Penalties, asks_for_penalties
from ddtree_appliance.ddtree.sampling import Sampling
from ddtree_appliance.ddtree.seeded_sampler import is_sampled, sampling_of
from ddtree_appliance.ddtree.torch_ops import AcceptBatch, TreeBatch, from_host


class TargetChoice:
    """max_depth: of any node. slots: of SGLang's request pool, by which outputs are counted."""

    def __init__(self, kernels: Kernels, max_depth: int, slots: int, vocabulary: int) -> None:
        self._kernels = kernels
        self._max_depth = max_depth
        self._slots = slots
        self._vocabulary = vocabulary
        self._counts: OutputCounts | None = None
        self._penalties: Penalties | None = None

    def warm_up(self, width: int, device: str) -> None:
        """Draw once, so that no sampled request waits for a kernel's compiler. width: V."""
        logits = torch.zeros((1, width, self._vocabulary), device=device)
        nodes = torch.zeros((1, width), dtype=torch.int64, device=device)
        for is_filtered in (False, True):
            asked = Sampling(
                temperatures=torch.ones((1, 1), device=device),
                top_ks=torch.full((1,), 2, dtype=torch.int32, device=device),
                top_ps=torch.ones(1, device=device),
                min_ps=torch.zeros(1, device=device),
                seeds=torch.zeros(1, dtype=torch.int64, device=device),
                is_filtered=is_filtered,
            )
            self._kernels.sample_nodes(logits, nodes, nodes[:, 0].clone(), self._max_depth, asked)

    def start(self, batch: Any, first_tokens: torch.Tensor) -> None:
        """After a prefill: begin to count the outputs of the requests that ask. first_tokens: [b], on the device."""
        asking = [index for index, request in enumerate(batch.reqs) if asks_for_penalties(request)]
        if not asking:
            return
        if self._counts is None:
            self._counts = OutputCounts(self._slots, self._vocabulary, first_tokens.device)
        rows = from_host(asking, torch.int64, first_tokens.device)
        outputs = [batch.reqs[index].output_ids for index in asking]
        self._counts.start(batch.req_pool_indices[rows], outputs, first_tokens[rows])

    def choose(self, batch: Any, trees: TreeBatch, logits: torch.Tensor, masks: NodeMasks | None) -> torch.Tensor:
        """batch: SGLang's ScheduleBatch. logits: [b * V, vocabulary], changed in place; masks: of the grammars.

        Returns [b, V] int64.
        """
        info = batch.sampling_info
        width = trees.parents.shape[1]
        nodes = logits.view(-1, width, logits.shape[-1])
        self._penalties = Penalties.of(batch.reqs, nodes.shape[-1], nodes.device)
        if self._penalties is not None:
            assert self._counts is not None, "a request that asks for penalties was not prefilled here"
            counts = self._counts.of(batch.req_pool_indices[self._penalties.rows])
            self._penalties.apply(nodes, counts, trees, batch.seq_lens, self._max_depth)
        if masks is not None:
            masks.apply(nodes)
        if info.logit_bias is not None:
            nodes += info.logit_bias.unsqueeze(1)
        if info.has_custom_logit_processor:
            apply_processors(nodes, info, batch.reqs, trees)
        sanitize_nan_logits(logits, "DDTREE: node logits")
        # SGLang's flag stays down once a sampled request has been in the batch.
        if not any(is_sampled(request.sampling_params) for request in batch.reqs):
            return torch.argmax(nodes, dim=-1)
        sampling = sampling_of(info, batch.reqs)
        return self._kernels.sample_nodes(nodes, trees.depths, batch.seq_lens, self._max_depth, sampling)

    def count(self, batch: Any, accepted: AcceptBatch) -> None:
        """Count what the last `choose` led to. accepted: the same on every rank."""
        if self._penalties is not None and self._counts is not None:
            rows = self._penalties.rows
            self._counts.add(batch.req_pool_indices[rows], accepted, rows)
