"""The two training loops: first the target on the text, then the drafter on the frozen target.

Weights and optimizer state are float32; on CUDA the passes run under bf16 autocast, on the CPU in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from ddtree_appliance.rehearsal.training.model import Drafter, DrafterShape, Target, masked_blocks
from ddtree_appliance.rehearsal.training.sample import continue_text


@dataclass(frozen=True)
class TargetPlan:
    steps: int = 1200
    batch: int = 64
    length: int = 1024
    peak_lr: float = 2e-3
    warmup_steps: int = 100


@dataclass(frozen=True)
class DrafterPlan:
    """`own_share` of each batch is text that the target wrote: that is what it meets when it serves."""

    steps: int = 2500
    batch: int = 32
    length: int = 512
    anchors: int = 24
    own_share: float = 0.75
    # Own texts are drawn from a pool of this size (or of what the steps need, if less), a few visits each.
    pool_rows: int = 16384
    prompt_length: int = 64
    # Early positions decide the accept length: a wrong one makes the later ones worthless.
    position_decay: float = 7.0
    peak_lr: float = 1e-3
    warmup_steps: int = 100


_SAMPLING_ROWS = 4096  # rows written at once; 2 MiB of bf16 cache each at 512 tokens


def precision(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()


def learning_rate_factor(step: int, steps: int, warmup_steps: int, floor: float = 0.05) -> float:
    """Linear warm-up, then a cosine from 1 to `floor`."""
    warmup_steps = min(warmup_steps, max(1, steps // 10))
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def draw_windows(tokens: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """[rows, length] int64 windows of `tokens` [N] int64 at random starts; the draw itself happens on the CPU."""
    starts = torch.randint(0, tokens.numel() - length + 1, (rows, 1), generator=generator)
    offsets = torch.arange(length, device=tokens.device)
    return tokens[starts.to(tokens.device, non_blocking=True) + offsets]


def optimise(
    module: nn.Module, loss_of_step: Callable[[], Tensor], steps: int, peak_lr: float, warmup_steps: int, name: str
) -> list[float]:
    """AdamW with clipping over `steps` calls of `loss_of_step`; returns the loss of every step."""
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    vectors = [p for p in module.parameters() if p.dim() < 2]
    device = matrices[0].device
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=peak_lr,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    losses: list[Tensor] = []
    progress = tqdm(range(steps), desc=name, mininterval=1.0, dynamic_ncols=True)
    for step in progress:
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * learning_rate_factor(step, steps, warmup_steps)
        with precision(device):
            loss = loss_of_step()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if step % 50 == 0:  # reading the value waits for the device
            progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return torch.stack(losses).tolist() if losses else []


def train_target(target: Target, tokens: Tensor, plan: TargetPlan, seed: int) -> list[float]:
    """Next-token training on random windows of `tokens` [N] int64, on the model's device."""
    generator = torch.Generator().manual_seed(seed)

    def loss_of_step() -> Tensor:
        windows = draw_windows(tokens, plan.batch, plan.length + 1, generator)
        hidden, _ = target(windows[:, :-1])
        return F.cross_entropy(target.logits(hidden).flatten(0, 1), windows[:, 1:].flatten())

    return optimise(target, loss_of_step, plan.steps, plan.peak_lr, plan.warmup_steps, "target")


def write_own_texts(target: Target, tokens: Tensor, plan: DrafterPlan, seed: int) -> Tensor:
    """[pool, length] int64: the target's continuations of training prompts, temperatures spread over 0..1.

    Greedy and near-greedy rows matter as much as plain samples, since most requests ask for temperature 0.
    """
    rows = min(plan.pool_rows, plan.steps * math.ceil(plan.batch * plan.own_share))
    prompt_generator = torch.Generator().manual_seed(seed)
    noise_generator = torch.Generator(device=tokens.device).manual_seed(seed)
    parts: list[Tensor] = []
    with precision(tokens.device):
        for first in tqdm(range(0, rows, _SAMPLING_ROWS), desc="own text", dynamic_ncols=True):
            count = min(_SAMPLING_ROWS, rows - first)
            prompts = draw_windows(tokens, count, plan.prompt_length, prompt_generator)
            temperatures = torch.linspace(0, 1, count, device=tokens.device)
            parts.append(continue_text(target, prompts, plan.length, temperatures, noise_generator))
    return torch.cat(parts) if parts else tokens.new_empty(0, plan.length)


def draw_anchors(rows: int, count: int, length: int, block_size: int, generator: torch.Generator) -> Tensor:
    """[rows, count] int64, distinct per row; each has context before it and a full block of labels after it."""
    usable = length - block_size
    picks = torch.rand(rows, usable, generator=generator).topk(count, dim=1).indices
    return picks.sort(dim=1).values + 1


def drafter_loss(target: Target, drafter: Drafter, windows: Tensor, anchors: Tensor, position_decay: float) -> Tensor:
    """Weighted cross-entropy of block positions 1..S-1 against the tokens AT these positions (not the next ones).

    `windows` [B, T] int64, `anchors` [B, N] int64. The weight of block position k is exp(-(k-1) / position_decay).
    """
    shape: DrafterShape = drafter.shape
    with torch.no_grad():
        _, features = target(windows, tap_layers=shape.target_layer_ids)
        blocks = masked_blocks(target, windows, anchors, shape)
    hidden = drafter(blocks, anchors, features)[:, :, 1:]
    ahead = torch.arange(1, shape.block_size, device=windows.device)
    labels = windows.gather(1, (anchors.unsqueeze(-1) + ahead).flatten(1))
    losses = F.cross_entropy(target.logits(hidden).flatten(0, 2), labels.flatten(), reduction="none")
    weights = torch.exp(-(ahead - 1) / position_decay)
    return (losses.view(-1, ahead.numel()) * weights).sum() / (weights.sum() * anchors.numel())


def train_drafter(target: Target, drafter: Drafter, tokens: Tensor, plan: DrafterPlan, seed: int) -> list[float]:
    """Train the drafter on `tokens` [N] int64 and on text that the frozen target writes."""
    target.requires_grad_(False)
    pool = write_own_texts(target, tokens, plan, seed + 1)
    generator = torch.Generator().manual_seed(seed)
    own_rows = round(plan.batch * plan.own_share)

    def loss_of_step() -> Tensor:
        picks = torch.randint(0, pool.shape[0], (own_rows,), generator=generator)
        windows = torch.cat(
            (pool[picks.to(pool.device)], draw_windows(tokens, plan.batch - own_rows, plan.length, generator))
        )
        anchors = draw_anchors(plan.batch, plan.anchors, plan.length, drafter.shape.block_size, generator)
        return drafter_loss(target, drafter, windows, anchors.to(tokens.device), plan.position_decay)

    return optimise(drafter, loss_of_step, plan.steps, plan.peak_lr, plan.warmup_steps, "drafter")
