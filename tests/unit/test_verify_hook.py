"""SGLang's Triton backend, as patched: which kernel answers a verify forward, and whether replays fill its metadata."""

import inspect
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.unit.engine import import_sglang


def triton_backend(calls: list[Any], **attributes: Any) -> Any:
    backend_class = import_sglang("sglang.srt.layers.attention.triton_backend").TritonAttnBackend
    backend = object.__new__(backend_class)
    pool = SimpleNamespace(get_key_buffer=lambda layer: "keys", get_value_buffer=lambda layer: "values")
    vars(backend).update(
        target_verify_fwd=lambda *arguments: calls.append(arguments),
        _verify_calls_with_metadata=0,
        _translate_kv_loc=None,
        token_to_kv_pool=pool,
        dcp_size=1,
        enable_deterministic=False,
        use_verify_splitkv=False,
        page_size=1,
        allow_bidirectional_attention_in_extend=False,
        forward_metadata=Mock(custom_mask="mask", max_extend_len=2),
        # What else may answer.
        extend_attention_fwd=lambda *arguments, **named: calls.append("general"),
        _forward_extend_unified=lambda *arguments, **named: calls.append("unified"),
        _forward_extend_dcp=lambda *arguments, **named: calls.append("dcp"),
    )
    vars(backend).update(attributes)
    return backend


def attend(backend: Any, is_verify: bool = True, **layer: Any) -> Any:
    import torch

    attention_type = import_sglang("sglang.srt.layers.radix_attention").AttentionType
    given: dict[str, Any] = {
        **{"tp_q_head_num": 2, "qk_head_dim": 4, "v_head_dim": 4, "layer_id": 0, "scaling": 0.5, "logit_cap": 0},
        **{"logit_capping_method": "tanh", "is_cross_attention": False, "attn_type": attention_type.DECODER},
        **{"sliding_window_size": -1, "k_scale": None, "v_scale": None, "xai_temperature_len": -1},
    }
    mode = SimpleNamespace(is_target_verify=lambda: is_verify)
    batch = SimpleNamespace(forward_mode=mode, seq_lens="prefix lengths")
    query = torch.zeros(2, 8)
    asked = {name: layer.pop(name) for name in ("sinks", "score_mod") if name in layer}
    return backend.forward_extend(
        query, query, query, SimpleNamespace(**(given | layer)), batch, save_kv_cache=False, **asked
    )  # fmt: skip


def test_a_plugins_kernel_gets_the_requests_rows_and_needs_no_metadata() -> None:
    calls: list[Any] = []
    backend = triton_backend(calls)
    output = attend(backend)
    (arguments,) = calls
    ours = import_sglang("ddtree_appliance.ddtree.fused.attention").VerifyAttention
    given = inspect.signature(ours.__call__).bind("self", *arguments).arguments
    assert given["query"].shape == (2, 2, 4)
    assert (given["key_pool"], given["value_pool"], given["prefix_lens"]) == ("keys", "values", "prefix lengths")
    assert (given["is_tree"], given["scale"], given["width"]) == (True, 0.5, 2)
    assert given["output"].shape == (2, 2, 4) and given["output"].data_ptr() == output.data_ptr()
    assert backend._verify_calls_with_metadata == 0


@pytest.mark.parametrize(
    "attributes,layer,answers",
    [
        ({"target_verify_fwd": None}, {}, "general"),
        ({}, {"logit_cap": 30.0}, "general"),
        ({}, {"k_scale": 1.0, "v_scale": 1.0, "k_scale_float": 2.0, "v_scale_float": 1.0}, "general"),
        ({}, {"k_scale": 1.0, "v_scale": 1.0, "k_scale_float": 1.0, "v_scale_float": 2.0}, "general"),
        ({}, {"sliding_window_size": 128}, "general"),
        ({}, {"is_cross_attention": True}, "general"),  # not causal, but a mask
        ({}, {"sinks": "sinks"}, "general"),
        ({}, {"score_mod": "a function"}, "general"),
        ({}, {"xai_temperature_len": 9}, "general"),
        ({"_translate_kv_loc": lambda slots: slots}, {}, "general"),
        ({"enable_deterministic": True}, {}, "unified"),
        ({"dcp_size": 2}, {}, "dcp"),
    ],
)
def test_a_layer_that_another_kernel_answers_is_counted(
    attributes: dict[str, Any], layer: dict[str, Any], answers: str
) -> None:
    calls: list[Any] = []
    backend = triton_backend(calls, **attributes)
    attend(backend, **layer)
    attend(backend, **layer)
    assert calls == [answers, answers]
    assert backend._verify_calls_with_metadata == 2


def test_layers_that_another_kernel_answers_count_among_others() -> None:
    calls: list[Any] = []
    backend = triton_backend(calls)
    for cap in (0, 30.0, 0, 0):
        attend(backend, logit_cap=cap)
    assert [call if call == "general" else "plugin" for call in calls] == ["plugin", "general", "plugin", "plugin"]
    assert backend._verify_calls_with_metadata == 1


def test_what_is_no_verify_forward_is_not_counted() -> None:
    calls: list[Any] = []
    backend = triton_backend(calls)
    attend(backend, is_verify=False)
    assert calls == ["general"]
    assert backend._verify_calls_with_metadata == 0


@pytest.mark.parametrize(
    "has_kernel,others,is_verify,filled",
    [(True, 0, True, False), (True, 3, True, True), (False, 0, True, True), (True, 0, False, True)],
)
def test_a_replay_fills_the_metadata_unless_nobody_reads_it(
    has_kernel: bool, others: int, is_verify: bool, filled: bool
) -> None:
    calls: list[str] = []
    backend = triton_backend([], _verify_calls_with_metadata=others)
    if not has_kernel:
        backend.target_verify_fwd = None
    backend._apply_cuda_graph_metadata = lambda **arguments: calls.append("metadata")
    backend._translate_cuda_graph_shared_pool_locs = lambda batch, size: calls.append("slots")
    backend._fill_cuda_graph_swa_out_cache_loc = lambda batch: calls.append("window")
    mode = SimpleNamespace(is_target_verify=lambda: is_verify)
    batch = SimpleNamespace(batch_size=1, req_pool_indices=None, seq_lens=None, forward_mode=mode, spec_info=None)
    backend.init_forward_metadata_out_graph(batch)
    assert calls == [*(["metadata"] if filled else []), "slots", "window"]
