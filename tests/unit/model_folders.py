"""Model folders made for a test: a sound pair in miniature, to be broken in one place."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I32": 4}
Tensor = tuple[str, list[int]]
WEIGHTS: dict[str, Tensor] = {"model.norm.weight": ("BF16", [8]), "lm_head.weight": ("BF16", [16, 8])}
TARGET: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
}
DRAFTER: dict[str, Any] = {
    **TARGET,
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}


def header_of(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A safetensors header for tensors given as name -> (type, shape)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return header


def safetensors(tensors: dict[str, Tensor]) -> bytes:
    """A sound file with these tensors, all zero."""
    header = json.dumps(header_of(tensors)).encode()
    data = sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in tensors.values())
    return struct.pack("<Q", len(header)) + header + bytes(data)


def make_checkpoint(
    folder: Path, config: dict[str, Any] | None = None, tensors: dict[str, Tensor] | None = None, tokenizer: bool = True
) -> Path:
    """A complete checkpoint in `folder`, which is made."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TARGET if config is None else config))
    (folder / "model.safetensors").write_bytes(safetensors(WEIGHTS if tensors is None else tensors))
    if tokenizer:
        (folder / "tokenizer.json").write_text("{}")
    return folder


def split_in_shards(folder: Path, count: int = 2) -> list[str]:
    """Replace the one file of weights in `folder` by `count` shards and their index; return the shards' names."""
    (folder / "model.safetensors").unlink()
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    for number, name in enumerate(names):
        (folder / name).write_bytes(safetensors({f"layer.{number}": ("BF16", [4])}))
    weight_map = {f"layer.{number}": name for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return names


def in_hub_cache(cache: Path, name: str, revision: str, source: Path) -> Path:
    """`source` as the hub's client stores it: blobs, and a snapshot of relative links to them. Returns the snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / revision
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(source.iterdir())):
        (repository / "blobs" / f"{number:040x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot
