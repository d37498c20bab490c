"""How good the pair is, measured without an engine: held-out loss, and tokens per round of a chain and of trees.

Under greedy verification a round accepts exactly the drafted path that the target's own greedy continuation follows.
So the continuation is computed once, one drafter pass gives the drafts of every position of it, and the rounds are
then played over these: no target pass per round. Float32 throughout.

Tree: best-first over the drafter's top tokens per position, arXiv 2604.12989.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from ddtree_appliance.rehearsal.training.model import Drafter, Target, masked_blocks
from ddtree_appliance.rehearsal.training.sample import continue_text

TREE_BUDGETS = (16, 32, 64)
TOP_TOKENS = 32
PROMPT_LENGTH = 96
NEW_TOKENS = 96


class DraftTree(Protocol):
    """Node 0 is the root (token -1, parent -1); a parent comes before its children."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def parents(self) -> Sequence[int]: ...


TreeBuilder = Callable[[Sequence[Sequence[float]], Sequence[Sequence[int]], int], DraftTree]
"""(log-probabilities [D, K], token ids [D, K], budget without the root) -> tree; `ddtree.tree.build_tree`."""


@dataclass(frozen=True)
class Report:
    """Accept lengths are tokens per round: accepted drafts and the bonus token."""

    heldout_loss: float
    chain_accept_length: float
    tree_accept_length: dict[int, float]
    prompts: int
    new_tokens: int


@torch.no_grad()
def heldout_loss(target: Target, tokens: Tensor, length: int = 1024, batch: int = 16) -> float:
    """Mean next-token loss in nats over consecutive windows of `tokens` [N] int64 (a rest shorter than one is left)."""
    windows = tokens[: (tokens.numel() // length) * length].view(-1, length)
    total = 0.0
    for chunk in tqdm(torch.split(windows, batch), desc="held-out loss", dynamic_ncols=True):
        hidden, _ = target(chunk)
        total += F.cross_entropy(
            target.logits(hidden[:, :-1]).flatten(0, 1), chunk[:, 1:].flatten(), reduction="sum"
        ).item()
    return total / (windows.shape[0] * (length - 1))


def pick_prompts(tokens: Tensor, count: int, length: int, seed: int) -> Tensor:
    """[count, length] int64: windows of the held-out `tokens` [N] int64 at seeded random places."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, tokens.numel() - length + 1, (count, 1), generator=generator)
    return tokens[starts.to(tokens.device) + torch.arange(length, device=tokens.device)]


@torch.no_grad()
def drafts_along(target: Target, drafter: Drafter, ids: Tensor, first: int, last: int) -> Tensor:
    """[last - first, S - 1, vocab] float32: log-probabilities drafted from each anchor first..last-1 of `ids` [T]."""
    sequence = ids.unsqueeze(0)
    _, features = target(sequence, tap_layers=drafter.shape.target_layer_ids)
    anchors = torch.arange(first, last, device=ids.device).unsqueeze(0)
    hidden = drafter(masked_blocks(target, sequence, anchors, drafter.shape), anchors, features)
    return target.logits(hidden[0, :, 1:]).float().log_softmax(dim=-1)


def ordered_top(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of the last dimension, by log-probability descending and then id ascending: values and ids.

    topk alone leaves the order of equal values open; two stable sorts settle it.
    """
    values, ids = logprobs.topk(count, dim=-1)
    ids, by_id = ids.sort(dim=-1, stable=True)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


def count_chain_hits(drafts: Sequence[int], continuation: Sequence[int]) -> int:
    """How many leading `drafts` equal the continuation."""
    hits = 0
    for draft, wanted in zip(drafts, continuation, strict=False):
        if draft != wanted:
            break
        hits += 1
    return hits


def count_tree_hits(tree: DraftTree, continuation: Sequence[int]) -> int:
    """Depth to which the tree contains the continuation as a path from its root."""
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(tree.parents, tree.token_ids, strict=True))
        if node
    }
    node, depth = 0, 0
    for wanted in continuation:
        found = children.get((node, wanted))
        if found is None:
            break
        node, depth = found, depth + 1
    return depth


@dataclass(frozen=True)
class Trial:
    """One prompt's greedy text and the drafts at every anchor first, first + 1, ... of it.

    `text` [T]; `logprobs` and `ids` [anchors, S - 1, K], ordered by `ordered_top`.
    """

    text: list[int]
    first: int
    logprobs: list[list[list[float]]]
    ids: list[list[list[int]]]

    def chain_hits(self, anchor: int) -> int:
        return count_chain_hits([row[0] for row in self.ids[anchor - self.first]], self.text[anchor + 1 :])

    def tree_hits(self, anchor: int, build_tree: TreeBuilder, budget: int) -> int:
        row = anchor - self.first
        return count_tree_hits(build_tree(self.logprobs[row], self.ids[row], budget), self.text[anchor + 1 :])


def play_rounds(hits_at: Callable[[int], int], first: int, new_tokens: int) -> tuple[int, int]:
    """(tokens, rounds) until `new_tokens` follow the anchor `first`; a last round that overshoots counts in full."""
    anchor, rounds = first, 0
    while anchor < first + new_tokens:
        anchor += hits_at(anchor) + 1
        rounds += 1
    return anchor - first, rounds


def run_trials(
    target: Target, drafter: Drafter, prompts: Tensor, new_tokens: int, top_tokens: int = TOP_TOKENS
) -> Iterator[Trial]:
    """Greedy text and drafts for each row of `prompts` [B, P] int64."""
    batch, first = prompts.shape
    # One block more than asked for, so that every round has a whole block of continuation to be judged by.
    length = first + new_tokens + drafter.shape.block_size
    texts = continue_text(target, prompts, length, torch.zeros(batch, device=prompts.device))
    for text in tqdm(texts, desc="accept length", dynamic_ncols=True):
        values, ids = ordered_top(drafts_along(target, drafter, text, first, first + new_tokens), top_tokens)
        yield Trial(text.tolist(), first, values.tolist(), ids.tolist())


def accept_lengths(
    target: Target,
    drafter: Drafter,
    prompts: Tensor,
    build_tree: TreeBuilder,
    new_tokens: int = NEW_TOKENS,
    budgets: Sequence[int] = TREE_BUDGETS,
) -> tuple[float, dict[int, float]]:
    """Tokens per round over all rows of `prompts` [B, P] int64: of the chain, and of a tree per node budget."""
    chain = (0, 0)  # tokens, rounds
    trees = dict.fromkeys(budgets, (0, 0))
    for trial in run_trials(target, drafter, prompts, new_tokens):
        chain = _added(chain, play_rounds(trial.chain_hits, trial.first, new_tokens))
        for budget in budgets:
            hits_at = partial(trial.tree_hits, build_tree=build_tree, budget=budget)
            trees[budget] = _added(trees[budget], play_rounds(hits_at, trial.first, new_tokens))
    return chain[0] / chain[1], {budget: tokens / rounds for budget, (tokens, rounds) in trees.items()}


def _added(total: tuple[int, int], more: tuple[int, int]) -> tuple[int, int]:
    return total[0] + more[0], total[1] + more[1]


def measure_pair(
    target: Target, drafter: Drafter, heldout: Tensor, build_tree: TreeBuilder, prompts: int = 24, seed: int = 0
) -> Report:
    """All figures of one pair on the held-out text `heldout` [N] int64, on the models' device."""
    chain, trees = accept_lengths(target, drafter, pick_prompts(heldout, prompts, PROMPT_LENGTH, seed), build_tree)
    return Report(
        heldout_loss=heldout_loss(target, heldout),
        chain_accept_length=chain,
        tree_accept_length=trees,
        prompts=prompts,
        new_tokens=NEW_TOKENS,
    )
