"""Custom logit processors, called for every node with the request as it would be there.

SGLang passes a processor its request (`__req__` in the custom parameters), and processors read the outputs from it: a
thinking budget counts them. At a node the outputs are the request's and the node's path. Trees and outputs must be on
the host for that, so batches with a processor are not overlapped; only they wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ddtree_appliance.ddtree.torch_ops import TreeBatch
from ddtree_appliance.ddtree.tree import NO_PARENT, ROOT


class RequestAtNode:
    """SGLang's Req with the tokens of a node's path after its outputs; everything else is the request's own."""

    def __init__(self, request: Any, path: Sequence[int]) -> None:
        self._request = request
        self.output_ids = request.output_ids[:]
        self.output_ids.extend(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def apply_processors(logits: torch.Tensor, sampling_info: Any, requests: Sequence[Any], trees: TreeBatch) -> None:
    """Change `logits` ([b, V, vocabulary]) in place, as SGLang's sampler does before it draws.

    sampling_info: SGLang's SamplingBatchInfo; requests: the batch's Reqs, with every output before the trees' roots and
    the roots' tokens in `output_ids`.
    """
    token_ids, parents = trees.token_ids.tolist(), trees.parents.tolist()
    for processor, asking in sampling_info.custom_logit_processor.values():
        for row in asking.nonzero().flatten().tolist():
            nodes = [ROOT, *(node for node, parent in enumerate(parents[row]) if parent != NO_PARENT)]
            paths: dict[int, list[int]] = {ROOT: []}
            for node in nodes[1:]:  # parents come before their children
                paths[node] = [*paths[parents[row][node]], token_ids[row][node]]
            params = [
                _at_node(sampling_info.custom_params[row], RequestAtNode(requests[row], paths[node])) for node in nodes
            ]
            # One call per request: some processors take one request's parameters for all rows.
            logits[row, nodes] = processor(logits[row, nodes], params)


def _at_node(params: dict[str, Any] | None, request: RequestAtNode) -> dict[str, Any] | None:
    return {**params, "__req__": request} if params is not None else None
