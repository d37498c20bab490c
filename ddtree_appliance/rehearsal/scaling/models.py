"""The scale pair: which tensors and which configuration the large target and the large drafter consist of."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ddtree_appliance.rehearsal.scaling.bounds import stream_bound
from ddtree_appliance.rehearsal.scaling.sizes import ModelSizes, ScaleSizes, require_room
from ddtree_appliance.rehearsal.scaling.weights import PlannedTensor, Scaling, plan_layers, stream_norm

SMALL_PAIR = Path(__file__).resolve().parent.parent / "models" / "tiny-code"
# A token beyond the small vocabulary gets at most this logit, whatever the input: -64 by construction, less what
# bf16 rounds off. That is for the longest residual stream that the weights allow; in practice it is below -10,000.
EXTRA_LOGIT_LIMIT = -50.0
_EXTRA_LOGIT = -64.0
_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass(frozen=True)
class SmallModel:
    """A stored model: its config.json and its weights as float32 on the CPU."""

    folder: Path
    config: dict[str, Any]
    weights: dict[str, Tensor]

    @property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of_config(self.config)

    @staticmethod
    def load(folder: Path) -> SmallModel:
        weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        return SmallModel(folder, json.loads((folder / "config.json").read_text(encoding="utf-8")), weights)


@dataclass(frozen=True)
class ModelPlan:
    """A checkpoint to be written: its configuration and its tensors, in order."""

    config: dict[str, Any]
    tensors: list[PlannedTensor]

    @property
    def parameters(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)


@dataclass(frozen=True)
class ScalePair:
    target: ModelPlan
    drafter: ModelPlan
    dtype: torch.dtype


def plan_pair(
    sizes: ScaleSizes, dtype: torch.dtype, device: torch.device, seed: int = 0, small_pair: Path = SMALL_PAIR
) -> ScalePair:
    """Plan a pair of `sizes` with the function of the pair in `small_pair`; no large tensor is made yet.

    dtype: torch.bfloat16 or torch.float32, of the weights. seed: of the inert weights; a GPU's are not the CPU's.
    Raises UsageError if `sizes` cannot hold the small pair.
    """
    target, drafter = SmallModel.load(small_pair / "target"), SmallModel.load(small_pair / "dflash")
    require_room(sizes, target.sizes, drafter.sizes, target.config["vocab_size"])
    # One constant serves both: the drafter starts from the target's embedding.
    for key in ("rms_norm_eps", "hidden_size", "head_dim"):
        assert target.config[key] == drafter.config[key], key
    generator = torch.Generator(device).manual_seed(seed)
    eps = target.config["rms_norm_eps"]
    of_target = Scaling(target.sizes, sizes.target, eps, dtype, device, generator)
    of_drafter = Scaling(drafter.sizes, sizes.drafter, eps, dtype, device, generator)
    target_plan = ModelPlan(
        {**_scaled_config(target.config, of_target, sizes.vocabulary), "tie_word_embeddings": False},
        list(_target_tensors(of_target, target, sizes.vocabulary)),
    )
    drafter_plan = ModelPlan(
        {**_scaled_config(drafter.config, of_drafter, sizes.vocabulary), "num_target_layers": sizes.layers},
        list(_drafter_tensors(of_drafter, drafter, target)),
    )
    return ScalePair(target_plan, drafter_plan, dtype)


def _scaled_config(config: dict[str, Any], scaling: Scaling, vocabulary: int) -> dict[str, Any]:
    """The small layers come first, so the target layers that the drafter reads keep their numbers."""
    large = scaling.large
    scaled = {
        **config,
        "dtype": _DTYPE_NAMES[scaling.dtype],
        "head_dim": large.head_dim,
        "hidden_size": large.hidden,
        "intermediate_size": large.intermediate,
        "layer_types": ["full_attention"] * large.layers,
        "num_attention_heads": large.heads,
        "num_hidden_layers": large.layers,
        "num_key_value_heads": large.kv_heads,
        "rms_norm_eps": scaling.large_eps,
        "vocab_size": vocabulary,
    }
    if "torch_dtype" in config:
        scaled["torch_dtype"] = scaled["dtype"]
    return scaled


def _target_tensors(scaling: Scaling, small: SmallModel, vocabulary: int) -> Iterator[PlannedTensor]:
    embedding = small.weights["model.embed_tokens.weight"]
    # A tied head is the embedding; the large one is not, as its rows must not read the constant.
    head = small.weights.get("lm_head.weight", embedding)
    shape = (vocabulary, scaling.large.hidden)
    bound = stream_bound(small.weights, "model.layers.", small.sizes, embedding)
    yield PlannedTensor("model.embed_tokens.weight", shape, partial(_embedding, scaling, embedding, vocabulary))
    yield from plan_layers(scaling, small.weights, "model.layers.")
    yield _final_norm(scaling, "model.norm.weight", small.weights["model.norm.weight"], bound)
    yield PlannedTensor("lm_head.weight", shape, partial(_head, scaling, head, vocabulary))


def _drafter_tensors(scaling: Scaling, small: SmallModel, target: SmallModel) -> Iterator[PlannedTensor]:
    embedding, context_norm = target.weights["model.embed_tokens.weight"], small.weights["hidden_norm.weight"]
    bound = stream_bound(small.weights, "layers.", small.sizes, embedding, context_norm)
    taps = len(small.config["dflash_config"]["target_layer_ids"])
    shape = (scaling.large.hidden, taps * scaling.large.hidden)
    yield PlannedTensor("fc.weight", shape, partial(_fc, scaling, small.weights["fc.weight"], taps))
    yield PlannedTensor("hidden_norm.weight", (scaling.large.hidden,), partial(stream_norm, scaling, context_norm))
    yield from plan_layers(scaling, small.weights, "layers.")
    yield _final_norm(scaling, "norm.weight", small.weights["norm.weight"], bound)


def _embedding(scaling: Scaling, small: Tensor, vocabulary: int) -> Tensor:
    """[vocabulary, N]. A token id beyond the small vocabulary reads as its remainder, so any prompt is sound."""
    hidden = scaling.small.hidden
    out = scaling.zeros(vocabulary, scaling.large.hidden)
    tokens = torch.arange(vocabulary, device=scaling.device) % len(small)
    out[:, :hidden] = small.to(scaling.device, scaling.dtype)[tokens]
    out[:, hidden] = scaling.constant
    return out


def _head(scaling: Scaling, small: Tensor, vocabulary: int) -> Tensor:
    """[vocabulary, N] of lm_head: tokens beyond the small vocabulary read the constant alone.

    Their logits differ by up to 2^6: a top-k that sorts into bins by exponent would pay for one that holds them all.
    """
    hidden = scaling.small.hidden
    out = scaling.zeros(vocabulary, scaling.large.hidden)
    out[: len(small), :hidden] = small.to(scaling.device, scaling.dtype)
    spread = torch.rand(vocabulary - len(small), device=scaling.device, generator=scaling.generator)
    out[len(small) :, hidden] = (_EXTRA_LOGIT * 2 ** (6 * spread)).to(scaling.dtype)
    return out


def _final_norm(scaling: Scaling, name: str, small: Tensor, stream: float) -> PlannedTensor:
    """The norm before the head: it makes the constant at least 1 however long the residual stream, at most `stream`."""
    largest_rms = math.sqrt((stream**2 + scaling.constant**2) / scaling.large.hidden + scaling.large_eps)
    gain = largest_rms / scaling.constant
    return PlannedTensor(name, (scaling.large.hidden,), partial(stream_norm, scaling, small, gain))


def _fc(scaling: Scaling, small: Tensor, taps: int) -> Tensor:
    """[N, taps * N] of the drafter's fc: the first tapped layer's constant passes on, for hidden_norm."""
    hidden, wide = scaling.small.hidden, scaling.large.hidden
    columns = (torch.arange(taps).unsqueeze(1) * wide + torch.arange(hidden)).flatten()
    out = scaling.put(scaling.zeros(wide, taps * wide), torch.arange(hidden), columns, small)
    out[hidden, hidden] = 1
    return out
