"""The plots of a report, as PNG. The only module that imports matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddtree_appliance.bench.step_times import PARTS

Row = Mapping[str, Any]
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#f0e442")
_MARKERS = "osD^vP*X"


def write_plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw what the rows allow into `folder`; the files written."""
    measured = [row for row in rows if row["tok_s"] is not None]
    drawings = {
        "speed.png": _draw_speed(measured),
        "accept_length.png": _draw_accept_length(measured),
        "step_breakdown.png": _draw_breakdown(measured),
    }
    written = []
    for name, figure in drawings.items():
        path = folder / name
        if figure is None:
            path.unlink(missing_ok=True)  # of an earlier report
            continue
        # Without the version of matplotlib in it, the same figures make the same file.
        figure.savefig(path, dpi=150, metadata={"Software": ""})
        written.append(path)
    return written


def _draw_speed(rows: Sequence[Row]) -> Figure | None:
    # Without the reference itself: it is the line at 1.
    compared = [row for row in rows if row["within_noise"] is not None]
    if not compared:
        return None
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes: Axes = figure.subplots()
    places = {concurrency: at for at, concurrency in enumerate(sorted({row["concurrency"] for row in compared}))}
    for number, (variant, session_rows) in enumerate(_series(compared)):
        x = [places[row["concurrency"]] for row in session_rows]
        y = [row["ratio_to_dflash"] for row in session_rows]
        errors = [
            [row["ratio_to_dflash"] - row["ratio_to_dflash_range"][0] for row in session_rows],
            [row["ratio_to_dflash_range"][1] - row["ratio_to_dflash"] for row in session_rows],
        ]
        style = {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKERS[number // len(_COLOURS) % len(_MARKERS)]}
        axes.errorbar(x, y, yerr=errors, label=variant, capsize=3, **style)  # type: ignore[arg-type]
    axes.axhline(1.0, color="grey", linewidth=0.8, zorder=0, label="dflash")
    axes.set_xticks(list(places.values()), [str(concurrency) for concurrency in places])
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel("tok/s / tok/s of DFLASH (median, lowest to highest)")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small", ncols=2)
    axes.set_title("Throughput against DFLASH's chain in the same session")
    return figure


def _series(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """(name, rows by concurrency) per variant. A baseline is in every group: each group's is its own line."""
    names = [(row["variant"], row["group"]) for row in rows]
    repeated = {variant for variant, group in names if any(v == variant and g != group for v, g in names)}
    found = []
    for variant, group in dict.fromkeys(names):
        here = [row for row in rows if (row["variant"], row["group"]) == (variant, group)]
        label = f"{variant} (group {group})" if variant in repeated else str(variant)
        found.append((label, sorted(here, key=lambda row: int(row["concurrency"]))))
    return found


def _draw_accept_length(rows: Sequence[Row]) -> Figure | None:
    trees = [row for row in rows if row["algorithm"] == "DDTREE" and row["accept_length"] is not None]
    if not trees:
        return None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes: Axes = figure.subplots()
    kinds = {(row["topk"], row["backend"]) for row in trees}
    lines = sorted({(row["concurrency"], row["topk"], row["backend"]) for row in trees}, key=str)
    for number, line in enumerate(sorted(lines, key=lambda line: int(line[0]))):
        here = [row for row in trees if (row["concurrency"], row["topk"], row["backend"]) == line]
        here.sort(key=lambda row: int(row["budget"]))
        label = f"{line[0]} at once" + (f", top {line[1]}, {line[2]}" if len(kinds) > 1 else "")
        budgets = [row["budget"] for row in here]
        lengths = [row["accept_length"] for row in here]
        axes.plot(budgets, lengths, marker="o", color=_COLOURS[number % len(_COLOURS)], label=label)
    chains = {row["block_size"]: row["accept_length"] for row in rows if row["algorithm"] == "DFLASH"}
    for block, length in chains.items():
        if length is not None:
            axes.axhline(length, color="grey", linestyle="--", linewidth=0.8)
            axes.annotate(f"DFLASH, block {block}", (0.01, length), xycoords=("axes fraction", "data"), va="bottom")
    axes.set_xscale("log", base=2)
    ticks = sorted({row["budget"] for row in trees})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("node budget")
    axes.set_ylabel("accept length (tokens per verify step)")
    axes.legend(fontsize="small")
    axes.set_title("Accept length by budget")
    return figure


def _draw_breakdown(rows: Sequence[Row]) -> Figure | None:
    recorded = [row for row in rows if row["breakdown_ms"]]
    if not recorded:
        return None
    recorded = sorted(recorded, key=lambda row: (int(row["concurrency"]), int(row["budget"])))
    figure = Figure(figsize=(max(7, 0.5 * len(recorded) + 3), 5), layout="constrained")
    axes: Axes = figure.subplots()
    names = [f"{row['variant']}\n{row['concurrency']} at once" for row in recorded]
    bottoms = [0.0] * len(recorded)
    for number, part in enumerate(PARTS):
        heights = [row["breakdown_ms"].get(part, 0.0) for row in recorded]
        axes.bar(range(len(recorded)), heights, bottom=bottoms, label=part, color=_COLOURS[number])
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xticks(range(len(recorded)), names, rotation=90, fontsize="small")
    axes.set_ylabel("ms per step")
    figure.legend(loc="outside right upper", fontsize="small")
    axes.set_title("Where a step's time goes")
    return figure
