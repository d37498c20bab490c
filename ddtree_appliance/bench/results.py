"""From stored units to the rows of results.json. A ratio is only ever computed within one unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ddtree_appliance.bench.records import Cell, ServerRecord, SessionRecord, UnitRecord
from ddtree_appliance.bench.statistics import Ratio, ratio_of, spread_of
from ddtree_appliance.bench.step_times import mean_breakdown
from ddtree_appliance.bench.variants import Variant, is_chain_baseline
from ddtree_appliance.errors import ApplianceError

SCHEMA = 1


def baselines_of(variants: Sequence[Variant]) -> dict[str, str]:
    """ "none" and "dflash" -> the name of the variant that is that baseline, where there is one.

    Of several chains the first with the drafter's own block size; attached servers do not tell, so the first.
    """
    found: dict[str, str] = {}
    for variant in variants:
        if variant.algorithm == "none":
            found.setdefault("none", variant.name)
        elif is_chain_baseline(variant):
            found.setdefault("dflash", variant.name)
    return found


def build_results(sessions: Sequence[SessionRecord], units: Sequence[UnitRecord], temperature: float) -> dict[str, Any]:
    """The content of results.json. Raises ApplianceError for a unit whose session or repeats are not whole."""
    by_number = {session.session: session for session in sessions}
    rows: list[dict[str, Any]] = []
    for unit in sorted(units, key=lambda unit: (unit.concurrency, unit.group, unit.session)):
        session = by_number.get(unit.session)
        if session is None:
            raise ApplianceError(f"a unit names session {unit.session}, which is not recorded", "was a file edited?")
        rows += unit_rows(session, unit, temperature)
    used = {unit.session for unit in units}
    return {
        "schema": SCHEMA,
        "sessions": [session.model_dump(mode="json") for session in sessions if session.session in used],
        "results": rows,
    }


def unit_rows(session: SessionRecord, unit: UnitRecord, temperature: float) -> list[dict[str, Any]]:
    """One row per variant of a unit, in the session's order."""
    cells = _cells_by_variant(session, unit)
    baselines = baselines_of([server.variant for server in session.servers.values()])
    chains = [n for n, server in session.servers.items() if server.variant.algorithm == "DFLASH" and n in cells]
    best_chain = max(chains, key=lambda name: spread_of(_tok_s(cells[name])).median, default=None)
    references = {
        "none": baselines.get("none"),
        "dflash": baselines.get("dflash"),
        "best_dflash": best_chain,
    }
    rows = []
    for name, server in session.servers.items():
        row = _facts(session, unit, server, temperature)
        if name in cells:
            row.update(_speed(name, cells, references))
            row.update(_steps(server, cells[name]))
            row.update(_clock(cells[name]))
        row.update(_agreement(unit, name))
        row["refused"] = unit.refused.get(name)
        rows.append({**_EMPTY, **_rounded(row)})
    return rows


def _rounded(value: Any) -> Any:
    """Four decimals everywhere: no measurement here is finer."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value


# Every row has every key: null where a variant was refused, or a value does not apply.
_EMPTY: dict[str, Any] = dict.fromkeys(
    (
        *("variant", "algorithm", "budget", "topk", "block_size", "backend", "concurrency", "temperature"),
        *("tok_s", "tok_s_range", "tok_s_repeats", "ratio_to_dflash", "ratio_to_dflash_range"),
        *("ratio_to_none", "ratio_to_none_range", "ratio_to_best_dflash", "ratio_to_best_dflash_range"),
        *("within_noise", "within_noise_of_none", "within_noise_of_best_dflash", "best_dflash"),
        *("accept_length", "accept_length_range", "step_ms", "step_ms_range", "first_token_ms", "breakdown_ms"),
        *("equal_to_none", "first_difference_to_none", "equal_to_dflash", "first_difference_to_dflash"),
        *("equal_to_itself", "first_difference_to_itself", "gpu_mhz", "gpu_lowest_mhz", "gpu_watts", "gpu_held_back"),
        *("repeats", "prompts", "tokens", "cached_tokens", "session", "group", "started", "refused"),
    )
)


def _cells_by_variant(session: SessionRecord, unit: UnitRecord) -> dict[str, list[Cell]]:
    cells: dict[str, list[Cell]] = {}
    for cell in sorted(unit.cells, key=lambda cell: cell.repeat):
        cells.setdefault(cell.variant, []).append(cell)
    counts = {len(group) for group in cells.values()}
    is_whole = set(cells) | set(unit.refused) == set(session.servers) and len(counts) <= 1
    if not is_whole or any([cell.repeat for cell in group] != list(range(len(group))) for group in cells.values()):
        raise ApplianceError(
            f"the unit of session {unit.session} at {unit.concurrency} concurrent requests is not whole",
            "was cells.jsonl edited? remove its line and run the benchmark again",
        )
    return cells


def _facts(session: SessionRecord, unit: UnitRecord, server: ServerRecord, temperature: float) -> dict[str, Any]:
    facts = server.facts
    is_tree = server.variant.algorithm == "DDTREE"
    is_chain = server.variant.algorithm == "DFLASH"
    # A tree's width is its budget + 1; its depth comes from the drafter's block.
    block = facts.get("speculative_dflash_block_size" if is_tree else "speculative_num_draft_tokens")
    return {
        "variant": server.variant.name,
        "algorithm": server.variant.algorithm,
        "budget": facts.get("speculative_ddtree_budget") if is_tree else None,
        "topk": facts.get("speculative_ddtree_topk") if is_tree else None,
        "block_size": block if is_tree or is_chain else None,
        "backend": facts.get("attention_backend"),
        "concurrency": unit.concurrency,
        "temperature": temperature,
        "prompts": unit.prompts,
        "session": session.session,
        "group": unit.group,
        "started": unit.started,
    }


def _speed(name: str, cells: dict[str, list[Cell]], references: dict[str, str | None]) -> dict[str, Any]:
    own = _tok_s(cells[name])
    speed = spread_of(own)
    row: dict[str, Any] = {
        "tok_s": speed.median,
        "tok_s_range": speed.to_json(),
        "tok_s_repeats": own,
        "repeats": len(own),
        "tokens": sum(cell.tokens for cell in cells[name]),
        "cached_tokens": sum(cell.cached_tokens for cell in cells[name]),
        "best_dflash": references["best_dflash"],
    }
    noise_keys = {
        "dflash": "within_noise",
        "none": "within_noise_of_none",
        "best_dflash": "within_noise_of_best_dflash",
    }
    for label, reference in references.items():
        if reference is None or reference not in cells:
            continue
        ratio: Ratio = ratio_of(own, _tok_s(cells[reference]))
        row[f"ratio_to_{label}"] = ratio.spread.median
        row[f"ratio_to_{label}_range"] = ratio.spread.to_json()
        # A variant is not "within noise" of itself.
        row[noise_keys[label]] = None if reference == name else ratio.within_noise
    return row


def _steps(server: ServerRecord, cells: Sequence[Cell]) -> dict[str, Any]:
    row: dict[str, Any] = {"first_token_ms": 1000 * spread_of([cell.first_s for cell in cells]).median}
    if step_ms := [cell.step_ms for cell in cells if cell.step_ms is not None]:
        row["step_ms"] = spread_of(step_ms).median
        row["step_ms_range"] = spread_of(step_ms).to_json()
    if server.variant.algorithm != "none" and all(cell.verify_steps for cell in cells):
        lengths = spread_of([1 + cell.correct_drafts / cell.verify_steps for cell in cells])
        row["accept_length"] = lengths.median
        row["accept_length_range"] = lengths.to_json()
    row["breakdown_ms"] = _breakdown(cells)
    return row


def _clock(cells: Sequence[Cell]) -> dict[str, Any]:
    """Over all samples of the repeats; nothing if they were not watched."""
    clocks = [cell.clock for cell in cells if cell.clock is not None]
    if not clocks:
        return {}
    samples = sum(clock.samples for clock in clocks)
    watts = [(clock.watts, clock.samples) for clock in clocks if clock.watts is not None]
    reasons = sorted({reason for clock in clocks for reason in clock.held_back})
    return {
        "gpu_mhz": sum(clock.mhz * clock.samples for clock in clocks) / samples,
        "gpu_lowest_mhz": min(clock.lowest_mhz for clock in clocks),
        "gpu_watts": sum(each * count for each, count in watts) / samples if len(watts) == len(clocks) else None,
        "gpu_held_back": {
            reason: sum(clock.held_back.get(reason, 0.0) * clock.samples for clock in clocks) / samples
            for reason in reasons
        },
    }


def _breakdown(cells: Iterable[Cell]) -> dict[str, float] | None:
    recorded = [cell.breakdown_ms for cell in cells if cell.breakdown_ms is not None]
    return mean_breakdown(
        {"steps": each["steps"], "ms": {part: ms for part, ms in each.items() if part != "steps"}} for each in recorded
    )


def _agreement(unit: UnitRecord, name: str) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for label, agreement in unit.agreement.get(name, {}).items():
        row[f"equal_to_{label}"] = agreement.share
        row[f"first_difference_to_{label}"] = agreement.first_difference
    return row


def _tok_s(cells: Sequence[Cell]) -> list[float]:
    return [cell.tok_s for cell in cells]
