"""The draft tree of one request and its reference builder: slow, obvious, the specification.

Source: best-first construction of the Diffusion Draft Tree (DDTree), arXiv 2604.12989. One pass of a block-diffusion
drafter gives, for each of the next D = block_size - 1 positions, a distribution that does not depend on the tokens
before it; a node at depth d is a path of d ranks, and its score is the sum of their log-probabilities.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddtree_appliance.ddtree.limits import MAX_BUDGET

ROOT = 0
NO_PARENT = -1
# The root's token is the bonus token, which the caller knows and the tree does not.
NO_TOKEN = -1


@dataclass(frozen=True)
class Tree:
    """A draft tree; node 0 is the root (the bonus token), the others stand in the order in which they were taken.

    token_ids: global vocabulary ids, `NO_TOKEN` at the root.
    parents: index of each node's parent, `NO_PARENT` at the root. A parent's index is smaller than its child's.
    depths: 0 at the root. `index >= depth` for every node, so that moving KV row by row along a path in depth order
        never overwrites a source that is still to be read.
    scores: path log-probabilities in natural log units, fp32, 0 at the root.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    scores: tuple[float, ...]

    def __len__(self) -> int:
        """Number of nodes, the root included."""
        return len(self.token_ids)

    def ancestors(self, node: int) -> list[int]:
        """The nodes that `node` attends to in the verify step: itself first, the root last."""
        path = [node]
        while (node := self.parents[node]) != NO_PARENT:
            path.append(node)
        return path

    def child(self, node: int, token_id: int) -> int | None:
        """The child of `node` that holds `token_id`, or None. Siblings hold different tokens, so one at most does."""
        for index in range(node + 1, len(self)):
            if self.parents[index] == node and self.token_ids[index] == token_id:
                return index
        return None


def build_tree(topk_logprobs: Sequence[Sequence[float]], topk_ids: Sequence[Sequence[int]], budget: int) -> Tree:
    """Take the `budget` most probable continuations, best first.

    topk_logprobs: [D, K] log-probabilities of the full vocabulary, read as fp32, clipped to <= 0, NaN as -inf; after
        that each row must stand in the order (log-probability descending, token id ascending).
    topk_ids: [D, K] the token ids that belong to them.
    budget: node budget, the root not counted; 1 to `MAX_BUDGET`.

    A child's score is fp32(parent's score + log-probability). Nodes are taken by the key (-score, depth, parent index,
    rank) until the budget is spent or no candidate is finite. D or K may be 0; the tree is then the root alone.

    Raises ValueError if the budget is out of range or a row is out of order.
    """
    if not 1 <= budget <= MAX_BUDGET:
        raise ValueError(f"node budget {budget} is outside 1..{MAX_BUDGET}")
    with np.errstate(over="ignore"):  # below the range of fp32 is -inf
        logprobs = np.asarray(topk_logprobs, dtype=np.float32)
    logprobs = np.minimum(np.where(np.isnan(logprobs), -np.inf, logprobs), np.float32(0)).astype(np.float32)
    ids = np.asarray(topk_ids, dtype=np.int64)
    for depth, (row, row_ids) in enumerate(zip(logprobs, ids, strict=True), start=1):
        keys = list(zip((-row).tolist(), row_ids.tolist(), strict=True))
        if keys != sorted(keys):
            raise ValueError(f"candidates at depth {depth} are not ordered by (log-probability, token id)")

    token_ids, parents, depths, scores = [NO_TOKEN], [NO_PARENT], [0], [np.float32(0)]
    frontier: list[tuple[np.float32, int, int, int]] = []

    def offer(parent: int, rank: int) -> None:
        depth = depths[parent] + 1
        if depth <= len(logprobs) and rank < logprobs.shape[1]:
            with np.errstate(over="ignore"):
                score = np.float32(scores[parent] + logprobs[depth - 1, rank])
            if np.isfinite(score):
                heapq.heappush(frontier, (-score, depth, parent, rank))

    offer(ROOT, 0)
    while frontier and len(token_ids) <= budget:
        negative_score, depth, parent, rank = heapq.heappop(frontier)
        token_ids.append(int(ids[depth - 1, rank]))
        parents.append(parent)
        depths.append(depth)
        scores.append(np.float32(-negative_score))
        # Every other candidate has a larger key than one of these two, so offering them lazily changes nothing.
        offer(parent, rank + 1)
        offer(len(token_ids) - 1, 0)
    return Tree(tuple(token_ids), tuple(parents), tuple(depths), tuple(float(score) for score in scores))
