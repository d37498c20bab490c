"""The token that the target chooses after each node, once everything that a request asked for has had its say.

The order is SGLang's: penalties, grammar, logit bias, custom processors, then the argmax or a draw. A batch that asks
for none of it goes straight to the argmax, which the model's own logits answer as well as a copy in float32 does.
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

    def warm_up(self, width: int, device: str, dtype: torch.dtype) -> None:
        """Choose and draw once, so that no request waits for a kernel's compiler. width: V; dtype: of the target."""
        logits = torch.zeros((1, width, self._vocabulary), device=device)
        for kept in (torch.float32, dtype):
            self._kernels.best_tokens(logits.to(kept))
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

    @staticmethod
    def changes_or_draws(batch: Any) -> bool:
        """Whether `choose` does more than an argmax, and so needs logits in float32. batch: SGLang's ScheduleBatch."""
        info = batch.sampling_info
        return bool(
            batch.has_grammar
            or info.logit_bias is not None
            or info.has_custom_logit_processor
            # SGLang's flag stays down once a sampled request has been in the batch.
            or any(is_sampled(each.sampling_params) or asks_for_penalties(each) for each in batch.reqs)
        )

    def choose(self, batch: Any, trees: TreeBatch, logits: torch.Tensor, masks: NodeMasks | None) -> torch.Tensor:
        """batch: SGLang's ScheduleBatch. masks: of the grammars.

        logits: [b * V, vocabulary], changed in place; fp32 if it `changes_or_draws`, else any float type. Returns
        [b, V] int64.
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
        if not any(is_sampled(request.sampling_params) for request in batch.reqs):
            return self._kernels.best_tokens(nodes)
        sampling = sampling_of(info, batch.reqs)
        return self._kernels.sample_nodes(nodes, trees.depths, batch.seq_lens, self._max_depth, sampling)

    def count(self, batch: Any, accepted: AcceptBatch) -> None:
        """Count what the last `choose` led to. accepted: the same on every rank."""
        if self._penalties is not None and self._counts is not None:
            rows = self._penalties.rows
            self._counts.add(batch.req_pool_indices[rows], accepted, rows)
