"""Model folders: found offline, complete, and how many bytes their weights are; all without reading a weight."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

from ddtree_appliance.config import Config
from ddtree_appliance.errors import HostError

_BUNDLED_FOLDERS = {"bundled:target": "target", "bundled:drafter": "dflash"}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
_INDEX = "model.safetensors.index.json"
# Bits per element, by safetensors' name of the type. The engine loads floats in its own compute type.
_FLOAT_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
_OTHER_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "C64": 64},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4},
}
_MAX_HEADER = 100_000_000  # safetensors' own limit
_MAX_JSON = 100_000_000


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. float_elements: of its floating-point tensors, whose type the engine may change;
    other_bytes: of everything else, quantised weights included."""

    path: Path
    config: Mapping[str, Any]
    float_elements: int
    other_bytes: int

    def weight_bytes(self, item_bytes: int) -> int:
        """Bytes of the weights once loaded with floating-point elements of `item_bytes`."""
        return self.float_elements * item_bytes + self.other_bytes


def with_local_models(config: Config) -> Config:
    """`config` with target and drafter as the folders that hold them. Raises HostError naming all that is missing."""
    engine = config.engine
    models = (
        ("model", engine.model, engine.model_revision),
        ("drafter", engine.drafter, engine.drafter_revision),
    )
    located, missing = {}, []
    for key, location, revision in models:
        try:
            located[key] = str(locate(location, revision, config.paths.models))
        except HostError as error:
            missing.append(error)
    if missing:
        hints = dict.fromkeys(error.hint for error in missing if error.hint)
        raise HostError("; ".join(error.message for error in missing), "\n  ".join(hints))
    return config.model_copy(update={"engine": engine.model_copy(update=located)})


def locate(location: str, revision: str | None, models: str | None) -> Path:
    """The folder of a model given as in engine.model. models: the folder that holds the hub cache.

    Raises HostError if nothing is there; nothing is ever downloaded.
    """
    if location in _BUNDLED_FOLDERS:
        folder = resources.files("ddtree_appliance") / "rehearsal" / "models" / "tiny-code" / _BUNDLED_FOLDERS[location]
        return Path(str(folder))
    if location.startswith("/"):
        path = Path(location)
        if not _exists(path):
            raise HostError(
                f"{location} does not exist {_where()}", "correct the path; inside a container, check paths.models"
            )
        return path
    if models is None or revision is None:
        raise HostError(f"{location} is a hub name: it needs paths.models and a revision", "set both")
    cache = f"models--{location.replace('/', '--')}"
    candidates = [Path(models) / part / cache / "snapshots" / revision for part in ("hub", ".")]
    for snapshot in candidates:
        if _exists(snapshot):
            return snapshot
    raise HostError(
        f"{location} at {revision} is not in the hub cache below {models} ({candidates[0]} does not exist)",
        f"HF_HOME={models} hf download {location} --revision {revision}",
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise HostError(f"{path}: {_reason(error)}", "let this user into every folder above it") from error


def _where() -> str:
    return "inside this container" if Path("/run/.containerenv").exists() else "on this host"


def _reason(error: OSError) -> str:
    return f"{error.strerror or error} (as user {os.geteuid()})"


def read_checkpoint(path: Path, needs_tokenizer: bool) -> Checkpoint:
    """Check that `path` holds one complete safetensors checkpoint that this user can read.

    Raises HostError with every problem; nothing else, whatever the files hold.
    """
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise HostError(
            f"{path} cannot be read as a folder: {_reason(error)}", "name the folder of one checkpoint"
        ) from error
    problems = [f"{name} is a dangling link" for name in sorted(names) if _dangles(path / name)]
    config: dict[str, Any] = {}
    if "config.json" not in names:
        problems.append("config.json is missing")
    elif not _dangles(path / "config.json"):
        config = _json(path / "config.json", problems)
    tokenizers = sorted(names.intersection(_TOKENIZERS)) if needs_tokenizer else []
    if needs_tokenizer and not tokenizers:
        problems.append(f"it holds no tokenizer ({', '.join(_TOKENIZERS)})")
    for name in tokenizers:
        if not _dangles(path / name) and not os.access(path / name, os.R_OK):
            problems.append(f"{name}: Permission denied (as user {os.geteuid()})")
    float_elements = other_bytes = 0
    for shard in _shards(path, names, problems):
        floats, others = _sizes(shard, problems)
        float_elements += floats
        other_bytes += others
    if problems:
        raise HostError(f"{path} is no complete checkpoint: {'; '.join(problems)}", "fetch the model again")
    return Checkpoint(path, config, float_elements, other_bytes)


def read_optional_json(path: Path) -> dict[str, Any]:
    """The object in `path`, empty if there is no such file. Raises HostError if it cannot be read."""
    if not _exists(path):
        return {}
    problems: list[str] = []
    value = _json(path, problems)
    if problems:
        raise HostError(f"{path.parent}: {problems[0]}", "fetch the model again")
    return value


def _dangles(path: Path) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        # Where a folder on the way is closed to this user, opening the file says so.
        return error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR)
    return False


def _open(path: Path) -> BinaryIO:
    # A pipe would never end, and reading a device is not looking at a file.
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(0, "is no regular file")
    return path.open("rb")


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        with _open(path) as file:
            value = json.loads(file.read(_MAX_JSON))
    except OSError as error:
        problems.append(f"{path.name}: {_reason(error)}")
    except (ValueError, RecursionError) as error:
        problems.append(f"{path.name} is no JSON ({error})")
    else:
        if isinstance(value, dict):
            return value
        problems.append(f"{path.name} holds no object")
    return {}


def _shards(path: Path, names: set[str], problems: list[str]) -> list[Path]:
    """The weight files that the engine would read: those that the index names, or all *.safetensors."""
    if _INDEX in names and not _dangles(path / _INDEX):
        known = len(problems)
        weight_map = _json(path / _INDEX, problems).get("weight_map")
        if len(problems) > known:
            return []
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            problems.append(f"{_INDEX} has no weight_map from tensors to files")
            return []
        wanted = sorted(set(weight_map.values()))
    else:
        wanted = sorted(name for name in names if name.endswith(".safetensors"))
    if not wanted:
        others = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf")))
        held = f", only {', '.join(others)}" if others else ""
        problems.append(f"it holds no *.safetensors weights{held}")
    # Names in an index are file names; anything else (a path out of the folder, say) is not read.
    problems += [f"{name} is missing" for name in wanted if name not in names]
    return [path / name for name in wanted if name in names and not _dangles(path / name)]


def _sizes(shard: Path, problems: list[str]) -> tuple[int, int]:
    """(float elements, other bytes) of one safetensors file, from its header."""
    try:
        with _open(shard) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 0 < length <= size - 8:
                is_pointer = start.startswith(b"version ")
                problems.append(f"{shard.name} is {'a git-lfs pointer, not the file' if is_pointer else 'cut short'}")
                return 0, 0
            if length > _MAX_HEADER:
                raise ValueError("the header is too long")
            header = json.loads(file.read(length))
        floats, others, end = _totals(header)
    except OSError as error:
        problems.append(f"{shard.name}: {_reason(error)}")
        return 0, 0
    except (ValueError, RecursionError):
        problems.append(f"{shard.name} has no readable header")
        return 0, 0
    expected = 8 + length + end
    if size != expected:
        problems.append(f"{shard.name} has {size} bytes, its header says {expected}")
        return 0, 0
    return floats, others


def _totals(header: Any) -> tuple[int, int, int]:
    """(float elements, other bytes, bytes of all data) by a header. Raises ValueError if it is not sound.

    Sound is what safetensors accepts: sizes that follow from shape and type, and data without holes or overlaps.
    """
    if not isinstance(header, dict):
        raise ValueError("no table of tensors")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("__metadata__ is no table of texts")
    floats = others = 0
    spans = []
    for name, tensor in header.items():
        if not isinstance(tensor, dict):
            raise ValueError(f"{name} is no tensor")
        shape, kind = _counts(tensor.get("shape")), tensor.get("dtype")
        offsets = _counts(tensor.get("data_offsets"))
        bits = {**_FLOAT_BITS, **_OTHER_BITS}.get(kind) if isinstance(kind, str) else None
        if bits is None or len(offsets) != 2:
            raise ValueError(f"{name} has no known type or no place")
        elements = math.prod(shape)
        if elements * bits != 8 * (offsets[1] - offsets[0]):
            raise ValueError(f"{name} has another size than its shape")
        if kind in _FLOAT_BITS:
            floats += elements
        else:
            others += offsets[1] - offsets[0]
        spans.append((offsets[0], offsets[1]))
    end = 0
    for first, last in sorted(spans):
        if first != end:
            raise ValueError("the data has holes or overlaps")
        end = last
    return floats, others, end


def _counts(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise ValueError("not a list of counts")
    return value
