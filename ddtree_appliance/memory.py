"""What must fit a GPU: weights, the KV pools of target and drafter, and the buffers of a verify step.

Pure arithmetic on configuration files and sizes, so that what cannot fit is refused before a weight is read. It repeats
SGLang 0.5.17's own sums; each function names the one that it follows, and the tests compare them. A plan without
problems is necessary, not sufficient: the activations of a prefill and the graphs' own memory come on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree_appliance.checkpoint import Checkpoint
from ddtree_appliance.config import Config
from ddtree_appliance.ddtree.limits import words_for
from ddtree_appliance.ddtree.pair import block_size_of

GIB = 1 << 30
# Measured on an H200 (driver 580, torch 2.11.0+cu130): what a process holds once CUDA has started; an NCCL
# communicator, which several ranks need; and what appears with the weights (kernel modules, tables of positions).
# SGLang takes its share of what is free after the first two.
CONTEXT_BYTES = 621 << 20
COMMUNICATOR_BYTES = 558 << 20
LOADED_BYTES = 120 << 20
# torch_ops ranks the drafter's candidates in chunks of at most this size (its CANDIDATE_BYTES and BYTES_PER_LOGIT).
CANDIDATE_BYTES = 256 << 20
CANDIDATE_BYTES_PER_LOGIT = 32
# Draws, penalties and log-probabilities work in chunks too, one after the other (sampling's DRAW_BYTES, penalties'
# PENALTY_BYTES, and theirs per logit; logprobs keeps to sampling's).
DRAW_BYTES = 640 << 20
DRAW_BYTES_PER_LOGIT = 56
_LOGIT_BYTES = 4
_KV_INDEX_BYTES = 8
_KV_SPLITS = 8  # --triton-attention-num-kv-splits
# In SGLang's order (CONTEXT_LENGTH_KEYS).
_CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")


@dataclass(frozen=True)
class MemoryPlan:
    """The arithmetic for one GPU (bytes, tokens) and what it refuses. `problems` is empty if everything fits.

    kv_bytes_per_token: of both pools as they are allocated; rest_bytes: what they and the weights leave.
    """

    free_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int
    pool_tokens: int
    needed_tokens: int
    step_bytes: int
    rest_bytes: int
    problems: tuple[str, ...]

    def rows(self) -> list[tuple[str, str]]:
        """The arithmetic as (what, how much), for people."""
        return [
            ("free memory", gib(self.free_bytes)),
            ("weights, target and drafter", gib(self.weight_bytes)),
            ("KV per token, target and drafter", f"{self.kv_bytes_per_token / 1024:.1f} KiB"),
            ("KV pool", f"{self.pool_tokens} tokens, {gib(self.pool_tokens * self.kv_bytes_per_token)}"),
            ("needed in the pool", f"{self.needed_tokens} tokens"),
            ("logits, masks and indices of a verify step", gib(self.step_bytes)),
            ("left for them, activations and graphs", gib(self.rest_bytes)),
        ]


def gib(count: int) -> str:
    """Bytes as GiB, for people."""
    return f"{count / GIB:.2f} GiB"


def item_bytes(config: Config) -> int:
    """Bytes of one floating-point weight, in target and drafter.

    As SGLang's `_get_and_verify_dtype`: on every device, auto runs a float32 checkpoint in half precision, and one that
    names no type too. So only an explicit float32 takes four bytes.
    """
    return 4 if config.engine.dtype == "float32" else 2


def kv_item_bytes(config: Config) -> int:
    """Bytes of one element of the KV pools (SGLang's `configure_kv_cache_dtype`; FP8 and FP4 are refused elsewhere)."""
    return item_bytes(config) if config.engine.kv_dtype == "auto" else 2


def text_config(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model."""
    nested = model.get("text_config")
    return nested if isinstance(nested, Mapping) else model


def context_limit(model: Mapping[str, Any]) -> int:
    """The longest context that SGLang gives a model with this config.json.

    Its `get_context_length` multiplies by the scaling's factor unless the original length is given, and transformers
    fills that in for some types.
    """
    model = text_config(model)
    scaling = model.get("rope_scaling") or model.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    is_final = kind in ("llama3", "yarn", "longrope") or "original_max_position_embeddings" in scaling
    factor = 1.0 if is_final else float(scaling.get("factor") or 1)
    length = next((model[key] for key in _CONTEXT_KEYS if model.get(key) is not None), 2048)
    return int(factor * length)


def layer_kv_bytes(model: Mapping[str, Any], tp_size: int, element_bytes: int) -> int:
    """Bytes of one token's keys and values in one layer on one GPU. model: the contents of its config.json."""
    model = text_config(model)
    kv_heads = max(_kv_heads(model) // tp_size, 1)  # fewer heads than ranks are replicated
    return 2 * kv_heads * _head_dim(model) * element_bytes


def _kv_heads(model: Mapping[str, Any]) -> int:
    return int(model.get("num_key_value_heads") or model["num_attention_heads"])


def _head_dim(model: Mapping[str, Any]) -> int:
    return int(model.get("head_dim") or int(model["hidden_size"]) // int(model["num_attention_heads"]))


def _layers(model: Mapping[str, Any]) -> int:
    return int(text_config(model)["num_hidden_layers"])


def sized_kv_bytes(target: Mapping[str, Any], drafter: Mapping[str, Any], tp_size: int, element_bytes: int) -> int:
    """Bytes per token by which SGLang sizes both pools: as though the drafter's layers were the target's.

    `DefaultPoolConfigurator` with `scale_kv_cell_size_per_token_for_dflash`. The drafter's pool then gets as many
    tokens in its own shape, so both may take more or less than this.
    """
    layers = _layers(target)
    cell = layers * layer_kv_bytes(target, tp_size, element_bytes)
    return -(-cell * (layers + _layers(drafter)) // layers)


def plan_memory(config: Config, target: Checkpoint, drafter: Checkpoint, free_bytes: int) -> MemoryPlan:
    """The plan for one GPU of which `free_bytes` are free before anything starts; on a CPU, for its memory.

    Weights are counted as they are loaded: a checkpoint that SGLang quantises at start (engine.quantization) as it is
    on disk, which is its peak. The pool follows `KVCacheConfigurator._profile_available_bytes`: what is left after the
    weights of both models, less (1 - memory_fraction) of what was free before them.
    """
    engine, tp_size, page = config.engine, config.tp_size, config.engine.page_size
    element_bytes = kv_item_bytes(config)
    per_token = sum(
        _layers(model) * layer_kv_bytes(model, tp_size, element_bytes) for model in (target.config, drafter.config)
    )
    weights = sum(model.weight_bytes(item_bytes(config)) for model in (target, drafter)) // tp_size
    loaded = weights + _beside_weights(config, drafter.config)
    available = max(free_bytes - _start_bytes(config), 0)
    static = int(available * engine.memory_fraction)
    left = max(static - loaded, 0)
    affordable = left // sized_kv_bytes(target.config, drafter.config, tp_size, element_bytes) // page * page
    pool = affordable if engine.kv_tokens is None else engine.kv_tokens // page * page

    context = engine.context_length or context_limit(target.config)
    reserve = 2 * _step_slots(config, drafter.config)
    full_requests = engine.max_running_requests if engine.guarantee_context else 1
    others = engine.max_running_requests - full_requests
    # Admission keeps one page free beside prompt and answer (PrefillAdder.add_one_req).
    needed = full_requests * _paged(context + max(reserve, page), page) + others * _paged(reserve, page)

    step = _step_bytes(config, target.config, drafter.config, context)
    rest = available - loaded - min(pool, affordable) * per_token

    problems = []
    if loaded >= static:
        problems.append(
            f"the weights ({gib(weights)} per GPU) exceed the {gib(static)} that memory_fraction "
            f"{engine.memory_fraction} leaves of {gib(free_bytes)}"
        )
    elif pool > affordable:
        problems.append(
            f"kv_tokens {pool} need {gib(pool * per_token)}; {gib(left)} are left beside the weights, for {affordable} "
            "tokens"
        )
    elif needed > pool:
        kind = f"{full_requests} requests of" if full_requests > 1 else "one request of"
        problems.append(
            f"{kind} {context} tokens and a reserve of {reserve} per request need {needed} tokens; the KV pool has "
            f"{pool} ({gib(pool * per_token)} at {per_token} bytes per token)"
        )
    if loaded < static and step > rest:
        problems.append(
            f"logits, masks and indices of a verify step ({engine.max_running_requests} requests x "
            f"{config.ddtree.budget + 1} nodes, context {context}) need {gib(step)}; weights and KV pool leave "
            f"{gib(rest)}"
        )
    return MemoryPlan(free_bytes, weights, per_token, pool, needed, step, rest, tuple(problems))


def _start_bytes(config: Config) -> int:
    if config.engine.device == "cpu":
        return 0
    return CONTEXT_BYTES + (COMMUNICATOR_BYTES if config.tp_size > 1 else 0)


def _beside_weights(config: Config, drafter: Mapping[str, Any]) -> int:
    """What loading leaves beside the weights: on a GPU, also a copy of the drafter's K and V projections.

    The copy is `FusedKVMaterializeHelper`'s, which writes accepted tokens into all layers of the drafter's KV at once.
    """
    if config.engine.device == "cpu":
        return 0
    model = text_config(drafter)
    rows = _layers(model) * layer_kv_bytes(model, config.tp_size, item_bytes(config))
    return LOADED_BYTES + rows * int(model["hidden_size"])


def _paged(tokens: int, page: int) -> int:
    return -(-tokens // page) * page


def _step_slots(config: Config, drafter: Mapping[str, Any]) -> int:
    # S of docs/engine.md; a step reserves twice as much (get_alloc_reserve_per_decode, patch 0002).
    return max(config.ddtree.budget + 1, block_size_of(drafter) or 0)


def _step_bytes(config: Config, target: Mapping[str, Any], drafter: Mapping[str, Any], context: int) -> int:
    """What a verify step of the largest batch, of sampled requests, holds besides weights, KV and activations.

    Logits are float32 for every node (`_copy_logits_to_buffer`) beside the model's own half-precision ones. With
    graphs, each request's mask and KV indices are kept for the longest context, per node
    (`TritonAttnBackend.init_cuda_graph_state`), and the drafter has buffers of its own.
    """
    running, tp_size, graphs = config.engine.max_running_requests, config.tp_size, config.engine.device == "cuda"
    width, block = config.ddtree.budget + 1, block_size_of(drafter) or 0
    nodes, drafts = running * width, running * block
    vocabulary = int(text_config(target)["vocab_size"])
    reserve = 2 * max(width, block)
    row = context + max(4 + width, reserve + config.engine.page_size - 1)  # get_req_to_token_extra_context_len

    model_logits = item_bytes(config) if item_bytes(config) < _LOGIT_BYTES else 0
    # Several ranks gather their parts of the vocabulary and put them in order: two more copies.
    logits = nodes * vocabulary * (_LOGIT_BYTES + model_logits * (1 if tp_size == 1 else 3))
    masks = nodes * (row + width)
    indices = running * context * _KV_INDEX_BYTES
    ranked = running * max(block - 1, 0) * vocabulary
    candidates = min(CANDIDATE_BYTES, ranked * CANDIDATE_BYTES_PER_LOGIT)
    if graphs:
        # The kernels keep all logits at once, in the model's type. Where that is less, the rest stands for the graphs.
        candidates = max(candidates, ranked * item_bytes(config))
    # One after the other, penalties and log-probabilities with less per logit; and how often each token was put out.
    table_rows = running + 1  # ReqToTokenPool: row 0 is for padding
    draws = min(DRAW_BYTES, nodes * vocabulary * DRAW_BYTES_PER_LOGIT) + table_rows * vocabulary * _LOGIT_BYTES
    total = logits + masks + indices + candidates + draws + table_rows * row * 4
    if not graphs:
        return total
    if drafts > nodes:
        total += drafts * vocabulary * _LOGIT_BYTES  # GraphSharedOutput: a larger buffer does not replace the first
    total += masks + (nodes + drafts) * context * _KV_INDEX_BYTES - indices
    # What the verify attention reads (`DDTreeWorker.init_attention_backends`): slots, and a bit per node and node.
    total += table_rows * (row * 4 + width * 4 * words_for(width))
    for model, rows in ((text_config(target), nodes), (text_config(drafter), drafts)):
        heads = max(int(model["num_attention_heads"]) // tp_size, 1)
        total += rows * heads * _KV_SPLITS * (_head_dim(model) + 1) * _LOGIT_BYTES
    return total
