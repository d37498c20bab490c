"""What the checks of one run share: the clients, the prompts, and answers that more than one of them needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ddtree_appliance.smoke.client import Deadline, ServiceClient, pick
from ddtree_appliance.smoke.outcome import CheckFailed
from ddtree_appliance.smoke.target import SmokeTarget

# Any language model can go on from these; eight, for eight requests at once.
PROMPTS = (
    'def read_lines(path):\n    """Return the lines of a text file."""\n',
    "The capital of France is Paris. The capital of Italy is",
    "import json\nimport sys\n\n\ndef main():\n",
    "Once upon a time there was a small house at the edge of the forest, and in it",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,",
    "for index in range(10):\n    if index % 2 == 0:\n",
    "To boil an egg, first fill a pot with water and",
)
SERIAL_TOKENS = 32


@dataclass(frozen=True)
class Generation:
    """A native answer. verify_steps is 0 where the answer names none: nothing was speculated."""

    text: str
    output_ids: list[int]
    finish_reason: Any
    completion_tokens: int
    verify_steps: int


class SmokeContext:
    """One run's state. clock and sleep (seconds) are passed in, so that tests need not wait."""

    def __init__(self, target: SmokeTarget, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self.target = target
        self.clock = clock
        self.sleep = sleep
        self.deadline = Deadline(target.deadline_s, clock)
        self.engine = ServiceClient(target.engine_url, target.api_key, self.deadline)
        self.sidecar = None
        if target.health_url is not None:
            self.sidecar = ServiceClient(target.health_url, None, self.deadline)

    @cached_property
    def server_info(self) -> dict[str, Any]:
        """The engine's arguments and state."""
        info: dict[str, Any] = pick(self.engine.get("/server_info").expect().json(), dict, where="GET /server_info")
        return info

    @property
    def is_float32(self) -> bool:
        """Whether equal prompts must give equal tokens. In 16 bits near-ties flip with the batch's shape."""
        return self.server_info.get("dtype") in ("float32", "float")

    @cached_property
    def model(self) -> str:
        """The served model's name, as the OpenAI endpoints want it."""
        models = self.engine.get("/v1/models").expect().json()
        return pick(models, str, "data", 0, "id", where="GET /v1/models")

    @cached_property
    def serial_answers(self) -> list[Generation]:
        """Every prompt's answer, asked one after the other."""
        return [self.generate(prompt, SERIAL_TOKENS) for prompt in PROMPTS]

    def generate(self, prompt: str, max_new_tokens: int) -> Generation:
        """Greedy native generation of exactly max_new_tokens tokens. Raises CheckFailed if that is not the answer."""
        answer = read_generation(self.engine.post("/generate", native_request(prompt, max_new_tokens)).expect().json())
        if {answer.completion_tokens, len(answer.output_ids)} != {max_new_tokens}:
            counts = f"{answer.completion_tokens} counted, {len(answer.output_ids)} sent"
            raise CheckFailed(f"POST /generate: {max_new_tokens} tokens were asked for: {counts}")
        return answer


def native_request(prompt: str, max_new_tokens: int) -> dict[str, Any]:
    """The body of a greedy /generate; EOS is ignored, so that every model writes max_new_tokens."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return {"text": prompt, "sampling_params": sampling}


def read_generation(answer: Any) -> Generation:
    """A native answer, or the last event of a streamed one. Raises CheckFailed if a field is missing."""
    where = "POST /generate"
    meta = pick(answer, dict, "meta_info", where=where)
    return Generation(
        text=pick(answer, str, "text", where=where),
        output_ids=pick(answer, list, "output_ids", where=where),
        finish_reason=meta.get("finish_reason"),
        completion_tokens=pick(meta, int, "completion_tokens", where=where),
        verify_steps=meta.get("spec_verify_ct") or 0,
    )
