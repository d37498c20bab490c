"""Weights of the scale model, tensor by tensor, so that no more than one has to exist at a time.

The small model's weights lie in the first rows and columns; units, heads and layers beyond them have random inner
weights and write nothing to the residual stream. Two compensations make the function the small model's exactly:
one residual dimension holds a constant that stands for the small epsilon, and query and key projections are scaled so
that the norm of a head sees the small epsilon too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ddtree_appliance.rehearsal.scaling.sizes import ModelSizes

Weights = Mapping[str, Tensor]

# q and k are scaled by this and the large epsilon by its square; a power of two, so bf16 weights stay what they are.
HEAD_SCALE = 2.0**-10
RANDOM_STD = 0.02


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the checkpoint that is not made yet. `make` returns it, of `shape`, on the plan's device."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Scaling:
    """How one small model lies in one large model.

    eps: the small model's rms_norm_eps. dtype, device: of the tensors to make. generator: of that device.
    """

    small: ModelSizes
    large: ModelSizes
    eps: float
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator

    @property
    def large_eps(self) -> float:
        """mean((t q)^2) over D dims + large_eps is d / D * t^2 times what the small head norm divides by."""
        return self.eps * self.small.head_dim / self.large.head_dim * HEAD_SCALE**2

    @property
    def constant(self) -> float:
        """c with c^2 + N large_eps = n eps, as `dtype` holds it: the large norm divides by sqrt(n / N) the small's."""
        square = self.small.hidden * self.eps - self.large.hidden * self.large_eps
        return float(torch.tensor(math.sqrt(square), dtype=self.dtype))

    @property
    def norm_scale(self) -> float:
        return math.sqrt(self.small.hidden / self.large.hidden)

    @property
    def query_gain(self) -> float:
        """Of q_norm: normed q and k are each sqrt(D / d) times as long as the small ones; 1 / sqrt(D) makes up half."""
        return math.sqrt(self.small.head_dim / self.large.head_dim)

    @property
    def query_heads(self) -> Tensor:
        """[small heads] int64: place of each; heads that share a key head in the small model do so in the large."""
        head = torch.arange(self.small.heads)
        return head // self.small.group * self.large.group + head % self.small.group

    @property
    def key_heads(self) -> Tensor:
        return torch.arange(self.small.kv_heads)

    @property
    def head_dims(self) -> Tensor:
        """[d] int64: places within a head at which the large rotary table has the small one's frequencies."""
        ratio = self.large.head_dim // self.small.head_dim
        half = torch.arange(self.small.head_dim // 2) * ratio
        return torch.cat((half, half + self.large.head_dim // 2))

    def of_heads(self, heads: Tensor) -> Tensor:
        """[heads * d] int64: the units of these large heads that hold the small ones' dims."""
        return (heads.unsqueeze(1) * self.large.head_dim + self.head_dims).flatten()

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def random(self, *shape: int) -> Tensor:
        empty = torch.empty(shape, dtype=self.dtype, device=self.device)
        return empty.normal_(std=RANDOM_STD, generator=self.generator)

    def put(self, into: Tensor, rows: Tensor, columns: Tensor, small: Tensor) -> Tensor:
        """into[rows, columns] = small, in place."""
        into[rows.to(self.device).unsqueeze(1), columns.to(self.device)] = small.to(self.device, self.dtype)
        return into


def _read_heads(scaling: Scaling, count: int, heads: Tensor, scale: float, small: Tensor) -> Tensor:
    """[count * D, N] of q_proj, k_proj or v_proj: `heads` of `count` are the small ones, the others random."""
    head_dim, hidden = scaling.large.head_dim, scaling.large.hidden
    out = scaling.random(count * head_dim, hidden)
    out.view(count, head_dim, hidden)[heads.to(scaling.device)] = 0
    return scaling.put(out, scaling.of_heads(heads), torch.arange(scaling.small.hidden), small * scale)


def _read_units(scaling: Scaling, small: Tensor) -> Tensor:
    """[intermediate, N] of gate_proj or up_proj."""
    out = scaling.random(scaling.large.intermediate, scaling.large.hidden)
    units = torch.arange(scaling.small.intermediate)
    out[: len(units)] = 0
    return scaling.put(out, units, torch.arange(scaling.small.hidden), small)


def _write(scaling: Scaling, columns: Tensor, width: int, small: Tensor) -> Tensor:
    """[N, width] of o_proj or down_proj: zero but for the small one, as other units and dims must not be written."""
    out = scaling.zeros(scaling.large.hidden, width)
    return scaling.put(out, torch.arange(scaling.small.hidden), columns, small)


def stream_norm(scaling: Scaling, small: Tensor, constant_gain: float = 0.0) -> Tensor:
    """[N] of a norm of the residual stream; zero for the constant dimension unless `constant_gain` is given."""
    hidden = scaling.small.hidden
    out = scaling.zeros(scaling.large.hidden)
    out[:hidden] = (small * scaling.norm_scale).to(scaling.device, scaling.dtype)
    out[hidden] = constant_gain
    return out


def _head_norm(scaling: Scaling, scale: float, small: Tensor) -> Tensor:
    """[D] of q_norm or k_norm."""
    out = scaling.zeros(scaling.large.head_dim) + 1
    out[scaling.head_dims.to(scaling.device)] = (small * scale).to(scaling.device, scaling.dtype)
    return out


def plan_layers(scaling: Scaling, small: Weights, prefix: str) -> Iterator[PlannedTensor]:
    """All tensors of all layers, those of one layer in a row; the small model's layers come first.

    small: float32 weights named `prefix` + "0.input_layernorm.weight" and so on.
    """
    for layer in range(scaling.large.layers):
        makers = _inert_layer(scaling)
        if layer < scaling.small.layers:
            for key, make in _small_layer(scaling).items():
                makers[key] = partial(make, small[f"{prefix}{layer}.{key}"])
        for key, shape in layer_shapes(scaling.large).items():
            yield PlannedTensor(f"{prefix}{layer}.{key}", shape, makers[key])


def layer_shapes(sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one layer's tensors, in the order in which they are stored."""
    query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    hidden, inner = sizes.hidden, sizes.intermediate
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (sizes.head_dim,),
        "self_attn.k_norm.weight": (sizes.head_dim,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def _small_layer(scaling: Scaling) -> dict[str, Callable[[Tensor], Tensor]]:
    """How each tensor of a small layer becomes one of a large layer."""
    large, queries, keys = scaling.large, scaling.query_heads, scaling.key_heads
    units = torch.arange(scaling.small.intermediate)
    return {
        "input_layernorm.weight": partial(stream_norm, scaling),
        "self_attn.q_proj.weight": partial(_read_heads, scaling, large.heads, queries, HEAD_SCALE),
        "self_attn.k_proj.weight": partial(_read_heads, scaling, large.kv_heads, keys, HEAD_SCALE),
        "self_attn.v_proj.weight": partial(_read_heads, scaling, large.kv_heads, keys, 1.0),
        "self_attn.o_proj.weight": partial(_write, scaling, scaling.of_heads(queries), large.heads * large.head_dim),
        "self_attn.q_norm.weight": partial(_head_norm, scaling, scaling.query_gain),
        "self_attn.k_norm.weight": partial(_head_norm, scaling, 1.0),
        "post_attention_layernorm.weight": partial(stream_norm, scaling),
        "mlp.gate_proj.weight": partial(_read_units, scaling),
        "mlp.up_proj.weight": partial(_read_units, scaling),
        "mlp.down_proj.weight": partial(_write, scaling, units, large.intermediate),
    }


def _inert_layer(scaling: Scaling) -> dict[str, Callable[[], Tensor]]:
    """A layer that costs what the others cost and adds zero to the residual stream."""
    makers: dict[str, Callable[[], Tensor]] = {}
    for key, shape in layer_shapes(scaling.large).items():
        if key.endswith(("o_proj.weight", "down_proj.weight")):
            makers[key] = partial(scaling.zeros, *shape)
        elif key.endswith("layernorm.weight"):
            makers[key] = partial(stream_norm, scaling, torch.ones(scaling.small.hidden))
        elif key.endswith("_norm.weight"):
            makers[key] = partial(_head_norm, scaling, 1.0, torch.ones(scaling.small.head_dim))
        else:
            makers[key] = partial(scaling.random, *shape)
    return makers
