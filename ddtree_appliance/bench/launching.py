"""The command line and the environment of a server that is measured."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ddtree_appliance.bench.plan import Plan
from ddtree_appliance.bench.prompts import Prompt
from ddtree_appliance.bench.variants import Variant
from ddtree_appliance.ddtree.limits import MAX_BUDGET
from ddtree_appliance.rehearsal.server import rehearsal_environment

# Read by the engine: where its worker appends the times of its steps.
STEP_TIMES_VARIABLE = "DDTREE_STEP_TIMES"
DEVICE_FLAGS = {
    "cpu": (
        *("--dtype", "float32"),
        *("--attention-backend", "torch_native"),
        "--disable-cuda-graph",
    ),
    "cuda": (
        *("--dtype", "bfloat16"),
        *("--attention-backend", "triton"),
        # Some of the 58 sizes that SGLang captures by default, which takes over a minute per server.
        *("--cuda-graph-bs-prefill", "128", "256", "512", "1024", "2048", "4096"),
        *("--grammar-backend", "none"),
    ),
}
COMMON_FLAGS = (
    # Every repeat sends the same prompts: none may be found in a cache.
    "--disable-radix-cache",
    # The servers of a group that are not measured must not spin.
    "--sleep-on-idle",
    # The pools are limited by --max-total-tokens; SGLang takes this share of what the servers of a group leave free.
    *("--mem-fraction-static", "0.9"),
)
# A text prompt's length is known to the server alone. English and code need a third of a token per character; where
# this is too little, requests wait for slots: --server-arg=--max-total-tokens --server-arg=N gives more.
_TOKENS_PER_CHARACTER = 0.5


def server_command(variant: Variant, plan: Plan, port: int, prompts: Sequence[Prompt]) -> list[str]:
    """The command that starts the variant's server. Later flags win: the variant's own, then --server-arg."""
    assert plan.model_path is not None
    largest = max(plan.concurrency)
    flags = [
        *("--model-path", plan.model_path),
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
        *("--device", plan.device),
        *DEVICE_FLAGS[plan.device],
        *COMMON_FLAGS,
        *("--max-running-requests", str(largest)),
        *("--max-total-tokens", str(pool_tokens(plan, prompts))),
    ]
    if plan.device == "cuda":
        # A graph for each concurrency that is measured; the smaller batches at the end of a repeat are padded to one.
        flags += ["--cuda-graph-bs-decode", *(str(size) for size in sorted(set(plan.concurrency)))]
    flags += [*variant.sglang_arguments(plan.drafter), *plan.server_args]
    # -W: SGLang's own deprecation warnings would hide what matters in the log.
    return [sys.executable, "-W", "ignore", "-m", "ddtree_appliance", "launch", "--", *flags]


def pool_tokens(plan: Plan, prompts: Sequence[Prompt]) -> int:
    """KV slots that no request ever waits for, the same for all variants: equal pools, equal memory traffic."""
    longest = max(len(prompt) * (_TOKENS_PER_CHARACTER if isinstance(prompt, str) else 1) for prompt in prompts)
    # SGLang reserves two verify widths ahead of each request.
    per_request = int(longest) + plan.new_tokens + 2 * (MAX_BUDGET + 1)
    needed = max(plan.concurrency) * per_request
    return max(8192, -(-needed * 5 // 4 // 1024) * 1024)


def server_environment(device: str, step_times: Path | None) -> dict[str, str]:
    """The environment of a server. step_times: the file for the times of its steps, None for none."""
    environment = dict(os.environ)
    environment.pop(STEP_TIMES_VARIABLE, None)  # every server would write into the operator's one file
    if step_times is not None:
        environment[STEP_TIMES_VARIABLE] = str(step_times)
    return rehearsal_environment(inherited=environment) if device == "cpu" else environment
