"""The transformer layer that the target and the drafter share: Qwen3's, with its parameter names.

Source: Qwen3 (grouped-query attention, RMS norm of each query and key head, SwiGLU); the names are those of
transformers' Qwen3ForCausalLM, from which SGLang's loader fuses its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LayerShape:
    """Widths that target and drafter have in common (the drafter borrows the target's embedding and head)."""

    hidden_size: int = 256
    intermediate_size: int = 768
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 4096


class RMSNorm(nn.Module):
    """Computed in float32 whatever the input: under autocast the fused kernel refuses mixed dtypes."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size], any float dtype -> the same shape, float32."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class RotaryTable(nn.Module):
    """cos and sin of every position, [max_position, head_dim] float32; not part of the checkpoint."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angle = torch.outer(
            torch.arange(shape.max_position_embeddings, dtype=torch.float32), shape.rope_theta**-exponent
        )
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate `x` [B, heads, T, head_dim] at `positions` [T] or [B, T] int64 (half-split, "neox" order)."""
        cos, sin = self.cos[positions], self.sin[positions]
        if positions.dim() == 2:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Projections only; who sees whom is the caller's: the drafter mixes keys of two sources."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_size = shape.num_attention_heads * shape.head_dim
        key_size = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def queries(self, x: Tensor, positions: Tensor, rotary: RotaryTable) -> Tensor:
        """[B, T, H] -> [B, heads, T, head_dim], normed and rotated."""
        rotated: Tensor = rotary(self.q_norm(self._heads(self.q_proj(x))), positions)
        return rotated

    def keys_values(self, x: Tensor, positions: Tensor, rotary: RotaryTable) -> tuple[Tensor, Tensor]:
        """[B, T, H] -> keys (normed, rotated) and values, each [B, kv_heads, T, head_dim]."""
        values = self._heads(self.v_proj(x))
        keys: Tensor = rotary(self.k_norm(self._heads(self.k_proj(x))), positions)
        return keys.to(values.dtype), values

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """[B, T, H]. `mask` is bool, broadcastable to [B, heads, T, keys], True = visible."""
        batch, heads, length, head_dim = q.shape
        group = heads // k.shape[1]
        q = q.to(v.dtype)
        if length == 1 and mask is None:
            # Decoding: the heads that share a key head become its query rows, so the cache is not expanded.
            out = F.scaled_dot_product_attention(q.reshape(batch, heads // group, group, head_dim), k, v)
            out = out.reshape(batch, heads, 1, head_dim)
        else:
            # Expanded by hand: the memory-efficient kernel, the one that takes a mask, has no grouped form.
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class Mlp(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def finish(self, x: Tensor, attention: Tensor) -> Tensor:
        """Both residual additions: after attention and after the MLP."""
        x = x + attention
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def initialise(module: nn.Module, num_layers: int) -> None:
    """Normal(0, 0.02), and smaller by sqrt(2 x layers) where a layer writes to the residual stream (GPT-2's rule)."""
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            continue
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        nn.init.normal_(parameter, std=0.02 / (2 * num_layers) ** 0.5 if into_residual else 0.02)
