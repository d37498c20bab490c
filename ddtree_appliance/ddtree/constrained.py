"""Trees inside a grammar: drafted by best-first search over what the matcher allows, with a mask for every node.

The search runs on the host, where SGLang's matchers live, so only batches that hold a grammar wait for it. A node is
offered only if the grammar allows it after its parent; what the grammar forces, a token or a text such as a property's
name, is offered whether or not the drafter thought of it. The target's choice after a node is limited by the node's own
mask, so that tokens are those of plain decoding under the same grammar, whatever was drafted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from ddtree_appliance.ddtree.torch_ops import TreeBatch, from_host, with_ancestors
from ddtree_appliance.ddtree.tree import NO_PARENT, NO_TOKEN, ROOT

BITS = 32
# Of the next token of a forced text, as the tokenizer cuts it: the target may cut it otherwise, but seldom does.
FORCED_TEXT_LOGPROB = math.log(0.9)


@dataclass(frozen=True)
class NodeMasks:
    """Which tokens are allowed after each node of the requests that have a grammar.

    rows: these requests' places in the batch; words: [len(rows) * V, words] int32, bits of allowed tokens, on the
    logits' device; grammar: one of theirs, whose class knows how to apply them.
    """

    grammar: Any
    rows: Sequence[int]
    words: torch.Tensor

    def apply(self, nodes: torch.Tensor) -> None:
        """Set the forbidden tokens' logits to -inf, in place. nodes: [b, V, vocabulary].

        One request at a time: SGLang's kernel reckons addresses in 32 bits, too few for all nodes of a large batch.
        """
        for row, words in zip(self.rows, self.words.chunk(len(self.rows)), strict=True):
            self.grammar.apply_vocab_mask(logits=nodes[row], vocab_mask=words)


def constrain_trees(
    requests: Sequence[Any],
    trees: TreeBatch,
    candidates: tuple[torch.Tensor, torch.Tensor],
    vocabulary: int,
) -> tuple[TreeBatch, NodeMasks]:
    """Replace the trees of the requests that have a grammar, and mask every node of theirs.

    requests: SGLang's Reqs of the batch; their grammars have accepted every output so far, the root's token included.
    candidates: what `Kernels.top_candidates` returns, [b, D, K] each. vocabulary: of SGLang's sampling info.
    """
    width, device = trees.parents.shape[1], trees.parents.device
    rows = [index for index, request in enumerate(requests) if request.grammar is not None]
    logprobs, ids = (tensor[rows].cpu().numpy() for tensor in candidates)
    handle = requests[rows[0]].grammar
    mask = handle.allocate_vocab_mask(vocab_size=vocabulary, batch_size=len(rows) * width, device="cpu")
    built = [
        constrained_tree(requests[row].grammar, *each, tokenizer=requests[row].tokenizer)
        for row, each in zip(rows, zip(logprobs, ids, mask.chunk(len(rows)), strict=True), strict=True)
    ]
    token_ids, parents, depths = (from_host(column, torch.int64, device) for column in zip(*built, strict=True))
    constrained = with_ancestors(token_ids, parents, depths, depth=logprobs.shape[1])
    where = from_host(rows, torch.int64, device)
    columns = [field.name for field in fields(TreeBatch)]
    result = TreeBatch(*(getattr(trees, name).index_copy(0, where, getattr(constrained, name)) for name in columns))
    return result, NodeMasks(handle, rows, handle.move_vocab_mask(mask, device))


def constrained_tree(
    grammar: Any, logprobs: np.ndarray, ids: np.ndarray, mask: torch.Tensor, tokenizer: Any = None
) -> tuple[list[int], list[int], list[int]]:
    """The most probable continuations that the grammar allows, and their masks.

    grammar: SGLang's BaseGrammarObject at the root, left as it was. logprobs, ids: [D, K], ordered as `build_tree`
    takes them. mask: [V, words] int32, all ones, the bits of allowed tokens; rows of nodes are filled, V - 1 is the
    budget. tokenizer: a Hugging Face one; without it forced texts are not looked for, forced tokens are.
    Returns token ids, parents and depths, [V] each, padded as in `TreeBatch`.

    What the grammar forbids among the candidates is taken out of their distribution: the others' log-probabilities
    grow by the same amount, a forced token's to 0. The next token of a forced text comes first, at
    `FORCED_TEXT_LOGPROB` or more. Nodes are taken by the key of `build_tree`. A token that ends the grammar is never a
    node: it can only be the bonus token, so that an accepted run ends with it; after it nothing is drafted, as SGLang
    then keeps one token of a run.
    """
    budget = len(mask) - 1
    token_ids, parents, depths = [NO_TOKEN], [NO_PARENT], [0]
    if grammar.is_terminated():
        return _padded(token_ids, parents, depths, budget)
    frontier: list[tuple[float, int, int, int, int]] = []
    at: list[int] = []  # the nodes that the matcher has accepted, root left out

    def offer(node: int, score: float) -> None:
        grammar.fill_vocab_mask(mask, node)
        depth = depths[node] + 1
        if depth > len(logprobs):
            return
        row = mask[node].numpy()
        children = _allowed(row, logprobs[depth - 1], ids[depth - 1])
        if tokenizer is not None:
            children = _with_forced_text(children, _next_of_forced_text(grammar, tokenizer, row))
        for rank, (token, logprob) in enumerate(children):
            if math.isfinite(logprob):
                heapq.heappush(frontier, (-(score + logprob), depth, node, rank, token))

    offer(ROOT, 0.0)
    while frontier and len(token_ids) <= budget:
        negative_score, depth, parent, _, token = heapq.heappop(frontier)
        _move(grammar, at, _path(parents, parent), token_ids)
        grammar.accept_token(token)
        if grammar.is_terminated():
            grammar.rollback(1)
            continue
        node = len(token_ids)
        token_ids.append(token)
        parents.append(parent)
        depths.append(depth)
        at.append(node)
        offer(node, -negative_score)
    _move(grammar, at, [], token_ids)
    return _padded(token_ids, parents, depths, budget)


def _allowed(mask: np.ndarray, logprobs: np.ndarray, ids: np.ndarray) -> list[tuple[int, float]]:
    """(token, log-probability) of each candidate that the mask allows, best first. mask: [words] int32."""
    words = np.flatnonzero(mask)
    if len(words) == 1 and (bits := int(mask[words[0]]) & 0xFFFFFFFF).bit_count() == 1:
        return [(int(words[0]) * BITS + bits.bit_length() - 1, 0.0)]
    kept = _is_allowed(mask, ids)
    left = 1.0 - float(np.exp(logprobs[~kept].astype(np.float64)).sum())
    gain = -math.log(left) if left > 0 else math.inf
    return [
        (int(token), min(0.0, float(logprob) + gain))
        for token, logprob in zip(ids[kept], logprobs[kept], strict=True)
        if logprob > -math.inf
    ]


def _next_of_forced_text(grammar: Any, tokenizer: Any, mask: np.ndarray) -> int | None:
    """The first token of the text that the grammar forces, unless it is the text's last: that may merge with more."""
    try:
        forced = grammar.try_jump_forward(tokenizer)
    except UnicodeDecodeError:  # between the bytes of a character
        return None
    tokens = tokenizer.encode(forced[1], add_special_tokens=False) if forced else []
    return int(tokens[0]) if len(tokens) > 1 and _is_allowed(mask, np.array(tokens[:1])).all() else None


def _with_forced_text(children: list[tuple[int, float]], token: int | None) -> list[tuple[int, float]]:
    if token is None:
        return children
    known = dict(children).get(token, -math.inf)
    return [(token, max(known, FORCED_TEXT_LOGPROB)), *(child for child in children if child[0] != token)]


def _is_allowed(mask: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """[n] bool, False for tokens beyond the mask. mask: [words] int32; ids: [n]."""
    in_range = ids // BITS < len(mask)
    return np.asarray(in_range & ((mask[np.where(in_range, ids // BITS, 0)] >> (ids % BITS)) & 1).astype(bool))


def _path(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root, left out, down to `node`."""
    path = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


def _move(grammar: Any, at: list[int], to: list[int], token_ids: Sequence[int]) -> None:
    """Take the matcher from one node's path to another's."""
    common = 0
    while common < min(len(at), len(to)) and at[common] == to[common]:
        common += 1
    if len(at) > common:  # SGLang's wrapper forgets every token when it rolls back none
        grammar.rollback(len(at) - common)
        del at[common:]
    for node in to[common:]:
        grammar.accept_token(token_ids[node])
        at.append(node)


def _padded(
    token_ids: list[int], parents: list[int], depths: list[int], budget: int
) -> tuple[list[int], list[int], list[int]]:
    missing = budget + 1 - len(token_ids)
    return token_ids + [NO_TOKEN] * missing, parents + [NO_PARENT] * missing, depths + [0] * missing
