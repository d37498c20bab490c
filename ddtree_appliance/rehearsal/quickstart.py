"""The quickstart: serve the bundled pair three ways on this machine and show what DDTREE does with it.

Without speculation, with DFLASH's chain and with DDTREE's tree, the same held-out prompts, greedy (temperature 0). The
tokens must be equal; what differs is how many of them each verify step brings.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_appliance.ddtree.start_rules import DEFAULT_BUDGET
from ddtree_appliance.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, ApplianceError
from ddtree_appliance.rehearsal.prompts import heldout_prompts
from ddtree_appliance.rehearsal.server import RehearsalServer

ALGORITHMS = (None, "DFLASH", "DDTREE")
PROMPT_TOKENS = 96
NEW_TOKENS = 64
RUN_END = "\N{BOX DRAWINGS LIGHT VERTICAL}"


@dataclass(frozen=True)
class Report:
    """One server's tokens for the prompts, and the totals of its verify steps (0 without speculation)."""

    tokens: list[list[int]]
    verify_steps: int
    correct_drafts: int

    @property
    def accept_length(self) -> float | None:
        """Tokens per verify step, the bonus token included; None without speculation."""
        return 1 + self.correct_drafts / self.verify_steps if self.verify_steps else None


def ask(server: RehearsalServer, prompts: Sequence[Sequence[int]]) -> Report:
    """Send the prompts one after the other."""
    answers = [server.generate(prompt, NEW_TOKENS) for prompt in prompts]
    meta: list[dict[str, Any]] = [answer["meta_info"] for answer in answers]
    return Report(
        tokens=[answer["output_ids"] for answer in answers],
        verify_steps=sum(m.get("spec_verify_ct", 0) for m in meta),
        correct_drafts=sum(m.get("spec_num_correct_drafts", 0) for m in meta),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the quickstart; the last line of stdout is one JSON object. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/quickstart", description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=int, default=DEFAULT_BUDGET, help="DDTREE's node budget (%(default)s)")
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts to send (%(default)s)")
    args = parser.parse_args(argv)
    try:
        return run(args.budget, args.prompts)
    except ApplianceError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE


def run(budget: int, num_prompts: int) -> int:
    """Start the three servers, ask them, print the result. Raises ApplianceError if a server does not come up."""
    begin = time.monotonic()
    prompts = heldout_prompts(num_prompts, PROMPT_TOKENS)
    logs = Path(tempfile.mkdtemp(prefix="ddtree-quickstart-"))
    with ExitStack() as stack:
        servers = {}
        for name in ALGORITHMS:
            flags = ["--speculative-ddtree-budget", str(budget)] if name == "DDTREE" else []
            server = RehearsalServer(name, logs / f"{label(name)}.log", flags)
            stack.callback(server.stop)
            server.spawn()
            servers[name] = server
        for name, server in servers.items():
            server.wait_ready(functools.partial(progress, f"starting {label(name)}"))
        progress("three servers are ready", time.monotonic() - begin, done=True)
        reports = {}
        for name, server in servers.items():
            progress(f"asking {label(name)}", time.monotonic() - begin)
            reports[name] = ask(server, prompts)
        progress("every prompt is answered", time.monotonic() - begin, done=True)
        runs = servers["DDTREE"].stream_runs(prompts[0], NEW_TOKENS)
    show_text(prompts[0], runs)
    show_table(reports, budget)

    plain, chain, tree = (reports[name] for name in ALGORITHMS)
    equal = tree.tokens == plain.tokens and chain.tokens == plain.tokens
    result = {
        "algorithm": "DDTREE",
        "budget": budget,
        "accept_length": rounded(tree.accept_length),
        "linear_accept_length": rounded(chain.accept_length),
        "tokens_equal": equal,
        "prompts": num_prompts,
        "new_tokens": NEW_TOKENS,
        "temperature": 0,
    }
    print(json.dumps(result))
    return EXIT_OK if equal else EXIT_FAILED


def label(algorithm: str | None) -> str:
    """The algorithm's name in tables and file names."""
    return algorithm or "plain"


def rounded(value: float | None) -> float | None:
    """Three decimals: more would not repeat on another machine's rounding."""
    return None if value is None else round(value, 3)


def progress(what: str, seconds: float, done: bool = False) -> None:
    """One line on stderr: rewritten in place on a terminal, elsewhere printed only when a stage is done."""
    if sys.stderr.isatty():
        print(f"\r\033[K[{seconds:4.0f} s] {what}", end="\n" if done else "", file=sys.stderr, flush=True)
    elif done:
        print(f"[{seconds:4.0f} s] {what}", file=sys.stderr, flush=True)


def show_text(prompt: Sequence[int], runs: Sequence[Sequence[int]]) -> None:
    """Print one prompt's end and its continuation, each verify step's accepted run marked."""
    from tokenizers import Tokenizer

    from ddtree_appliance.rehearsal.server import TARGET

    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print("A held-out file's beginning (end of it), and what DDTREE wrote; each mark ends a verify step's run:\n")
    print("    ..." + indented(tokenizer.decode(list(prompt[-40:]))))
    print("    " + "-" * 60)
    marked, written, tokens = "", "", list[int]()
    for number, run_tokens in enumerate(runs):
        tokens.extend(run_tokens)
        before, written = written, tokenizer.decode(tokens)
        piece = written[len(before) :]
        marked += f"\033[{7 * (number % 2)}m{piece}\033[0m" if colour else piece + RUN_END
    print("    " + indented(marked) + "\n")


def indented(text: str) -> str:
    """`text` with its lines four columns to the right."""
    return text.replace("\n", "\n    ")


def show_table(reports: dict[str | None, Report], budget: int) -> None:
    """Print accept length, verify steps and equality for each server."""
    plain = reports[None]
    print(f"{'':<10}{'accept length':>14}{'verify steps':>14}{'tokens equal':>14}")
    for name, report in reports.items():
        length = f"{report.accept_length:.2f}" if report.accept_length else "-"
        steps = str(report.verify_steps or f"{sum(len(tokens) - 1 for tokens in plain.tokens)} *")
        equal = "-" if report is plain else ("yes" if report.tokens == plain.tokens else "NO")
        print(f"{label(name):<10}{length:>14}{steps:>14}{equal:>14}")
    print(f"\nDDTREE with {budget} nodes. * without speculation every token but the prefill's is a step.")


if __name__ == "__main__":
    sys.exit(main())
