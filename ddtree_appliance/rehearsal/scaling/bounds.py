"""How long the residual stream can get, proved from the weights: tokens that must never win are made to lose by it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ddtree_appliance.rehearsal.scaling.sizes import ModelSizes
from ddtree_appliance.rehearsal.scaling.weights import Weights


def stream_bound(
    weights: Weights, prefix: str, sizes: ModelSizes, embedding: Tensor, context_norm: Tensor | None = None
) -> float:
    """An upper bound of the Euclidean norm of the residual stream after the last layer, for any input.

    weights: float32, the small model's; embedding [vocabulary, n]: what the stream starts from. context_norm [n]:
    weight of the norm of a drafter's context, whose values are mixed with those of the block.
    """
    bound = float(embedding.norm(dim=1).max())
    for layer in range(sizes.layers):
        of_layer = {key: weights[f"{prefix}{layer}.{key}"] for key in _READ}
        bound += _attention_bound(of_layer, sizes, context_norm) + _mlp_bound(of_layer, sizes)
    return bound


_READ = (
    "input_layernorm.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)


def _attention_bound(layer: Weights, sizes: ModelSizes, context_norm: Tensor | None) -> float:
    """A normed vector is at most sqrt(n) long before its weight; a head's output is a mean of values."""
    norms = [layer["input_layernorm.weight"]] + ([] if context_norm is None else [context_norm])
    values = layer["self_attn.v_proj.weight"].view(sizes.kv_heads, sizes.head_dim, sizes.hidden)
    longest = torch.stack([_spectral(values * norm) for norm in norms]).amax(dim=0)
    outputs = layer["self_attn.o_proj.weight"].view(sizes.hidden, sizes.heads, sizes.head_dim).transpose(0, 1)
    per_head = _spectral(outputs) * longest.repeat_interleave(sizes.group)
    return math.sqrt(sizes.hidden) * float(per_head.sum())


def _mlp_bound(layer: Weights, sizes: ModelSizes) -> float:
    """|silu(g)| <= |g|, so the output is at most sum_j |d_j g_j| |u_j|, and that a product of two lengths."""
    norm = layer["post_attention_layernorm.weight"]
    down = layer["mlp.down_proj.weight"].norm(dim=0)
    gate = layer["mlp.gate_proj.weight"] * norm * down.unsqueeze(1)
    up = layer["mlp.up_proj.weight"] * norm
    return sizes.hidden * float(_spectral(torch.stack((gate, up))).prod())


def _spectral(matrices: Tensor) -> Tensor:
    """[k, a, b] -> [k] float64, at least the largest singular value and at most 1.2 times it (b = 256).

    The Frobenius norm of the 16th power of the Gram matrix: five products, where a decomposition takes seconds.
    """
    matrices = matrices.double()
    tall = matrices.shape[1] >= matrices.shape[2]
    power = matrices.mT @ matrices if tall else matrices @ matrices.mT
    for _ in range(4):
        power = power @ power
    norm: Tensor = power.flatten(1).norm(dim=1) ** (1 / 32)
    return norm
