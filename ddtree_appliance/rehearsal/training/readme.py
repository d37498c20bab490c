"""The README of a trained pair: what it is, what it was trained on and the figures measured on the stored weights."""

from __future__ import annotations

from ddtree_appliance.rehearsal.training.corpus import END_OF_TEXT_ID, PAD_ID, SPECIAL_TOKENS, Corpus
from ddtree_appliance.rehearsal.training.export import Pair
from ddtree_appliance.rehearsal.training.report import PROMPT_LENGTH, TOP_TOKENS, Report
from ddtree_appliance.rehearsal.training.train import DrafterPlan, TargetPlan


def render_readme(
    pair: Pair, corpus: Corpus, report: Report, target_plan: TargetPlan, drafter_plan: DrafterPlan, seed: int
) -> str:
    """Markdown. Everything in it is computed from the arguments; nothing is quoted from elsewhere."""
    target, drafter = pair.target.shape, pair.drafter.shape
    layer = target.layer
    sizes = [sum(p.numel() for p in module.parameters()) / 1e6 for module in (pair.target, pair.drafter)]
    budgets = sorted(report.tree_accept_length)
    heads = f"{layer.num_attention_heads} heads / {layer.num_key_value_heads} KV heads of {layer.head_dim}"
    return f"""\
# tiny-code: a trained target and DFlash drafter, small enough to commit

| | target (`target/`) | drafter (`dflash/`) |
|---|---|---|
| architecture | Qwen3ForCausalLM, {target.num_hidden_layers} layers, hidden {layer.hidden_size}, {heads}, \
tied embeddings | DFlashDraftModel, {drafter.num_hidden_layers} layers, same widths |
| parameters | {sizes[0]:.2f} M, bf16 | {sizes[1]:.2f} M, bf16 |
| vocabulary | {target.vocab_size:,} byte-level BPE, mask token `{_cell(SPECIAL_TOKENS[drafter.mask_token_id])}` = \
{drafter.mask_token_id}, end of text = {END_OF_TEXT_ID}, pad = {PAD_ID} | the target's embedding and head |
| DFlash fields | - | block_size {drafter.block_size}, target_layer_ids {list(drafter.target_layer_ids)}, \
mask_token_id {drafter.mask_token_id} |

Made by `scripts/train-tiny-pair` with seed {seed}. Trained from scratch on the standard library in `{corpus.label}`
({corpus.train_files:,} files, {corpus.train.size / 1e6:.1f} M tokens; {corpus.heldout_files} files held out):
the target {target_plan.steps:,} steps of {target_plan.batch} x {target_plan.length:,} tokens \
(held-out loss {report.heldout_loss:.3f}),
then the drafter {drafter_plan.steps:,} steps of {drafter_plan.batch} x {drafter_plan.length:,} tokens \
with {drafter_plan.anchors} anchors each,
{drafter_plan.own_share:.0%} of them text sampled from the target itself at temperatures from 0 to 1,
the loss at block position k weighted exp(-(k-1)/{drafter_plan.position_decay:g}).
Licence of the text: PSF. The weights are the project's own.

Tokens per round (accepted drafts + the bonus token), greedy, {report.prompts} held-out prompts of {PROMPT_LENGTH} \
tokens, {report.new_tokens} new tokens each,
computed without an engine in float32 (best-first tree over the drafter's top-{TOP_TOKENS} per position;
the budget counts nodes besides the root):

| linear block of {drafter.block_size} | {" | ".join(f"tree, budget {budget}" for budget in budgets)} |
|---|{"---|" * len(budgets)}
| {report.chain_accept_length:.3f} | {" | ".join(f"{report.tree_accept_length[budget]:.3f}" for budget in budgets)} |

`heldout.bin`: the held-out files as token ids (little-endian uint16, each document closed by {END_OF_TEXT_ID}), \
{corpus.heldout.size:,} tokens:
prompts for tests and benchmarks.
"""


def _cell(token: str) -> str:
    return token.replace("|", "\\|")
