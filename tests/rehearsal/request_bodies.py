"""Hypothesis strategies: HTTP requests to a server, made of the fields of SGLang's own request models.

Every field has values that SGLang may accept; ODD holds what no field, or hardly any, can take.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from tests.unit.engine import import_sglang

Values = Mapping[str, Sequence[Any]]

NAN, INFINITY = float("nan"), float("inf")
VOCABULARY, CONTEXT = 4096, 4096
HUGE = 10**30
TEXT = "def main():\n    return "
IDS = [5, 17, 300, 42, 7, 1000]
NESTED: Any = {"a": [{"b": {"c": [[[]]]}}]}

ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e-9, 1e308, NAN, INFINITY, -INFINITY),
    *(2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, HUGE, -HUGE),
    *("", " ", "0", "x", "null", "\0", "\ud800", "\U0010ffff", "ü" * 300),
    *([], [None], [[]], ["x"], [1, "x"], [True], [0.5], [-1], [HUGE], [NAN], [{}], [IDS, None]),
    *({}, {"": None}, {"x": 1}, {"5": "x"}, {"x": [NAN]}, NESTED),
]

COUNT = [0, 1, 2, 3, 7, 8]
FLAG = [True, False, None]
TOKEN_IDS = [[], [0], [5], [5, 17], [5, 5], [VOCABULARY - 1], [VOCABULARY], [-1], [2**31], list(range(300))]
PROMPT_IDS = [
    IDS,
    [0],
    [VOCABULARY - 1],
    [],
    [VOCABULARY],
    [-1],
    [-VOCABULARY - 1],
    [2**40],
    [3] * CONTEXT,
    [True],
    IDS * 9,
]
PROMPTS = [TEXT, "", " ", "x", "a" * 3000, "word " * (2 * CONTEXT), "é\U0001f600\0\ud800", "<|endoftext|>"]
BATCHES = [[TEXT, "x"], [], [""], [TEXT] * 4, [TEXT, None], ["x", 5]]
ID_BATCHES = [[IDS, [5]], [[]], [[5], []], [[5], [-1]], [IDS, [VOCABULARY]], [IDS, "x"]]
NAMES = ["x", "", "a" * 500, "ü"]
STOPS = ["\n", "", "return", ["\n", " "], [], [""], ["x"] * 20, "a" * 5000, [None]]
# Patterns that a backtracking matcher never finishes are left out: nothing here limits how long a regex may run.
STOP_REGEXES = [
    "[0-9]",
    "",
    "(",
    "*",
    "[a-",
    "(?P<n",
    ["\\d", "x"],
    ["("],
    "(?i)x",
    "a{3,1}",
    "a{99999999999}",
    "(?<=a*)b",
]
PENALTIES = [0, 0.0, 0.5, -2, 2, 2.0001, -2.0001]
BIASES = [
    *({"5": 1}, {"5": -100, "7": 100.5}, {}),
    *({str(VOCABULARY): 1}, {"-1": 1}, {"x": 1}, {"5": 1e308}, {"5": INFINITY}, {"5": -INFINITY}),
]
PROCESSORS = ["", "x", "{}", '{"callable": "80"}', "null"]
LORAS = ["adapter", "", ["adapter"], [None], []]
SESSIONS = [
    {},
    {"id": "x"},
    {"id": "x", "rid": "y", "offset": 1},
    {"id": None},
    {"id": ["x"]},
    {"replace": "x"},
    {"unknown": 1},
    {"id": 5},
    {"offset": -1},
]
RIDS = ["", ["a", "b"], [], ["a", "a"], [None], ["a"]]
IMAGES = ["x", "data:image/png;base64,AAAA", ["x"], [], [[]], [["x"]], {"url": "x"}, [None]]
ROOMS = [0, 1, 2**63 - 1, [1], [], [None]]
SCHEMAS = ["{}", '{"type": "object"}', "{", "null", "", "[]", '{"type": "nothing"}', '{"$ref": "#/nowhere"}']
GRAMMARS = ['root ::= "a"', "", "root ::=", "x"]
TAGS = ["", "{}", '{"structures": [], "triggers": []}', "x"]
MESSAGES = [
    [{"role": "user", "content": "print a list"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": ""}],
    [{"role": "USER", "content": "x"}],
    [{"role": "Assistant", "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": ""}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": ""}}]}],
    [{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": None}],
    [{"role": "user"}],
    [{"role": None, "content": "x"}],
    [{"content": "x"}],
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": None, "arguments": None}}]}],
    [{"role": "tool", "content": "x", "tool_call_id": "y"}],
    [{"role": "user", "content": "x", "tools": []}, {"role": "assistant", "content": "unfinish"}],
    [{"role": "user", "content": "\ud800"}],
    [{"role": "user", "content": "x"}] * 40,
    [],
    [None],
    ["x"],
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [[TOOL], [], [TOOL, TOOL], [{"type": "x"}], [{"function": {}}], [{"function": {"name": "f", "parameters": 5}}]]
CHOICES = [
    "auto",
    "none",
    "required",
    "x",
    {"type": "function", "function": {"name": "f"}},
    {"function": {"name": None}},
]
FORMATS = [
    *({"type": "text"}, {"type": "json_object"}, {"type": "x"}, {"type": "json_schema"}, {"type": "structural_tag"}),
    {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    {"type": "json_schema", "json_schema": {"name": "n"}},
    {"type": "json_schema", "schema": {"title": "n"}},
    {"type": "json_schema", "schema": 5},
    {"type": "structural_tag", "structures": [], "triggers": []},
]
STREAMS = [{}, {"include_usage": True}, {"include_usage": "x"}, {"continuous_usage_stats": True, "include_usage": True}]
EFFORTS = ["low", "none", "max", 0.5, 0.99, 1.0, -0.1, "x", "0.3"]
OVERRIDES = [[[[0.5]]], [[0.5]], [None], [], [[[]]]]

SAMPLING: Values = {
    "max_new_tokens": COUNT,
    "stop": STOPS,
    "stop_token_ids": [*TOKEN_IDS, [None], [5, None], 5, ["5"]],
    "stop_regex": STOP_REGEXES,
    "temperature": [0, 0.0, 1e-7, 0.7, 1, 2, 100, -0.1, 1e-5],
    "top_p": [1, 1.0, 0.9, 1e-6, 0, 1.0001, -0.1],
    "top_k": [1, -1, 2, 40, VOCABULARY, VOCABULARY + 1, 0, -2, 1.5],
    "min_p": [0, 0.1, 1, 1.1, -0.1],
    "frequency_penalty": PENALTIES,
    "presence_penalty": PENALTIES,
    "repetition_penalty": [1, 1.0, 1.2, 2, 2.1, 0, 0.01, -1],
    "min_new_tokens": [0, 1, 4, 8, 9, -1],
    "n": [1, 2, 3, 0, -1],
    "json_schema": SCHEMAS,
    "regex": ["[a-z]+", "", "(", "a{99999}"],
    "ebnf": GRAMMARS,
    "structural_tag": TAGS,
    "ignore_eos": FLAG,
    "skip_special_tokens": FLAG,
    "spaces_between_special_tokens": FLAG,
    "no_stop_trim": FLAG,
    "stream_interval": [1, 2, 8, 0, -1],
    "logit_bias": BIASES,
    "sampling_seed": [0, 1, -1, 42, 2**31 - 1, 2**63 - 1],
    "custom_params": [{}, {"thinking_budget": 1}, {"x": [1, 2]}, {"x": {"y": 1}}, {"__req__": 1}, {"x": NESTED}],
    "stop_strs": STOPS,
    "stop_regex_strs": STOP_REGEXES,
    "stop_str_max_len": COUNT,
    "stop_regex_max_len": COUNT,
    "is_normalized": FLAG,
}

NATIVE: Values = {
    "rid": RIDS,
    "session_id": NAMES,
    "text": [*PROMPTS, *BATCHES],
    "input_ids": [*PROMPT_IDS, *ID_BATCHES],
    "input_embeds": [[[0.5] * 256], [[[0.5] * 256]], [], [[]], [[0.5], []], [[NAN] * 256]],
    "image_data": IMAGES,
    "video_data": IMAGES,
    "audio_data": IMAGES,
    "mm_hashes": [["ff"], [["ff"]], [], ["x"]],
    "use_audio_in_video": FLAG,
    # `sampling_params` is drawn from SAMPLING; these are the shapes around it.
    "sampling_params": [{}, [], [{}], [{}, {}], [{"n": 2}, {"n": 1}], {"unknown": 1}, [None], "x"],
    "return_logprob": [*FLAG, [True], [True, False], []],
    "logprob_start_len": [-1, 0, 1, 3, 5000, -2, [0], [0, 1]],
    "top_logprobs_num": [0, 1, 5, VOCABULARY, VOCABULARY + 1, -1, [2], [1, 2]],
    "token_ids_logprob": [*TOKEN_IDS, [[5], [7]], 5, [[]]],
    "return_sampling_mask": [*FLAG, [True], []],
    "return_text_in_logprobs": FLAG,
    "return_flat_raw_top_logprobs": FLAG,
    "return_flat_raw_top_logprobs_b64": FLAG,
    "stream": FLAG,
    "log_metrics": FLAG,
    "return_hidden_states": [*FLAG, "last", "x", [True], ["last", False], []],
    "return_routed_experts": FLAG,
    "routed_experts_start_len": [0, 1, -1, 5000],
    "return_indexer_topk": FLAG,
    "modalities": [["image"], [], ["x"], [None]],
    "session_params": SESSIONS,
    "lora_path": LORAS,
    "lora_id": LORAS,
    "custom_logit_processor": [*PROCESSORS, ["x", None], []],
    "positional_embed_overrides": [{}, [], [None], {"embeds": [[0.5]], "positions": [0]}],
    "bootstrap_host": ["127.0.0.1", "", ["x"], []],
    "bootstrap_port": [0, 1, 65536, [1], [None]],
    "bootstrap_room": ROOMS,
    "bootstrap_pair_key": ["x", ["x"], []],
    "decode_tp_size": [0, 1, 2, [1], []],
    "routed_dp_rank": [0, 1, -1],
    "disagg_prefill_dp_rank": [0, 1, -1],
    "routing_key": NAMES,
    "conversation_id": NAMES,
    "http_worker_ipc": NAMES,
    "background": FLAG,
    "require_reasoning": FLAG,
    "max_thinking_tokens": COUNT,
    "priority": [0, 1, -1, 5],
    "extra_key": [*NAMES, ["a", "b"], []],
    "no_logs": FLAG,
    "custom_labels": [{}, {"a": "b"}],
    "return_bytes": FLAG,
    "return_entropy": FLAG,
    "return_prompt_token_ids": FLAG,
    "external_trace_header": [{}, {"traceparent": "x"}],
    "received_time": [0, 1.5, -1.0, 1e12],
    "need_wait_for_mm_inputs": FLAG,
    "num_items_assigned": [{}, {"image": [1]}, {"IMAGE": [1]}, {"1": [1]}],
    "mm_data_mooncake": [[], ["x"], [{}]],
    "encoder_urls": [[], ["http://127.0.0.1:1"]],
    "max_dynamic_patch": COUNT,
    "min_dynamic_patch": COUNT,
    "image_max_dynamic_patch": COUNT,
    "video_max_dynamic_patch": COUNT,
    "images_config": [{}, {"x": 1}],
    "multi_item_delimiter_indices": [[], [0], [1, 2], [[1], [2]], [-1], [5000], [[]]],
}

# Fields that the completion and chat requests of OpenAI's interface share, with what SGLang adds to it.
_OPENAI: Values = {
    **{name: SAMPLING[name] for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")},
    **{name: SAMPLING[name] for name in ("n", "stop", "temperature", "top_p", "top_k", "min_p", "stop_regex")},
    **{name: SAMPLING[name] for name in ("regex", "ebnf", "ignore_eos", "no_stop_trim", "skip_special_tokens")},
    **{name: SAMPLING[name] for name in ("stop_token_ids", "custom_params")},
    **{name: NATIVE[name] for name in ("stream", "return_hidden_states", "return_routed_experts", "session_id")},
    **{name: NATIVE[name] for name in ("routed_experts_start_len", "lora_path", "session_params", "images_config")},
    **{name: NATIVE[name] for name in ("custom_logit_processor", "bootstrap_host", "bootstrap_port", "bootstrap_room")},
    **{name: NATIVE[name] for name in ("routed_dp_rank", "disagg_prefill_dp_rank", "rid", "extra_key", "priority")},
    "model": [*NAMES, "base:adapter", ":", "base:"],
    "max_tokens": COUNT,
    "min_tokens": SAMPLING["min_new_tokens"],
    "seed": SAMPLING["sampling_seed"],
    "stream_options": STREAMS,
    "user": NAMES,
    "return_cached_tokens_details": FLAG,
    "return_token_ids": FLAG,
    "response_format": FORMATS,
    "data_parallel_rank": [0, 1, -1],
    "cache_salt": [*NAMES, ["a"], []],
}

COMPLETION: Values = {
    **_OPENAI,
    "prompt": [*PROMPTS, *BATCHES, *PROMPT_IDS, *ID_BATCHES],
    "best_of": [1, 2, 0],
    "echo": FLAG,
    "logprobs": [0, 1, 5, -1, VOCABULARY + 1],
    "suffix": NAMES,
    "json_schema": SCHEMAS,
    "custom_labels": NATIVE["custom_labels"],
}

CHAT: Values = {
    **_OPENAI,
    "messages": MESSAGES,
    "logprobs": FLAG,
    "top_logprobs": [0, 1, 5, 20, 21, -1, VOCABULARY + 1],
    "max_completion_tokens": [1, 2, 8],
    "tools": TOOLS,
    "tool_choice": CHOICES,
    "parallel_tool_calls": FLAG,
    "return_prompt_token_ids": FLAG,
    "return_meta_info": FLAG,
    "reasoning_effort": EFFORTS,
    "task": ["action", "x"],
    "continue_final_message": FLAG,
    "separate_reasoning": FLAG,
    "stream_reasoning": FLAG,
    "chat_template_kwargs": [{}, {"enable_thinking": False}, {"thinking": True}, {"messages": 5}, {"tokenize": False}],
    "max_dynamic_patch": COUNT,
    "min_dynamic_patch": COUNT,
    "use_audio_in_video": FLAG,
    "input_ids": PROMPT_IDS,
}

EMBEDDING: Values = {
    "input": [*PROMPTS, *BATCHES, *PROMPT_IDS, *ID_BATCHES, [{"text": "x"}], [{"image": "x"}], [{}]],
    "model": _OPENAI["model"],
    "encoding_format": ["float", "base64", "x"],
    "dimensions": [1, 256, 0, -1, 257],
    "user": NAMES,
    "rid": RIDS,
    "priority": NATIVE["priority"],
    "lora_path": LORAS,
    "embed_override_token_id": [5, -1, VOCABULARY],
    "embed_overrides": OVERRIDES,
}

SCORING: Values = {
    "query": [*PROMPTS, *PROMPT_IDS],
    "items": [*PROMPTS, *BATCHES, *ID_BATCHES],
    "embed_override_token_id": [5, -1, VOCABULARY],
    "query_embed_overrides": [[[0.5]], [], [[]]],
    "item_embed_overrides": OVERRIDES,
    "label_token_ids": TOKEN_IDS,
    "apply_softmax": FLAG,
    "item_first": FLAG,
    "return_pooled_hidden_states": FLAG,
    "model": _OPENAI["model"],
}

TOKENIZE: Values = {
    "model": _OPENAI["model"],
    "prompt": [*PROMPTS, *BATCHES],
    **{name: CHAT[name] for name in ("messages", "tools", "tool_choice", "reasoning_effort")},
    **{name: CHAT[name] for name in ("continue_final_message", "chat_template_kwargs")},
    "add_special_tokens": FLAG,
}

DETOKENIZE: Values = {
    "model": _OPENAI["model"],
    "tokens": [*PROMPT_IDS, *ID_BATCHES],
    "skip_special_tokens": FLAG,
}

RESPONSES: Values = {
    "background": FLAG,
    "include": [[], ["message.output_text.logprobs"], ["reasoning.encrypted_content"], ["x"]],
    "input": [
        *PROMPTS,
        *MESSAGES,
        [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
        [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
        [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}],
        [{"type": "function_call_output", "call_id": "c", "output": "x"}],
        [{"type": "reasoning", "id": "r", "summary": []}],
        [{"type": "x"}],
        [{}],
    ],
    "instructions": NAMES,
    "max_output_tokens": [3, 8, 10, 1, 2],
    "max_tool_calls": COUNT,
    "metadata": [{}, {"a": "b"}],
    "model": _OPENAI["model"],
    "parallel_tool_calls": FLAG,
    "previous_response_id": ["resp_x", "x", ""],
    "reasoning": [{}, {"effort": "low"}, {"effort": "x"}, {"summary": "auto"}],
    "service_tier": ["auto", "flex", "x"],
    "store": FLAG,
    "stream": FLAG,
    "temperature": SAMPLING["temperature"],
    "tool_choice": ["auto", "none", "required", "x"],
    "tools": [
        [],
        [{"type": "function", "name": "f", "parameters": {}}],
        [{"type": "web_search"}],
        [{"type": "x"}],
        [{}],
    ],
    "top_logprobs": [0, 1, 5, -1],
    "top_p": SAMPLING["top_p"],
    "truncation": ["auto", "disabled", "x"],
    "user": NAMES,
    "request_id": ["", "resp_1", "x"],
    "session_id": NAMES,
    "priority": NATIVE["priority"],
    "extra_key": NAMES,
    "cache_salt": NAMES,
    "frequency_penalty": PENALTIES,
    "presence_penalty": PENALTIES,
    "stop": STOPS,
    "top_k": SAMPLING["top_k"],
    "min_p": SAMPLING["min_p"],
    "repetition_penalty": SAMPLING["repetition_penalty"],
}

OLLAMA: Values = {
    "model": NAMES,
    "prompt": PROMPTS,
    "suffix": NAMES,
    "system": NAMES,
    "template": NAMES,
    "context": TOKEN_IDS,
    "stream": FLAG,
    "raw": FLAG,
    "format": ["json", "x", {"type": "object"}],
    "options": [{"seed": 5, "num_predict": 4}, {"temperature": 0, "num_predict": -1}, {"num_predict": 4, "unknown": 1}],
    "keep_alive": [0, 1.5, "5m"],
    "images": [[], ["x"]],
    "think": FLAG,
}
OLLAMA_OPTIONS: Values = {
    **{name: SAMPLING[name] for name in ("temperature", "top_p", "top_k", "stop")},
    **{name: PENALTIES for name in ("presence_penalty", "frequency_penalty")},
    "num_predict": COUNT,
    "seed": SAMPLING["sampling_seed"],
}


# Module and name below sglang.srt -> the fields that are drawn for it.
MODELS: dict[tuple[str, str], Values] = {
    ("sampling.sampling_params", "SamplingParams"): SAMPLING,
    ("managers.io_struct", "GenerateReqInput"): NATIVE,
    ("entrypoints.openai.protocol", "CompletionRequest"): COMPLETION,
    ("entrypoints.openai.protocol", "ChatCompletionRequest"): CHAT,
    ("entrypoints.openai.protocol", "EmbeddingRequest"): EMBEDDING,
    ("entrypoints.openai.protocol", "ScoringRequest"): SCORING,
    ("entrypoints.openai.protocol", "TokenizeRequest"): TOKENIZE,
    ("entrypoints.openai.protocol", "DetokenizeRequest"): DETOKENIZE,
    ("entrypoints.openai.protocol", "ResponsesRequest"): RESPONSES,
    ("entrypoints.ollama.protocol", "OllamaGenerateRequest"): OLLAMA,
}


def field_names(module: str, name: str) -> set[str]:
    """The fields of a request model: pydantic's, a dataclass or msgspec's."""
    model = getattr(import_sglang(f"sglang.srt.{module}"), name)
    if dataclasses.is_dataclass(model):
        return {field.name for field in dataclasses.fields(model)}
    return set(getattr(model, "model_fields", None) or model.__struct_fields__)


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """base: a sound body; fields: what is added to it or changed; inner: the field that has a model of its own."""

    path: str
    base: Mapping[str, Any]
    fields: Values
    weight: int
    inner: str | None = None
    inner_fields: Values = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return {*self.fields, *self.inner_fields}


ENDPOINTS = [
    Endpoint(
        *("/generate", {"text": TEXT, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}, NATIVE, 8),
        *("sampling_params", SAMPLING),
    ),
    Endpoint("/v1/completions", {"model": "x", "prompt": TEXT, "temperature": 0, "max_tokens": 4}, COMPLETION, 5),
    Endpoint("/v1/chat/completions", {"messages": MESSAGES[0], "temperature": 0, "max_tokens": 4}, CHAT, 5),
    Endpoint("/v1/responses", {"input": TEXT, "temperature": 0, "max_output_tokens": 8}, RESPONSES, 2),
    Endpoint(
        *("/api/generate", {"model": "x", "prompt": TEXT, "options": {"temperature": 0, "num_predict": 4}}, OLLAMA, 2),
        *("options", OLLAMA_OPTIONS),
    ),
    Endpoint("/v1/embeddings", {"input": TEXT}, EMBEDDING, 1),
    Endpoint("/v1/score", {"query": TEXT, "items": ["x", "y"], "label_token_ids": [5, 7]}, SCORING, 1),
    Endpoint("/tokenize", {"prompt": TEXT}, TOKENIZE, 1),
    Endpoint("/detokenize", {"tokens": IDS}, DETOKENIZE, 1),
]


@dataclasses.dataclass(frozen=True)
class Request:
    """A body as bytes, because what is no JSON is sent too; `value` is the object that it holds, or None."""

    endpoint: Endpoint
    body: bytes
    value: Any

    def __str__(self) -> str:
        return f"POST {self.endpoint.path} {self.body.decode('utf-8', 'backslashreplace')[:2000]}"


BROKEN = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"5",
    b"\xff",
    b'{"text": "x"',
    b"{]}",
    b"[" * 2000,
    b'{"a":' * 5000,
    b"9" * 5000,
    b"{'a': 1}",
]
# Without a limit a request may write the whole context, which takes a CPU minutes.
LIMITS = ("max_new_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict")
LIMITED = [value for value in ODD if value is not None and value is not False and value != 0]
WITHOUT_LIMITS = [value for value in ODD if value is not None and not isinstance(value, dict)]


def _odd(name: str) -> st.SearchStrategy[Any]:
    return st.sampled_from(LIMITED if name in LIMITS else WITHOUT_LIMITS if name == "options" else ODD)


@st.composite
def _fields(draw: st.DrawFn, values: Values, least: int, most: int) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(values)), max_size=most, min_size=least, unique=True))
    # Three of four values are of the kind that the field is for: a body of wrong types only never gets far.
    kinds = {name: draw(st.integers(0, 3)) for name in names}
    return {name: draw(_odd(name) if kind == 0 else st.sampled_from(values[name])) for name, kind in kinds.items()}


@st.composite
def requests_to(draw: st.DrawFn, endpoint: Endpoint) -> Request:
    if draw(st.integers(0, 60)) == 0:
        raw = draw(st.sampled_from(BROKEN))
        return Request(endpoint, raw, None)
    body = dict(endpoint.base)
    sampled = {"temperature": draw(st.sampled_from([0, 0, 0.8]))}
    if endpoint.inner is not None:
        body[endpoint.inner] = {**body[endpoint.inner], **sampled, **draw(_fields(endpoint.inner_fields, 0, 3))}
    elif "temperature" in body:
        body.update(sampled)
    body.update(draw(_fields(endpoint.fields, 0 if endpoint.inner else 1, 3)))
    if "stream" in endpoint.fields and draw(st.integers(0, 3)) == 0:
        body["stream"] = True
    change = draw(st.integers(0, 30))
    if change == 0:
        body.pop(draw(st.sampled_from(sorted(set(body) - {*LIMITS, endpoint.inner}))))
    elif change == 1:
        body["unknown_field"] = draw(_odd("unknown_field"))
    # JSON has no infinity, but numbers that are read as one; NaN is no JSON at all.
    raw = json.dumps(body).replace("Infinity", "1e999").encode()
    return Request(endpoint, raw, None if b"NaN" in raw else body)


request_bodies = st.sampled_from([e for e in ENDPOINTS for _ in range(e.weight)]).flatmap(requests_to)
