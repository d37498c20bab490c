"""results.md: the rows of results.json as tables, the best first and the losers named, and how to repeat them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ddtree_appliance.bench.plan import Plan
from ddtree_appliance.bench.step_times import PARTS

Row = Mapping[str, Any]
_SPEED_HEADER = (
    *("variant", "tok/s", "vs DFLASH", "vs best DFLASH", "vs none", "accept length", "step ms", "first token ms"),
    *("equal to none", "equal to DFLASH", "equal to itself", "GPU MHz"),
)
_NOISE = "~"
_CLOCK_TOLERANCE = 0.01  # of the mean clock; a smaller difference is no more than the samples' own
_FREE_SHARE = 0.97  # the driver itself holds some of a GPU that nobody uses


def render_report(results: Mapping[str, Any], plan: Plan, missing: Sequence[tuple[int, int]]) -> str:
    """The whole of results.md."""
    rows: list[Row] = results["results"]
    sessions: list[Mapping[str, Any]] = results["sessions"]
    sections = ["# Benchmark results", _summary(sessions, plan)]
    if missing:
        units = ", ".join(f"group {group} at {concurrency}" for group, concurrency in missing)
        sections.append(f"**Not complete.** Still to be measured: {units}.")
    sections.append(_reading())
    for concurrency in sorted({row["concurrency"] for row in rows}):
        title = "request" if concurrency == 1 else "requests"
        sections.append(f"## {concurrency} concurrent {title}")
        here = [row for row in rows if row["concurrency"] == concurrency]
        for session in dict.fromkeys(row["session"] for row in here):
            sections.append(_unit([row for row in here if row["session"] == session], plan))
    sections.append(_breakdown(rows, plan))
    sections.append(_commands(sessions))
    return "\n\n".join(section for section in sections if section) + "\n"


def _summary(sessions: Sequence[Mapping[str, Any]], plan: Plan) -> str:
    prompts = f"bundled held-out code, {plan.prompt_tokens} tokens each" if plan.prompts is None else plan.prompts
    lines = [
        f"* Pair: {plan.model_path or 'that of the attached servers'}, drafter {plan.drafter or 'theirs'}",
        f"* Requests: {prompts}; {plan.new_tokens} new tokens each, EOS ignored, temperature {plan.temperature:g};"
        f" {plan.repeats} repeats",
    ]
    for session in sessions:
        host = session["host"]
        is_attached = any(server["command"] is None for server in session["servers"].values())
        unknown = "attached servers, their GPU and packages are not known (here:" if is_attached else "no GPU"
        gpus = ", ".join(gpu["name"] for gpu in host.get("gpus", [])) or unknown
        packages = ", ".join(f"{name} {number}" for name, number in host["packages"].items())
        driver = f", driver {host['driver']}" if "driver" in host else ""
        lines.append(
            f"* Session {session['session']}, group {session['group']}, {session['started']}: {gpus}{driver};"
            f" {packages}; Python {host['python']}; revision {host['revision'] or 'unknown'}"
            + (")" if is_attached else "")
        )
        lines += [f"  * {sentence}" for sentence in _handicaps(session)]
    return "\n".join(lines)


def _handicaps(session: Mapping[str, Any]) -> list[str]:
    """What kept a session's servers from being as fast as they could."""
    facts = {name: server["facts"] for name, server in session["servers"].items()}
    lines = []
    if eager := [name for name, each in facts.items() if each.get("disable_cuda_graph")]:
        lines.append(f"Without CUDA graphs: {', '.join(eager)}.")
    if waiting := [name for name, each in facts.items() if each.get("disable_overlap_schedule")]:
        lines.append(f"Without overlap scheduling: {', '.join(waiting)}.")
    for gpu in session["host"].get("gpus", []):
        if gpu["free_mib"] < _FREE_SHARE * gpu["memory_mib"]:
            used = gpu["memory_mib"] - gpu["free_mib"]
            lines.append(f"**Something else held {used} MiB of the {gpu['name']} before the session began.**")
    return lines


def _reading() -> str:
    return (
        "tok/s: the median of the repeats, each all generated tokens over the time from the first request sent to the"
        " last one ended. Ratios: computed repeat by repeat on the same prompts within one session, median (lowest to"
        f" highest); `{_NOISE}` marks one within noise. Accept length: tokens per verify step, the bonus token"
        " included. Step: as a request sees it after its first token, with the prefills of others in between. Equal:"
        " share of greedy answers that are the same, in brackets the mean position where the others part; `itself` is"
        " the same variant in its first repeat, the floor of what rounding does. docs/benchmarks/README.md says more."
    )


def _unit(rows: Sequence[Row], plan: Plan) -> str:
    measured = sorted((row for row in rows if row["tok_s"] is not None), key=lambda row: -float(row["tok_s"]))
    table = [_SPEED_HEADER, *(_speed_cells(row) for row in measured)]
    first = rows[0]
    parts = [f"Session {first['session']}, group {first['group']}; {first['prompts']} prompts per variant and repeat."]
    if measured:
        parts.append(markdown_table(table))
    parts += [f"* {sentence}" for sentence in _sentences(rows, measured)]
    return "\n\n".join([*parts[:2], "\n".join(parts[2:])]).strip()


def _speed_cells(row: Row) -> tuple[str, ...]:
    return (
        str(row["variant"]),
        _number(row["tok_s"], 1 if row["tok_s"] < 100 else 0),
        _ratio(row, "dflash", "within_noise"),
        _ratio(row, "best_dflash", "within_noise_of_best_dflash"),
        _ratio(row, "none", "within_noise_of_none"),
        _number(row["accept_length"], 2),
        _number(row["step_ms"], 2),
        _number(row["first_token_ms"], 0),
        *(_equal(row, label) for label in ("none", "dflash", "itself")),
        _number(row["gpu_mhz"], 0),
    )


def _ratio(row: Row, label: str, noise: str) -> str:
    ratio, spread = row[f"ratio_to_{label}"], row[f"ratio_to_{label}_range"]
    if ratio is None:
        return "-"
    if row[noise] is None:
        return "1"
    return f"{_NOISE if row[noise] else ''}{ratio:.2f} ({spread[0]:.2f} to {spread[1]:.2f})"


def _equal(row: Row, label: str) -> str:
    share, difference = row[f"equal_to_{label}"], row[f"first_difference_to_{label}"]
    if share is None:
        return "-"
    return f"{100 * share:.0f} %" + ("" if difference is None else f" ({difference:.0f})")


def _sentences(rows: Sequence[Row], measured: Sequence[Row]) -> list[str]:
    sentences = []
    for label, title in (("dflash", "DFLASH"), ("none", "no speculation")):
        noise = "within_noise" if label == "dflash" else "within_noise_of_none"
        others = [row for row in measured if row[noise] is not None and row["algorithm"] != "none"]
        slower = [row for row in others if row[f"ratio_to_{label}"] < 1 and not row[noise]]
        unclear = [row["variant"] for row in others if row[noise]]
        if slower:
            named = ", ".join(f"{row['variant']} ({row[f'ratio_to_{label}']:.2f})" for row in slower)
            sentences.append(f"Slower than {title}: {named}.")
        if unclear:
            sentences.append(f"No different from {title} within noise: {', '.join(unclear)}.")
    if cached := [f"{row['variant']} ({row['cached_tokens']})" for row in measured if row["cached_tokens"]]:
        sentences.append(f"Prompt tokens came from a prefix cache, so prefill cost less: {', '.join(cached)}.")
    sentences += _clock_sentences(measured)
    sentences += [f"{row['variant']} refused the requests: {row['refused']}" for row in rows if row["refused"]]
    return sentences


def _clock_sentences(measured: Sequence[Row]) -> list[str]:
    clocks = [row for row in measured if row["gpu_mhz"] is not None]
    if not clocks:
        return []
    slowest, fastest = (pick(clocks, key=lambda row: float(row["gpu_mhz"])) for pick in (min, max))
    if slowest["gpu_mhz"] >= (1 - _CLOCK_TOLERANCE) * fastest["gpu_mhz"]:
        return []
    reasons = slowest["gpu_held_back"] or {"nothing that the GPU names": 1.0}
    held = ", ".join(f"{reason} ({100 * share:.0f} % of the time)" for reason, share in reasons.items())
    return [
        f"The GPU's clock was not the same: {slowest['gpu_mhz']:.0f} MHz with {slowest['variant']}, held back by"
        f" {held}, and {fastest['gpu_mhz']:.0f} with {fastest['variant']}."
    ]


def _breakdown(rows: Sequence[Row], plan: Plan) -> str:
    trees = [row for row in rows if row["algorithm"] == "DDTREE" and row["tok_s"] is not None]
    if not trees:
        return ""
    recorded = [row for row in trees if row["breakdown_ms"]]
    if not recorded:
        reason = "the engine wrote no step times" if plan.breakdown else "it was switched off, or servers were attached"
        return f"## Where a step's time goes\n\nNot recorded: {reason}."
    parts = [part for part in PARTS if any(part in row["breakdown_ms"] for row in recorded)]
    body = [
        (
            *(str(row["variant"]), str(row["concurrency"]), str(row["session"])),
            *(_number(row["breakdown_ms"].get(part), 3) for part in parts),
            *(_number(row["breakdown_ms"].get("step"), 3), f"{row['breakdown_ms']['steps']:.0f}"),
        )
        for row in recorded
    ]
    header = ("variant", "concurrent", "session", *parts, "step", "steps")
    lost = [f"{row['variant']} at {row['concurrency']}" for row in trees if not row["breakdown_ms"]]
    lines = [
        "## Where a step's time goes",
        "Milliseconds per step of the whole batch, from CUDA events in the engine (on a CPU from its clock)."
        " Recording was on during the repeats above and costs the trees a little; the baselines have none.",
        markdown_table([header, *body]),
    ]
    if lost:
        lines.append(f"Not recorded: {', '.join(lost)}.")
    return "\n\n".join(lines)


def _commands(sessions: Sequence[Mapping[str, Any]]) -> str:
    lines = ["## Commands"]
    for session in sessions:
        block = [shlex.join(session["argv"])]
        for name, server in session["servers"].items():
            attached = f"(attached: {server['url']})"
            block.append(f"{name}: {shlex.join(server['command']) if server['command'] else attached}")
        lines.append(f"Session {session['session']}:\n\n```\n" + "\n".join(block) + "\n```")
    return "\n\n".join(lines)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equal length as a table, the first as its head; numbers to the right, the first column to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for row in (rows[0], rule, *rows[1:]):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
