"""What each verify step should accept, computed without an engine: full recompute, the reference builder, no cache.

The target's greedy text is known, so a step at an anchor accepts exactly the depth to which the tree drafted there
contains the text. This is what catches wrong drafter KV, which leaves the tokens right and only drafts worse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from ddtree_appliance.ddtree.tree import build_tree
from ddtree_appliance.rehearsal.server import MODELS
from ddtree_appliance.rehearsal.training.export import load_pair
from ddtree_appliance.rehearsal.training.report import Trial, drafts_along, ordered_top


@dataclass
class Agreement:
    """Verify steps judged, and those whose correct drafts equal the reference's."""

    steps: int = 0
    equal: int = 0

    @property
    def share(self) -> float:
        return self.equal / self.steps


load = cache(load_pair)


@cache
def reference_drafts(prompt: tuple[int, ...], text: tuple[int, ...], topk: int) -> Trial:
    """The drafts at every position of `text` after `prompt`, in float32."""
    pair = load(MODELS)
    tokens = torch.tensor([*prompt, *text])
    with torch.no_grad():
        drafts = drafts_along(pair.target, pair.drafter, tokens, len(prompt), len(tokens))
    values, ids = ordered_top(drafts, topk)
    return Trial(tokens.tolist(), len(prompt), values.tolist(), ids.tolist())


def judge(
    prompts: Sequence[Sequence[int]], runs_of: Sequence[Sequence[Sequence[int]]], budget: int, topk: int
) -> Agreement:
    """Compare streamed runs with the reference, each at the engine's own anchor, so that one miss is one miss.

    runs_of: per prompt, the tokens of the prefill and of each verify step. The last step is left out: the length limit
    may have cut it.
    """
    agreement = Agreement()
    for prompt, runs in zip(prompts, runs_of, strict=True):
        text = tuple(token for run in runs for token in run)
        trial = reference_drafts(tuple(prompt), text, topk)
        anchor = len(prompt) + len(runs[0]) - 1
        for run in runs[1:-1]:
            agreement.steps += 1
            agreement.equal += trial.tree_hits(anchor, build_tree, budget) == len(run) - 1
            anchor += len(run)
    return agreement
