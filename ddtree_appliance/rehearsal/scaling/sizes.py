"""Sizes of the small pair and of its scale model, and which sizes can hold which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_appliance.errors import UsageError


@dataclass(frozen=True)
class ModelSizes:
    """One transformer: target or drafter. The vocabulary is the target's."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @staticmethod
    def of_config(config: Mapping[str, Any]) -> ModelSizes:
        """From the contents of a config.json."""
        return ModelSizes(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            intermediate=config["intermediate_size"],
        )


@dataclass(frozen=True)
class ScaleSizes:
    """What is asked for; the defaults are Qwen3-8B and its published drafter's five layers."""

    layers: int = 36
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 12288
    vocabulary: int = 151936
    drafter_layers: int = 5

    @property
    def target(self) -> ModelSizes:
        return self._model(self.layers)

    @property
    def drafter(self) -> ModelSizes:
        return self._model(self.drafter_layers)

    def _model(self, layers: int) -> ModelSizes:
        return ModelSizes(self.hidden, layers, self.heads, self.kv_heads, self.head_dim, self.intermediate)


def require_room(scale: ScaleSizes, target: ModelSizes, drafter: ModelSizes, vocabulary: int) -> None:
    """Raise UsageError with every size of `scale` that cannot hold the small target and drafter, on one line.

    target, drafter: the small ones, which have hidden size and head_dim in common. vocabulary: of both.
    """
    problems = []

    def at_least(option: str, value: int, minimum: int, why: str) -> None:
        if value < minimum:
            problems.append(f"--{option} {value} is below {minimum}, {why}: give at least {minimum}")

    own = "the small pair's own"
    at_least("layers", scale.layers, target.layers, own)
    at_least("drafter-layers", scale.drafter_layers, drafter.layers, own)
    at_least("hidden", scale.hidden, target.hidden + 1, "the small pair's own and the constant dimension")
    at_least("kv-heads", scale.kv_heads, max(target.kv_heads, drafter.kv_heads), own)
    at_least("intermediate", scale.intermediate, max(target.intermediate, drafter.intermediate), own)
    at_least("vocabulary", scale.vocabulary, vocabulary, own)
    if scale.heads % scale.kv_heads:
        problems.append(f"--heads {scale.heads} is no multiple of --kv-heads {scale.kv_heads}: give a multiple")
    else:
        group = max(target.group, drafter.group)
        why = f"{group} query heads share a key head in the small pair"
        at_least("heads", scale.heads, group * scale.kv_heads, why)
    if scale.head_dim % target.head_dim:
        problems.append(
            f"--head-dim {scale.head_dim} is no multiple of the small pair's {target.head_dim}, "
            "so the rotary frequencies differ: give a multiple"
        )
    if problems:
        raise UsageError("; ".join(problems))
