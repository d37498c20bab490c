"""What DDTREE refuses at start, asked with the fields and defaults of SGLang's own ServerArgs."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from ddtree_appliance.ddtree import start_rules
from ddtree_appliance.ddtree.limits import MAX_BUDGET, MAX_TOPK
from ddtree_appliance.ddtree.start_rules import (
    DEFAULT_BUDGET,
    DEFAULT_TOPK,
    REFUSED_ENVIRONMENT,
    START_RULES,
    StartRule,
    backend_problems,
    block_size_problem,
    budget_of,
    model_problems,
    start_problems,
    topk_of,
)
from ddtree_appliance.rehearsal.server import DRAFTER, TARGET
from tests.unit.engine import import_sglang


def server_args_class() -> Any:
    return import_sglang("sglang.srt.server_args").ServerArgs


def server_args_fields() -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(server_args_class())


def server_args(**changes: Any) -> SimpleNamespace:
    """The defaults of SGLang's ServerArgs, which cannot be constructed without looking at the machine."""
    values = {}
    for field in server_args_fields():
        if field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
    given = {"model_path": str(TARGET), "speculative_draft_model_path": str(DRAFTER), **changes}
    assert set(given) <= {field.name for field in server_args_fields()}
    return SimpleNamespace(**{**values, **given})


# Field: values that are refused, other values that are not. The defaults are good for every rule.
CASES: dict[str, tuple[list[Any], list[Any]]] = {
    "pp_size": ([2], [None]),
    "dp_size": ([2], [None]),
    "ep_size": ([2], [None]),
    "nnodes": ([2], [None]),
    "attn_cp_size": ([2], [None]),
    "dcp_size": ([2], [None]),
    "tokenizer_worker_num": ([2], [None]),
    "enable_dp_attention": ([True], []),
    "disaggregation_mode": (["prefill", "decode"], []),
    "enable_hierarchical_cache": ([True], []),
    "enable_lmcache": ([True], []),
    "enable_flexkv": ([True], []),
    "radix_cache_backend": (["other"], []),
    "enable_hisparse": ([True], []),
    "enable_mixed_chunk": ([True], []),
    "enable_two_batch_overlap": ([True], []),
    "enable_pdmux": ([True], []),
    "enable_lora": ([True], [False]),
    "lora_paths": ([["adapter=/models/adapter"]], [[]]),
    "enable_strict_thinking": ([True], []),
    "enable_deterministic_inference": ([True], []),
    "enable_streaming_session": ([True], []),
    "enable_session_radix_cache": ([True], []),
    "enable_page_major_kv_layout": ([True], []),
    "enable_unified_memory": ([True], []),
    "encoder_only": ([True], []),
    "dllm_algorithm": (["LowConfidence"], []),
    "use_ray": ([True], []),
    "smg_grpc_mode": ([True], []),
    "elastic_ep_backend": (["mooncake"], []),
    "speculative_adaptive": ([True], []),
    "speculative_use_rejection_sampling": ([True], []),
    "speculative_token_map": (["map.pt"], []),
    "speculative_draft_window_size": ([512], []),
    "speculative_attention_mode": (["decode"], []),
    "speculative_num_steps": ([0, 2, 5], [1]),
    "speculative_eagle_topk": ([0, 2, 4], [1]),
    "sampling_backend": (["flashinfer", "pytorch"], ["seeded"]),
    "grammar_backend": (["outlines", "llguidance"], ["xgrammar", "none"]),
    "kv_cache_dtype": (["fp8_e4m3", "fp8_e5m2", "fp4_e2m1"], ["bfloat16", "bf16", "float16", "float32"]),
    "speculative_draft_model_path": ([None, ""], ["org/drafter"]),
    "speculative_ddtree_budget": ([-1, 0, MAX_BUDGET + 1], [1, MAX_BUDGET]),
    "speculative_ddtree_topk": ([-1, 0, MAX_TOPK + 1], [1, MAX_TOPK]),
    "speculative_num_draft_tokens": ([DEFAULT_BUDGET, DEFAULT_BUDGET + 2, 16], [DEFAULT_BUDGET + 1]),
}


# Start rules


@pytest.mark.parametrize(
    "field,value",
    [
        ("speculative_accept_threshold_single", 0.5),
        ("speculative_ngram_capacity", 7),
        ("speculative_dspark_block_size", 4),
        ("enable_multi_layer_eagle", True),
        ("decoupled_spec_role", "drafter"),
    ],
)
def test_a_flag_of_another_algorithm_is_refused_not_ignored(field: str, value: Any) -> None:
    defaults = [
        (field.name, Any, dataclasses.field(default=field.default))
        for field in server_args_fields()
        if field.default is not dataclasses.MISSING
    ]
    stand_in = dataclasses.make_dataclass("ServerArgs", defaults)
    assert start_rules.unread_problems(stand_in()) == []
    flag = "--" + field.replace("_", "-")
    assert start_rules.unread_problems(stand_in(**{field: value})) == [f"{flag} = {value}: DDTREE does not read it"]


def test_a_plain_start_has_no_problem() -> None:
    assert start_problems(server_args(), {}) == []


def test_every_rule_has_a_case_and_every_case_a_rule() -> None:
    fields = [rule.field for rule in START_RULES]
    assert fields == list(CASES)
    assert all(broken for broken, _ in CASES.values())


@pytest.mark.parametrize(
    "rule,value", [(rule, value) for rule in START_RULES for value in CASES.get(rule.field, ([], []))[0]]
)
def test_a_broken_rule_names_the_flag_the_value_and_the_reason(rule: StartRule, value: Any) -> None:
    flag = "--" + rule.field.replace("_", "-")
    assert start_problems(server_args(**{rule.field: value}), {}) == [f"{flag} = {value}: {rule.reason}"]


@pytest.mark.parametrize("field,value", [(field, value) for field, (_, good) in CASES.items() for value in good])
def test_a_value_that_changes_nothing_is_accepted(field: str, value: Any) -> None:
    assert start_problems(server_args(**{field: value}), {}) == []


@pytest.mark.parametrize("budget", [1, 15, 64, MAX_BUDGET])
def test_the_verify_width_follows_the_node_budget(budget: int) -> None:
    good = server_args(speculative_ddtree_budget=budget, speculative_num_draft_tokens=budget + 1)
    bad = server_args(speculative_ddtree_budget=budget, speculative_num_draft_tokens=budget)
    assert start_problems(good, {}) == []
    assert start_problems(bad, {}) == [
        f"--speculative-num-draft-tokens = {budget}: the verify width is the node budget + 1;"
        " set --speculative-ddtree-budget instead"
    ]


def test_all_problems_are_reported_at_once_in_the_order_of_the_table() -> None:
    problems = start_problems(server_args(enable_lora=True, pp_size=2), {"SGLANG_RUST_SERVER": "1"})
    assert [problem.split(" = ")[0] for problem in problems] == ["--pp-size", "--enable-lora", "SGLANG_RUST_SERVER"]


@pytest.mark.parametrize("rule", START_RULES, ids=lambda rule: rule.field)
def test_every_rule_names_an_option_of_sglang(rule: StartRule) -> None:
    assert rule.field in {field.name for field in server_args_fields()}
    assert "--" + rule.field.replace("_", "-") in sglang_options()


@functools.cache
def sglang_options() -> set[str]:
    parser = argparse.ArgumentParser()
    server_args_class().add_cli_args(parser)
    return set(parser._option_string_actions)


@pytest.mark.parametrize("given,budget", [(None, DEFAULT_BUDGET), (1, 1), (64, 64), (0, 0)])
def test_the_node_budget_is_the_given_one_or_the_default(given: int | None, budget: int) -> None:
    assert budget_of(server_args(speculative_ddtree_budget=given)) == budget


@pytest.mark.parametrize("given,topk", [(None, DEFAULT_TOPK), (1, 1), (64, 64), (0, 0)])
def test_the_candidates_are_the_given_ones_or_the_default(given: int | None, topk: int) -> None:
    assert topk_of(server_args(speculative_ddtree_topk=given)) == topk


# Environment


@pytest.mark.parametrize("name", REFUSED_ENVIRONMENT)
@pytest.mark.parametrize("value", ["1", "3.5", "true", "True", "yes"])
def test_an_environment_variable_without_effect_on_ddtree_is_refused(name: str, value: str) -> None:
    problem = f"{name} = {value}: {REFUSED_ENVIRONMENT[name]}"
    assert start_problems(server_args(), {name: value, "HOME": "/root"}) == [problem]


@pytest.mark.parametrize("name", REFUSED_ENVIRONMENT)
@pytest.mark.parametrize("value", ["", "0", "-1", "false", "False"])
def test_an_environment_variable_that_is_off_is_accepted(name: str, value: str) -> None:
    assert start_problems(server_args(), {name: value}) == []


@pytest.mark.parametrize("name", REFUSED_ENVIRONMENT)
def test_sglang_reads_the_refused_environment_variable(name: str) -> None:
    assert hasattr(import_sglang("sglang.srt.environ").envs, name)


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    assert start_problems(server_args()) == [
        "SGLANG_SIMULATE_ACC_LEN = 3: accept lengths are measured, never simulated"
    ]


# Block size, backends, target


@pytest.mark.parametrize(
    "given,drafter,is_good", [(None, 16, True), (16, 16, True), (8, 16, False), (32, 16, False), (0, 16, False)]
)
def test_a_block_size_other_than_the_drafters_is_refused(given: int | None, drafter: int, is_good: bool) -> None:
    problem = block_size_problem(server_args(speculative_dflash_block_size=given), drafter)
    expected = f"--speculative-dflash-block-size = {given}: the drafter's block size is {drafter}; leave it out"
    assert problem == (None if is_good else expected)


@pytest.mark.parametrize(
    "device,backends,problems",
    [
        # good
        ("cpu", {"attention-backend": "torch_native"}, []),
        ("cuda", {"attention-backend": "triton", "decode-attention-backend": "triton"}, []),
        ("cuda:1", {"attention-backend": "triton"}, []),
        ("cuda", {"attention-backend": "flashinfer", "speculative-draft-attention-backend": "flashinfer"}, []),
        ("cuda", {}, []),
        # bad
        (
            "cpu",
            {"attention-backend": "triton"},
            ["--attention-backend = triton: on cpu trees are verified by torch_native"],
        ),
        (
            "cuda",
            {"attention-backend": None},
            ["--attention-backend = None: on cuda trees are verified by triton, flashinfer"],
        ),
        (
            "cuda:1",
            {
                "attention-backend": "triton",
                "prefill-attention-backend": "fa3",
                "decode-attention-backend": "trtllm_mha",
            },
            [
                "--prefill-attention-backend = fa3: on cuda:1 trees are verified by triton, flashinfer",
                "--decode-attention-backend = trtllm_mha: on cuda:1 trees are verified by triton, flashinfer",
            ],
        ),
        ("xpu", {"attention-backend": "triton"}, ["--device = xpu: DDTREE runs on cpu, cuda"]),
        ("npu:0", {}, ["--device = npu:0: DDTREE runs on cpu, cuda"]),
    ],
)
def test_a_backend_that_cannot_verify_a_tree_is_refused(
    device: str, backends: dict[str, str | None], problems: list[str]
) -> None:
    assert backend_problems(device, backends) == problems


class NothingMissing:
    """Hands on what SGLang's ModelConfig holds, and fails where a default would hide that a name is gone."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        assert hasattr(self._real, name), f"ModelConfig has no {name}"
        return getattr(self._real, name)


def test_the_bundled_target_is_served_and_every_attribute_that_decides_it_exists() -> None:
    module = import_sglang("sglang.srt.configs.model_config")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = module.ModelConfig(model_path=str(TARGET))
        assert not start_rules._is_hybrid(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_rules, "_is_hybrid", lambda _: False)
        assert model_problems(NothingMissing(config)) == []


@pytest.mark.parametrize(
    "changes,kind",
    [
        ({"is_multimodal": True}, "multimodal"),
        ({"is_hybrid_swa": True}, "sliding-window"),
        (
            {"hf_text_config": SimpleNamespace(layer_types=["full_attention", "sliding_attention"])},
            "sliding-window",
        ),
        ({"hf_text_config": SimpleNamespace(attention_chunk_size=8192)}, "sliding-window"),
        ({"attention_arch": SimpleNamespace(name="MLA")}, "MLA"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"is_generation": False}, "embedding"),
        ({"hybrid": True}, "hybrid (linear attention or Mamba)"),
    ],
)
def test_a_target_that_a_tree_does_not_fit_is_refused_by_its_kind(
    changes: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_rules, "_is_hybrid", lambda config: getattr(config, "hybrid", False))
    plain = {
        "is_multimodal": False,
        "is_hybrid_swa": False,
        "attention_arch": SimpleNamespace(name="MHA"),
        "is_encoder_decoder": False,
        "is_generation": True,
    }
    assert model_problems(SimpleNamespace(**plain)) == []
    problems = model_problems(SimpleNamespace(**{**plain, **changes}))
    assert problems == [f"the target is a {kind} model: DDTREE serves full-attention text models"]
