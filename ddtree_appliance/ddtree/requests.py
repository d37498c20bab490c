"""Which requests DDTREE serves exactly; every other one is refused by name, never answered approximately.

Whatever shapes the distribution of the next token is served: sampling, penalties, biases, grammars, processors, and the
log-probabilities of it. Refused is what asks for the model's inner values, which a verify step holds in another form,
and what changes the prompt's embeddings or the weights, which the drafter would not see.
"""

from __future__ import annotations

from typing import Any

# On the request: the tokenizer manager's and the scheduler's have different names for two of these.
REQUEST_FIELDS: dict[str, tuple[str, ...]] = {
    "return_hidden_states": ("return_hidden_states",),
    "return_sampling_mask": ("return_sampling_mask",),
    "return_routed_experts": ("return_routed_experts",),
    "return_indexer_topk": ("return_indexer_topk",),
    "LoRA (lora_path)": ("lora_id",),
    "input_embeds": ("input_embeds", "positional_embed_overrides"),
    "images, audio or video": ("mm_inputs", "multimodal_inputs"),
    "sessions (session_params)": ("session_params", "session"),
}

# SGLang passes the budget on to whoever looks for it, and without a processor nobody does.
UNHEARD_BUDGET = "max_thinking_tokens without a custom_logit_processor that obeys it"


def unsupported_features(request: Any) -> list[str]:
    """The features of `request` that DDTREE cannot serve exactly.

    request: SGLang's TokenizedGenerateReqInput or Req.
    """
    features = [
        name
        for name, fields in REQUEST_FIELDS.items()
        if any(_is_set(getattr(request, field, None)) for field in fields)
    ]
    params = request.sampling_params.custom_params
    if params and "thinking_budget" in params and not request.custom_logit_processor:
        features.append(UNHEARD_BUDGET)
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
