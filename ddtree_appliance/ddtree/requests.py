"""Which requests DDTREE serves exactly; every other one is refused by name, never answered approximately.

Greedy decoding is built. What changes the distribution (sampling, penalties, grammars, biases) or asks for more than
tokens (log-probabilities, hidden states) is refused until it is built and proved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rule = tuple[str, Callable[[Any], bool]]

# On the sampling parameters. SGLang turns temperature 0 into top_k 1, so top_k 1 is what greedy means.
SAMPLING_RULES: tuple[Rule, ...] = (
    ("sampling (send temperature=0; SGLang's default is 1.0)", lambda p: p.top_k != 1),
    ("frequency_penalty", lambda p: p.frequency_penalty != 0),
    ("presence_penalty", lambda p: p.presence_penalty != 0),
    ("repetition_penalty", lambda p: p.repetition_penalty != 1),
    ("min_new_tokens", lambda p: p.min_new_tokens > 0),
    ("logit_bias", lambda p: bool(p.logit_bias)),
    ("json_schema", lambda p: p.json_schema is not None),
    ("regex", lambda p: p.regex is not None),
    ("ebnf", lambda p: p.ebnf is not None),
    ("structural_tag", lambda p: p.structural_tag is not None),
    ("max_thinking_tokens", lambda p: bool(p.custom_params) and "thinking_budget" in p.custom_params),
)

# On the request: the tokenizer manager's and the scheduler's have different names for two of these.
REQUEST_FIELDS: dict[str, tuple[str, ...]] = {
    "return_logprob": ("return_logprob",),
    "custom_logit_processor": ("custom_logit_processor",),
    "return_hidden_states": ("return_hidden_states",),
    "return_sampling_mask": ("return_sampling_mask",),
    "return_routed_experts": ("return_routed_experts",),
    "return_indexer_topk": ("return_indexer_topk",),
    "LoRA (lora_path)": ("lora_id",),
    "input_embeds": ("input_embeds", "positional_embed_overrides"),
    "images, audio or video": ("mm_inputs", "multimodal_inputs"),
    "sessions (session_params)": ("session_params", "session"),
}


def unsupported_features(request: Any) -> list[str]:
    """The features of `request` that DDTREE cannot serve exactly.

    request: SGLang's TokenizedGenerateReqInput or Req.
    """
    params = request.sampling_params
    features = [name for name, asked in SAMPLING_RULES if asked(params)]
    for name, fields in REQUEST_FIELDS.items():
        if any(_is_set(getattr(request, field, None)) for field in fields):
            features.append(name)
    return features


def refusal(request: Any) -> str | None:
    """The message of the HTTP 400 for `request`, or None if DDTREE serves it."""
    features = unsupported_features(request)
    if not features:
        return None
    return f"DDTREE does not support {', '.join(features)} yet; remove it from the request."


def _is_set(value: Any) -> bool:
    # Tensors and arrays have no single truth value; being there is what counts.
    return value is not None and value is not False and not (isinstance(value, (list, str)) and not value)
