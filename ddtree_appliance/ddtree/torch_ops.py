"""The steps around the two model forwards for a whole batch, in torch: the twins that fused kernels must equal.

Shapes: b requests, V = node budget + 1 (verify width), B = block size, D = B - 1 (deepest node), K candidates per
depth, L = min(D, budget) + 1 (longest accepted run). No function reads a device
value on the host, so none waits for the device; every output shape follows from shapes and plain integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddtree_appliance.ddtree.head import HeadShard
from ddtree_appliance.ddtree.kv_buffers import KVBuffers
from ddtree_appliance.ddtree.tree import NO_PARENT, NO_TOKEN

# Ranking the candidates here keeps logits, log-probabilities and int64 keys of a few rows at a time, outside SGLang's
# memory plan: at most this much, whatever the batch. The kernels keep all rows' logits, in the model's type.
CANDIDATE_BYTES = 256 << 20
BYTES_PER_LOGIT = 32


@dataclass(frozen=True)
class TreeBatch:
    """b draft trees, each padded to V rows. Row 0 is the root.

    token_ids: [b, V] int64, `NO_TOKEN` at the root and at padding.
    parents: [b, V] int64, `NO_PARENT` at the root and at padding.
    depths: [b, V] int64, 0 at the root and at padding.
    ancestors: [b, V, V] bool, True where the row's node may attend to the column's: its ancestors and itself.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor


@dataclass(frozen=True)
class AcceptBatch:
    """What one verify step accepted.

    path: [b, L] int64, the accepted node at each depth; past the accepted run, the depth itself (so that gathers and
        moves along it are defined and harmless).
    num_correct: [b] int32, accepted drafts, the bonus token not counted.
    tokens: [b, L] int64, the accepted run and the bonus token, 0 after them.
    bonus: [b] int64.
    """

    path: torch.Tensor
    num_correct: torch.Tensor
    tokens: torch.Tensor
    bonus: torch.Tensor

    def packed(self) -> torch.Tensor:
        """All of it in one [b, 2 L + 2] int64 tensor, for one exchange."""
        columns = [self.path, self.tokens, self.bonus.unsqueeze(1), self.num_correct.unsqueeze(1).to(torch.int64)]
        return torch.cat(columns, dim=1)

    @classmethod
    def unpacked(cls, packed: torch.Tensor) -> AcceptBatch:
        """The inverse of `packed`."""
        run = packed.shape[1] // 2 - 1
        path, tokens, bonus, num_correct = torch.split(packed, [run, run, 1, 1], dim=1)
        return cls(
            path.contiguous(),
            num_correct.squeeze(1).to(torch.int32),
            tokens.contiguous(),
            bonus.squeeze(1).contiguous(),
        )


def top_candidates(hidden_states: torch.Tensor, head: HeadShard, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The K most probable tokens per position under the target's head, the same on every rank that holds a shard of it.

    hidden_states: [b, D, H].
    Returns log-probabilities [b, D, K] fp32 of the full vocabulary, clipped to <= 0 and NaN as -inf, and token ids
    [b, D, K] int64, ordered by (log-probability descending, token id ascending), also at the cut. A head's bias, scale
    or soft cap is left out: it would change which tokens are drafted, never which are accepted.
    """
    rows = hidden_states.flatten(0, 1)
    per_chunk = max(1, CANDIDATE_BYTES // (BYTES_PER_LOGIT * head.largest_shard))
    keys = torch.cat([_ranked_keys(chunk, head, topk) for chunk in torch.split(rows, per_chunk)])
    keys = keys.view(*hidden_states.shape[:2], -1)
    return (keys >> ID_BITS).to(torch.int32).view(torch.float32), keys & ID_MASK


# topk leaves the order of ties open. The bits of a non-positive float, read as an integer, grow as the float falls:
# (bits, token id) in one int64 is a key without ties whose smallest entries are the candidates in order.
ID_BITS = 31
ID_MASK = (1 << ID_BITS) - 1
# Sorts after every token: fills up a shard of fewer than K tokens.
NO_KEY = (1 << 63) - 1


def _ranked_keys(rows: torch.Tensor, head: HeadShard, topk: int) -> torch.Tensor:
    """[n, H] -> [n, K] int64 keys of the candidates, best first; see `top_candidates`."""
    logits = torch.matmul(rows.to(head.weight.dtype), head.weight.T).float()
    logprobs = _clipped(_log_softmax(logits, head))
    # +0.0 has sign bit 0 and -0.0 has 1; adding 0.0 makes both +0.0, and its key 0 is the smallest, as it should be.
    bits = (logprobs + 0.0).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    ids = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int64) + head.first_id
    topk = min(topk, head.vocabulary)
    keys = _smallest((bits << ID_BITS) | ids, topk)
    if head.all_gather is None:
        return keys
    # Not `pad`, whose value goes through a float64 that cannot hold NO_KEY.
    keys = torch.cat([keys, keys.new_full((len(keys), topk - keys.shape[1]), NO_KEY)], dim=-1)
    return _smallest(torch.cat(list(head.all_gather(keys)), dim=-1), topk)


def _smallest(keys: torch.Tensor, count: int) -> torch.Tensor:
    return torch.topk(keys, min(count, keys.shape[-1]), dim=-1, largest=False, sorted=True).values


def _log_softmax(logits: torch.Tensor, head: HeadShard) -> torch.Tensor:
    """Over the whole vocabulary. logits: [n, rows of this shard] fp32."""
    if head.all_gather is None:
        return torch.log_softmax(logits, dim=-1)
    top = logits.amax(dim=-1, keepdim=True)
    # Without a finite value the differences would be NaN where the sum must be 0.
    shift = torch.where(top == float("-inf"), 0.0, top)
    parts = head.all_gather(torch.cat([top, (logits - shift).exp().sum(dim=-1, keepdim=True)], dim=-1))
    tops, sums = parts[..., 0], parts[..., 1]
    top = tops.amax(dim=0)
    shift = torch.where(top == float("-inf"), 0.0, top)
    return (logits - shift.unsqueeze(1)) - (sums * (tops - shift).exp()).sum(dim=0).log().unsqueeze(1)


def _clipped(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.masked_fill(logprobs.isnan(), float("-inf")).clamp(max=0.0)


def build_trees(topk_logprobs: torch.Tensor, topk_ids: torch.Tensor, budget: int) -> TreeBatch:
    """`tree.build_tree` for a batch, level by level.

    topk_logprobs: [b, D, K] fp32, ordered as `top_candidates` returns them; topk_ids: [b, D, K] int64.

    Why this equals the best-first search: a child's score never exceeds its parent's and its depth is larger, so
    best-first takes nodes in the order of their keys (-score, depth, parent index, rank), and a node with `budget`
    smaller keys is never taken. Within a level, "parent index" orders the parents as their level does, so one stable
    sort per level by score (over parent-major, rank-minor candidates) and one over the concatenated levels reproduce
    the key exactly, ties included.
    """
    batch, max_depth, topk = topk_logprobs.shape
    device = topk_logprobs.device
    topk_logprobs = _clipped(topk_logprobs)
    levels = min(max_depth, budget)
    scores = torch.zeros((batch, 1), dtype=torch.float32, device=device)
    level_scores, level_tokens, level_parents, level_depths = [], [], [], []
    offset = 0  # of the previous level's first row in the concatenation, whose row 0 is the root
    for level in range(levels):
        candidates = (scores.unsqueeze(2) + topk_logprobs[:, level].unsqueeze(1)).flatten(1)
        ranked = torch.sort(candidates, dim=1, descending=True, stable=True)
        scores, order = ranked.values[:, :budget], ranked.indices[:, :budget]
        level_scores.append(scores)
        level_tokens.append(torch.gather(topk_ids[:, level], 1, order % topk))
        level_parents.append(order // topk + offset)
        level_depths.append(torch.full_like(order, level + 1))
        offset += 1 if level == 0 else level_scores[-2].shape[1]

    if not levels or not topk:
        return with_ancestors(
            torch.full((batch, budget + 1), NO_TOKEN, dtype=torch.int64, device=device),
            torch.full((batch, budget + 1), NO_PARENT, dtype=torch.int64, device=device),
            torch.zeros((batch, budget + 1), dtype=torch.int64, device=device),
            depth=0,
        )
    all_scores = torch.cat(level_scores, dim=1)
    ranked = torch.sort(all_scores, dim=1, descending=True, stable=True)
    taken = ranked.indices[:, :budget]
    finite = torch.isfinite(ranked.values[:, :budget])
    # Where each row of the concatenation (root first) ended up; rows that were not taken are never looked up.
    index_of = torch.zeros((batch, all_scores.shape[1] + 1), dtype=torch.int64, device=device)
    index_of.scatter_(1, taken + 1, torch.arange(1, taken.shape[1] + 1, device=device).expand_as(taken))
    parents = torch.gather(index_of, 1, torch.gather(torch.cat(level_parents, dim=1), 1, taken))

    def column(values: torch.Tensor, padding: int) -> torch.Tensor:
        rows = torch.full((batch, budget + 1), padding, dtype=torch.int64, device=device)
        rows[:, 1 : taken.shape[1] + 1] = torch.where(finite, values, padding)
        return rows

    return with_ancestors(
        column(torch.gather(torch.cat(level_tokens, dim=1), 1, taken), NO_TOKEN),
        column(parents, NO_PARENT),
        column(torch.gather(torch.cat(level_depths, dim=1), 1, taken), 0),
        depth=levels,
    )


def with_ancestors(token_ids: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, depth: int) -> TreeBatch:
    """A batch of trees from their parents; [b, V] int64 each, no node deeper than `depth`.

    Closes the parent relation by pointer doubling: after k rounds each row knows its 2^k nearest ancestors.
    """
    batch, width = parents.shape
    ancestors = torch.eye(width, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
    # A row without a parent points at itself, which adds nothing.
    jump = torch.where(parents == NO_PARENT, torch.arange(width, device=parents.device), parents)
    reach = 1
    while reach <= depth:
        ancestors = ancestors | torch.gather(ancestors, 1, jump.unsqueeze(2).expand(-1, -1, width))
        jump = torch.gather(jump, 1, jump)
        reach *= 2
    return TreeBatch(token_ids, parents, depths, ancestors.contiguous())


def from_host(rows: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A small table from the host, on `device`; pinned, so that the copy does not wait behind the forward."""
    table = torch.tensor(rows, dtype=dtype)
    if device.type == "cuda":
        table = table.pin_memory()
    return table.to(device, non_blocking=True)


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The first of the most probable tokens after each node. logits: [b, V, vocabulary]. Returns [b, V] int64."""
    return torch.argmax(logits, dim=-1)


def accept(trees: TreeBatch, target_predict: torch.Tensor, max_run: int) -> AcceptBatch:
    """Follow the target's own choice from the root as long as the tree holds it.

    target_predict: [b, V] int64, the target's choice after each node, its argmax or a draw; max_run: L.
    A node is on the path if its token is what the target chose after its parent, and so for all its ancestors.
    """
    parents = trees.parents.clamp(min=0)
    chosen = trees.token_ids == torch.gather(target_predict, 1, parents)
    chosen &= trees.parents != NO_PARENT
    chosen[:, 0] = True
    on_path = ~(trees.ancestors & ~chosen.unsqueeze(1)).any(dim=2)
    num_correct = on_path.sum(dim=1) - 1

    batch, width = on_path.shape
    depth = torch.arange(max_run, device=on_path.device).expand(batch, -1)
    path = depth.clone()
    # One accepted node per depth at most; the others write to a column of their own, which is dropped.
    column = torch.where(on_path, trees.depths, max_run)
    path = torch.cat([path, path[:, :1]], dim=1)
    path.scatter_(1, column, torch.arange(width, device=on_path.device).expand(batch, -1))
    path = path[:, :max_run].contiguous()

    within = depth <= num_correct.unsqueeze(1)
    tokens = torch.where(within, torch.gather(target_predict, 1, path), 0)
    bonus = torch.gather(tokens, 1, num_correct.unsqueeze(1)).squeeze(1)
    return AcceptBatch(path, num_correct.to(torch.int32), tokens, bonus)


def path_slots(slots: torch.Tensor, path: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the accepted path's KV lies and where it belongs.

    slots: [b, >= V] int64, the KV slots after each request's prefix, in node order; path: [b, L] int64.
    Returns (source, target), both [b, L] int64. Entries past the accepted run name the same slot twice. A node's index
    is at least its depth, so a move row by row in depth order never overwrites a source that is still to be read; a
    move of all rows at once must read every source before it writes (`move_kv` does).
    """
    return torch.gather(slots, 1, path), slots[:, : path.shape[1]].contiguous()


def move_kv(buffers: KVBuffers, slots: torch.Tensor, path: torch.Tensor) -> None:
    """Move the accepted paths' KV rows to right behind the prefixes (`path_slots`), in every layer's buffers.

    slots: [b, >= V] int64, no slot in two requests; path: [b, L] int64. Rows overlap (the target of one depth is the
    source of another), so the gather ends before the scatter begins: SGLang's tiled copy kernel has no such barrier
    between its warps.
    """
    source, target = path_slots(slots, path)
    for buffer in buffers.tensors:
        buffer[target] = buffer[source]


def gather_path(rows: torch.Tensor, accepted: AcceptBatch) -> torch.Tensor:
    """Rows of the accepted nodes in path order: [b * V, H] -> [b, L, H]."""
    per_request = rows.view(len(accepted.path), -1, rows.shape[-1])
    return torch.gather(per_request, 1, accepted.path.unsqueeze(2).expand(-1, -1, rows.shape[-1]))
