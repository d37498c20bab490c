"""Measure one unit: all variants of a session at one concurrency, in rotation, one server loaded at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime, timezone
from statistics import fmean
from typing import TypeVar

from ddtree_appliance.bench.gpu_clock import ClockWatch
from ddtree_appliance.bench.load import Load, RequestRefused, run_load, sampling_parameters, try_request
from ddtree_appliance.bench.plan import Plan
from ddtree_appliance.bench.prompts import Prompt
from ddtree_appliance.bench.records import Agreement, Cell, GpuClock, UnitRecord
from ddtree_appliance.bench.servers import BenchServer
from ddtree_appliance.bench.step_times import StepTimesReader, mean_breakdown
from ddtree_appliance.errors import ApplianceError

Item = TypeVar("Item")
# (what is being measured, its cell if it is done)
OnProgress = Callable[[str, Cell | None], None]
Tokens = list[list[int]]


def rotated(items: Sequence[Item], repeat: int) -> list[Item]:
    """The order of a repeat (from 0): each begins one further, so that no variant always comes after the same heat."""
    start = repeat % len(items) if items else 0
    return [*items[start:], *items[:start]]


def measure_unit(
    servers: Sequence[BenchServer],
    baselines: Mapping[str, str],
    plan: Plan,
    prompts: Sequence[Prompt],
    session: int,
    group: int,
    concurrency: int,
    on_progress: OnProgress,
    watch: ClockWatch | None = None,
) -> UnitRecord:
    """The whole unit, or an exception: nothing of an unfinished unit is returned.

    baselines: "none" and "dflash" -> the server's name, where there is one. watch: over the GPU's clock. Raises
    ApplianceError with the variant's name and the end of its server's log.
    """
    started = utc_now()
    prompts = prompts[: plan.prompt_count(concurrency)]
    sampling = sampling_parameters(plan.new_tokens, plan.temperature)
    refused: dict[str, str] = {}
    cells: list[Cell] = []
    tokens: dict[str, list[Tokens]] = {}
    readers = {server.name: StepTimesReader(server.step_times) for server in servers if server.step_times}
    for each in readers.values():
        each.skip_old()  # of another concurrency

    for server in servers:
        on_progress(f"c{concurrency} warm-up {server.name}", None)
        try:
            try_request(server.url, server.name, prompts[0], plan.temperature)
        except RequestRefused as refusal:
            refused[server.name] = refusal.message
            continue
        # One wave at full concurrency: every kernel and graph of this batch size has run once.
        _load(server, prompts[:concurrency], concurrency, sampling)
    served = [server for server in servers if server.name not in refused]
    for repeat in range(plan.repeats):
        for server in rotated(served, repeat):
            on_progress(f"c{concurrency} repeat {repeat + 1}/{plan.repeats} {server.name}", None)
            reader = readers.get(server.name)
            if reader is not None:
                reader.read_new()  # of the warm-up
            with watch or nullcontext():
                load = _load(server, prompts, concurrency, sampling)
            clock = watch.seen() if watch is not None else None
            breakdown = mean_breakdown(reader.read_new()) if reader is not None else None
            cell = summarise(server.name, repeat, load, breakdown, clock)
            cells.append(cell)
            tokens.setdefault(server.name, []).append([answer.tokens for answer in load.answers])
            on_progress(f"c{concurrency} repeat {repeat + 1}/{plan.repeats} {server.name}", cell)
    return UnitRecord(
        session=session,
        group=group,
        concurrency=concurrency,
        started=started,
        prompts=len(prompts),
        cells=tuple(cells),
        refused=refused,
        # Sampled answers differ by intent.
        agreement=agreements(tokens, baselines) if plan.temperature == 0 else {},
    )


def _load(server: BenchServer, prompts: Sequence[Prompt], concurrency: int, sampling: Mapping[str, object]) -> Load:
    server.forget_prompts()
    try:
        return run_load(server.url, server.name, prompts, concurrency, sampling)
    except ApplianceError as error:
        raise ApplianceError(error.message, server.log_tail() or error.hint) from error


def summarise(name: str, repeat: int, load: Load, breakdown: dict[str, float] | None, clock: GpuClock | None) -> Cell:
    """The sums of one cell."""
    answers = load.answers
    return Cell(
        variant=name,
        repeat=repeat,
        wall_s=load.wall_s,
        tokens=sum(len(answer.tokens) for answer in answers),
        decode_s=sum(answer.decode_s for answer in answers),
        decode_steps=sum(answer.verify_steps or len(answer.tokens) - 1 for answer in answers),
        first_s=fmean(answer.first_s for answer in answers),
        verify_steps=sum(answer.verify_steps for answer in answers),
        correct_drafts=sum(answer.correct_drafts for answer in answers),
        cached_tokens=sum(answer.cached_tokens for answer in answers),
        breakdown_ms=breakdown,
        clock=clock,
    )


def agreements(tokens: Mapping[str, Sequence[Tokens]], baselines: Mapping[str, str]) -> dict[str, dict[str, Agreement]]:
    """How each variant's answers equal the baselines' of the same repeat, and its own first repeat's."""
    found: dict[str, dict[str, Agreement]] = {}
    for name, repeats in tokens.items():
        references = {label: tokens[base] for label, base in baselines.items() if base != name and base in tokens}
        found[name] = {
            label: compare_tokens(_flat(repeats), _flat(reference)) for label, reference in references.items()
        }
        later = repeats[1:]
        found[name]["itself"] = compare_tokens(_flat(later), _flat([repeats[0]] * len(later)))
    return found


def _flat(repeats: Sequence[Tokens]) -> Tokens:
    return [answer for repeat in repeats for answer in repeat]


def compare_tokens(answers: Tokens, references: Tokens) -> Agreement:
    """How many answers equal their references (equally many), and where the others part on average."""
    differences = [
        next(
            (at for at, (a, b) in enumerate(zip(answer, reference, strict=False)) if a != b),
            min(len(answer), len(reference)),
        )
        for answer, reference in zip(answers, references, strict=True)
        if answer != reference
    ]
    return Agreement(
        compared=len(answers),
        share=1 - len(differences) / len(answers) if answers else 1.0,
        first_difference=fmean(differences) if differences else None,
    )


def utc_now() -> str:
    """ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
