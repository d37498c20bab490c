"""The target language model and its DFlash drafter.

DFlash (a block-diffusion drafter): one non-causal pass over [last token, mask, mask, ...] predicts a whole block. The
drafter has neither embedding nor head; it reads the target's hidden states as extra keys and values. The semantics
here are those of SGLang 0.5.17 (`srt/models/dflash.py`, `srt/speculative/dflash_worker_v2.py`); the test-suite checks
them by the accept length of the published pair.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddtree_appliance.rehearsal.training.layers import Layer, LayerShape, RMSNorm, RotaryTable, initialise

KeyValueCache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class TargetShape:
    vocab_size: int = 4096
    num_hidden_layers: int = 4
    layer: LayerShape = field(default_factory=LayerShape)


@dataclass(frozen=True)
class DrafterShape:
    """`target_layer_ids` k means the residual stream AFTER target layer k (transformers' hidden_states[k + 1])."""

    num_hidden_layers: int = 2
    block_size: int = 16
    mask_token_id: int = 4
    target_layer_ids: tuple[int, ...] = (0, 1, 2)
    layer: LayerShape = field(default_factory=LayerShape)


class TargetBody(nn.Module):
    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.layer.hidden_size)
        self.layers = nn.ModuleList(Layer(shape.layer) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.layer.hidden_size, shape.layer.rms_norm_eps)


class Target(nn.Module):
    """Qwen3-like causal language model with tied embedding; state_dict keys are those of Qwen3ForCausalLM."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = TargetBody(shape)
        self.rotary = RotaryTable(shape.layer)
        initialise(self, shape.num_hidden_layers)

    def embed(self, ids: Tensor) -> Tensor:
        """[...] int64 -> [..., H]."""
        out: Tensor = self.model.embed_tokens(ids)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H], already normed -> [..., vocab]; the drafter's hidden states go through it too."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def new_cache(self, batch: int, length: int, dtype: torch.dtype) -> KeyValueCache:
        """Per layer, keys and values [batch, kv_heads, length, head_dim]."""
        layer = self.shape.layer
        size = (batch, layer.num_key_value_heads, length, layer.head_dim)
        device = self.model.norm.weight.device
        return [
            (torch.empty(size, dtype=dtype, device=device), torch.empty(size, dtype=dtype, device=device))
            for _ in range(self.shape.num_hidden_layers)
        ]

    def forward(
        self, ids: Tensor, start: int = 0, cache: KeyValueCache | None = None, tap_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """`ids` [B, T] int64 at positions start..start+T-1.

        Returns the normed hidden states [B, T, H] and, if `tap_layers` is given, the residual stream after each of
        these layers side by side, [B, T, H * len(tap_layers)]. With a cache, either start is 0 or T is 1.
        """
        length = ids.shape[1]
        if start and (cache is None or length != 1):
            raise ValueError(f"start={start} needs a cache and one token, got {length}")
        positions = torch.arange(start, start + length, device=ids.device)
        hidden = self.embed(ids)
        taps: dict[int, Tensor] = {}
        for index, layer in enumerate(self.model.layers):
            assert isinstance(layer, Layer)
            normed = layer.input_layernorm(hidden)
            query = layer.self_attn.queries(normed, positions, self.rotary)
            keys, values = layer.self_attn.keys_values(normed, positions, self.rotary)
            if cache is not None:
                cached_keys, cached_values = cache[index]
                cached_keys[:, :, start : start + length] = keys
                cached_values[:, :, start : start + length] = values
                keys, values = cached_keys[:, :, : start + length], cached_values[:, :, : start + length]
            hidden = layer.finish(hidden, layer.self_attn.attend(query, keys, values, causal=length > 1))
            if index in tap_layers:
                taps[index] = hidden
        features = torch.cat([taps[index] for index in tap_layers], dim=-1) if tap_layers else None
        normed_out: Tensor = self.model.norm(hidden)
        return normed_out, features


def block_visibility(anchors: Tensor, block_size: int, context_length: int) -> Tensor:
    """Which keys each block position sees: its whole own block, and the context strictly before its anchor.

    `anchors` [B, N] int64: position of each block's first token. Returns bool [B, 1, N*S, context + N*S], True =
    visible. The anchor's own hidden state is not context: when the engine drafts, the target has not run on it yet.
    """
    batch, blocks = anchors.shape
    device = anchors.device
    of_query = anchors.repeat_interleave(block_size, dim=1)
    context = torch.arange(context_length, device=device) < of_query.unsqueeze(-1)
    block_of = torch.arange(blocks, device=device).repeat_interleave(block_size)
    own_block = (block_of.unsqueeze(1) == block_of.unsqueeze(0)).expand(batch, -1, -1)
    return torch.cat((context, own_block), dim=-1).unsqueeze(1)


class Drafter(nn.Module):
    """state_dict keys are those of SGLang's DFlashDraftModel checkpoint."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        hidden_size = shape.layer.hidden_size
        self.layers = nn.ModuleList(Layer(shape.layer) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(hidden_size, shape.layer.rms_norm_eps)
        self.fc = nn.Linear(hidden_size * len(shape.target_layer_ids), hidden_size, bias=False)
        self.hidden_norm = RMSNorm(hidden_size, shape.layer.rms_norm_eps)
        self.rotary = RotaryTable(shape.layer)
        initialise(self, shape.num_hidden_layers)

    def forward(self, blocks: Tensor, anchors: Tensor, features: Tensor) -> Tensor:
        """Normed hidden states [B, N, S, H] of many blocks per sequence at once.

        `blocks` [B, N, S, H]: target embeddings of [token at the anchor, mask, ...]; `anchors` [B, N] int64;
        `features` [B, T, H*K]: the target's tapped hidden states of positions 0..T-1.
        """
        batch, count, size, _ = blocks.shape
        context_length = features.shape[1]
        context = self.hidden_norm(self.fc(features))
        context_positions = torch.arange(context_length, device=features.device)
        positions = (anchors.unsqueeze(-1) + torch.arange(size, device=anchors.device)).flatten(1)
        visible = block_visibility(anchors, size, context_length)
        hidden = blocks.flatten(1, 2)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            attention = layer.self_attn
            normed = layer.input_layernorm(hidden)
            query = attention.queries(normed, positions, self.rotary)
            # The context enters by the same projections but without the layer's input norm: fc's output is normed.
            context_keys, context_values = attention.keys_values(context, context_positions, self.rotary)
            block_keys, block_values = attention.keys_values(normed, positions, self.rotary)
            keys = torch.cat((context_keys, block_keys), dim=2)
            values = torch.cat((context_values, block_values), dim=2)
            hidden = layer.finish(hidden, attention.attend(query, keys, values, mask=visible))
        out: Tensor = self.norm(hidden)
        return out.view(batch, count, size, -1)


def masked_blocks(target: Target, ids: Tensor, anchors: Tensor, shape: DrafterShape) -> Tensor:
    """[B, N, S, H]: embeddings of [ids at the anchor, mask, mask, ...], what the engine feeds the drafter."""
    batch, count = anchors.shape
    tokens = torch.full((batch, count, shape.block_size), shape.mask_token_id, dtype=torch.int64, device=ids.device)
    tokens[:, :, 0] = ids.gather(1, anchors)
    return target.embed(tokens)
