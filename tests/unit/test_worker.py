"""Which attention kernel verifies trees, and the type that their logits have."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

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
    slots, bits = torch.zeros(1, 1), torch.zeros(1)
    worker._bring_verify_attention(
        SimpleNamespace(attn_backend=attn_backend, token_to_kv_pool=pool, device="cpu", is_draft_worker=False),
        slots,
        bits,
    )
    assert isinstance(backend.target_verify_fwd, worker.VerifyAttention) is given
    if given:
        assert (backend.target_verify_fwd.slots, backend.target_verify_fwd.bits) == (slots, bits)
    assert ("general attention kernel" in caplog.text) is not given


@pytest.mark.parametrize("served", [(True, True), (True, False), (False, True), (False, False)])
def test_a_step_writes_the_buffers_by_which_target_and_drafter_attend(
    served: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none that nobody reads."""
    import torch

    module = import_sglang("ddtree_appliance.ddtree.worker")
    monkeypatch.setattr(module.DFlashWorkerV2, "init_attention_backends", lambda worker: None)
    worker = object.__new__(module.DDTreeWorker)
    worker.device, worker.verify_width, worker.ps = "meta", 66, SimpleNamespace(tp_size=1)
    req_to_token = torch.zeros((5, 90), dtype=torch.int32, device="meta")
    runners = []
    for is_draft, is_served in zip((False, True), served, strict=True):
        backend = object.__new__(module.TritonAttnBackend)
        backend.target_verify_fwd = None
        head_dim = 128 if is_served else 256
        pool = SimpleNamespace(head_dim=head_dim, v_head_dim=head_dim, dtype=torch.bfloat16)
        model = SimpleNamespace(logits_processor=SimpleNamespace(keeps_verify_dtype=False))
        names = {"attn_backend": backend, "token_to_kv_pool": pool, "model": model, "is_draft_worker": is_draft}
        table = SimpleNamespace(req_to_token=req_to_token)
        runners.append(SimpleNamespace(**names, device="meta", req_to_token_pool=table))
    worker.model_runner, worker.draft_model_runner = runners

    worker.init_attention_backends()

    target, drafter = (runner.attn_backend.target_verify_fwd for runner in runners)
    assert (target is not None, drafter is not None) == served
    given = [attention for attention in (target, drafter) if attention is not None]
    assert all(attention.slots is worker._step_rows is not req_to_token for attention in given)
    if given:
        assert (worker._step_rows.shape, worker._step_rows.dtype) == ((5, 90), torch.int32)
    else:
        assert worker._step_rows is None
    if target is None:
        assert worker._ancestor_bits is None
    else:
        assert target.bits is worker._ancestor_bits
        assert (target.bits.shape, target.bits.dtype) == ((5, 66, 3), torch.int32)
    assert drafter is None or drafter.bits is None


def test_another_backend_is_left_as_it_is() -> None:
    worker = import_sglang("ddtree_appliance.ddtree.worker")
    other = SimpleNamespace()
    worker._bring_verify_attention(SimpleNamespace(attn_backend=other, token_to_kv_pool=None), None, None)
    assert vars(other) == {}


@pytest.mark.parametrize("tp_size", [1, 2])
def test_one_ranks_target_keeps_its_logits_as_they_are(tp_size: int) -> None:
    worker = object.__new__(import_sglang("ddtree_appliance.ddtree.worker").DDTreeWorker)
    processor = SimpleNamespace(keeps_verify_dtype=False)
    worker.model_runner = SimpleNamespace(model=SimpleNamespace(logits_processor=processor))
    worker.ps = SimpleNamespace(tp_size=tp_size)
    worker._keep_logits_as_they_are()
    assert processor.keeps_verify_dtype is (tp_size == 1)


def test_a_target_with_a_logits_processor_of_its_own_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    worker = object.__new__(import_sglang("ddtree_appliance.ddtree.worker").DDTreeWorker)
    worker.model_runner = SimpleNamespace(model=SimpleNamespace(logits_processor=SimpleNamespace()))
    worker._keep_logits_as_they_are()
    assert "copies its logits" in caplog.text


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("columns", [5, 8])
def test_logits_become_floats_in_the_graphs_own_buffer(columns: int, dtype: str) -> None:
    """Of a padded vocabulary too."""
    import torch

    worker = object.__new__(import_sglang("ddtree_appliance.ddtree.worker").DDTreeWorker)
    buffer = torch.zeros(8, 5)
    asked = []

    def get_logits_buffer(vocabulary: int, *, rows: int) -> torch.Tensor:
        asked.append((vocabulary, rows))
        return buffer[:rows]

    worker.model_runner = SimpleNamespace(graph_shared_output=SimpleNamespace(get_logits_buffer=get_logits_buffer))
    logits = torch.randn(3, columns).to(getattr(torch, dtype))[:, :5]
    inside, outside = worker._float_logits(logits, True), worker._float_logits(logits, False)
    for each in (inside, outside):
        assert each.dtype == torch.float32 and each.is_contiguous() and torch.equal(each, logits.float())
    if dtype == "float32" and columns == 5:
        assert inside is outside is logits and not asked
    else:
        assert asked == [(5, 3)] and inside.data_ptr() == buffer.data_ptr() != outside.data_ptr()


@pytest.mark.parametrize(
    "is_kept,is_verify,softcap,expected",
    [
        (True, True, None, "bfloat16"),
        (False, True, None, "float32"),
        (True, False, None, "float32"),
        (True, True, 30.0, "float32"),  # computed in place afterwards, and must not round
    ],
)
def test_sglang_leaves_a_plugins_verify_logits_as_they_are(
    is_kept: bool, is_verify: bool, softcap: float | None, expected: str
) -> None:
    got, logits = verify_logits(is_kept, is_verify, softcap)
    import torch

    assert got.dtype == getattr(torch, expected) and torch.equal(got.float(), logits[:, :4].float())


def verify_logits(is_kept: bool, is_verify: bool, softcap: float | None) -> tuple[Any, Any]:
    """What SGLang makes of random logits of a padded vocabulary, and these."""
    import torch

    processor = object.__new__(import_sglang("sglang.srt.layers.logits_processor").LogitsProcessor)
    state = {"vocab_size": 4, "keeps_verify_dtype": is_kept, "final_logit_softcapping": softcap}
    processor.__dict__.update(state)
    metadata = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: is_verify), next_token_logits_buffer=None
    )
    logits = torch.randn(2, 6).bfloat16()
    return processor._copy_logits_to_buffer(logits, metadata), logits


def test_a_graph_does_not_own_the_logits_that_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    # The real module refuses to be imported without a GPU.
    weak = ModuleType("sglang.srt.compilation.weak_ref_tensor")
    weak.__dict__["weak_ref_tensors"] = lambda logits: seen.append(logits) or "a weak reference"
    import_sglang("sglang.srt.layers.logits_processor")
    monkeypatch.setitem(sys.modules, weak.__name__, weak)
    monkeypatch.setattr("sglang.srt.model_executor.runner_utils.get_is_capture_mode", lambda: True)
    got, logits = verify_logits(is_kept=True, is_verify=True, softcap=None)
    assert got == "a weak reference"
    assert [each.data_ptr() for each in seen] == [logits.data_ptr()]
    assert not isinstance(verify_logits(is_kept=False, is_verify=True, softcap=None)[0], str)
