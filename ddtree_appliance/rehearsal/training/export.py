"""The pair on disk: two model folders that transformers and SGLang load, the held-out text, and a README.

Weights are stored in bf16. Whoever reports figures loads the folder again first, so that they are the stored pair's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from ddtree_appliance.errors import ApplianceError
from ddtree_appliance.rehearsal.training.corpus import END_OF_TEXT_ID, MASK_ID, PAD_ID, SPECIAL_TOKENS, TokenArray
from ddtree_appliance.rehearsal.training.layers import LayerShape
from ddtree_appliance.rehearsal.training.model import Drafter, DrafterShape, Target, TargetShape

_WEIGHTS = "model.safetensors"
_CHAT_TEMPLATE = """\
{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class Pair:
    target: Target
    drafter: Drafter


def _layer_config(shape: LayerShape, num_hidden_layers: int, vocab_size: int) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": END_OF_TEXT_ID,
        "dtype": "bfloat16",
        "eos_token_id": END_OF_TEXT_ID,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "layer_types": ["full_attention"] * num_hidden_layers,
        "max_position_embeddings": shape.max_position_embeddings,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "pad_token_id": PAD_ID,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "sliding_window": None,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab_size,
    }


def target_config(shape: TargetShape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        **_layer_config(shape.layer, shape.num_hidden_layers, shape.vocab_size),
        "tie_word_embeddings": True,
    }


def drafter_config(shape: DrafterShape, target: TargetShape) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        **_layer_config(shape.layer, shape.num_hidden_layers, target.vocab_size),
        "tie_word_embeddings": False,
        "block_size": shape.block_size,
        "num_target_layers": target.num_hidden_layers,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "mask_token": SPECIAL_TOKENS[MASK_ID],
            "target_layer_ids": list(shape.target_layer_ids),
        },
    }


def _layer_shape(config: dict[str, Any]) -> LayerShape:
    return LayerShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        max_position_embeddings=config["max_position_embeddings"],
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _save_weights(module: nn.Module, path: Path) -> None:
    weights = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in module.state_dict().items()}
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it private; the engine may run as another user


def _load_weights(module: nn.Module, path: Path) -> None:
    try:
        module.load_state_dict({name: tensor.float() for name, tensor in load_file(path).items()})
    except RuntimeError as error:
        raise ApplianceError(f"{path}: not a checkpoint of this shape: {error}") from error


def write_pair(folder: Path, pair: Pair, tokenizer: Tokenizer, heldout: TokenArray) -> None:
    """Write target/, dflash/ and heldout.bin (little-endian uint16) below `folder`."""
    target_folder, drafter_folder = folder / "target", folder / "dflash"
    target_folder.mkdir(parents=True, exist_ok=True)
    drafter_folder.mkdir(exist_ok=True)
    target_shape = pair.target.shape
    _save_weights(pair.target, target_folder / _WEIGHTS)
    _save_weights(pair.drafter, drafter_folder / _WEIGHTS)
    _write_json(target_folder / "config.json", target_config(target_shape))
    _write_json(drafter_folder / "config.json", drafter_config(pair.drafter.shape, target_shape))
    _write_json(
        target_folder / "generation_config.json",
        {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID, "pad_token_id": PAD_ID, "use_cache": True},
    )
    tokenizer.save(str(target_folder / "tokenizer.json"))
    _write_json(
        target_folder / "tokenizer_config.json",
        {
            "backend": "tokenizers",
            "eos_token": SPECIAL_TOKENS[END_OF_TEXT_ID],
            "model_max_length": target_shape.layer.max_position_embeddings,
            "pad_token": SPECIAL_TOKENS[PAD_ID],
            "tokenizer_class": "TokenizersBackend",
        },
    )
    (target_folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")
    (folder / "heldout.bin").write_bytes(heldout.astype("<u2").tobytes())


def load_pair(folder: Path) -> Pair:
    """The stored pair as float32 modules on the CPU."""
    target_json = json.loads((folder / "target" / "config.json").read_text(encoding="utf-8"))
    drafter_json = json.loads((folder / "dflash" / "config.json").read_text(encoding="utf-8"))
    dflash = drafter_json["dflash_config"]
    target = Target(TargetShape(target_json["vocab_size"], target_json["num_hidden_layers"], _layer_shape(target_json)))
    drafter = Drafter(
        DrafterShape(
            num_hidden_layers=drafter_json["num_hidden_layers"],
            block_size=drafter_json["block_size"],
            mask_token_id=dflash["mask_token_id"],
            target_layer_ids=tuple(dflash["target_layer_ids"]),
            layer=_layer_shape(drafter_json),
        )
    )
    _load_weights(target, folder / "target" / _WEIGHTS)
    _load_weights(drafter, folder / "dflash" / _WEIGHTS)
    return Pair(target.eval(), drafter.eval())


def load_heldout(folder: Path) -> Tensor:
    """[N] int64: the held-out text as token ids."""
    ids = np.frombuffer((folder / "heldout.bin").read_bytes(), dtype="<u2")
    return torch.from_numpy(ids.astype(np.int64))
