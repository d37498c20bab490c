"""DDTreeWorker: one verify step of DDTREE inside SGLang, for a batch of greedy and sampled requests.

Drafter pass -> top-K candidates -> trees -> one target forward over all nodes -> the target's choice at each -> accept
walk -> commit. Prefill, the drafter's model and its KV from target hidden states are DFLASH's own; what differs is
everything between the two forwards. No step reads a device value on the host; exempt are flashinfer's own planning, and
batches with a grammar or a custom logit processor, which run there. On several tensor-parallel ranks, what was accepted
is rank 0's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from ddtree_appliance.ddtree.constrained import constrain_trees
from ddtree_appliance.ddtree.draft_candidates import DraftCandidates
from ddtree_appliance.ddtree.fused.attention import VerifyAttention, serves
from ddtree_appliance.ddtree.head import target_head
from ddtree_appliance.ddtree.inputs import DraftInputs
from ddtree_appliance.ddtree.kernels import kernels_for
from ddtree_appliance.ddtree.kv_buffers import KVBuffers
from ddtree_appliance.ddtree.limits import words_for
from ddtree_appliance.ddtree.logprobs import add_logprobs
from ddtree_appliance.ddtree.step_times import StepTimes
from ddtree_appliance.ddtree.target_choice import TargetChoice
from ddtree_appliance.ddtree.torch_ops import AcceptBatch, TreeBatch

logger = logging.getLogger(__name__)


class DDTreeWorker(DFlashWorkerV2):  # type: ignore[misc]  # SGLang ships no type information
    """Speculative worker for DDTREE.

    Widths: V = node budget + 1 tokens per request in the target's verify, B = block size in the drafter's pass,
    S = max(V, B) KV slots per request and step, L = min(V, B) tokens at most in an accepted run (bonus included).
    """

    supports_logprobs = True

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
        self.head = target_head(self.model_runner.model)
        self._candidates = self._candidates_for(max_batch=0)
        # What `VerifyAttention` reads in a step: each request's slots, and its tree as bits.
        self._step_rows: torch.Tensor | None = None
        self._ancestor_bits: torch.Tensor | None = None
        self._times = StepTimes.of_environment(self.device, self.ps.tp_rank)

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        """As DFLASH; then refuse a KV layout whose rows cannot be moved one by one. Raises ValueError."""
        super().alloc_memory_pool(*args, **kwargs)
        pool = self.model_runner.token_to_kv_pool
        if type(pool) is not MHATokenToKVPool or pool.use_hnd:
            raise ValueError(f"DDTREE moves accepted KV in MHATokenToKVPool (NHD) only, not in {type(pool).__name__}")
        self._kv_buffers = KVBuffers.of([*pool.k_buffer, *pool.v_buffer])
        request_slots = len(self.model_runner.req_to_token_pool.req_to_token)
        vocabulary = self.model_runner.model_config.vocab_size
        self._choice = TargetChoice(self.kernels, self.max_run - 1, request_slots, vocabulary)
        if self.device != "cpu":
            self._choice.warm_up(self.verify_width, self.device, self.model_runner.model_config.dtype)

    def init_attention_backends(self) -> None:
        """As DFLASH; then give Triton's backend the attention kernel for trees and for drafters' blocks.

        Called before the target's graphs are captured.
        """
        super().init_attention_backends()
        if self.device != "cpu":
            req_to_token = self.model_runner.req_to_token_pool.req_to_token
            # Not SGLang's own table: the scheduler may write that while a forward runs.
            rows = torch.zeros_like(req_to_token)
            shape = len(req_to_token), self.verify_width, words_for(self.verify_width)
            bits = torch.zeros(shape, dtype=torch.int32, device=self.device)
            is_targets = _bring_verify_attention(self.model_runner, rows, bits)
            is_drafters = _bring_verify_attention(self.draft_model_runner, rows, None)
            # A step fills what is read.
            self._step_rows = rows if is_targets or is_drafters else None
            self._ancestor_bits = bits if is_targets else None
            self._keep_logits_as_they_are()

    def _maybe_build_draft_sampler(self) -> DraftCandidates:
        """What the base class captures at the end of the drafter's graph, in place of its argmax."""
        self._candidates = self._candidates_for(max_batch=max(get_exec().graph.cuda_graph_config.decode.bs))
        return self._candidates

    def _candidates_for(self, max_batch: int) -> DraftCandidates:
        return DraftCandidates(self.kernels, self.head, self.topk, self.block_size, max_batch)

    def _make_next_draft_input_prefill(self, *, bonus_tokens: torch.Tensor, seq_lens: torch.Tensor) -> Any:
        """As DFLASH, with rank 0's first tokens on every rank. The broadcast is in place: they are also the result."""
        if self.ps.tp_size > 1:
            get_tp_group().broadcast(bonus_tokens, src=0)
        return super()._make_next_draft_input_prefill(bonus_tokens=bonus_tokens, seq_lens=seq_lens)

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Callable[[torch.Tensor], None] | None = None,
        grammar_barrier: Any = None,
    ) -> Any:
        """Prefill and idle batches as DFLASH does; a decode batch by one verify step.

        on_publish receives the new sequence lengths ([b] int64, on the device) as soon as they are known.
        grammar_barrier brings every grammar up to the outputs of the steps before.
        """
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            result = super().forward_batch_generation(batch, on_publish, grammar_barrier)
            if not batch.forward_mode.is_idle():
                self._choice.start(batch, result.next_token_ids)
            return result
        if self.device != "cpu":
            # Under overlap the lengths come from another stream's step.
            batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())

        if self._times:
            self._times.begin(len(batch.reqs))
        prefix_lens = batch.seq_lens
        req_to_token = self.model_runner.req_to_token_pool.req_to_token
        inputs = self.kernels.draft_inputs(
            batch.spec_info.bonus_tokens,
            prefix_lens,
            batch.req_pool_indices,
            req_to_token,
            int(self._mask_token_id),
            self.block_size,
            self.step_slots,
            rows_out=self._step_rows,
        )
        candidates = self._draft(batch, inputs)
        self._end("draft")
        trees = self.kernels.build_trees(*candidates, self.budget)
        masks = None
        if batch.has_grammar:
            if grammar_barrier is not None:
                grammar_barrier()
            trees, masks = constrain_trees(batch.reqs, trees, candidates, batch.sampling_info.vocab_size)
            # What the prefill left: it masks one row per request.
            batch.sampling_info.grammar_mask = None
        bound = self._host_bound(batch, self.verify_width)
        verify_input = self._verify_input(batch, trees, bound[1])
        self._end("build")
        logits_output, can_run_cuda_graph = self._verify(
            batch, verify_input, inputs.slots[:, : self.verify_width], bound
        )
        if batch.return_logprob or self._choice.changes_or_draws(batch):
            logits_output.next_token_logits = self._float_logits(logits_output.next_token_logits, can_run_cuda_graph)
        self._end("verify")
        target_predict = self._choice.choose(batch, trees, logits_output.next_token_logits, masks)
        accepted = self._agreed(self.kernels.accept(trees, target_predict, self.max_run))
        accept_lens = accepted.num_correct + 1
        new_seq_lens = prefix_lens + accept_lens
        if on_publish is not None:
            on_publish(new_seq_lens)
        self._end("accept")
        self._commit(accepted, accept_lens, logits_output.hidden_states, inputs)
        self._choice.count(batch, accepted)
        if batch.return_logprob:
            first_rows = torch.arange(len(accepted.path), device=accepted.path.device) * self.verify_width
            rows = accepted.path + first_rows.unsqueeze(1)
            add_logprobs(batch, logits_output, target_predict.flatten(), rows)
        self._end("commit")
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

    def _end(self, stage: str) -> None:
        if self._times:
            self._times.end(stage)

    def _draft(self, batch: Any, inputs: DraftInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """One drafter pass over [bonus token, mask, mask, ...], and its candidates.

        Returns what `Kernels.top_candidates` does.
        """
        block_ids = inputs.block_ids
        embeddings = self.target_worker.model_runner.model.get_input_embeddings()(block_ids)
        seq_lens_cpu, seq_lens_sum = self._host_bound(batch, self.block_size)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(block_ids),
            input_ids=block_ids.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=inputs.slots[:, : self.block_size].flatten(),
            seq_lens_sum=seq_lens_sum,
            seq_lens_cpu=seq_lens_cpu,
            positions=inputs.positions[:, : self.block_size].flatten(),
            input_embeds=embeddings.view(-1, embeddings.shape[-1]),
            spec_algorithm=self.draft_model_runner.spec_algorithm,
            spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        with torch.inference_mode():
            output = self.draft_model_runner.forward(forward_batch)
            if output.can_run_graph:
                return self._candidates.captured(len(block_ids))
            hidden = output.logits_output.hidden_states
            if hidden is None:
                raise RuntimeError("the drafter returned no hidden states")
            return self._candidates.rank(hidden)

    def _verify_input(self, batch: Any, trees: TreeBatch, seq_lens_sum: int) -> DFlashVerifyInput:
        """Tokens, positions and mask of one target forward over every node of every tree. seq_lens_sum: its bound."""
        inputs = self.kernels.verify_inputs(
            trees,
            batch.spec_info.bonus_tokens,
            batch.seq_lens,
            seq_lens_sum,
            mask_out=self._mask_buffer(len(trees.token_ids)),
            bits_out=self._ancestor_bits,
        )
        return DFlashVerifyInput(
            draft_token=inputs.token_ids.flatten(),
            positions=inputs.positions.flatten(),
            draft_token_num=self.verify_width,
            custom_mask=inputs.mask,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )

    def _mask_buffer(self, batch: int) -> torch.Tensor | None:
        """The buffer that the attention backend's graphs read, so that the mask is written where it is read.

        Only Triton's backend has one among those that verify trees; it never reads a mask's prefix columns.
        """
        mask = self.model_runner.attn_backend.verify_mask
        if mask is None or mask.mode != TreeMaskMode.FULL_MASK or not mask.fits(batch):
            return None
        buffer: torch.Tensor = mask.buffer
        return buffer

    def _verify(
        self, batch: Any, verify_input: DFlashVerifyInput, slots: torch.Tensor, bound: tuple[torch.Tensor, int]
    ) -> tuple[Any, bool]:
        """One target forward. slots: [b, V] int64; bound: what `_host_bound` gives for it.

        Returns SGLang's logits output ([b * V, vocabulary] logits, [b * V, H'] hidden states) and whether a CUDA graph
        ran it.
        """
        batch.out_cache_loc = slots.flatten()
        committed = batch.seq_lens_cpu, batch.seq_lens_sum
        # Backends plan with an upper bound; the committed lengths go back afterwards.
        batch.seq_lens_cpu, batch.seq_lens_sum = bound
        forward_batch, _ = verify_input.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = committed
        output = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
        return output.logits_output, output.can_run_cuda_graph

    def _keep_logits_as_they_are(self) -> None:
        """Spare the steps that only look for a maximum the copy of all logits into float32 (`_float_logits`)."""
        processor: Any = getattr(self.model_runner.model, "logits_processor", None)
        if hasattr(processor, "keeps_verify_dtype"):
            # Several ranks gather their logits into buffers that this has not been tried with.
            processor.keeps_verify_dtype = self.ps.tp_size == 1
        else:
            logger.warning("the target has no logits processor of SGLang's: every step copies its logits into float32")

    def _float_logits(self, logits: torch.Tensor, is_from_graph: bool) -> torch.Tensor:
        """The logits in float32, contiguous: SGLang's grammar kernel takes a row's length for its stride.

        logits: [b * V, vocabulary], as the model gives them, perhaps the first columns of a padded vocabulary's;
        is_from_graph: the graphs' shared buffer has room for them.
        """
        if logits.dtype == torch.float32 and logits.is_contiguous():
            return logits
        if not is_from_graph:
            return logits.float().contiguous()
        rows, vocabulary = logits.shape
        buffer: torch.Tensor = self.model_runner.graph_shared_output.get_logits_buffer(vocabulary, rows=rows)
        return buffer.copy_(logits)

    def _agreed(self, accepted: AcceptBatch) -> AcceptBatch:
        """Rank 0's, on every rank: rounding may differ between ranks, and lengths that part end in a deadlock."""
        if self.ps.tp_size == 1:
            return accepted
        packed = accepted.packed()
        get_tp_group().broadcast(packed, src=0)
        return AcceptBatch.unpacked(packed)

    def _commit(
        self,
        accepted: AcceptBatch,
        accept_lens: torch.Tensor,
        hidden_states: torch.Tensor,
        inputs: DraftInputs,
    ) -> None:
        """Make the accepted path the prefix: its KV right after the old prefix, its hidden states in the drafter's KV.

        accept_lens: [b] int32; hidden_states: [b * V, H'] of the nodes. The bonus token has no KV yet: it is the root
        of the next tree.
        """
        self.kernels.move_kv(self._kv_buffers, inputs.slots, accepted.path)
        path_hidden = self.kernels.gather_path(hidden_states, accepted)
        target = inputs.slots[:, : self.max_run].contiguous()
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=path_hidden.flatten(0, 1),
            cache_loc=target.flatten(),
            cache_loc_2d=target,
            positions=inputs.positions[:, : self.max_run].flatten(),
            commit_lens=accept_lens,
        )

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        """Nothing to check: the base class would warn of its own fall-back, which is not used here."""

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


def _bring_verify_attention(runner: Any, slots: torch.Tensor, bits: torch.Tensor | None) -> bool:
    """Give Triton's backend, where it runs TARGET_VERIFY forwards, our kernel. Returns whether it has it.

    runner: SGLang's ModelRunner; slots, bits: as `VerifyAttention` takes them.
    """
    backend, pool = runner.attn_backend, runner.token_to_kv_pool
    if hasattr(backend, "_select_backend"):  # one backend for prefill and verify, another for decoding
        backend = backend._select_backend(ForwardMode.TARGET_VERIFY)
    if not isinstance(backend, TritonAttnBackend):
        return False
    if not serves(pool.head_dim, pool.v_head_dim, pool.dtype):
        kind = "drafter" if runner.is_draft_worker else "target"
        logger.warning("%s: heads of %d (%s) take SGLang's general attention kernel", kind, pool.head_dim, pool.dtype)
        return False
    backend.target_verify_fwd = VerifyAttention(runner.device, slots, bits)
    return True
