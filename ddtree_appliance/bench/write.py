"""Write results.json, results.md and the plots of a folder from what is stored in it, and nothing else."""

from __future__ import annotations

import json
from typing import Any

from ddtree_appliance.bench.report import render_report
from ddtree_appliance.bench.results import build_results
from ddtree_appliance.bench.store import Store, replace_file

NO_PLOTS = "no plots: matplotlib is not installed; hint: pip install 'ddtree-appliance[bench]', then bench report"


def write_results(store: Store) -> tuple[dict[str, Any], str | None]:
    """Rewrite the report; the content of results.json, and why there are no plots (None if there are)."""
    plan = store.read_plan()
    results = build_results(store.sessions(), store.units(), plan.temperature)
    missing = store.missing_units(plan)
    results["plan"] = plan.model_dump(mode="json")
    results["missing"] = [{"group": group, "concurrency": concurrency} for group, concurrency in missing]
    replace_file(store.path / "results.json", json.dumps(results, indent=1) + "\n")
    replace_file(store.path / "results.md", render_report(results, plan, missing))
    try:
        from ddtree_appliance.bench.plots import write_plots
    except ImportError as error:
        if not (error.name or "").startswith("matplotlib"):
            raise
        return results, NO_PLOTS
    write_plots(results["results"], store.path)
    return results, None
