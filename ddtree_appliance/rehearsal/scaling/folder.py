"""The scale pair on disk: shards as they are made, and last the files without which no folder looks complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ddtree_appliance.errors import ApplianceError, HostError, UsageError
from ddtree_appliance.rehearsal.scaling.models import SMALL_PAIR, ModelPlan, ScalePair
from ddtree_appliance.rehearsal.scaling.weights import PlannedTensor

SHARD_BYTES = 2 * 1024**3
# Shards that wait for the disk, each in host memory, while the next one is made.
_WAITING_SHARDS = 2
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def require_empty(out: Path) -> None:
    """Raise UsageError if `out` is something else than a new or empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out: {out} exists and is not an empty folder: remove it or name another")


def require_space(out: Path, pair: ScalePair) -> None:
    """Raise HostError if the disk of `out` cannot take the pair's weights."""
    needed = (pair.target.parameters + pair.drafter.parameters) * pair.dtype.itemsize
    existing = next(folder for folder in (out, *out.resolve().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise HostError(f"{out}: {needed / 1e9:.1f} GB of weights, but {free / 1e9:.1f} GB free")


def write_pair(
    out: Path,
    pair: ScalePair,
    say: Callable[[str], None],
    small_pair: Path = SMALL_PAIR,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write out/target and out/dflash. `say` is told of each shard.

    The two config.json come last of all: an interrupted run leaves no folder that transformers or SGLang would load.
    Raises UsageError if `out` is not empty, HostError if the disk is too small, ApplianceError if writing fails.
    """
    require_empty(out)
    require_space(out, pair)
    folders = {out / "target": pair.target, out / "dflash": pair.drafter}
    try:
        for folder in folders:
            folder.mkdir(parents=True)
        for name in _TOKENIZER_FILES:
            shutil.copyfile(small_pair / "target" / name, out / "target" / name)
        indexes = {
            folder: _write_shards(folder, plan, pair.dtype, say, shard_bytes) for folder, plan in folders.items()
        }
        for folder, index in indexes.items():
            _write_json(folder / "model.safetensors.index.json", index)
        for folder, plan in folders.items():
            _write_json(folder / "config.json", plan.config)
    except (OSError, SafetensorError) as error:
        raise ApplianceError(
            f"{out}: cannot write the pair: {error}", hint="remove the folder and try again"
        ) from error


def _write_shards(
    folder: Path, plan: ModelPlan, dtype: torch.dtype, say: Callable[[str], None], shard_bytes: int
) -> dict[str, Any]:
    """Make and write all tensors; returns the contents of the index. A thread writes while the next shard is made."""
    shards = list(_shards(plan.tensors, dtype.itemsize, shard_bytes))
    weight_map: dict[str, str] = {}
    waiting: list[Future[None]] = []
    with ThreadPoolExecutor(_WAITING_SHARDS) as writers:
        for number, shard in enumerate(shards, start=1):
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
            if len(waiting) == _WAITING_SHARDS:
                waiting.pop(0).result()
            tensors = {}
            for planned in shard:
                tensor = planned.make()
                assert tuple(tensor.shape) == planned.shape and tensor.dtype == dtype, planned.name
                tensors[planned.name] = tensor.cpu()
                weight_map[planned.name] = name
            waiting.append(writers.submit(_save, tensors, folder / name))
            say(f"{folder / name}: {sum(planned.numel for planned in shard) * dtype.itemsize / 1e9:.2f} GB")
        for future in waiting:
            future.result()
    return {"metadata": {"total_size": plan.parameters * dtype.itemsize}, "weight_map": weight_map}


def _shards(tensors: list[PlannedTensor], itemsize: int, shard_bytes: int) -> Iterator[list[PlannedTensor]]:
    """Consecutive tensors, at most `shard_bytes` together unless one alone is larger."""
    shard: list[PlannedTensor] = []
    for tensor in tensors:
        if shard and (sum(planned.numel for planned in shard) + tensor.numel) * itemsize > shard_bytes:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it private; the engine may run as another user


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
