"""Checks of what the service writes: the same text on every way to it, faster than one token a step, or a refusal."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ddtree_appliance.smoke.client import pick
from ddtree_appliance.smoke.context import (
    PROMPTS,
    SERIAL_TOKENS,
    Generation,
    SmokeContext,
    native_request,
    read_generation,
)
from ddtree_appliance.smoke.outcome import CheckFailed, Outcome, passed, reported, skipped

EQUALITY_TOKENS = 24
# A trained drafter brings 2 or more; one that guesses now and then costs more than it brings.
HELPS_FROM = 1.1
# In 16 bits a near-tie flips with the batch's shape: with what is cached, or with others' requests. The second try
# asks with the same cache both times. A defect follows every prompt, a flip does not.
TRIES_IN_16_BITS = (PROMPTS[0], PROMPTS[0], PROMPTS[1])
HOT = 2
SEEDS = (1, 2, 3)
STORY = PROMPTS[3]
LOST_TEXT_HINT = "something between the engine and this client changes answers, or it is not the patched SGLang"


def greedy(context: SmokeContext) -> Outcome:
    """Native /generate and OpenAI /v1/completions, temperature 0."""

    def both(prompt: str) -> tuple[str, str]:
        native = context.generate(prompt, EQUALITY_TOKENS).text
        return native, _complete(context, prompt)[0]

    note = _expect_equal(context, "/generate and /v1/completions", both)
    return passed(f"{EQUALITY_TOKENS} tokens, the same text on both endpoints{note}")


def chat(context: SmokeContext) -> Outcome:
    """A message is answered with text; a base model, without a template for chats, has nothing to show here."""
    message = {"role": "user", "content": "Write one short sentence about the sea."}
    body = {"model": context.model, "messages": [message], "temperature": 0, "max_tokens": EQUALITY_TOKENS}
    answer = context.engine.post("/v1/chat/completions", body)
    if answer.status >= 400 and ("chat template" in answer.text or "chat_template" in answer.text):
        return skipped(f"the model has no chat template: {answer.message}")
    reply = pick(answer.expect().json(), dict, "choices", 0, "message", where=answer.asked)
    # A reasoning model may spend all of these tokens on its thoughts.
    text = str(reply.get("content") or reply.get("reasoning_content") or "")
    if not text.strip():
        raise CheckFailed("the chat's answer is empty", "does the model's chat template fit the model?")
    return passed(f"{len(text)} characters")


def streaming(context: SmokeContext) -> Outcome:
    """Streamed and whole answers have the same text and finish reason, native and OpenAI."""

    def native(prompt: str) -> tuple[tuple[str, Any], tuple[str, Any]]:
        whole = context.generate(prompt, EQUALITY_TOKENS)
        return (whole.text, whole.finish_reason), _stream_native(context, prompt)

    def openai(prompt: str) -> tuple[tuple[str, Any], tuple[str, Any]]:
        return _complete(context, prompt), _stream_completion(context, prompt)

    notes = [
        _expect_equal(context, "/generate, whole and streamed,", native),
        _expect_equal(context, "/v1/completions, whole and streamed,", openai),
    ]
    return passed(f"the same text and finish reason, native and OpenAI{notes[0] or notes[1]}")


def speculation(context: SmokeContext) -> Outcome:
    """Tokens per verify step, over every prompt; more than 1, or speculation only costs."""
    answers = context.serial_answers
    steps = sum(answer.verify_steps for answer in answers)
    if not steps:
        raise CheckFailed("no answer reports verify steps (spec_verify_ct): nothing is speculated", "see `versions`")
    # An answer's first token comes from its prefill. Counted, it would lift a useless drafter above 1.
    accept_length = sum(answer.completion_tokens - 1 for answer in answers) / steps
    seen = f"accept length {accept_length:.2f} ({steps} verify steps, {len(answers)} prompts)"
    if accept_length <= 1:
        raise CheckFailed(
            f"the drafter does not help: {seen}",
            "it was not trained for this target, or it is quantised (--speculative-draft-model-quantization unquant)",
        )
    if accept_length < HELPS_FROM:
        return reported(f"the drafter hardly helps: {seen}")
    return passed(seen)


def concurrency(context: SmokeContext) -> Outcome:
    """All prompts at once against one by one: equal tokens in float32, elsewhere no answer may be another prompt's."""
    serial = [answer.output_ids for answer in context.serial_answers]
    at_once = [answer.output_ids for answer in _generate_at_once(context)]
    hint = "requests disturb each other: do not serve; report it with the model and the engine's arguments"
    different = [index for index, ids in enumerate(at_once) if ids != serial[index]]
    mixed = [index for index in different if at_once[index] in serial]
    if mixed:
        raise CheckFailed(f"{len(mixed)} of {len(serial)} requests at once got another request's answer", hint)
    if not different:
        return passed(f"{len(serial)} at once, the same tokens as one by one")
    seen = f"{len(different)} of {len(serial)} requests at once differ from the same one by one"
    if context.is_float32:
        raise CheckFailed(f"{seen} (float32)", hint)
    return reported(f"{seen} (dtype {context.server_info.get('dtype')}: near-ties flip with the batch)")


def sampling(context: SmokeContext) -> Outcome:
    """A sampled request follows its seed: the same tokens again, others for another seed."""

    def twice(prompt: str) -> tuple[str, str]:
        return _sample(context, prompt, seed=1), _sample(context, prompt, seed=1)

    note = _expect_equal(context, "a sampled request and the same again", twice)
    # Hot, so that no model writes the same for two seeds; many seeds, so that no chance does.
    seen = {_sample(context, STORY, seed) for seed in SEEDS}
    if len(seen) == 1:
        raise CheckFailed(
            f"{len(SEEDS)} seeds at temperature {HOT} gave one text: requests are answered greedily",
            "is it DDTREE that answers, and this release's appliance?",
        )
    return passed(f"a seed repeats its text, {len(SEEDS)} seeds gave {len(seen)} texts{note}")


def refusal(context: SmokeContext) -> Outcome:
    """What DDTREE cannot serve is answered with 400 and a message that names it."""
    body = {**native_request(PROMPTS[0], 4), "return_routed_experts": True}
    answer = context.engine.post("/generate", body)
    if answer.status != 400 or "return_routed_experts" not in answer.text:
        raise CheckFailed(
            f"return_routed_experts was answered with {answer.status}, not refused by name",
            "is it DDTREE that answers, and this release's appliance?",
        )
    return passed("return_routed_experts is refused with 400, by name")


def _sample(context: SmokeContext, prompt: str, seed: int) -> str:
    body = native_request(prompt, EQUALITY_TOKENS)
    body["sampling_params"].update(temperature=HOT, sampling_seed=seed)
    return read_generation(context.engine.post("/generate", body).expect().json()).text


def _expect_equal(context: SmokeContext, what: str, ask: Callable[[str], tuple[Any, Any]]) -> str:
    """A note for the detail if the two answers are equal. Raises CheckFailed, with where they part, if not."""
    tries = PROMPTS[:1] if context.is_float32 else TRIES_IN_16_BITS
    for number, prompt in enumerate(tries, 1):
        one, other = ask(prompt)
        if one == other:
            return "" if number == 1 else f" at try {number} ({context.server_info.get('dtype')}: near-ties flip)"
    raise CheckFailed(f"{what} differ: {_difference(one, other)}", LOST_TEXT_HINT)


def _difference(one: Any, other: Any) -> str:
    if isinstance(one, tuple) and one[0] == other[0]:
        return f"finish reason {one[1]!r} and {other[1]!r}"
    text, other_text = (one[0], other[0]) if isinstance(one, tuple) else (one, other)
    pairs = zip(text, other_text, strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return f"after {same} characters {text[same : same + 40]!r} and {other_text[same : same + 40]!r}"


def _completion_request(context: SmokeContext, prompt: str) -> dict[str, Any]:
    tokens = {"max_tokens": EQUALITY_TOKENS, "ignore_eos": True}
    return {"model": context.model, "prompt": prompt, "temperature": 0, **tokens}


def _complete(context: SmokeContext, prompt: str) -> tuple[str, Any]:
    answer = context.engine.post("/v1/completions", _completion_request(context, prompt)).expect()
    choice = pick(answer.json(), dict, "choices", 0, where=answer.asked)
    return pick(choice, str, "text", where=answer.asked), choice.get("finish_reason")


def _stream_completion(context: SmokeContext, prompt: str) -> tuple[str, Any]:
    text, finish_reason = "", None
    for event in context.engine.stream("/v1/completions", _completion_request(context, prompt)):
        if not pick(event, list, "choices", where="POST /v1/completions, streamed"):
            continue  # only the usage
        choice = pick(event, dict, "choices", 0, where="POST /v1/completions, streamed")
        text += pick(choice, str, "text", where="POST /v1/completions, streamed")
        finish_reason = choice.get("finish_reason") or finish_reason
    return text, finish_reason


def _stream_native(context: SmokeContext, prompt: str) -> tuple[str, Any]:
    events = [
        read_generation(event) for event in context.engine.stream("/generate", native_request(prompt, EQUALITY_TOKENS))
    ]
    if not events:
        return "", None
    pieces = [event.text for event in events]
    # A flag of the engine's: events then carry what is new, not everything so far.
    is_incremental = context.server_info.get("incremental_streaming_output")
    return "".join(pieces) if is_incremental else pieces[-1], events[-1].finish_reason


def _generate_at_once(context: SmokeContext) -> Sequence[Generation]:
    """Every prompt in its own request, all at the same time. Raises the first failure."""
    results: list[Generation | BaseException | None] = [None] * len(PROMPTS)

    def ask(index: int) -> None:
        try:
            results[index] = context.generate(PROMPTS[index], SERIAL_TOKENS)
        except BaseException as error:
            results[index] = error

    # Not an executor: its threads are waited for when the process ends, these are not.
    threads = [threading.Thread(target=ask, args=(index,), daemon=True) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = []
    for result in results:
        if not isinstance(result, Generation):
            raise result or AssertionError("a thread ended without a result")
        answers.append(result)
    return answers
