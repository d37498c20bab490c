"""Deliberate faults for the negative controls: an SGLang plugin that breaks one step of DDTREE in a test's server.

The test puts this folder on the server's PYTHONPATH and names the fault in DDTREE_SABOTAGE. Nothing in the product
knows of it: the faults replace entries of the kernel table, or a function of SGLang, before the worker is made.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ddtree_appliance.ddtree import inputs, kernels, sampling, torch_ops


def mask_dropped(trees: torch_ops.TreeBatch, *others: Any, **outs: Any) -> inputs.VerifyInputs:
    """Causal in node order, as a backend without the mask would be."""
    chain = replace(trees, ancestors=torch.ones_like(trees.ancestors).tril())
    return inputs.verify_inputs(chain, *others, **outs)


def kv_not_moved(*arguments: Any) -> None:
    pass


def hidden_in_slot_order(rows: torch.Tensor, accepted: torch_ops.AcceptBatch) -> torch.Tensor:
    batch, run = accepted.path.shape
    return rows.view(batch, -1, rows.shape[-1])[:, :run].contiguous()


def hidden_of_another_request(rows: torch.Tensor, accepted: torch_ops.AcceptBatch) -> torch.Tensor:
    """Right as long as a request is alone."""
    return torch_ops.gather_path(rows, accepted).roll(1, dims=0)


def positions_by_index(trees: torch_ops.TreeBatch, *others: Any, **outs: Any) -> inputs.VerifyInputs:
    chain = replace(trees, depths=torch.arange(trees.depths.shape[1]).expand_as(trees.depths))
    return inputs.verify_inputs(chain, *others, **outs)


def builder_ignores_path(logprobs: torch.Tensor, ids: torch.Tensor, budget: int) -> torch_ops.TreeBatch:
    """Ranks count instead of log-probabilities: a valid tree, but not the most probable one."""
    ranks = torch.arange(logprobs.shape[2], dtype=torch.float32).expand_as(logprobs)
    return torch_ops.build_trees(-1.0 - ranks, ids, budget)


def noise_of_the_node(
    logits: torch.Tensor, depths: torch.Tensor, prefix_lens: torch.Tensor, max_depth: int, asked: sampling.Sampling
) -> torch.Tensor:
    """Noise by index instead of depth: the right distribution after each prefix, but not the tokens of the seed."""
    indices = torch.arange(depths.shape[1]).expand_as(depths)
    return sampling.sample_nodes(logits, indices, prefix_lens, depths.shape[1] - 1, asked)


def rank_1_disagrees(trees: torch_ops.TreeBatch, target_predict: torch.Tensor, max_run: int) -> torch_ops.AcceptBatch:
    """Another rank than 0 finds that the target chose a token that nobody drafted."""
    if torch.distributed.get_rank() != 0:
        target_predict = torch.full_like(target_predict, 7)
    return torch_ops.accept(trees, target_predict, max_run)


def rank_1_disagrees_unheard(*arguments: Any) -> torch_ops.AcceptBatch:
    from sglang.srt.distributed import get_tp_group

    get_tp_group().broadcast = lambda tensor, src=0: tensor
    return rank_1_disagrees(*arguments)


def reserve_from_budget_alone() -> None:
    from sglang.srt.mem_cache import allocation_sizing
    from sglang.srt.runtime_context import get_server_args

    def verify_width(server_args: Any = None) -> int:
        return int((server_args or get_server_args()).max_speculative_num_draft_tokens)

    allocation_sizing.get_alloc_len_per_decode = verify_width


KERNEL_FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "mask_dropped": ("verify_inputs", mask_dropped),
    "kv_not_moved": ("move_kv", kv_not_moved),
    "hidden_in_slot_order": ("gather_path", hidden_in_slot_order),
    "hidden_of_another_request": ("gather_path", hidden_of_another_request),
    "positions_by_index": ("verify_inputs", positions_by_index),
    "builder_ignores_path": ("build_trees", builder_ignores_path),
    "noise_of_the_node": ("sample_nodes", noise_of_the_node),
    "rank_1_disagrees": ("accept", rank_1_disagrees),
    "rank_1_disagrees_unheard": ("accept", rank_1_disagrees_unheard),
}


def register() -> None:
    fault = os.environ["DDTREE_SABOTAGE"]
    if fault == "reserve_from_budget_alone":
        reserve_from_budget_alone()
        return
    step, function = KERNEL_FAULTS[fault]
    broken = replace(kernels.TORCH, **{step: function})
    kernels.TABLES["cpu"] = lambda: broken
