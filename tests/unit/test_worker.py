"""Which attention kernel verifies trees."""

from types import SimpleNamespace

import pytest

from tests.unit.engine import import_sglang


@pytest.mark.parametrize(
    "head_dim,dtype,is_hybrid,given",
    [
        (128, "bfloat16", False, True),
        (128, "bfloat16", True, True),  # verify runs on the prefill backend
        (256, "bfloat16", False, False),
        (128, "float32", False, False),
    ],
)
def test_tritons_backend_gets_the_tree_kernel_where_the_heads_fit(
    head_dim: int, dtype: str, is_hybrid: bool, given: bool, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    worker = import_sglang("ddtree_appliance.ddtree.worker")
    backend = object.__new__(worker.TritonAttnBackend)
    backend.target_verify_fwd = None
    outer = SimpleNamespace(_select_backend=lambda mode: backend if mode.is_target_verify() else None)
    pool = SimpleNamespace(head_dim=head_dim, v_head_dim=head_dim, dtype=getattr(torch, dtype))
    attn_backend = outer if is_hybrid else backend
    worker._bring_verify_attention(
        SimpleNamespace(attn_backend=attn_backend, token_to_kv_pool=pool, device="cpu", is_draft_worker=False)
    )
    assert isinstance(backend.target_verify_fwd, worker.VerifyAttention) is given
    assert ("general attention kernel" in caplog.text) is not given


def test_another_backend_is_left_as_it_is() -> None:
    worker = import_sglang("ddtree_appliance.ddtree.worker")
    other = SimpleNamespace()
    worker._bring_verify_attention(SimpleNamespace(attn_backend=other, token_to_kv_pool=None))
    assert vars(other) == {}
