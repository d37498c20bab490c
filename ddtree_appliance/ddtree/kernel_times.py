"""The parts of a verify step around the matrix products, as calls to be timed: each kernel beside its torch twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources

from ddtree_appliance.ddtree.fused.attention import Tiling, VerifyAttention
from ddtree_appliance.ddtree.head import HeadShard
from ddtree_appliance.ddtree.inputs import ancestor_bits, verify_mask
from ddtree_appliance.ddtree.kernels import TORCH, Kernels
from ddtree_appliance.ddtree.kv_buffers import KVBuffers
from ddtree_appliance.ddtree.limits import words_for
from ddtree_appliance.ddtree.sampling import Sampling

Call = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """A target and its drafter. slots: of one layer's KV pool, and moved_slots of all layers'; prefix: the longest."""

    block_size: int = 16
    vocabulary: int = 151_936
    hidden: int = 4096
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    topk: int = 16
    slots: int = 65_536
    moved_slots: int = 8192
    prefix: int = 2000


QWEN3_8B = Sizes()


def microseconds(call: Call) -> float | None:
    """Median time of a replayed graph of many calls; None if a graph cannot hold the call, or the GPU its tiles.

    Raises torch.AcceleratorError if the call broke the GPU's context: nothing after it would be a measurement.
    """
    try:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        return 1e3 * float(triton.testing.do_bench_cudagraph(call, rep=20, return_mode="median"))
    except (RuntimeError, torch.AcceleratorError, OutOfResources):
        torch.cuda.synchronize()  # raises again after a failed assertion or an illegal access, and only then
        return None


class Inputs:
    """Random inputs of up to `batch` requests, made once and shared by every case. dtype: of weights and KV."""

    def __init__(self, sizes: Sizes, batch: int, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.sizes, self.device, self.dtype = sizes, device, dtype
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device, generator=generator).to(dtype)

        self.weight = normal(sizes.vocabulary, sizes.hidden) / sizes.hidden**0.5
        self.hidden = normal(batch, sizes.block_size - 1, sizes.hidden)
        self.head = HeadShard.whole(self.weight)
        self.candidates = TORCH.top_candidates(self.hidden, self.head, sizes.topk)
        self.prefix = torch.randint(1, sizes.prefix, (batch,), device=device, generator=generator)
        self.slots = torch.randperm(sizes.slots, device=device, generator=generator)
        shape = (sizes.slots, sizes.kv_heads, sizes.head_dim)
        self.keys, self.values = normal(*shape), normal(*shape)
        # A smaller pool for all layers: what counts is how many rows move.
        moved = [normal(sizes.moved_slots, *shape[1:]) for _ in range(2 * sizes.layers)]
        self.kv = KVBuffers.of(moved)

    def product(self, batch: int) -> Call:
        """The matrix product with the output embedding, which a chain needs as well as a tree."""
        rows = self.hidden[:batch].flatten(0, 1)
        return lambda: torch.matmul(rows, self.weight.T)

    def steps(self, table: Kernels, batch: int, budget: int) -> dict[str, Call]:
        """Every step around the forwards for `batch` requests and `budget` nodes, by name."""
        sizes = self.sizes
        width, run = budget + 1, min(sizes.block_size, budget + 1)
        hidden, prefix = self.hidden[:batch], self.prefix[:batch]
        logprobs, ids = (each[:batch] for each in self.candidates)
        trees = TORCH.build_trees(logprobs, ids, budget)
        # A target that takes a node's next row as its choice: long walks, and rows that move.
        choice = trees.token_ids.roll(-1, dims=1).clamp(min=0).contiguous()
        accepted = TORCH.accept(trees, choice, run)
        slots = torch.randperm(sizes.moved_slots, device=self.device)[: batch * width].view(batch, width)
        rows = torch.randn(batch * width, 3 * sizes.hidden, device=self.device).to(self.dtype)
        mask = torch.ones(width * (int(prefix.sum()) + batch * width), device=self.device, dtype=torch.uint8)
        bits = torch.zeros((batch, width, words_for(width)), device=self.device, dtype=torch.int32)
        requests = torch.arange(batch, device=self.device)
        table_shape = batch, sizes.prefix + width
        req_to_token = torch.randint(sizes.slots, table_shape, device=self.device, dtype=torch.int32)
        step_rows = torch.zeros_like(req_to_token)
        bonus = torch.zeros(batch, device=self.device, dtype=torch.int64)
        logits = torch.randn(batch, width, sizes.vocabulary, device=self.device)
        calls: dict[str, Call] = {
            "draft inputs": lambda: table.draft_inputs(bonus, prefix, requests, req_to_token, 5, run, width, step_rows),
            "candidates": lambda: table.top_candidates(hidden, self.head, sizes.topk),
            "build": lambda: table.build_trees(logprobs, ids, budget),
            "verify inputs": lambda: table.verify_inputs(trees, bonus, prefix, 0, mask, bits),
            "argmax": lambda: table.best_tokens(logits),
            "accept": lambda: table.accept(trees, choice, run),
            "move_kv": lambda: table.move_kv(self.kv, slots, accepted.path),
            "gather": lambda: table.gather_path(rows, accepted),
        }
        return calls | self.draws(table, logits, trees.depths, prefix)

    def draws(
        self, table: Kernels, logits: torch.Tensor, depths: torch.Tensor, prefix: torch.Tensor
    ) -> dict[str, Call]:
        """The draw per node without filters and with top-p. logits: [b, V, vocabulary]; depths: [b, V]; prefix: [b]."""
        given = logits, depths, prefix, self.sizes.block_size - 1
        samplings = {"sample": self._sampling(len(logits), False), "sample, top-p": self._sampling(len(logits), True)}
        return {name: partial(table.sample_nodes, *given, asked) for name, asked in samplings.items()}

    def _sampling(self, batch: int, is_filtered: bool) -> Sampling:
        def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((batch,), value, dtype=dtype, device=self.device)

        top_ks = full(1 << 30, torch.int32)
        top_ps = full(0.9 if is_filtered else 1.0)
        return Sampling(full(1.0).unsqueeze(1), top_ks, top_ps, full(0.0), full(7, torch.int64), is_filtered)


class Attention:
    """One layer's verify attention, by this project's kernel under any tiling and by SGLang's own kernel.

    batch: requests, of `budget` nodes each, after `prefix` tokens each.
    """

    def __init__(self, inputs: Inputs, batch: int, budget: int, prefix: int) -> None:
        sizes, device = inputs.sizes, inputs.device
        self.width = budget + 1
        logprobs, ids = (each[:batch] for each in inputs.candidates)
        trees = TORCH.build_trees(logprobs, ids, budget)
        lens = torch.full((batch,), prefix, device=device)
        self.query = torch.randn(batch * self.width, sizes.heads, sizes.head_dim, device=device).to(inputs.dtype)
        self.keys, self.values = inputs.keys, inputs.values
        prefixes, nodes = batch * prefix, batch * self.width
        self.prefix_slots, self.node_slots = inputs.slots[:prefixes], inputs.slots[prefixes : prefixes + nodes]
        rows = [self.prefix_slots.view(batch, prefix), self.node_slots.view(batch, self.width)]
        self.slots = torch.cat(rows, dim=1).to(torch.int32)
        self.prefix_lens = lens
        steps = torch.arange(batch + 1, device=device)
        self.prefix_indptr = (steps * prefix).to(torch.int32)
        self.node_indptr = (steps * self.width).to(torch.int32)
        self.bits = ancestor_bits(trees.ancestors)
        self.mask = verify_mask(trees.ancestors, lens, prefixes)
        self.mask_indptr = steps * (self.width * (prefix + self.width))
        self.scale = sizes.head_dim**-0.5
        self.output = torch.empty_like(self.query)

    def ours(self, tiling: Tiling | None = None) -> Call:
        """This project's kernel. tiling: None for its own choice."""
        attention = VerifyAttention(self.query.device, self.slots, self.bits, tiling)
        return lambda: attention(
            self.query,
            self.keys,
            self.values,
            self.prefix_lens,
            True,
            self.scale,
            self.width,
            self.output,
        )

    def sglangs(self) -> Call:
        """The extend kernel of SGLang's triton backend. Raises ImportError without SGLang."""
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

        keys, values = self.keys[self.node_slots], self.values[self.node_slots]
        return lambda: extend_attention_fwd(
            self.query,
            keys,
            values,
            self.output,
            self.keys,
            self.values,
            self.node_indptr,
            self.prefix_indptr,
            self.prefix_slots,
            self.mask,
            True,
            self.mask_indptr,
            self.width,
            1.0,
            1.0,
            self.scale,
        )
