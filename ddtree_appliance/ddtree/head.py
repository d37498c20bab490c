"""The target's output embedding as the drafter's candidates need it: this rank's rows, and how ranks exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class HeadShard:
    """One tensor-parallel rank's rows of the output embedding; the whole of it where there is one rank.

    weight: [rows, H], without padding rows. first_id: the token id of row 0. vocabulary: tokens over all ranks.
    largest_shard: rows of the rank that has most. rank: this one's place among the shards. all_gather: [n, c] of this
    rank -> [ranks, n, c], the same on every rank; None with one rank.
    """

    weight: torch.Tensor
    first_id: int
    vocabulary: int
    largest_shard: int
    rank: int = 0
    all_gather: Callable[[torch.Tensor], torch.Tensor] | None = None

    @classmethod
    def whole(cls, weight: torch.Tensor) -> HeadShard:
        """A head that is not sharded. weight: [vocabulary, H]."""
        return cls(weight, first_id=0, vocabulary=len(weight), largest_shard=len(weight))


def target_head(model: object) -> HeadShard:
    """The shard of a loaded SGLang model. Raises ValueError for a head whose distribution cannot be ranked exactly."""
    from sglang.srt.distributed import get_tp_group

    head = getattr(model, "lm_head", None)
    weight: torch.Tensor | None = getattr(head, "weight", None)
    if weight is None or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError("DDTREE needs an unquantised lm_head: candidates are ranked by its full distribution")
    group = get_tp_group()
    shard = getattr(head, "shard_indices", None)
    if shard is None:
        if group.world_size > 1:
            raise ValueError(
                "DDTREE needs to know which rows of lm_head are on which rank, and this model does not say"
            )
        return HeadShard.whole(weight)
    # The head's own count: added rows may all lie on another rank, and every rank must refuse.
    if shard.num_added_elements or getattr(head, "num_added_embeddings", 0):
        raise ValueError("DDTREE does not support a vocabulary with added rows")
    vocabulary = int(getattr(head, "org_vocab_size", shard.num_org_elements))
    if (group.world_size - 1) * int(shard.num_org_elements_padded) >= vocabulary:
        raise ValueError(f"a vocabulary of {vocabulary} tokens leaves the last of {group.world_size} ranks none")
    rows = weight[: shard.num_org_elements]
    if group.world_size == 1:
        return HeadShard.whole(rows)

    def all_gather(values: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = group.all_gather(values.contiguous(), dim=0)
        return gathered.view(group.world_size, *values.shape)

    # SGLang cuts the padded vocabulary evenly; padding rows lie at the end of the last shards.
    return HeadShard(
        rows,
        first_id=int(shard.org_vocab_start_index),
        vocabulary=vocabulary,
        largest_shard=int(shard.num_org_elements_padded),
        rank=int(group.rank_in_group),
        all_gather=all_gather,
    )
