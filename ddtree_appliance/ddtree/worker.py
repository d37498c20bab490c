"""DDTreeWorker: one verify step of DDTREE inside SGLang, for a batch of greedy requests.

Drafter pass -> top-K candidates -> trees -> one target forward over all nodes -> accept walk -> commit. Prefill, the
drafter's model and its KV from target hidden states are DFLASH's own; what differs is everything between the two
forwards. No step reads a device value on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from ddtree_appliance.ddtree.kernels import kernels_for
from ddtree_appliance.ddtree.requests import refusal
from ddtree_appliance.ddtree.torch_ops import AcceptBatch, TreeBatch


class DDTreeWorker(DFlashWorkerV2):  # type: ignore[misc]  # SGLang ships no type information
    """Speculative worker for DDTREE.

    Widths: V = node budget + 1 tokens per request in the target's verify, B = block size in the drafter's pass,
    S = max(V, B) KV slots per request and step, L = min(V, B) tokens at most in an accepted run (bonus included).
    """

    def __init__(self, server_args: Any, *args: Any, **kwargs: Any) -> None:
        # The base class has one width and takes it from here; `server_args` is the drafter's own copy already.
        self.budget = int(server_args.speculative_ddtree_budget)
        self.topk = int(server_args.speculative_ddtree_topk)
        # A cached value of the width that is about to change.
        server_args.__dict__.pop("max_speculative_num_draft_tokens", None)
        server_args.override(
            "ddtree.drafter_width", speculative_num_draft_tokens=int(server_args.speculative_dflash_block_size)
        )
        super().__init__(server_args, *args, **kwargs)
        if self.model_runner.sliding_window_size is not None:
            raise ValueError("DDTREE does not support sliding windows: kernels would count them in node order")
        self.verify_width = self.budget + 1
        self.step_slots = max(self.verify_width, self.block_size)
        self.max_run = min(self.verify_width, self.block_size)
        self.speculative_num_draft_tokens = self.verify_width
        self.kernels = kernels_for(self.device)
        self.head_weight = _target_head(self.model_runner.model)
        self._slot_offsets = torch.arange(self.step_slots, device=self.device, dtype=torch.int64)

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """As DFLASH; then refuse a KV layout whose rows cannot be moved one by one. Raises ValueError."""
        super().alloc_memory_pool(*args, **kwargs)
        pool = self.model_runner.token_to_kv_pool
        if type(pool) is not MHATokenToKVPool or pool.use_hnd:
            raise ValueError(f"DDTREE moves accepted KV in MHATokenToKVPool (NHD) only, not in {type(pool).__name__}")

    def _maybe_build_draft_sampler(self) -> None:
        """No argmax sampler in the drafter's graph: a tree needs the K best candidates, taken from hidden states."""
        return None

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Any = None,
    ) -> Any:
        """Prefill and idle batches as DFLASH does; a decode batch by one verify step.

        on_publish receives the new sequence lengths ([b] int64, on the device) as soon as they are known.
        """
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, on_publish, grammar_barrier)
        if batch.has_grammar or not batch.sampling_info.is_all_greedy:
            _check_all_ending(batch.reqs)
        if self.device != "cpu":
            # Under overlap the lengths come from another stream's step.
            batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())

        prefix_lens = batch.seq_lens
        req_to_token = self.model_runner.req_to_token_pool.req_to_token
        positions = prefix_lens.unsqueeze(1) + self._slot_offsets
        slots = req_to_token[batch.req_pool_indices.unsqueeze(1), positions].to(torch.int64)

        hidden = self._draft(batch, positions[:, : self.block_size], slots[:, : self.block_size])
        trees = self.kernels.build_trees(
            *self.kernels.top_candidates(hidden[:, 1:], self.head_weight, self.topk), self.budget
        )
        logits_output, can_run_cuda_graph = self._verify(batch, trees, slots[:, : self.verify_width])
        target_predict = torch.argmax(logits_output.next_token_logits, dim=-1).view(-1, self.verify_width)
        accepted = self.kernels.accept_greedy(trees, target_predict, self.max_run)

        accept_lens = accepted.num_correct + 1
        new_seq_lens = prefix_lens + accept_lens.to(prefix_lens.dtype)
        if on_publish is not None:
            on_publish(new_seq_lens)
        self._commit(accepted, accept_lens, logits_output.hidden_states, positions, slots)
        # Large, and read by nobody else: overlap would copy it to the host.
        logits_output.hidden_states = None
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=accepted.tokens.flatten(),
            accept_lens=accept_lens,
            can_run_cuda_graph=can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(bonus_tokens=accepted.bonus, new_seq_lens=new_seq_lens),
            # The stride of next_token_ids.
            speculative_num_draft_tokens=self.max_run,
            new_seq_lens=new_seq_lens,
        )

    def _draft(self, batch: Any, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """One drafter pass over [bonus token, mask, mask, ...].

        positions, slots: [b, B] int64. Returns hidden states [b, B, H]; row d belongs to the token at depth d.
        """
        block_ids = torch.full_like(positions, int(self._mask_token_id))
        block_ids[:, 0] = batch.spec_info.bonus_tokens
        embeddings = self.target_worker.model_runner.model.get_input_embeddings()(block_ids)
        seq_lens_cpu, seq_lens_sum = self._host_bound(batch, self.block_size)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(block_ids),
            input_ids=block_ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=slots.flatten(),
            seq_lens_sum=seq_lens_sum,
            seq_lens_cpu=seq_lens_cpu,
            positions=positions.flatten(),
            input_embeds=embeddings.view(-1, embeddings.shape[-1]),
            spec_algorithm=self.draft_model_runner.spec_algorithm,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        with torch.inference_mode():
            hidden = self.draft_model_runner.forward(forward_batch).logits_output.hidden_states
        if hidden is None:
            raise RuntimeError("the drafter returned no hidden states")
        per_request: torch.Tensor = hidden.view(*block_ids.shape, -1)
        return per_request

    def _verify(self, batch: Any, trees: TreeBatch, slots: torch.Tensor) -> tuple[Any, bool]:
        """One target forward over every node of every tree.

        slots: [b, V] int64. Returns SGLang's logits output ([b * V, vocabulary] logits, [b * V, H'] hidden states) and
        whether a CUDA graph ran it.
        """
        token_ids = trees.token_ids.clamp(min=0)  # padding rows need some token; nothing reads what they compute
        token_ids[:, 0] = batch.spec_info.bonus_tokens
        positions = self.kernels.node_positions(trees.depths, batch.seq_lens)
        seq_lens_cpu, seq_lens_sum = self._host_bound(batch, self.verify_width)
        verify_input = DFlashVerifyInput(
            draft_token=token_ids.flatten(),
            positions=positions.flatten(),
            draft_token_num=self.verify_width,
            custom_mask=self.kernels.verify_mask(trees.ancestors, batch.seq_lens, seq_lens_sum),
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        batch.out_cache_loc = slots.flatten()
        committed = batch.seq_lens_cpu, batch.seq_lens_sum
        # Backends plan with an upper bound; the committed lengths go back afterwards.
        batch.seq_lens_cpu, batch.seq_lens_sum = seq_lens_cpu, seq_lens_sum
        forward_batch, _ = verify_input.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = committed
        output = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
        return output.logits_output, output.can_run_cuda_graph

    def _commit(
        self,
        accepted: AcceptBatch,
        accept_lens: torch.Tensor,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Make the accepted path the prefix: its KV right after the old prefix, its hidden states in the drafter's KV.

        accept_lens: [b] int32; hidden_states: [b * V, H'] of the nodes; positions, slots: [b, S]. The bonus token has
        no KV yet: it is the root of the next tree.
        """
        source, target = self.kernels.path_slots(slots, accepted)
        pool = self.model_runner.token_to_kv_pool
        self.kernels.move_kv([*pool.k_buffer, *pool.v_buffer], target.flatten(), source.flatten())
        path_hidden = self.kernels.gather_path(hidden_states, accepted)
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=path_hidden.flatten(0, 1),
            cache_loc=target.flatten(),
            cache_loc_2d=target,
            positions=positions[:, : self.max_run].flatten(),
            commit_lens=accept_lens,
        )

    @staticmethod
    def _host_bound(batch: Any, width: int) -> tuple[torch.Tensor, int]:
        """An upper bound of prefix + width per request and its sum, both known on the host without waiting."""
        if batch.seq_lens_cpu is not None:
            bound = batch.seq_lens_cpu + width
            return bound, int(bound.sum())
        reserved = batch.spec_info.reserved_seq_lens_cpu
        if reserved is None:
            raise RuntimeError("neither committed nor reserved lengths are on the host")
        return reserved, int(batch.spec_info.reserved_seq_lens_sum)


def _check_all_ending(reqs: list[Any]) -> None:
    """Under overlap a refused request may see one more step before it is taken out; any other must not be here."""
    served = [req.rid for req in reqs if refusal(req) and req.to_finish is None and not req.finished()]
    if served:
        raise RuntimeError(f"requests that DDTREE refuses reached the worker: {served}")


def _target_head(model: Any) -> torch.Tensor:
    """The target's output embedding, [vocabulary, H], without padding rows."""
    head = getattr(model, "lm_head", None)
    weight: torch.Tensor | None = getattr(head, "weight", None)
    if weight is None or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError("DDTREE needs an unquantised lm_head: candidates are ranked by its full distribution")
    shard = getattr(head, "shard_indices", None)
    if shard is None:
        return weight
    if shard.num_added_elements:
        raise ValueError("DDTREE does not support a vocabulary with added rows")
    return weight[: shard.num_org_elements]
