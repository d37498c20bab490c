"""What is stored: a session (servers that were up together) and its units. One JSON line each, never changed."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from ddtree_appliance.bench.variants import Variant


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ServerRecord(_Record):
    """One server of a session. command: None if it was attached to; facts: its resolved arguments."""

    variant: Variant
    url: str
    command: tuple[str, ...] | None
    facts: dict[str, Any]


class SessionRecord(_Record):
    """The servers of one group, up at the same time. start_s: until all of them were ready."""

    session: int
    group: int
    started: str
    argv: tuple[str, ...]
    start_s: float
    servers: dict[str, ServerRecord]
    host: dict[str, Any]


class GpuClock(_Record):
    """The GPU during a repeat. mhz, lowest_mhz: of its SMs; watts: None if it does not tell.

    held_back: what kept the clock from being higher -> in which share of the samples.
    """

    samples: int
    mhz: float
    lowest_mhz: int
    watts: float | None
    held_back: dict[str, float]


class Cell(_Record):
    """One variant's repeat in a unit: every prompt answered once.

    wall_s: first request sent to last one ended. decode_s, decode_steps: summed over the requests, from each one's
    first token to its end. first_s: mean time to the first token. cached_tokens: prompt tokens found in a cache. clock:
    None without a GPU, and where it was not watched.
    """

    variant: str
    repeat: int
    wall_s: float
    tokens: int
    decode_s: float
    decode_steps: int
    first_s: float
    verify_steps: int
    correct_drafts: int
    cached_tokens: int
    breakdown_ms: dict[str, float] | None = None
    clock: GpuClock | None = None

    @property
    def tok_s(self) -> float:
        """Generated tokens per second over the whole cell, its start and end included."""
        return self.tokens / self.wall_s

    @property
    def step_ms(self) -> float | None:
        """Milliseconds per step as a request sees them; None if nothing was decoded after the first token."""
        return 1000 * self.decode_s / self.decode_steps if self.decode_steps else None


class Agreement(_Record):
    """How far greedy answers equal those of a reference to the same prompts.

    share: of equal answers, out of `compared`. first_difference: mean position (from 0) where the others part; None
    if all are equal.
    """

    compared: int
    share: float
    first_difference: float | None


class UnitRecord(_Record):
    """A whole unit: every variant of a session at one concurrency, all repeats.

    refused: variant -> the server's words, for those that do not serve such requests (HTTP 400). agreement: variant ->
    reference ("none", "dflash": the baselines; "itself": its own first repeat) -> how equal; empty if sampled.
    """

    session: int
    group: int
    concurrency: int
    started: str
    prompts: int
    cells: tuple[Cell, ...]
    refused: dict[str, str]
    agreement: dict[str, dict[str, Agreement]]
