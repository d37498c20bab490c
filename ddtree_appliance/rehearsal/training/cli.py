"""The command behind `scripts/train-tiny-pair`: text -> target -> drafter -> folder -> figures of that folder."""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ddtree_appliance.errors import ApplianceError, HostError, UsageError, report
from ddtree_appliance.rehearsal.options import positive, say
from ddtree_appliance.rehearsal.training.corpus import build_corpus
from ddtree_appliance.rehearsal.training.export import Pair, load_pair, write_pair
from ddtree_appliance.rehearsal.training.model import Drafter, DrafterShape, Target, TargetShape
from ddtree_appliance.rehearsal.training.readme import render_readme
from ddtree_appliance.rehearsal.training.report import Report, TreeBuilder, measure_pair
from ddtree_appliance.rehearsal.training.train import DrafterPlan, TargetPlan, train_drafter, train_target


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train-tiny-pair",
        description="Train the rehearsal's target and DFlash drafter from the standard library's sources.",
        epilog="The last line on stdout is one JSON object with the figures; target_loss is the held-out loss.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; new or empty")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and samples (the split has its own)")
    parser.add_argument("--target-steps", type=positive, default=TargetPlan.steps, metavar="N")
    parser.add_argument("--drafter-steps", type=positive, default=DrafterPlan.steps, metavar="N")
    parser.add_argument(
        "--batch",
        type=positive,
        default=TargetPlan.batch,
        metavar="N",
        help=f"sequences per target step, the drafter takes half as many (default: {TargetPlan.batch})",
    )
    parser.add_argument("--report-prompts", type=positive, default=24, metavar="N", help="default: 24")
    parser.add_argument(
        "--stdlib",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        metavar="DIR",
        help="folder of the sources to train on (default: this interpreter's standard library)",
    )
    return parser


def train_pair(
    out: Path,
    library: Path,
    device: torch.device,
    seed: int,
    target_plan: TargetPlan,
    drafter_plan: DrafterPlan,
    report_prompts: int,
    build_tree: TreeBuilder,
) -> Report:
    """Train, write `out` and measure what was written."""
    corpus = build_corpus(library)
    say(
        f"corpus: {corpus.train_files} files, {corpus.train.size:,} tokens of {corpus.label}; "
        f"held out: {corpus.heldout_files} files, {corpus.heldout.size:,} tokens"
    )
    tokens = torch.from_numpy(corpus.train.astype(np.int64)).to(device)
    torch.manual_seed(seed)
    target = Target(TargetShape(vocab_size=corpus.tokenizer.get_vocab_size())).to(device)
    drafter = Drafter(DrafterShape()).to(device)
    train_target(target, tokens, target_plan, seed)
    train_drafter(target, drafter, tokens, drafter_plan, seed)
    write_pair(out, Pair(target, drafter), corpus.tokenizer, corpus.heldout)

    stored = load_pair(out)
    stored.target.to(device)
    stored.drafter.to(device)
    heldout = torch.from_numpy(corpus.heldout.astype(np.int64)).to(device)
    report = measure_pair(stored.target, stored.drafter, heldout, build_tree, prompts=report_prompts)
    readme = render_readme(stored, corpus, report, target_plan, drafter_plan, seed)
    (out / "README.md").write_text(readme, encoding="utf-8")
    return report


def run(argv: Sequence[str] | None) -> int:
    options = build_parser().parse_args(argv)
    started = time.monotonic()
    # Imported before the minutes of training, not after: an incomplete checkout should fail at once.
    from ddtree_appliance.ddtree.tree import build_tree

    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise UsageError(f"--out: {options.out} exists and is not an empty folder")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise HostError("--device cuda: torch finds no usable GPU", hint="--device cpu trains too, over many hours")
    report = train_pair(
        out=options.out,
        library=options.stdlib,
        device=torch.device(options.device),
        seed=options.seed,
        target_plan=TargetPlan(steps=options.target_steps, batch=options.batch),
        drafter_plan=DrafterPlan(steps=options.drafter_steps, batch=max(1, options.batch // 2)),
        report_prompts=options.report_prompts,
        build_tree=build_tree,
    )
    figures = {
        "target_loss": round(report.heldout_loss, 4),
        "chain_accept_length": round(report.chain_accept_length, 4),
        "tree_accept_length": {str(budget): round(rate, 4) for budget, rate in report.tree_accept_length.items()},
        "seconds": round(time.monotonic() - started, 1),
    }
    print(json.dumps(figures), flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(argv)
    except ApplianceError as error:
        return report(error)
