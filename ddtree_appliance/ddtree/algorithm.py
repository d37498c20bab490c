"""DDTREE as SGLang's scheduler sees it: which built-in branches it shares with DFLASH, and what it accepts at start."""

from __future__ import annotations

import json
from typing import Any

from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from ddtree_appliance.ddtree import requests
from ddtree_appliance.ddtree.pair import block_size_of, pair_problems
from ddtree_appliance.ddtree.start_rules import (
    SAMPLING_BACKEND,
    backend_problems,
    block_size_problem,
    budget_of,
    model_problems,
    start_problems,
    topk_of,
    unread_problems,
)

NAME = "DDTREE"


class DDTreeAlgorithm(CustomSpecAlgo):  # type: ignore[misc]  # SGLang ships no type information
    """The registered algorithm. Two widths: budget + 1 for the target's verify, block_size for the drafter."""

    def is_dflash_family(self) -> bool:
        """True: the drafter's KV accounting, hidden-state capture and stateful decode preparation are DFLASH's."""
        return True

    def supports_target_verify_for_draft(self) -> bool:
        """True: the drafter's block runs as a TARGET_VERIFY forward."""
        return True

    def verifies_trees(self) -> bool:
        """True: the verify step needs its mask on every backend."""
        return True

    def supports_grammar_overlap(self) -> bool:
        """True: the verify step brings the grammars up to date itself, before it drafts."""
        return True

    def default_sampling_backend(self) -> str:
        """The sampling backend that a start without --sampling-backend gets."""
        return SAMPLING_BACKEND

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Tokens per request in one forward: the drafter's block, or the verify width (`num_draft_tokens`)."""
        if not is_draft_worker:
            return num_draft_tokens
        from sglang.srt.runtime_context import get_server_args

        return int(get_server_args().speculative_dflash_block_size)

    def validate_request(self, request: Any, enable_overlap: bool) -> str | None:
        """The reason to answer `request` with HTTP 400, or None."""
        return requests.refusal(request)

    def handle_server_args(self, server_args: Any) -> None:
        """Refuse what cannot work, then fill in the widths. Raises ValueError that names every problem."""
        problems = start_problems(server_args) + unread_problems(server_args)
        if server_args.speculative_draft_model_path:
            target = server_args.get_model_config()
            drafter = _draft_hf_config(server_args)
            problems += model_problems(target)
            problems += pair_problems(target.hf_text_config.to_dict(), drafter)
            block_size = block_size_of(drafter)
            if block_size is not None:
                problem = block_size_problem(server_args, block_size)
                problems += [problem] if problem else []
                server_args.speculative_dflash_block_size = block_size
        problems += backend_problems(server_args.device, _attention_backends(server_args))
        if problems:
            raise ValueError("DDTREE cannot start: " + "; ".join(problems) + ".")

        server_args.speculative_ddtree_budget = budget_of(server_args)
        server_args.speculative_ddtree_topk = topk_of(server_args)
        server_args.speculative_num_draft_tokens = server_args.speculative_ddtree_budget + 1
        server_args.speculative_num_steps = 1
        # Backends key tree handling of the *server* on this, drafter included; the tree is in the spec input's mask.
        server_args.speculative_eagle_topk = 1
        if server_args.speculative_draft_attention_backend is None:
            server_args.speculative_draft_attention_backend = _attention_backends(server_args)["attention-backend"]
        if server_args.device == "cpu":
            from sglang.srt.arg_groups.speculative_hook import _disable_overlap_schedule_for_cpu

            _disable_overlap_schedule_for_cpu(server_args)
        if server_args.max_running_requests is None:
            # SGLang's own default for speculative decoding, set here so that /server_info shows it.
            server_args.max_running_requests = 48


def _draft_hf_config(server_args: Any) -> dict[str, Any]:
    from sglang.srt.utils.hf_transformers_utils import get_config

    config = get_config(
        server_args.speculative_draft_model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.speculative_draft_model_revision,
        model_override_args=json.loads(server_args.json_model_override_args),
    )
    drafter: dict[str, Any] = config.to_dict()
    return drafter


def _attention_backends(server_args: Any) -> dict[str, str | None]:
    """The resolved backends of the target's prefill and decode and of the drafter, by flag."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    prefill, decode = attention_backends_of(resolved_view(server_args))
    return {
        "attention-backend": prefill,
        "decode-attention-backend": decode,
        "speculative-draft-attention-backend": server_args.speculative_draft_attention_backend or prefill,
    }
