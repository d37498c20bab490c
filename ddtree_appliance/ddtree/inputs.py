"""What the two model forwards of a step read, in torch: the twins of `fused/inputs.py`.

Shapes: b requests, V = node budget + 1 (verify width), B = block size, S = max(V, B) KV slots per request and step.
As in `torch_ops`, no function reads a device value on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddtree_appliance.ddtree.limits import BITS_PER_WORD, words_for
from ddtree_appliance.ddtree.torch_ops import TreeBatch


@dataclass(frozen=True)
class DraftInputs:
    """What a drafter's pass reads, and where a step's KV goes.

    block_ids: [b, B] int64, the bonus token and mask tokens.
    positions, slots: [b, S] int64, the positions after each request's prefix and their KV slots.
    """

    block_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class VerifyInputs:
    """What the target's forward over all nodes reads.

    token_ids: [b, V] int64, the bonus token at the root, 0 at padding (some token is needed there, and none is read).
    positions: [b, V] int64.
    mask: as `verify_mask` returns it.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor


def draft_inputs(
    bonus_tokens: torch.Tensor,
    prefix_lens: torch.Tensor,
    requests: torch.Tensor,
    req_to_token: torch.Tensor,
    mask_token: int,
    block_size: int,
    step_slots: int,
    rows_out: torch.Tensor | None = None,
) -> DraftInputs:
    """The drafter's block and the S slots of a step.

    bonus_tokens: [b] int64; prefix_lens: [b] int32 or int64; requests: [b] int64, each request's row in req_to_token
    ([any, longest] int32, the slots of a request's tokens); step_slots: S, at least B; rows_out: [>= b, longest] int32,
    where the first prefix + S slots of each request are copied, for an attention kernel that reads them there.
    """
    positions = prefix_lens.to(torch.int64).unsqueeze(1) + torch.arange(step_slots, device=prefix_lens.device)
    slots = req_to_token[requests.unsqueeze(1), positions].to(torch.int64)
    if rows_out is not None:
        is_known = torch.arange(rows_out.shape[1], device=rows_out.device) < positions[:, -1:] + 1
        rows_out[: len(requests)] = torch.where(is_known, req_to_token[requests], rows_out[: len(requests)])
    block_ids = torch.full_like(positions[:, :block_size], mask_token)
    block_ids[:, 0] = bonus_tokens
    return DraftInputs(block_ids, positions, slots)


def node_positions(depths: torch.Tensor, prefix_lens: torch.Tensor) -> torch.Tensor:
    """Each node's position in its request: prefix + depth, whatever its index. [b, V], [b] -> [b, V] int64."""
    return prefix_lens.to(torch.int64).unsqueeze(1) + depths


def verify_mask(
    ancestors: torch.Tensor, prefix_lens: torch.Tensor, prefix_lens_bound: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """SGLang's flat allow-mask of a verify step: per request [V, prefix + V], True where attention is allowed.

    ancestors: [b, V, V] bool; prefix_lens: [b] on the device; prefix_lens_bound: an upper bound of their sum, known on
    the host. Returns a flat bool tensor of V * (bound + b * V) entries; those past the real end are True and unread.
    With `out`, a flat bool or uint8 buffer at least as long, the V columns of each row that are the tree are written
    there and nothing else: for an attention kernel that reads a captured buffer and never its prefix columns.
    """
    batch, width, _ = ancestors.shape
    if out is None:
        out = torch.ones(width * (prefix_lens_bound + batch * width), dtype=torch.bool, device=ancestors.device)
    row_len = prefix_lens.to(torch.int64) + width
    start = torch.cumsum(row_len * width, dim=0) - row_len * width
    rows = torch.arange(width, device=out.device)
    # The last `width` columns of each row are the tree; the columns before them, the prefix, stay True.
    cell = start.view(-1, 1, 1) + rows.view(1, -1, 1) * row_len.view(-1, 1, 1) + (row_len - width).view(-1, 1, 1) + rows
    out[cell.flatten()] = ancestors.flatten().to(out.dtype)
    return out


def ancestor_bits(ancestors: torch.Tensor) -> torch.Tensor:
    """What each node may attend to, a bit per node: [b, V, V] bool -> [b, V, `words_for`(V)] int32.

    Bit i of word w stands for node 32 w + i + 1. The root has none: every node sees it.
    """
    batch, width, _ = ancestors.shape
    words = words_for(width)
    padded = ancestors.new_zeros((batch, width, words * BITS_PER_WORD), dtype=torch.int64)
    padded[:, :, : width - 1] = ancestors[:, :, 1:]
    place = torch.arange(BITS_PER_WORD, device=ancestors.device)
    return (padded.view(batch, width, words, BITS_PER_WORD) << place).sum(dim=-1).to(torch.int32)


def verify_inputs(
    trees: TreeBatch,
    bonus_tokens: torch.Tensor,
    prefix_lens: torch.Tensor,
    prefix_lens_bound: int,
    mask_out: torch.Tensor | None = None,
    bits_out: torch.Tensor | None = None,
) -> VerifyInputs:
    """Tokens, positions and mask of one target forward over every node of every tree.

    bonus_tokens, prefix_lens: [b]; prefix_lens_bound, mask_out: as in `verify_mask`; bits_out: [>= b, V, words] int32,
    where `ancestor_bits` go if an attention kernel reads them.
    """
    if bits_out is not None:
        bits_out[: len(prefix_lens)] = ancestor_bits(trees.ancestors)
    token_ids = trees.token_ids.clamp(min=0)
    token_ids[:, 0] = bonus_tokens
    mask = verify_mask(trees.ancestors, prefix_lens, prefix_lens_bound, mask_out)
    return VerifyInputs(token_ids, node_positions(trees.depths, prefix_lens), mask)
