"""`bench run`: for each group with missing units, bring its servers up, measure, store, and write the results."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ddtree_appliance.bench.gpu_clock import gpu_watched
from ddtree_appliance.bench.host_facts import host_facts
from ddtree_appliance.bench.launching import pool_tokens, server_command, server_environment
from ddtree_appliance.bench.plan import Plan
from ddtree_appliance.bench.progress import Progress
from ddtree_appliance.bench.prompts import Prompt, digest_of, load_prompts
from ddtree_appliance.bench.records import ServerRecord, SessionRecord
from ddtree_appliance.bench.results import baselines_of
from ddtree_appliance.bench.servers import BenchServer, running, variant_of
from ddtree_appliance.bench.store import Store
from ddtree_appliance.bench.unit import measure_unit, utc_now
from ddtree_appliance.bench.variants import Variant
from ddtree_appliance.errors import ApplianceError, UsageError
from ddtree_appliance.ports import reserve_port


@dataclass(frozen=True)
class RunOptions:
    """This command's own conditions, which no result depends on. stop_after_s: None for no limit."""

    argv: tuple[str, ...]
    stop_after_s: float | None = None
    start_limit_s: float = 900.0


def run_bench(
    store: Store, plan: Plan, options: RunOptions, clock: Callable[[], float] = time.monotonic
) -> list[tuple[int, int]]:
    """Measure what is missing; the (group, concurrency) pairs that are still missing when the time is up.

    Raises ApplianceError; whatever was complete before is kept.
    """
    begin = clock()

    def is_late() -> bool:
        return options.stop_after_s is not None and clock() - begin >= options.stop_after_s

    prompts = _prompts(plan)
    with store.locked(), _sigterm_interrupts():
        missing = store.missing_units(plan)
        with Progress(sum(_cells_of(plan, group) for group, _ in missing)) as progress:
            for group in dict.fromkeys(group for group, _ in missing):
                if is_late():
                    break
                wanted = [concurrency for each, concurrency in missing if each == group]
                _run_group(store, plan, options, prompts, group, wanted, is_late, progress)
        return store.missing_units(plan)


def _cells_of(plan: Plan, group: int) -> int:
    return plan.repeats * (len(plan.attach) or len(plan.groups()[group]))


def _prompts(plan: Plan) -> list[Prompt]:
    path = None if plan.prompts is None else Path(plan.prompts)
    if path is not None and digest_of(path) != plan.prompts_sha256:
        raise UsageError(f"--prompts {path} has changed since this benchmark was begun", "use another --out folder")
    return load_prompts(path, plan.largest_prompt_count, plan.prompt_tokens)


def _run_group(
    store: Store,
    plan: Plan,
    options: RunOptions,
    prompts: Sequence[Prompt],
    group: int,
    concurrencies: Sequence[int],
    is_late: Callable[[], bool],
    progress: Progress,
) -> None:
    number = 1 + max((session.session for session in store.sessions()), default=-1)
    host = host_facts("cpu" if plan.attach else plan.device)
    servers = _servers(store, plan, prompts, group, number)
    begin = time.monotonic()
    with running([server for server in servers.values() if server.command], progress.waiting, options.start_limit_s):
        started_s = time.monotonic() - begin
        records = {name: _record(server, plan, group, pool_tokens(plan, prompts)) for name, server in servers.items()}
        session = SessionRecord(
            session=number,
            group=group,
            started=utc_now(),
            argv=options.argv,
            start_s=round(started_s, 1),
            servers=records,
            host=host,
        )
        store.add_session(session)
        progress.say(f"session {number}, group {group}: {', '.join(servers)} ready after {started_s:.0f} s")
        baselines = baselines_of([record.variant for record in records.values()])
        is_watched = plan.device == "cuda" and not plan.attach  # attached servers may run anywhere
        with gpu_watched(progress.say) if is_watched else nullcontext() as watch:
            for concurrency in concurrencies:
                if is_late():
                    return
                unit = measure_unit(
                    list(servers.values()),
                    baselines,
                    plan,
                    prompts,
                    number,
                    group,
                    concurrency,
                    progress.measuring,
                    watch,
                )
                for name, words in unit.refused.items():
                    progress.say(f"c{concurrency} {name} refused the requests: {words}")
                store.add_unit(unit)


def _servers(store: Store, plan: Plan, prompts: Sequence[Prompt], group: int, session: int) -> dict[str, BenchServer]:
    if plan.attach:
        return {name: BenchServer(name, url) for name, url in plan.attach.items()}
    store.step_times.mkdir(exist_ok=True)
    servers = {}
    for variant in plan.groups()[group]:
        file = f"{session}-{variant.name}"
        port = reserve_port()
        records_steps = plan.breakdown and variant.algorithm == "DDTREE"
        step_times = (store.step_times / f"{file}.jsonl").resolve() if records_steps else None
        servers[variant.name] = BenchServer(
            variant.name,
            f"http://127.0.0.1:{port}",
            server_command(variant, plan, port, prompts),
            server_environment(plan.device, step_times),
            store.logs / f"{file}.log",
            step_times,
        )
    return servers


def _record(server: BenchServer, plan: Plan, group: int, needed_tokens: int) -> ServerRecord:
    facts = server.facts()
    if server.command is None:
        variant = variant_of(facts, server.name)
    else:
        variant = next(variant for variant in plan.groups()[group] if variant.name == server.name)
        _check_is(variant, facts)
        if "--max-total-tokens" not in plan.server_args:
            _check_room(variant, facts, needed_tokens)
    if facts.get("max_running_requests", max(plan.concurrency)) < max(plan.concurrency):
        raise ApplianceError(
            f"variant {server.name}: its server runs {facts['max_running_requests']} requests at once,"
            f" not {max(plan.concurrency)}",
            "the others would wait: give it more, or lower --concurrency",
        )
    command = None if server.command is None else tuple(server.command)
    return ServerRecord(variant=variant, url=server.url, command=command, facts=facts)


def _check_is(variant: Variant, facts: dict[str, Any]) -> None:
    """Raise ApplianceError if the server runs something else: --server-arg may have undone the variant's flags."""
    asked = {
        "speculative_algorithm": None if variant.algorithm == "none" else variant.algorithm,
        "speculative_ddtree_budget": variant.budget,
        "speculative_ddtree_topk": variant.topk,
        "speculative_num_draft_tokens": variant.block_size,
        "attention_backend": variant.backend,
    }
    for name, value in asked.items():
        is_asked = value is not None or name == "speculative_algorithm"
        if is_asked and facts.get(name) != value:
            raise ApplianceError(f"variant {variant.name}: its server runs {name} {facts.get(name)}, not {value}")


def _check_room(variant: Variant, facts: dict[str, Any], needed_tokens: int) -> None:
    """Raise ApplianceError if the KV pool came out smaller than asked for, which SGLang only warns of."""
    if facts.get("max_total_num_tokens", needed_tokens) < needed_tokens:
        raise ApplianceError(
            f"variant {variant.name}: its KV pool holds {facts['max_total_num_tokens']} tokens, {needed_tokens} are"
            " needed: the servers of the group fill the memory",
            "lower --group-size, or the largest --concurrency",
        )


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    # So that the servers, which have process groups of their own, end with this command.
    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
