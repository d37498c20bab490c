"""What DDTREE refuses when the server starts: one row, one rule, each with the reason.

Rows read SGLang's ServerArgs and run before any weight is loaded. A row that names a feature not built yet says so;
it leaves this table in the commit that builds and proves the feature.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_appliance.ddtree.limits import MAX_BUDGET, MAX_TOPK

# With the root a whole number of the tiles that matrix products have on a GPU.
DEFAULT_BUDGET = 31
DEFAULT_TOPK = 16
# Attention backends that verify a tree with its mask, by device type.
TREE_BACKENDS = {"cpu": ("torch_native",), "cuda": ("triton", "flashinfer")}
# The plugin registers it with SGLang; trees are drawn from by the same code.
SAMPLING_BACKEND = "seeded"


@dataclass(frozen=True)
class StartRule:
    """Refuse a start in which `broken(server_args)` holds. `field` names what the operator set."""

    field: str
    broken: Callable[[Any], bool]
    reason: str


def _more_than_one(field: str, reason: str) -> StartRule:
    return StartRule(field, lambda args: (getattr(args, field) or 1) > 1, reason)


def _is_on(field: str, reason: str) -> StartRule:
    return StartRule(field, lambda args: bool(getattr(args, field)), reason)


START_RULES: tuple[StartRule, ...] = (
    _more_than_one("pp_size", "the verify step runs on one pipeline stage"),
    _more_than_one("dp_size", "data-parallel replicas are untested; run one server per replica"),
    _more_than_one("ep_size", "expert parallelism is untested"),
    _more_than_one("nnodes", "one server runs on one host"),
    _more_than_one("attn_cp_size", "context parallelism splits the prefix that the tree attends to"),
    _more_than_one("dcp_size", "decode context parallelism splits the prefix that the tree attends to"),
    _more_than_one("tokenizer_worker_num", "SGLang loads no plugins in extra tokenizer workers"),
    _is_on("enable_dp_attention", "DFLASH-family drafts do not run under DP attention"),
    StartRule(
        "disaggregation_mode",
        lambda args: args.disaggregation_mode != "null",
        "prefill/decode disaggregation does not carry the drafter's KV",
    ),
    _is_on("enable_hierarchical_cache", "the drafter's KV is not offloaded with the target's"),
    _is_on("enable_lmcache", "the drafter's KV is not stored with the target's"),
    _is_on("enable_flexkv", "the drafter's KV is not stored with the target's"),
    _is_on("radix_cache_backend", "only SGLang's own radix cache holds the drafter's KV"),
    _is_on("enable_hisparse", "sparse attention has no tree mask"),
    _is_on("enable_mixed_chunk", "a verify step cannot share its forward with a prefill chunk"),
    _is_on("enable_two_batch_overlap", "a batch's trees are verified in one forward"),
    _is_on("enable_pdmux", "a batch's trees are verified in one forward"),
    _is_on("enable_lora", "LoRA adapters are untested with drafts"),
    _is_on("lora_paths", "LoRA adapters are untested with drafts"),
    _is_on("enable_strict_thinking", "it attaches a grammar to every request"),
    _is_on("enable_deterministic_inference", "deterministic inference is untested with drafts"),
    _is_on("enable_streaming_session", "sessions are untested with drafts"),
    _is_on("enable_session_radix_cache", "sessions are untested with drafts"),
    _is_on("enable_page_major_kv_layout", "accepted KV is moved in the per-layer layout only"),
    _is_on("enable_unified_memory", "accepted KV is moved in the per-layer layout only"),
    _is_on("encoder_only", "there is nothing to draft"),
    _is_on("dllm_algorithm", "a diffusion target has no next token to verify"),
    _is_on("use_ray", "plugins are not loaded in Ray actors"),
    _is_on("smg_grpc_mode", "the gRPC front does not return DDTREE's refusals"),
    _is_on("elastic_ep_backend", "expert parallelism is untested"),
    _is_on("speculative_adaptive", "it changes EAGLE's step count, which DDTREE has not"),
    _is_on("speculative_use_rejection_sampling", "its acceptance test is biased for trees"),
    _is_on("speculative_token_map", "the drafter uses the target's whole vocabulary"),
    _is_on("speculative_draft_window_size", "a windowed drafter cache is untested with trees"),
    StartRule(
        "speculative_attention_mode",
        lambda args: args.speculative_attention_mode != "prefill",
        "trees are verified by the prefill kernels, which take a mask",
    ),
    StartRule(
        "speculative_num_steps",
        lambda args: args.speculative_num_steps not in (None, 1),
        "the drafter makes one pass; the tree's depth is its block size - 1",
    ),
    StartRule(
        "speculative_eagle_topk",
        lambda args: args.speculative_eagle_topk not in (None, 1),
        "it belongs to EAGLE; candidates per position are --speculative-ddtree-topk",
    ),
    StartRule(
        "sampling_backend",
        lambda args: args.sampling_backend not in (None, SAMPLING_BACKEND),
        f"a request's tokens would depend on the tree and on its neighbours; leave it out, or set {SAMPLING_BACKEND}",
    ),
    StartRule(
        "grammar_backend",
        lambda args: args.grammar_backend not in (None, "xgrammar", "none"),
        "trees are constrained with xgrammar's matchers, which roll back; others are unproved",
    ),
    StartRule(
        "kv_cache_dtype",
        lambda args: args.kv_cache_dtype not in ("auto", "bfloat16", "bf16", "float16", "float32"),
        "quantised KV is unproved with trees",
    ),
    StartRule(
        "speculative_draft_model_path",
        lambda args: not args.speculative_draft_model_path,
        "DDTREE needs a DFlash drafter",
    ),
    StartRule(
        "speculative_ddtree_budget",
        lambda args: not 1 <= budget_of(args) <= MAX_BUDGET,
        f"the node budget must be 1 to {MAX_BUDGET}",
    ),
    StartRule(
        "speculative_ddtree_topk",
        lambda args: not 1 <= topk_of(args) <= MAX_TOPK,
        f"the candidates per position must be 1 to {MAX_TOPK}",
    ),
    StartRule(
        "speculative_num_draft_tokens",
        lambda args: args.speculative_num_draft_tokens not in (None, budget_of(args) + 1),
        "the verify width is the node budget + 1; set --speculative-ddtree-budget instead",
    ),
)

# Read by SGLang's workers from the environment; silently without effect on DDTREE if not refused.
REFUSED_ENVIRONMENT = {
    "SGLANG_SIMULATE_ACC_LEN": "accept lengths are measured, never simulated",
    "SGLANG_RUST_SERVER": "the Rust front does not return DDTREE's refusals",
}


def budget_of(server_args: Any) -> int:
    """The node budget that a start with these arguments uses."""
    given = server_args.speculative_ddtree_budget
    return DEFAULT_BUDGET if given is None else int(given)


def topk_of(server_args: Any) -> int:
    """The candidates per position that a start with these arguments uses."""
    given = server_args.speculative_ddtree_topk
    return DEFAULT_TOPK if given is None else int(given)


def start_problems(server_args: Any, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Everything in the arguments and the environment that DDTREE refuses, one sentence each."""
    problems = [
        f"--{rule.field.replace('_', '-')} = {getattr(server_args, rule.field)}: {rule.reason}"
        for rule in START_RULES
        if rule.broken(server_args)
    ]
    return problems + environment_problems(environment)


def environment_problems(environment: Mapping[str, str]) -> list[str]:
    """The variables in `environment` that DDTREE refuses, one sentence each."""
    return [
        f"{name} = {environment[name]}: {reason}"
        for name, reason in REFUSED_ENVIRONMENT.items()
        if not _is_off(environment.get(name, ""))
    ]


SPECULATIVE_PREFIXES = ("speculative_", "decoupled_spec", "spec_trace", "enable_multi_layer")
# Flags of speculative decoding that DDTREE, or the part of SGLang that loads its drafter, reads or judges above.
READ_FLAGS = frozenset(
    {
        "speculative_algorithm",
        "speculative_draft_model_path",
        "speculative_draft_model_revision",
        "speculative_draft_load_format",
        "speculative_draft_attention_backend",
        "speculative_draft_model_quantization",
        "speculative_moe_runner_backend",
        "speculative_dflash_block_size",
        *(rule.field for rule in START_RULES),
    }
)


def unread_problems(server_args: Any) -> list[str]:
    """Flags of other speculative algorithms that were set: they would have no effect. `server_args`: a dataclass."""
    problems = []
    for field in dataclasses.fields(server_args):
        is_speculative = field.name.startswith(SPECULATIVE_PREFIXES)
        if is_speculative and field.name not in READ_FLAGS:
            value = getattr(server_args, field.name)
            if value != field.default:
                problems.append(f"--{field.name.replace('_', '-')} = {value}: DDTREE does not read it")
    return problems


def _is_off(value: str) -> bool:
    # As SGLang reads them: a boolean by these words, a number by its sign.
    try:
        return float(value) <= 0
    except ValueError:
        return value.strip().lower() in ("", "false", "no", "n")


def block_size_problem(server_args: Any, drafter_block_size: int) -> str | None:
    """The contradiction between a block size on the command line and the drafter's, or None."""
    given = server_args.speculative_dflash_block_size
    if given is None or int(given) == drafter_block_size:
        return None
    return f"--speculative-dflash-block-size = {given}: the drafter's block size is {drafter_block_size}; leave it out"


def backend_problems(device: str, backends: Mapping[str, str | None]) -> list[str]:
    """Attention backends that cannot verify a tree. `backends` maps the flag's name to the resolved backend."""
    usable = TREE_BACKENDS.get(device.split(":")[0])
    if usable is None:
        return [f"--device = {device}: DDTREE runs on {', '.join(TREE_BACKENDS)}"]
    return [
        f"--{flag} = {backend}: on {device} trees are verified by {', '.join(usable)}"
        for flag, backend in backends.items()
        if backend not in usable
    ]


def model_problems(model_config: Any) -> list[str]:
    """Kinds of target whose attention or state a tree does not fit yet. `model_config`: SGLang's ModelConfig."""
    kinds = {
        "multimodal": bool(getattr(model_config, "is_multimodal", False)),
        "sliding-window": bool(getattr(model_config, "is_hybrid_swa", False)) or _has_windowed_layers(model_config),
        "MLA": getattr(getattr(model_config, "attention_arch", None), "name", "MHA") != "MHA",
        "hybrid (linear attention or Mamba)": _is_hybrid(model_config),
        "encoder-decoder": bool(getattr(model_config, "is_encoder_decoder", False)),
        "embedding": not getattr(model_config, "is_generation", True),
    }
    found = [kind for kind, is_so in kinds.items() if is_so]
    return [f"the target is a {kind} model: DDTREE serves full-attention text models" for kind in found]


def _has_windowed_layers(model_config: Any) -> bool:
    # SGLang's own flag knows some architectures only, and is off where the memory for windows is not split.
    config = getattr(model_config, "hf_text_config", None)
    layer_types = getattr(config, "layer_types", None) or []
    return bool(set(layer_types) & {"sliding_attention", "chunked_attention"}) or bool(
        getattr(config, "attention_chunk_size", None)
    )


def _is_hybrid(model_config: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model_config) is not None
