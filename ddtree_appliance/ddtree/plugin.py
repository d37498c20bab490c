"""Entry point of group `sglang.srt.plugins`: SGLang calls `register` in the launcher, the engine and every scheduler.

SGLang logs a plugin's failure and goes on without it, so whoever starts a server must check that DDTREE resolves
(`ddtree_appliance.launch` does).
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Register DDTREE and its sampling backend with SGLang.

    Needs the patched SGLang (patches/); raises AttributeError or TypeError without.
    """
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from ddtree_appliance.ddtree.algorithm import NAME, DDTreeAlgorithm
    from ddtree_appliance.ddtree.start_rules import SAMPLING_BACKEND

    def sampler() -> Any:
        from ddtree_appliance.ddtree.seeded_sampler import SeededSampler

        return SeededSampler()

    register_sampler_backend(SAMPLING_BACKEND, sampler, uses_seeds=True)

    @SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=DDTreeAlgorithm)  # type: ignore[untyped-decorator]
    def worker_class(server_args: Any) -> type:
        from ddtree_appliance.ddtree.worker import DDTreeWorker

        return DDTreeWorker
