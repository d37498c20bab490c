"""What must fit a GPU: cases by hand, properties, and the same sums done by SGLang's own code."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree_appliance.checkpoint import Checkpoint, read_checkpoint
from ddtree_appliance.config import Config
from ddtree_appliance.memory import (
    CANDIDATE_BYTES,
    CANDIDATE_BYTES_PER_LOGIT,
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    DRAW_BYTES,
    DRAW_BYTES_PER_LOGIT,
    GIB,
    LOADED_BYTES,
    MemoryPlan,
    context_limit,
    gib,
    item_bytes,
    kv_item_bytes,
    layer_kv_bytes,
    plan_memory,
    sized_kv_bytes,
    text_config,
)
from ddtree_appliance.rehearsal import server
from tests.unit.engine import import_sglang
from tests.unit.model_folders import DRAFTER, TARGET

# Qwen3-8B and its DFlash drafter, by their sizes.
TARGET_ELEMENTS = 8_190_735_360
DRAFTER_ELEMENTS = 1_048_626_176
# Beside the weights: what appears with them, and a copy of the drafter's K and V projections.
BESIDE = LOADED_BYTES + 5 * 2 * 1024 * 4096 * 2
FREE = {"80 GB": 79 * GIB, "96 GB": 95 * GIB, "141 GB": 139 * GIB}


def configured(**changes: Any) -> Config:
    """A configuration from keys of `engine` and, by these names, budget and gpus."""
    budget, gpus = changes.pop("budget", 64), changes.pop("gpus", 1)
    engine = {"model": "/srv/models/target", "drafter": "/srv/models/drafter", "context_length": 32768, **changes}
    names = [str(number) for number in range(gpus)] if engine.get("device") != "cpu" else []
    return Config.model_validate({"engine": engine, "ddtree": {"budget": budget}, "gpus": names})


def checkpoint(model: dict[str, Any], elements: int, other_bytes: int = 0) -> Checkpoint:
    return Checkpoint(Path("/srv/models/x"), model, elements, other_bytes)


def plan(
    free: int = FREE["96 GB"],
    target: dict[str, Any] | None = None,
    drafter: dict[str, Any] | None = None,
    elements: tuple[int, int] = (TARGET_ELEMENTS, DRAFTER_ELEMENTS),
    **changes: Any,
) -> MemoryPlan:
    models = ({**TARGET, **(target or {})}, {**DRAFTER, **(drafter or {})})
    return plan_memory(configured(**changes), *map(checkpoint, models, elements), free)


# By hand


def test_an_8b_pair_by_hand_on_96_gb() -> None:
    found = plan(FREE["96 GB"], max_running_requests=8, memory_fraction=0.85)
    # 2 (K, V) x 8 heads x 128 x 2 bytes = 4096 per layer; 36 target layers and 5 of the drafter.
    assert found.kv_bytes_per_token == 4096 * 41
    assert found.weight_bytes == (8_190_735_360 + 1_048_626_176) * 2
    available = 95 * GIB - 621 * 2**20
    pool_bytes = int(available * 0.85) - found.weight_bytes - (120 * 2**20 + 5 * 2 * 8 * 128 * 4096 * 2)
    assert found.pool_tokens == pool_bytes // (4096 * 41) == 401_716
    # S = 65 nodes, reserve 130; every request may grow to the context.
    assert found.needed_tokens == 8 * (32768 + 130)
    assert found.rest_bytes == available - found.weight_bytes - BESIDE - found.pool_tokens * 4096 * 41
    assert found.problems == ()


def test_the_plan_is_what_real_starts_on_an_h200_had() -> None:
    """2026-11-29, through `serve`: SGLang's max_total_num_tokens. Free memory is known to 0.01 GiB only."""
    big = plan(int(139.20 * GIB), memory_fraction=0.85)
    assert abs(big.pool_tokens - 641_904) < 0.01 * GIB * 0.85 / (4096 * 41)
    # Its log: 20.75 GB free once both pools were there, 19.73 once the graphs were.
    assert big.rest_bytes / GIB == pytest.approx(20.75, abs=0.1)
    drawing = DRAW_BYTES + 8 * 151936 * 4  # taken by the first sampled request, not at the start
    assert (big.step_bytes - drawing) / GIB == pytest.approx(20.75 - 19.73, abs=0.1)
    pair = (read_checkpoint(server.TARGET, True), read_checkpoint(server.DRAFTER, False))
    config = configured(context_length=2048, max_running_requests=16, memory_fraction=0.3)
    tiny = plan_memory(config, *pair, int(139.80 * GIB))
    assert abs(tiny.pool_tokens - 7_274_887) < 0.01 * GIB * 0.3 / 6144


def test_a_verify_step_by_hand() -> None:
    found = plan(max_running_requests=8)
    nodes, drafts = 8 * 65, 8 * 16
    row = 32768 + 2 * 65
    assert found.step_bytes == sum(
        (
            nodes * 151936 * 4,  # the graph's logits, float32
            nodes * 151936 * 2,  # the model's own, bfloat16
            2 * nodes * (row + 65),  # masks: the graph's and the step's
            (nodes + drafts) * 32768 * 8,  # the graphs' KV indices
            2 * 9 * row * 4,  # req_to_token, a row of padding included, and its rows as the step found them
            9 * 65 * 2 * 4,  # ancestors, in bits
            256 << 20,  # ranking candidates: 8 x 15 x 151936 x 32 bytes would be more
            640 << 20,  # draws: nodes x 151936 x 56 bytes would be more
            9 * 151936 * 4,  # how often each token was put out
            (nodes + drafts) * 32 * 8 * 129 * 4,  # the graphs' split-KV outputs and their log-sums
        )
    )


@pytest.mark.parametrize(
    "memory,requests,fits",
    [
        # good
        ("80 GB", 8, True),
        ("96 GB", 8, True),
        ("141 GB", 16, True),
        # bad: 32 KiB x 5 of KV per token are 5.1 GiB per request
        ("80 GB", 10, False),
        ("96 GB", 13, False),
        ("141 GB", 20, False),
    ],
)
def test_requests_of_32k_on_the_usual_cards(memory: str, requests: int, fits: bool) -> None:
    found = plan(FREE[memory], max_running_requests=requests)
    assert (not found.problems) == fits
    if not fits:
        assert found.problems[0] == (
            f"{requests} requests of 32768 tokens and a reserve of 130 per request need {found.needed_tokens} tokens; "
            f"the KV pool has {found.pool_tokens} ({gib(found.pool_tokens * 4096 * 41)} at 167936 bytes per token)"
        )


def test_without_the_guarantee_one_request_must_fit() -> None:
    found = plan(FREE["80 GB"], max_running_requests=64, guarantee_context=False, budget=16)
    # S is 17 nodes, wider than a block of 16.
    assert found.needed_tokens == 32768 + 34 + 63 * 34
    assert found.problems == ()
    alone = plan(FREE["80 GB"], context_length=None, max_running_requests=1, guarantee_context=False)
    assert alone.needed_tokens == 40960 + 130


def test_a_small_budget_reserves_for_the_drafters_block() -> None:
    assert plan(budget=7, max_running_requests=1).needed_tokens == 32768 + 2 * 16
    assert plan(budget=15, max_running_requests=1).needed_tokens == 32768 + 2 * 16
    assert plan(budget=16, max_running_requests=1).needed_tokens == 32768 + 2 * 17


def test_a_drafter_wider_than_the_tree_has_its_own_logits() -> None:
    narrow, wide = plan(budget=15, max_running_requests=8), plan(budget=14, max_running_requests=8)
    per_node = 151936 * 6 + 2 * (32768 + 32 + 15) + 32768 * 8 + 32 * 8 * 129 * 4
    # One node less per request, but a second buffer of 8 x 16 rows; the masks' rows are narrower by one, too.
    saved = 8 * per_node + 9 * 4 + 2 * 8 * 16  # bits are kept for a row of padding as well
    assert wide.step_bytes - narrow.step_bytes == 8 * 16 * 151936 * 4 - saved


@pytest.mark.parametrize(
    "kv_heads,gpus,heads_here",
    [(8, 1, 8), (8, 2, 4), (8, 4, 2), (8, 8, 1), (4, 8, 1), (2, 4, 1), (1, 2, 1), (None, 2, 16)],
)
def test_ranks_share_kv_heads_down_to_one(kv_heads: int | None, gpus: int, heads_here: int) -> None:
    changes = {"num_key_value_heads": kv_heads}
    found = plan(target=changes, drafter=changes, gpus=gpus)
    assert found.kv_bytes_per_token == 41 * 2 * heads_here * 128 * 2
    assert found.weight_bytes == (TARGET_ELEMENTS + DRAFTER_ELEMENTS) * 2 // gpus


def test_several_ranks_hold_a_communicator_each() -> None:
    one, two = plan(gpus=1), plan(gpus=2)
    assert one.free_bytes == two.free_bytes
    left = [
        found.rest_bytes + found.weight_bytes + found.pool_tokens * found.kv_bytes_per_token for found in (one, two)
    ]
    # A rank holds its part of the copied projections.
    assert left[0] - left[1] == COMMUNICATOR_BYTES - (BESIDE - LOADED_BYTES) // 2
    assert left[0] == one.free_bytes - CONTEXT_BYTES - BESIDE


def test_a_float32_checkpoint_is_counted_as_it_is_loaded() -> None:
    auto = plan(target={"dtype": "float32"})
    assert auto.weight_bytes == (TARGET_ELEMENTS + DRAFTER_ELEMENTS) * 2
    single = plan(FREE["141 GB"], device="cpu", dtype="float32", kv_tokens=65536, max_running_requests=1)
    assert single.weight_bytes == (TARGET_ELEMENTS + DRAFTER_ELEMENTS) * 4
    assert single.kv_bytes_per_token == 2 * 4096 * 41


def test_quantised_weights_are_counted_as_they_lie() -> None:
    pair = (checkpoint(TARGET, 1_200_000_000, 7_000_000_000), checkpoint(DRAFTER, DRAFTER_ELEMENTS))
    found = plan_memory(configured(), *pair, FREE["80 GB"])
    assert found.weight_bytes == 2_400_000_000 + 7_000_000_000 + 2 * DRAFTER_ELEMENTS


def test_a_drafter_of_another_shape_gets_as_many_tokens_in_its_own() -> None:
    same = plan()
    narrow, wide = plan(drafter={"num_key_value_heads": 2}), plan(drafter={"num_key_value_heads": 32})
    # SGLang sizes the pools by the target's layers, whatever the drafter's are; only its copied projections differ.
    copied_head = 5 * 2 * 128 * 4096 * 2
    assert narrow.pool_tokens - same.pool_tokens == pytest.approx(6 * copied_head / 167936, abs=1)
    assert same.pool_tokens - wide.pool_tokens == pytest.approx(24 * copied_head / 167936, abs=1)
    per_layer_head = 2 * 128 * 2
    assert narrow.kv_bytes_per_token == same.kv_bytes_per_token - 5 * 6 * per_layer_head
    # What the narrow one leaves of its share, and the wide one takes beyond it, is the step's.
    assert narrow.rest_bytes - same.rest_bytes == pytest.approx(same.pool_tokens * 5 * 6 * per_layer_head, rel=0.01)
    assert same.rest_bytes - wide.rest_bytes == pytest.approx(same.pool_tokens * 5 * 24 * per_layer_head, rel=0.01)


def test_a_drafter_with_a_larger_kv_can_leave_too_little() -> None:
    found = plan(drafter={"num_hidden_layers": 8, "num_key_value_heads": 32}, memory_fraction=0.9)
    assert len(found.problems) == 1
    assert found.problems[0].startswith(
        "logits, masks and indices of a verify step (8 requests x 65 nodes, context 32768) need "
    )
    assert found.rest_bytes < 0
    assert plan(drafter={"num_hidden_layers": 8}, memory_fraction=0.9).problems == ()


def test_kv_tokens_set_the_pool_and_leave_the_rest() -> None:
    free = plan()
    fixed = plan(kv_tokens=300_000)
    assert fixed.pool_tokens == 300_000
    assert fixed.rest_bytes - free.rest_bytes == (free.pool_tokens - 300_000) * fixed.kv_bytes_per_token
    assert fixed.problems == ()


def test_kv_tokens_beyond_the_memory_are_refused() -> None:
    found = plan(kv_tokens=410_000)
    left = plan().pool_tokens
    assert found.problems == (
        f"kv_tokens 410000 need {gib(410_000 * 167936)}; {gib(left * 167936)} are left beside the weights, for {left} "
        "tokens",
    )


def test_kv_tokens_below_the_need_are_refused() -> None:
    found = plan(kv_tokens=100_000)
    assert found.problems == (
        "8 requests of 32768 tokens and a reserve of 130 per request need 263184 tokens; the KV pool has 100000 "
        f"({gib(100_000 * 167936)} at 167936 bytes per token)",
    )


def test_weights_beyond_the_memory_are_the_only_problem_told() -> None:
    found = plan(FREE["80 GB"], elements=(70_000_000_000, DRAFTER_ELEMENTS))
    static = int((FREE["80 GB"] - CONTEXT_BYTES) * 0.85)
    assert found.problems == (
        f"the weights ({gib(found.weight_bytes)} per GPU) exceed the {gib(static)} that memory_fraction 0.85 leaves "
        "of 79.00 GiB",
    )
    assert found.pool_tokens == 0


@pytest.mark.parametrize("free", [0, 1, CONTEXT_BYTES])
def test_no_memory_is_a_problem_and_no_crash(free: int) -> None:
    assert plan(free).problems


@pytest.mark.parametrize("page,per_request", [(1, 32898), (16, 32912), (64, 32960), (256, 33024)])
def test_requests_take_whole_pages(page: int, per_request: int) -> None:
    found = plan(page_size=page, max_running_requests=4)
    # At 256 a page is more than the reserve, and admission keeps one free per request.
    assert found.needed_tokens == 4 * per_request
    assert found.pool_tokens % page == 0


def test_a_request_that_ends_on_a_page_needs_the_free_one_too() -> None:
    # 16254 + 130 are 64 pages of 256; admission wants 16254 + 256 to be free.
    found = plan(context_length=16254, page_size=256, max_running_requests=1)
    assert found.needed_tokens == 65 * 256


def test_the_last_token_and_the_last_byte_count() -> None:
    needed = plan().needed_tokens
    assert plan(kv_tokens=needed).problems == ()
    assert len(plan(kv_tokens=needed - 1).problems) == 1
    # With nearly all memory for the pool, its size decides what a step has.
    tight = {"memory_fraction": 0.999, "max_running_requests": 4}
    empty = plan(kv_tokens=64, **tight)
    most = (empty.rest_bytes + 64 * empty.kv_bytes_per_token - empty.step_bytes) // empty.kv_bytes_per_token
    assert plan(kv_tokens=most, **tight).problems == ()
    assert len(plan(kv_tokens=most + 1, **tight).problems) == 1


def test_explicit_kv_dtype_is_half_as_large_as_float32() -> None:
    assert kv_item_bytes(configured(dtype="float32", device="cpu", kv_tokens=64)) == 4
    assert kv_item_bytes(configured(dtype="float32", device="cpu", kv_tokens=64, kv_dtype="bfloat16")) == 2


def test_on_a_cpu_there_are_no_graphs_and_no_context() -> None:
    found = plan(
        16 * GIB,
        elements=(5_000_000, 2_000_000),
        device="cpu",
        dtype="float32",
        kv_tokens=16384,
        context_length=1024,
        budget=32,
        target={"vocab_size": 4096},
    )
    nodes, row = 8 * 33, 1024 + 66
    assert found.step_bytes == sum(
        (
            nodes * 4096 * 4,  # float32 already
            nodes * (row + 33),
            8 * 1024 * 8,
            9 * row * 4,  # req_to_token, a row of padding included
            8 * 15 * 4096 * 32,
            nodes * 4096 * 56,  # draws
            9 * 4096 * 4,  # how often each token was put out
        )
    )
    assert found.pool_tokens == 16384
    assert found.rest_bytes == 16 * GIB - found.weight_bytes - 16384 * found.kv_bytes_per_token
    assert found.problems == ()


def test_the_rehearsal_profile_fits_this_class_of_host() -> None:
    pair = (read_checkpoint(server.TARGET, True), read_checkpoint(server.DRAFTER, False))
    config = configured(device="cpu", dtype="float32", kv_tokens=16384, context_length=1024, budget=32)
    assert plan_memory(config, *pair, 2 * GIB).problems == ()
    assert plan_memory(config, *pair, 100 << 20).problems


def test_the_rows_say_what_the_numbers_are() -> None:
    found = plan()
    rows = dict(found.rows())
    assert rows["free memory"] == "95.00 GiB"
    assert rows["weights, target and drafter"] == "17.21 GiB"
    assert rows["KV per token, target and drafter"] == "164.0 KiB"
    assert rows["KV pool"] == f"{found.pool_tokens} tokens, {gib(found.pool_tokens * 167936)}"
    assert len(rows) == 7


def test_the_language_model_of_a_nested_configuration_counts() -> None:
    nested = {"architectures": ["X"], "text_config": TARGET, "hidden_size": 1}
    assert text_config(nested) is TARGET
    assert layer_kv_bytes(nested, 1, 2) == 4096
    assert context_limit(nested) == 40960
    assert text_config({"text_config": None, "a": 1}) == {"text_config": None, "a": 1}


def test_the_head_size_follows_from_the_hidden_size_if_not_given() -> None:
    assert layer_kv_bytes({"num_attention_heads": 32, "hidden_size": 4096}, 1, 2) == 2 * 32 * 128 * 2
    assert layer_kv_bytes({"num_attention_heads": 32, "hidden_size": 4096, "head_dim": 64}, 1, 2) == 2 * 32 * 64 * 2


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_attention_heads": 32},
        {"num_attention_heads": 0, "hidden_size": 1, "num_hidden_layers": 1},
        {**TARGET, "num_hidden_layers": 0},
        {**TARGET, "num_hidden_layers": "many"},
        {**TARGET, "rope_scaling": "yarn"},
    ],
)
def test_a_configuration_of_no_model_raises_what_its_reader_expects(config: dict[str, Any]) -> None:
    pair = (checkpoint(config, 1), checkpoint(DRAFTER, 1))
    with pytest.raises((ArithmeticError, AttributeError, LookupError, TypeError, ValueError)):
        plan_memory(configured(context_length=None, guarantee_context=False), *pair, GIB)


# Properties

SIZES = {
    "context_length": st.integers(64, 1 << 17),
    "max_running_requests": st.integers(1, 256),
    "budget": st.integers(1, 128),
    "memory_fraction": st.floats(0.1, 0.95),
    "page_size": st.sampled_from([1, 16, 64, 256]),
    "guarantee_context": st.booleans(),
    "kv_tokens": st.none() | st.integers(64, 1_000_000),
    "gpus": st.sampled_from([1, 2, 4, 8]),
}
QUICK = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FREE_BYTES = st.integers(4 * GIB, 180 * GIB)


@QUICK
@given(free=FREE_BYTES, sizes=st.fixed_dictionaries(SIZES), more=st.integers(1, 64))
def test_more_context_requests_or_nodes_never_need_less(free: int, sizes: dict[str, Any], more: int) -> None:
    base = plan(free, **sizes)
    for key in ("context_length", "max_running_requests", "budget"):
        grown = plan(free, **{**sizes, key: min(sizes[key] + more, 128) if key == "budget" else sizes[key] + more})
        assert grown.needed_tokens >= base.needed_tokens
        assert grown.pool_tokens == base.pool_tokens
        if key != "budget":
            assert grown.step_bytes >= base.step_bytes
        if base.problems and key != "budget":
            assert grown.problems


@QUICK
@given(free=FREE_BYTES, sizes=st.fixed_dictionaries(SIZES), more=st.integers(0, 64 * GIB))
def test_more_memory_never_makes_a_problem(free: int, sizes: dict[str, Any], more: int) -> None:
    if not plan(free, **sizes).problems:
        assert not plan(free + more, **sizes).problems


@QUICK
@given(free=FREE_BYTES, sizes=st.fixed_dictionaries(SIZES))
def test_problems_are_told_exactly_if_something_does_not_fit(free: int, sizes: dict[str, Any]) -> None:
    found = plan(free, **sizes)
    overhead = CONTEXT_BYTES + (COMMUNICATOR_BYTES if sizes["gpus"] > 1 else 0)
    static = int((free - overhead) * sizes["memory_fraction"])
    cell = sized_kv_bytes(TARGET, DRAFTER, sizes["gpus"], 2)
    loaded = found.weight_bytes + LOADED_BYTES + (BESIDE - LOADED_BYTES) // sizes["gpus"]
    fits = (
        loaded < static
        and found.pool_tokens * cell <= static - loaded
        and found.needed_tokens <= found.pool_tokens
        and found.step_bytes <= found.rest_bytes
    )
    assert fits == (not found.problems)
    if found.pool_tokens * cell <= static - loaded:
        used = loaded + found.pool_tokens * found.kv_bytes_per_token + found.rest_bytes
        assert used == free - overhead


# SGLang's own sums


@pytest.fixture(scope="module")
def sglang() -> SimpleNamespace:
    """The modules that ours repeat."""
    root = "sglang.srt"
    return SimpleNamespace(
        model_config=import_sglang(f"{root}.configs.model_config"),
        pools=import_sglang(f"{root}.model_executor.pool_configurator"),
        configurator=import_sglang(f"{root}.mem_cache.kv_cache_configurator"),
        sizing=import_sglang(f"{root}.mem_cache.allocation_sizing"),
        common=import_sglang(f"{root}.utils.hf_transformers.common"),
        kv_dtype=import_sglang(f"{root}.mem_cache.kv_cache_dtype"),
        triton=import_sglang(f"{root}.layers.attention.triton_backend"),
        masks=import_sglang(f"{root}.layers.attention.verify_mask"),
        shared=import_sglang(f"{root}.model_executor.graph_shared_output"),
        pool=import_sglang(f"{root}.mem_cache.memory_pool"),
    )


def pool_tokens_by_sglang(
    sglang: SimpleNamespace, config: Config, target: Checkpoint, drafter: Checkpoint, free_gib: float
) -> int:
    """Size the pool by `KVCacheConfigurator` with a model's facts in place of a loaded model."""
    import torch

    kv_heads = int(target.config["num_key_value_heads"])
    yes, no = (lambda: True), (lambda: False)
    algorithm = SimpleNamespace(is_eagle=no, is_standalone=no, is_dflash_family=yes)
    server_args = SimpleNamespace(
        max_total_tokens=config.engine.kv_tokens, dcp_size=1, pp_size=1, enable_dsa_cache_layer_split=False
    )
    configurator = SimpleNamespace(
        device="cuda",
        gpu_id=0,
        server_args=server_args,
        kv_cache_dtype=torch.bfloat16,
        kv_cache_dtype_str=None,
        is_draft_worker=False,
        is_hybrid_swa=False,
        mambaish_config=None,
        post_capture_kv_active=False,
        use_mla_backend=False,
        spec_algorithm=algorithm,
        spec_aux_config=SimpleNamespace(dflash_draft_num_layers=drafter.config["num_hidden_layers"]),
        layer_info=SimpleNamespace(num_effective_layers=target.config["num_hidden_layers"]),
        ps=SimpleNamespace(attn_dp_size=1, pp_size=1),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(architectures=target.config["architectures"]),
            context_len=config.engine.context_length,
            get_num_kv_heads=lambda size: max(1, kv_heads // size),
            head_dim=target.config["head_dim"],
            v_head_dim=target.config["head_dim"],
        ),
    )
    weights = sum(model.weight_bytes(2) for model in (target, drafter)) / config.tp_size / GIB
    layers, heads = (drafter.config[key] for key in ("num_hidden_layers", "num_key_value_heads"))
    copied = layers * 2 * max(heads // config.tp_size, 1) * 128 * 4096 * 2 / GIB
    after_loading = free_gib - weights - LOADED_BYTES / GIB - copied
    schedule = SimpleNamespace(
        mem_fraction_static=config.engine.memory_fraction,
        max_total_tokens=config.engine.kv_tokens,
        page_size=config.engine.page_size,
    )
    own = sglang.configurator.KVCacheConfigurator
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang.configurator, "get_world_group", lambda: SimpleNamespace(world_size=1, cpu_group=None))
        patch.setattr(sglang.configurator, "get_schedule", lambda: schedule)
        patch.setattr(sglang.configurator, "get_available_gpu_memory", lambda *args, **kwargs: after_loading)
        patch.setattr(sglang.pools, "get_parallel", lambda: SimpleNamespace(attn_tp_size=config.tp_size))
        patch.setattr(sglang.pools, "mambaish_config", lambda model_config: None)
        patch.setattr(sglang.pools, "create_memory_pool_configurator", sglang.pools.DefaultPoolConfigurator)
        configurator._apply_token_constraints = lambda capacity: own._apply_token_constraints(configurator, capacity)
        budget = own._profile_available_bytes(configurator, free_gib)
        return int(own.config_from_budget(configurator, budget).max_total_num_tokens)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    free=st.integers(40 * GIB, 180 * GIB),
    sizes=st.fixed_dictionaries(
        {"page_size": SIZES["page_size"], "gpus": SIZES["gpus"], "kv_tokens": st.none() | st.integers(256, 1_000_000)}
    ),
    fraction=st.floats(0.6, 0.95),
    layers=st.tuples(st.integers(1, 80), st.integers(1, 12)),
    heads=st.tuples(st.sampled_from([1, 2, 4, 8, 32]), st.sampled_from([2, 8])),
)
def test_the_pool_is_as_large_as_sglang_makes_it(
    free: int,
    sizes: dict[str, Any],
    fraction: float,
    layers: tuple[int, int],
    heads: tuple[int, int],
    sglang: SimpleNamespace,
) -> None:
    config = configured(memory_fraction=fraction, **sizes)
    target, drafter = (
        checkpoint({**model, "num_hidden_layers": count, "num_key_value_heads": kv_heads}, elements)
        for model, count, kv_heads, elements in zip(
            (TARGET, DRAFTER), layers, heads, (TARGET_ELEMENTS, DRAFTER_ELEMENTS), strict=True
        )
    )
    overhead = CONTEXT_BYTES + (COMMUNICATOR_BYTES if config.tp_size > 1 else 0)
    ours = plan_memory(config, target, drafter, free)
    theirs = pool_tokens_by_sglang(sglang, config, target, drafter, (free - overhead) / GIB)
    if any("kv_tokens" in problem for problem in ours.problems):
        assert theirs < ours.pool_tokens  # SGLang would take less and only warn
    else:
        # It computes in floating-point GiB.
        assert abs(theirs - ours.pool_tokens) <= config.engine.page_size


@pytest.mark.parametrize("named", ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn", None])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "float32"])
def test_elements_are_as_large_as_sglang_makes_them(named: str | None, dtype: str, sglang: SimpleNamespace) -> None:
    chosen = sglang.model_config._get_and_verify_dtype({"dtype": named, "model_type": "qwen3"}, dtype)
    assert item_bytes(configured(dtype=dtype)) == chosen.itemsize


@pytest.mark.parametrize("kv_dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_kv_elements_are_as_large_as_sglang_makes_them(dtype: str, kv_dtype: str, sglang: SimpleNamespace) -> None:
    import torch

    model_dtype = sglang.model_config._get_and_verify_dtype({"dtype": "bfloat16"}, dtype)
    _, chosen = sglang.kv_dtype.configure_kv_cache_dtype(
        server_args_kv_cache_dtype=kv_dtype,
        model=torch.nn.Linear(1, 1),
        model_dtype=model_dtype,
        is_draft_worker=False,
        is_dflash=True,
        speculative_draft_attention_backend="triton",
    )
    assert kv_item_bytes(configured(dtype=dtype, kv_dtype=kv_dtype)) == chosen.itemsize


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": YARN},
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 32768}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
        {"rope_parameters": {**YARN, "rope_theta": 1000000}},
        {"rope_theta": 1000000, "model_max_length": 8192},
        {"max_sequence_length": 4096},
        {"max_position_embeddings": 1 << 20},
    ],
)
def test_the_context_limit_is_sglangs(fields: dict[str, Any], sglang: SimpleNamespace, tmp_path: Path) -> None:
    from sglang.srt.utils.hf_transformers_utils import get_config, get_hf_text_config

    model = {**TARGET, **fields}
    (tmp_path / "config.json").write_text(json.dumps(model))
    read = get_hf_text_config(get_config(str(tmp_path), trust_remote_code=False))
    assert context_limit(model) == sglang.common.get_context_length(read)


@settings(max_examples=100, deadline=None)
@given(budget=st.integers(1, 128), block=st.integers(2, 64), page=st.sampled_from([1, 16, 256]))
def test_the_reserve_is_sglangs(budget: int, block: int, page: int) -> None:
    sizing = import_sglang("sglang.srt.mem_cache.allocation_sizing")
    server_args = SimpleNamespace(
        speculative_algorithm="DFLASH",
        speculative_num_steps=1,
        speculative_eagle_topk=1,
        max_speculative_num_draft_tokens=budget + 1,
        speculative_dflash_block_size=block,
        page_size=page,
    )
    reserve = sizing.get_alloc_reserve_per_decode(server_args)
    found = plan(budget=budget, drafter={"block_size": block}, page_size=page, max_running_requests=1)
    assert found.needed_tokens == -(-(32768 + max(reserve, page)) // page) * page


def bytes_of(tensors: Any) -> int:
    import torch

    return sum(value.nbytes for value in vars(tensors).values() if isinstance(value, torch.Tensor))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    budget=st.integers(1, 128),
    block=st.integers(2, 64),
    requests=st.integers(1, 64),
    context=st.integers(64, 1 << 16),
    page=st.sampled_from([1, 16, 256]),
)
def test_a_steps_buffers_are_those_that_sglang_makes(
    budget: int, block: int, requests: int, context: int, page: int, sglang: SimpleNamespace
) -> None:
    """Its own code makes the graphs' buffers, on the meta device; the step's own are added by their shapes."""
    from sglang.srt.model_executor.cuda_graph_config import Backend

    from ddtree_appliance.ddtree.limits import words_for

    width = budget + 1
    server_args = SimpleNamespace(
        speculative_algorithm="DFLASH",
        speculative_num_steps=1,
        speculative_eagle_topk=1,
        max_speculative_num_draft_tokens=width,
        speculative_dflash_block_size=block,
        page_size=page,
        cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend=Backend.FULL, bs=[requests])),
    )
    total = 0
    own = sglang.shared.GraphSharedOutput
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang.triton, "get_server_args", lambda: server_args)
        patch.setattr(own, "_process_shared", None)
        patch.setattr(sglang.masks, "default_tree_mask_mode", lambda: sglang.masks.TreeMaskMode.FULL_MASK)  # a GPU's
        buffers = {}
        for is_draft, tokens in ((False, width), (True, block)):
            backend = SimpleNamespace(
                num_head=32,
                max_kv_splits=8,
                v_head_dim=128,
                swa_v_head_dim=None,
                device="meta",
                max_context_len=context,
                is_draft_runner=is_draft,
                skip_prefill=False,
                num_draft_tokens=tokens,
                sliding_window_size=None,
                use_sliding_window_kv_pool=False,
                _translate_kv_loc=None,
            )
            sglang.triton.TritonAttnBackend.init_cuda_graph_state(backend, requests, requests * tokens)
            total += bytes_of(backend) - backend.cuda_graph_num_kv_splits.nbytes
            if backend._verify_mask is not None:
                total += backend._verify_mask.buffer.nbytes
            runner = SimpleNamespace(
                server_args=server_args, device="meta", max_decode_logits_rows=lambda rows=requests * tokens: rows
            )
            shared = own.create_for_model_runner(runner)
            buffers[id(shared.get_logits_buffer(151936, rows=requests * tokens)._base)] = shared
        total += sum(4 * 151936 * shared.max_rows for shared in {id(each): each for each in buffers.values()}.values())
    row = context + sglang.sizing.get_req_to_token_extra_context_len(server_args)
    table = sglang.pool.ReqToTokenPool(requests, row, "meta", enable_memory_saver=False).req_to_token
    total += 2 * table.nbytes + len(table) * width * 4 * words_for(width)  # the second: the rows as the step found them
    total += requests * width * (row + width) + requests * width * 151936 * 2
    ranked = requests * (block - 1) * 151936
    total += max(min(CANDIDATE_BYTES, ranked * CANDIDATE_BYTES_PER_LOGIT), ranked * 2)
    total += min(DRAW_BYTES, requests * width * 151936 * DRAW_BYTES_PER_LOGIT) + len(table) * 151936 * 4
    found = plan(
        budget=budget,
        drafter={"block_size": block},
        max_running_requests=requests,
        context_length=context,
        page_size=page,
    )
    assert found.step_bytes == total


def test_candidates_are_ranked_in_chunks_of_the_size_that_is_planned() -> None:
    from ddtree_appliance.ddtree import torch_ops

    assert (CANDIDATE_BYTES, CANDIDATE_BYTES_PER_LOGIT) == (torch_ops.CANDIDATE_BYTES, torch_ops.BYTES_PER_LOGIT)


def test_draws_penalties_and_logprobs_work_in_chunks_of_the_size_that_is_planned() -> None:
    from ddtree_appliance.ddtree import logprobs, penalties, sampling

    assert (DRAW_BYTES, DRAW_BYTES_PER_LOGIT) == (sampling.DRAW_BYTES, sampling.BYTES_PER_PROBABILITY)
    assert penalties.PENALTY_BYTES <= DRAW_BYTES and penalties.BYTES_PER_LOGIT <= DRAW_BYTES_PER_LOGIT
    assert logprobs.BYTES_PER_LOGIT <= DRAW_BYTES_PER_LOGIT and logprobs.DRAW_BYTES == DRAW_BYTES
