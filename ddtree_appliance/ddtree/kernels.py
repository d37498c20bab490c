"""Which implementation of each step runs on which device.

One table per device type; a fused kernel replaces the torch function of the same name and must equal it on every
input (same shapes, dtypes, ties and padding). The worker calls the steps only through a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ddtree_appliance.ddtree import torch_ops


@dataclass(frozen=True)
class Kernels:
    """The steps around the two model forwards; see `torch_ops` for their contracts."""

    top_candidates: Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
    build_trees: Callable[[torch.Tensor, torch.Tensor, int], torch_ops.TreeBatch]
    node_positions: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    verify_mask: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
    accept_greedy: Callable[[torch_ops.TreeBatch, torch.Tensor, int], torch_ops.AcceptBatch]
    path_slots: Callable[[torch.Tensor, torch_ops.AcceptBatch], tuple[torch.Tensor, torch.Tensor]]
    move_kv: Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], None]
    gather_path: Callable[[torch.Tensor, torch_ops.AcceptBatch], torch.Tensor]


TORCH = Kernels(
    top_candidates=torch_ops.top_candidates,
    build_trees=torch_ops.build_trees,
    node_positions=torch_ops.node_positions,
    verify_mask=torch_ops.verify_mask,
    accept_greedy=torch_ops.accept_greedy,
    path_slots=torch_ops.path_slots,
    move_kv=torch_ops.move_kv,
    gather_path=torch_ops.gather_path,
)

TABLES: dict[str, Kernels] = {"cpu": TORCH, "cuda": TORCH}


def kernels_for(device: str) -> Kernels:
    """The table for a device such as "cpu" or "cuda:0". Raises KeyError for a type without one."""
    return TABLES[torch.device(device).type]
