"""`bench run|report`: compare no speculation, DFLASH and DDTREE side by side, and tell what was measured."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_appliance.commands import format_table, leaf_options, print_json
from ddtree_appliance.errors import EXIT_OK, ApplianceError, UsageError

if TYPE_CHECKING:
    from ddtree_appliance.bench.store import Store
    from ddtree_appliance.commands import Commands

# Options that are part of the plan: None where not given, so that a continued benchmark need not repeat them.
_PLAN_OPTIONS = (
    *("model_path", "drafter", "device", "variants", "attach", "group_size", "server_args", "concurrency"),
    *("repeats", "prompts", "prompt_tokens", "prompts_per_cell", "new_tokens", "temperature", "breakdown"),
)


def add(commands: Commands) -> None:
    """Add the parsers."""
    parser = commands.add_parser(
        "bench", help="measure no speculation, DFLASH and DDTREE side by side on the same prompts"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    run = actions.add_parser(
        "run",
        parents=[leaf_options()],
        help="start the servers of a comparison, or attach to them, and measure; continues what is in DIR",
        epilog="The same command again measures what is missing. Method: docs/benchmarks/README.md.",
    )
    run.add_argument("--out", type=Path, required=True, metavar="DIR", help="made, or continued")
    pair = run.add_argument_group("what is measured")
    pair.add_argument("--model-path", metavar="DIR", help="the target")
    pair.add_argument("--drafter", metavar="DIR", help="its DFlash drafter")
    pair.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda")
    pair.add_argument(
        "--variant",
        action="append",
        dest="variants",
        metavar="SPEC",
        help="none, dflash[:block=N], ddtree:budget=N[,topk=K], each also backend=B, arg=ARG, name=LABEL; repeatable."
        " none and dflash are always there. Default: also dflash:block=8 and budgets 7, 15, 31, 63, 127",
    )
    pair.add_argument(
        "--server-arg",
        action="append",
        dest="server_args",
        metavar="ARG",
        help="an SGLang argument for every server, as --server-arg=--FLAG",
    )
    pair.add_argument("--group-size", type=int, metavar="N", help="servers up at once, baselines included; default: 4")
    pair.add_argument(
        "--attach", action="append", metavar="NAME=URL", help="a server that runs already, instead of starting any"
    )
    load = run.add_argument_group("the load")
    load.add_argument("--concurrency", metavar="N,N,...", help="default: 1,2,4,8,16,32")
    load.add_argument("--repeats", type=int, metavar="N", help="default and least: 3")
    load.add_argument("--prompts", metavar="FILE", help='lines {"prompt": text} or {"input_ids": [...]}')
    load.add_argument("--prompt-tokens", type=int, metavar="N", help="length of the bundled prompts; default: 96")
    load.add_argument("--prompts-per-cell", type=int, metavar="N", help="default: twice the concurrency, at least 8")
    load.add_argument("--new-tokens", type=int, metavar="N", help="per request; default: 128")
    load.add_argument("--temperature", type=float, metavar="T", help="default: 0")
    load.add_argument(
        "--breakdown",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="let DDTREE servers record where a step's time goes; default: on",
    )
    limits = run.add_argument_group("this command alone")
    limits.add_argument("--stop-after", type=float, metavar="S", help="begin no further unit after this many seconds")
    limits.add_argument(
        "--start-limit", type=float, default=900.0, metavar="S", help="for the servers (default: %(default)g)"
    )
    run.set_defaults(handler=_run)

    report = actions.add_parser(
        "report", parents=[leaf_options()], help="rewrite results.json, results.md and plots from what was measured"
    )
    report.add_argument("folder", type=Path, metavar="DIR")
    report.set_defaults(handler=_report)


def _run(args: argparse.Namespace) -> int:
    from ddtree_appliance.bench.plan import continue_plan, make_plan
    from ddtree_appliance.bench.run import RunOptions, run_bench
    from ddtree_appliance.bench.store import Store
    from ddtree_appliance.bench.write import write_results

    for name in ("stop_after", "start_limit"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')} must be a positive number of seconds, not {value}")
    store = Store(args.out)
    given = _given(args)
    if store.has_plan():
        plan = continue_plan(store.read_plan(), given, args.out)
    else:
        plan = make_plan(given)
        store.write_plan(plan)
    options = RunOptions(("ddtree-appliance", *sys.argv[1:]), args.stop_after, args.start_limit)
    try:
        missing = run_bench(store, plan, options)
    except (ApplianceError, KeyboardInterrupt):
        if store.units():
            write_results(store)
            print(f"what was complete before is kept in {store.path}", file=sys.stderr)
        raise
    if missing:
        print(f"{len(missing)} units are still missing: the same command again continues", file=sys.stderr)
    return _tell(store, args.json)


def _report(args: argparse.Namespace) -> int:
    from ddtree_appliance.bench.store import Store

    return _tell(Store(args.folder), args.json)


def _tell(store: Store, as_json: bool) -> int:
    from ddtree_appliance.bench.write import write_results

    results, no_plots = write_results(store)
    if no_plots is not None:
        print(no_plots, file=sys.stderr)
    if as_json:
        print_json(results)
    else:
        print(_table(results["results"]))
        print(f"\n{store.path / 'results.md'}")
    return EXIT_OK


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [("CONCURRENT", "VARIANT", "TOK/S", "VS DFLASH", "VS NONE", "ACCEPT LENGTH", "STEP MS")]
    for row in rows:
        if row["refused"]:
            lines.append((str(row["concurrency"]), row["variant"], "refused", "-", "-", "-", "-"))
            continue
        numbers = (row["ratio_to_dflash"], row["ratio_to_none"], row["accept_length"], row["step_ms"])
        shown = ["-" if number is None else f"{number:.2f}" for number in numbers]
        noise = "~" if row["within_noise"] else ""
        lines.append((str(row["concurrency"]), row["variant"], f"{row['tok_s']:.1f}", noise + shown[0], *shown[1:]))
    return format_table(lines)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The plan's options that were given, in the plan's types. Raises UsageError."""
    from ddtree_appliance.bench.prompts import digest_of

    given = {name: getattr(args, name) for name in _PLAN_OPTIONS if getattr(args, name) is not None}
    for name in ("model_path", "drafter", "prompts"):
        if name in given:
            # A later command may run in another folder.
            given[name] = str(Path(given[name]).absolute())
    if "prompts" in given:
        given["prompts_sha256"] = digest_of(Path(given["prompts"]))
    if "concurrency" in given:
        given["concurrency"] = _numbers(given["concurrency"])
    if "server_args" in given:
        given["server_args"] = tuple(given["server_args"])
    if "attach" in given:
        given["attach"] = _attached(given["attach"])
    return given


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--concurrency {text}: whole numbers with commas between them", "for example 1,4,16"
        ) from None


def _attached(pairs: list[str]) -> dict[str, str]:
    servers: dict[str, str] = {}
    for pair in pairs:
        name, separator, url = pair.partition("=")
        if not separator or not name or not url.startswith(("http://", "https://")):
            raise UsageError(f"--attach {pair}: not NAME=URL", "for example --attach tree=http://127.0.0.1:30000")
        if name in servers:
            raise UsageError(f"--attach {pair}: {name} is attached twice")
        servers[name] = url
    return servers
