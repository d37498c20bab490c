"""Which requests DDTREE refuses, asked with SGLang's own request classes."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from ddtree_appliance.ddtree.requests import REQUEST_FIELDS, UNHEARD_BUDGET, refusal, unsupported_features
from tests.unit.engine import import_sglang

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")


def sampling_params_class() -> Any:
    return import_sglang("sglang.srt.sampling.sampling_params").SamplingParams


def tokenized_class() -> Any:
    return import_sglang("sglang.srt.managers.io_struct").TokenizedGenerateReqInput


GREEDY = {"temperature": 0}


def tokenized(sampling: dict[str, Any], **fields: Any) -> Any:
    """The request as the tokenizer manager sends it to the scheduler."""
    required = {
        "input_text": "x",
        "input_ids": array("q", [5, 6]),
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": False,
    }
    params = sampling_params_class()(**sampling)
    return tokenized_class()(sampling_params=params, **{**required, **fields})


def scheduled(sampling: dict[str, Any], **fields: Any) -> Any:
    """The request as the scheduler keeps it."""
    req_class = import_sglang("sglang.srt.managers.schedule_batch").Req
    return req_class("rid", "x", array("q", [5, 6]), sampling_params_class()(**sampling), **fields)


class Tokenizer:
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [0] * len(text)


# Requests that are served


@pytest.mark.parametrize("make", [tokenized, scheduled])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 0.0, "max_new_tokens": 1},
        {"temperature": 1e-7},  # SGLang takes this for 0
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.7, "top_k": 1},
        {**GREEDY, "max_new_tokens": None},
        {**GREEDY, "top_p": 0.5, "min_p": 0.1, "top_k": 40},  # without effect on the most probable token
        {**GREEDY, "stop": "end"},
        {**GREEDY, "stop": ["a", "b"]},
        {**GREEDY, "stop_token_ids": [3, 4]},
        {**GREEDY, "stop_regex": "a+"},
        {**GREEDY, "ignore_eos": True},
        {**GREEDY, "n": 4},
        {**GREEDY, "sampling_seed": 7},
        {**GREEDY, "skip_special_tokens": False, "spaces_between_special_tokens": False, "no_stop_trim": True},
        {**GREEDY, "stream_interval": 3},
        # a feature that is named but not asked for
        {**GREEDY, "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1, "min_new_tokens": 0},
        {**GREEDY, "logit_bias": None, "json_schema": None, "regex": "", "ebnf": None, "structural_tag": ""},
        {**GREEDY, "logit_bias": {}, "custom_params": {}},
        {**GREEDY, "custom_params": {"note": "for a processor that is not there"}},
        # everything that shapes the distribution of the next token
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "sampling_seed": -1},
        {"frequency_penalty": 0.1, "presence_penalty": -0.1, "repetition_penalty": 1.1, "min_new_tokens": 1},
        {**GREEDY, "logit_bias": {"5": -100.0}},
        {**GREEDY, "json_schema": "{}"},
        {**GREEDY, "regex": "a"},
        {**GREEDY, "ebnf": "root ::= 'a'"},
        {**GREEDY, "structural_tag": "{}"},
    ],
)
def test_whatever_shapes_the_next_tokens_distribution_is_served(make: Any, sampling: dict[str, Any]) -> None:
    request = make(sampling)
    assert unsupported_features(request) == []
    assert refusal(request) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"token_ids_logprob": []},
        {"token_ids_logprob": [1]},  # asks for nothing as long as return_logprob is off
        {"return_logprob": True, "top_logprobs_num": 5, "token_ids_logprob": [1], "logprob_start_len": 0},
        {"custom_logit_processor": "{}"},
        {"top_logprobs_num": 5},
        {"priority": 3, "extra_key": "salt", "routing_key": "k"},
        {"input_embeds": []},
        {"lora_id": ""},
        {"lora_id": None, "custom_logit_processor": None, "session_params": None, "mm_inputs": None},
        {"return_hidden_states": False, "return_sampling_mask": False, "return_routed_experts": False},
        {"session_id": "a"},  # a label only, unless sessions are enabled, which the start rules refuse
    ],
)
def test_fields_of_every_request_are_served(fields: dict[str, Any]) -> None:
    assert refusal(tokenized(GREEDY, **fields)) is None


def test_normalized_and_transported_parameters_are_judged_alike() -> None:
    msgspec = pytest.importorskip("msgspec", reason="needs the rehearsal environment (SGLang)")
    for params, is_served in (({"note": 1}, True), ({"thinking_budget": 3}, False)):
        request = tokenized({"stop": "x", "custom_params": params})
        request.sampling_params.normalize(Tokenizer())
        wire = msgspec.msgpack.encode(request.sampling_params)
        request.sampling_params = msgspec.msgpack.decode(wire, type=sampling_params_class())
        assert request.sampling_params.is_normalized
        assert (refusal(request) is None) is is_served


# Requests that are refused, by name

# A request carries each of these twice: as the tokenizer manager sends it, and as the scheduler keeps it.
REFUSED_FIELDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("return_hidden_states", {"return_hidden_states": True}, {"return_hidden_states": True}),
    ("return_hidden_states", {"return_hidden_states": "last"}, {"return_hidden_states": "last"}),
    ("return_sampling_mask", {"return_sampling_mask": True}, {"return_sampling_mask": True}),
    ("return_routed_experts", {"return_routed_experts": True}, {"return_routed_experts": True}),
    ("return_indexer_topk", {"return_indexer_topk": True}, {"return_indexer_topk": True}),
    ("LoRA (lora_path)", {"lora_id": "a1"}, {"lora_id": "a1"}),
    ("input_embeds", {"input_embeds": [[0.5]]}, {"input_embeds": [[0.5]]}),
    # tensors have no truth value
    ("input_embeds", {"positional_embed_overrides": torch.zeros(2)}, {"positional_embed_overrides": torch.zeros(2)}),
    ("images, audio or video", {"mm_inputs": object()}, {"multimodal_inputs": object()}),
    ("images, audio or video", {"mm_inputs": torch.zeros(2)}, {"multimodal_inputs": torch.zeros(2)}),
    ("sessions (session_params)", {"session_params": object()}, {"session": object()}),
]


@pytest.mark.parametrize("make", [tokenized, scheduled])
@pytest.mark.parametrize("budget", [0, 5, None])
def test_a_thinking_budget_that_nobody_would_obey_is_refused(budget: int | None, make: Any) -> None:
    request = make({"custom_params": {"thinking_budget": budget}})
    assert refusal(request) == f"DDTREE does not support {UNHEARD_BUDGET} yet; remove it from the request."
    assert refusal(make({"custom_params": {"thinking_budget": budget}}, custom_logit_processor="{}")) is None


@pytest.mark.parametrize("name,sent,kept", REFUSED_FIELDS)
def test_a_request_feature_is_refused_by_its_name(name: str, sent: dict[str, Any], kept: dict[str, Any]) -> None:
    message = f"DDTREE does not support {name} yet; remove it from the request."
    assert refusal(tokenized(GREEDY, **sent)) == message
    request = scheduled(GREEDY)
    for field, value in kept.items():
        assert hasattr(request, field)
        setattr(request, field, value)
    assert refusal(request) == message


def test_all_features_are_named_at_once() -> None:
    request = tokenized({"custom_params": {"thinking_budget": 1}}, return_hidden_states=True, lora_id="a1")
    names = f"return_hidden_states, LoRA (lora_path), {UNHEARD_BUDGET}"
    assert refusal(request) == f"DDTREE does not support {names} yet; remove it from the request."


# The tables are complete


def test_every_rule_has_a_refused_request_here() -> None:
    assert set(REQUEST_FIELDS) == {name for name, _, _ in REFUSED_FIELDS}


@pytest.mark.parametrize("name", REQUEST_FIELDS)
def test_every_request_field_exists_on_both_kinds_of_request(name: str) -> None:
    sent, kept = set(tokenized_class().__struct_fields__), scheduled(GREEDY)
    for field in REQUEST_FIELDS[name]:
        assert field in sent or hasattr(kept, field)
    # Each kind is asked about by at least one of the names, or the rule would hold on one side only.
    assert sent & set(REQUEST_FIELDS[name])
    assert any(hasattr(kept, field) for field in REQUEST_FIELDS[name])


# What SGLang can be asked for and DDTREE serves. A field that a new SGLang adds belongs here or in a rule.
SERVED_SAMPLING = {
    *("max_new_tokens", "n", "ignore_eos", "stop", "stop_token_ids", "stop_regex"),
    *("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"),
    *("temperature", "top_k", "top_p", "min_p", "sampling_seed", "logit_bias"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"),
    *("json_schema", "regex", "ebnf", "structural_tag"),
    "custom_params",  # refused only if it holds a thinking budget that nobody would obey
    # set by SGLang itself
    *("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"),
}
SERVED_FIELDS = {
    *("input_text", "input_ids", "token_type_ids", "sampling_params", "stream"),
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "return_flat_raw_top_logprobs"),
    "custom_logit_processor",
    *("multi_item_delimiter_indices", "return_entropy", "routed_experts_start_len"),
    # routing, accounting, transport
    *("rid", "http_worker_ipc", "routed_dp_rank", "routing_key", "priority", "extra_key", "no_logs", "time_stats"),
    *("session_id", "return_bytes"),
    "require_reasoning",  # for grammars that begin after the thoughts
    # prefill/decode disaggregation and encoder servers, which the start rules refuse
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "decode_tp_size"),
    *("disagg_prefill_dp_rank", "need_wait_for_mm_inputs", "num_items_assigned", "mm_data_mooncake", "encoder_urls"),
}


def test_every_sampling_parameter_of_sglang_is_known_here() -> None:
    assert set(sampling_params_class().__struct_fields__) == SERVED_SAMPLING


def test_every_request_field_of_sglang_is_either_served_or_refused() -> None:
    refused = {field for _, sent, _ in REFUSED_FIELDS for field in sent}
    assert SERVED_FIELDS | refused == set(tokenized_class().__struct_fields__)
    assert not SERVED_FIELDS & refused
