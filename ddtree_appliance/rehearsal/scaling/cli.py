"""The command behind `scripts/make-scale-model`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from ddtree_appliance.errors import ApplianceError, HostError, report
from ddtree_appliance.rehearsal.options import positive, say
from ddtree_appliance.rehearsal.scaling.folder import require_empty, write_pair
from ddtree_appliance.rehearsal.scaling.models import plan_pair
from ddtree_appliance.rehearsal.scaling.sizes import ScaleSizes

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_SIZE_HELP = {
    "layers": "layers of the target",
    "hidden": "width of the residual stream of target and drafter, as all following widths",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "head_dim": "width of a head; a multiple of the small pair's",
    "intermediate": "units of an MLP",
    "vocabulary": "rows of embedding and head; tokens beyond the small pair's never win",
    "drafter_layers": "layers of the drafter",
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make-scale-model",
        description="Write the bundled pair at a real model's size: the same function, and so the same tokens and "
        "accept lengths, at the cost of that many weights. The default sizes are those of Qwen3-8B and a five-layer "
        "drafter, 18 GB in bfloat16.",
        epilog="The last line on stdout is one JSON object with the folders, parameter counts and seconds.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; new or empty")
    for field in fields(ScaleSizes):
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=positive,
            default=field.default,
            metavar="N",
            help=f"{_SIZE_HELP[field.name]} (default: {field.default})",
        )
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bfloat16", help="default: bfloat16")
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="where weights are made; auto: cuda if there"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the inert weights (default: 0)")
    return parser


def _device(name: str) -> torch.device:
    usable = torch.cuda.is_available()
    if name == "cuda" and not usable:
        raise HostError("--device cuda: torch finds no usable GPU", hint="--device cpu needs minutes at full size")
    return torch.device("cuda" if usable and name != "cpu" else "cpu")


@torch.no_grad()
def run(argv: Sequence[str] | None) -> int:
    options = build_parser().parse_args(argv)
    started = time.monotonic()
    require_empty(options.out)
    sizes = ScaleSizes(**{field.name: getattr(options, field.name) for field in fields(ScaleSizes)})
    pair = plan_pair(sizes, _DTYPES[options.dtype], _device(options.device), options.seed)
    write_pair(options.out, pair, say)
    result = {
        "target": str(options.out / "target"),
        "drafter": str(options.out / "dflash"),
        "target_parameters": pair.target.parameters,
        "drafter_parameters": pair.drafter.parameters,
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(result), flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(argv)
    except ApplianceError as error:
        return report(error)
