"""Which implementation of each step runs on which device.

One table per device type; a fused kernel replaces the torch function of the same name and must equal it on every
input (same shapes, dtypes, ties and padding), but for rounding where its docstring says so. The worker calls the steps
only through a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ddtree_appliance.ddtree import inputs, sampling, torch_ops
from ddtree_appliance.ddtree.head import HeadShard
from ddtree_appliance.ddtree.kv_buffers import KVBuffers


class DraftInputs(Protocol):
    """The signature of `inputs.draft_inputs`."""

    def __call__(
        self,
        bonus_tokens: torch.Tensor,
        prefix_lens: torch.Tensor,
        requests: torch.Tensor,
        req_to_token: torch.Tensor,
        mask_token: int,
        block_size: int,
        step_slots: int,
        rows_out: torch.Tensor | None = None,
    ) -> inputs.DraftInputs: ...


class VerifyInputs(Protocol):
    """The signature of `inputs.verify_inputs`."""

    def __call__(
        self,
        trees: torch_ops.TreeBatch,
        bonus_tokens: torch.Tensor,
        prefix_lens: torch.Tensor,
        prefix_lens_bound: int,
        mask_out: torch.Tensor | None = None,
        bits_out: torch.Tensor | None = None,
    ) -> inputs.VerifyInputs: ...


@dataclass(frozen=True)
class Kernels:
    """The steps around the two model forwards; see `inputs`, `torch_ops` and `sampling` for their contracts."""

    draft_inputs: DraftInputs
    top_candidates: Callable[[torch.Tensor, HeadShard, int], tuple[torch.Tensor, torch.Tensor]]
    build_trees: Callable[[torch.Tensor, torch.Tensor, int], torch_ops.TreeBatch]
    verify_inputs: VerifyInputs
    best_tokens: Callable[[torch.Tensor], torch.Tensor]
    sample_nodes: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, sampling.Sampling], torch.Tensor]
    accept: Callable[[torch_ops.TreeBatch, torch.Tensor, int], torch_ops.AcceptBatch]
    move_kv: Callable[[KVBuffers, torch.Tensor, torch.Tensor], None]
    gather_path: Callable[[torch.Tensor, torch_ops.AcceptBatch], torch.Tensor]


TORCH = Kernels(
    draft_inputs=inputs.draft_inputs,
    top_candidates=torch_ops.top_candidates,
    build_trees=torch_ops.build_trees,
    verify_inputs=inputs.verify_inputs,
    best_tokens=torch_ops.best_tokens,
    sample_nodes=sampling.sample_nodes,
    accept=torch_ops.accept,
    move_kv=torch_ops.move_kv,
    gather_path=torch_ops.gather_path,
)


def fused() -> Kernels:
    """The table of Triton kernels."""
    from ddtree_appliance.ddtree.fused import accept, candidates, greedy, kv, sampling, trees
    from ddtree_appliance.ddtree.fused import inputs as fused_inputs

    return Kernels(
        draft_inputs=fused_inputs.draft_inputs,
        top_candidates=candidates.top_candidates,
        build_trees=trees.build_trees,
        verify_inputs=fused_inputs.verify_inputs,
        best_tokens=greedy.best_tokens,
        sample_nodes=sampling.sample_nodes,
        accept=accept.accept,
        move_kv=kv.move_kv,
        gather_path=accept.gather_path,
    )


# Made when asked for: importing Triton kernels takes Triton, which a CPU host's tests of other parts need not have.
TABLES: dict[str, Callable[[], Kernels]] = {"cpu": lambda: TORCH, "cuda": fused}


def kernels_for(device: str) -> Kernels:
    """The table for a device such as "cpu" or "cuda:0". Raises KeyError for a type without one."""
    return TABLES[torch.device(device).type]()
