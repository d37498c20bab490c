"""Do a target and a drafter belong together? Answered from their configuration files, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DRAFTER_ARCHITECTURE = "DFlashDraftModel"


def block_size_of(drafter: Mapping[str, Any]) -> int | None:
    """The drafter's block size (the bonus token and block_size - 1 drafts), or None if its configuration has none."""
    sizes = (drafter.get("block_size"), _dflash(drafter).get("block_size"))
    return next((int(size) for size in sizes if size is not None), None)


def pair_problems(target: Mapping[str, Any], drafter: Mapping[str, Any]) -> list[str]:
    """Everything that keeps `drafter` from drafting for `target`, one sentence each; empty if nothing does.

    target, drafter: the contents of the two config.json files.
    """
    problems = []
    architectures = drafter.get("architectures") or []
    if DRAFTER_ARCHITECTURE not in architectures:
        problems.append(f"the drafter's architecture is {architectures or 'missing'}, not {DRAFTER_ARCHITECTURE}")
    for field in ("hidden_size", "vocab_size"):
        if target.get(field) != drafter.get(field):
            problems.append(f"{field} differs: target {target.get(field)}, drafter {drafter.get(field)}")

    num_layers = target.get("num_hidden_layers")
    trained_for = drafter.get("num_target_layers")
    if trained_for is not None and trained_for != num_layers:
        problems.append(f"the drafter was trained for a target of {trained_for} layers, this one has {num_layers}")
    layer_ids = _dflash(drafter).get("target_layer_ids")
    if not layer_ids:
        problems.append("the drafter names no dflash_config.target_layer_ids")
    elif isinstance(num_layers, int) and not all(0 <= layer < num_layers for layer in layer_ids):
        problems.append(f"target_layer_ids {layer_ids} are outside the target's {num_layers} layers")

    windowed = sorted(set(drafter.get("layer_types") or []) - {"full_attention"})
    if windowed:
        problems.append(f"the drafter has {', '.join(windowed)} layers; only full attention is supported")
    block_size = block_size_of(drafter)
    if block_size is None:
        problems.append("the drafter names no block_size")
    elif block_size < 2:
        problems.append(f"block_size {block_size} leaves nothing to draft")
    mask_token_id = _dflash(drafter).get("mask_token_id")
    vocab_size = target.get("vocab_size")
    if mask_token_id is not None and isinstance(vocab_size, int) and not 0 <= mask_token_id < vocab_size:
        problems.append(f"mask_token_id {mask_token_id} is outside the target's vocabulary of {vocab_size}")
    return problems


def _dflash(drafter: Mapping[str, Any]) -> Mapping[str, Any]:
    return drafter.get("dflash_config") or {}
