"""Sessions and units with constructed numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddtree_appliance.bench.records import Agreement, Cell, GpuClock, ServerRecord, SessionRecord, UnitRecord
from ddtree_appliance.bench.variants import Variant, parse_variant

VARIANTS = ("none", "dflash", "dflash:block=8", "ddtree:budget=8", "ddtree:budget=64")
TOKENS = 1000
# tok/s of three repeats. dflash itself varies by 5 %.
SPEEDS: dict[str, tuple[float, ...]] = {
    "none": (100.0, 100.0, 100.0),
    "dflash": (200.0, 210.0, 205.0),
    "dflash-b8": (150.0, 150.0, 150.0),
    "ddtree-8": (204.0, 214.0, 209.0),
    "ddtree-64": (300.0, 315.0, 307.5),
}
# Of one session's steps; all but the count in milliseconds.
BREAKDOWN = {
    "steps": 64,
    "draft": 1.0,
    "build": 0.1,
    "verify": 4.0,
    "accept": 0.1,
    "commit": 0.2,
    "gap": 0.1,
    "step": 5.5,
}
ACCEPTED = {"none": 0, "dflash": 2, "dflash-b8": 2, "ddtree-8": 3, "ddtree-64": 4}


def facts(variant: Variant) -> dict[str, Any]:
    is_tree = variant.algorithm == "DDTREE"
    return {
        "speculative_algorithm": None if variant.algorithm == "none" else variant.algorithm,
        "speculative_ddtree_budget": variant.budget,
        "speculative_ddtree_topk": 16 if is_tree else None,
        "speculative_dflash_block_size": 16 if is_tree else None,
        "speculative_num_draft_tokens": (variant.budget or 0) + 1 if is_tree else variant.block_size or 16,
        "attention_backend": "triton",
        "disable_cuda_graph": False,
        "disable_overlap_schedule": False,
        "disable_radix_cache": True,
    }


def session(number: int, group: int = 0, variants: Sequence[str] = VARIANTS) -> SessionRecord:
    servers = {}
    for text in variants:
        variant = parse_variant(text)
        command = ("python3", "-m", "ddtree_appliance", "launch", "--", *variant.sglang_arguments("/d"))
        servers[variant.name] = ServerRecord(
            variant=variant, url="http://127.0.0.1:1", command=command, facts=facts(variant)
        )
    host = {
        **{"ddtree_appliance": "0.1.0", "revision": "abc", "python": "3.12.3", "system": "Linux", "cpus": 16},
        **{"packages": {"sglang": "0.5.17+ddtree.2", "torch": "2.11.0"}, "driver": "580.1", "cuda_of_driver": "13.0"},
        "gpus": [{"name": "NVIDIA H200", "memory_mib": 143771, "free_mib": 143000}],
    }
    return SessionRecord(
        session=number,
        group=group,
        started="2026-11-29T22:00:00+00:00",
        argv=("ddtree-appliance", "bench", "run", "--out", "DIR"),
        start_s=70.0,
        servers=servers,
        host=host,
    )


def cell(variant: str, repeat: int, tok_s: float, accepted: int = 0, **changed: Any) -> Cell:
    values: dict[str, Any] = {
        **{"variant": variant, "repeat": repeat, "wall_s": TOKENS / tok_s, "tokens": TOKENS},
        **{"decode_s": 9.0, "decode_steps": TOKENS // (accepted or 1), "first_s": 0.02, "cached_tokens": 0},
        **{"verify_steps": TOKENS // accepted if accepted else 0},
        **{"correct_drafts": TOKENS // accepted * (accepted - 1) if accepted else 0},
    }
    return Cell(**(values | changed))


def unit(
    session: int,
    concurrency: int,
    group: int = 0,
    speeds: Mapping[str, Sequence[float]] = SPEEDS,
    refused: Mapping[str, str] | None = None,
    breakdown: Mapping[str, float] | None = None,
    clocks: Mapping[str, Sequence[GpuClock]] | None = None,
) -> UnitRecord:
    """clocks: by variant, of each repeat."""
    refused = dict(refused or {})
    cells = [
        cell(
            name,
            repeat,
            tok_s,
            ACCEPTED[name],
            breakdown_ms=dict(breakdown) if breakdown and "tree" in name else None,
            clock=clocks[name][repeat] if clocks and name in clocks else None,
        )
        for name, values in speeds.items()
        if name not in refused
        for repeat, tok_s in enumerate(values)
    ]
    most = Agreement(compared=48, share=0.875, first_difference=61.5)
    itself = Agreement(compared=32, share=1.0, first_difference=None)
    return UnitRecord(
        session=session,
        group=group,
        concurrency=concurrency,
        started="2026-11-29T22:01:00+00:00",
        prompts=16,
        cells=tuple(cells),
        refused=refused,
        agreement={
            name: {label: most for label in ("none", "dflash") if label != name} | {"itself": itself}
            for name in speeds
            if name not in refused
        },
    )
