"""What `scripts/bench-kernels` times can be called: every step, fused and twin, and the attention under a tiling.

At small sizes, through the interpreter or on a GPU; the times themselves are no matter of a test.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
triton = pytest.importorskip("triton", reason="needs triton")
from ddtree_appliance.ddtree.fused.attention import Tiling  # noqa: E402
from ddtree_appliance.ddtree.kernel_times import Attention, Inputs, Sizes, microseconds  # noqa: E402
from ddtree_appliance.ddtree.kernels import Kernels  # noqa: E402
from tests.kernels.test_fused import DEVICE, FUSED, INTERPRETED, TWIN, pytestmark  # noqa: E402, F401

SMALL = Sizes(
    block_size=4, vocabulary=64, hidden=16, layers=2, heads=4, kv_heads=2, head_dim=16, topk=3,
    slots=256, moved_slots=64, prefix=20,
)  # fmt: skip
STEPS = [
    "draft inputs",
    "candidates",
    "build",
    "verify inputs",
    "argmax",
    "accept",
    "move_kv",
    "gather",
    "sample",
    "sample, top-p",
]


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return Inputs(SMALL, 2, DEVICE, torch.float16)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_can_be_called_fused_and_as_its_twin(name: str, inputs: Inputs) -> None:
    for table in (FUSED, TWIN):
        steps = inputs.steps(table, 2, 7)
        assert list(steps) == STEPS
        steps[name]()


@pytest.mark.parametrize("table", [FUSED, TWIN], ids=["fused", "twin"])
def test_the_longest_prefix_has_slots_where_the_pool_is_smaller_than_all_rows_together(table: Kernels) -> None:
    """On a GPU a missing slot is an assertion that ends every later call; 32 requests at Qwen3-8B's sizes met it."""
    inputs = Inputs(replace(SMALL, slots=32), 2, DEVICE, torch.float16)
    inputs.prefix.fill_(SMALL.prefix - 1)
    drafts = inputs.steps(table, 2, 7)["draft inputs"]()
    assert drafts.slots.shape == (2, 8)
    assert 0 <= int(drafts.slots.min()) <= int(drafts.slots.max()) < 32


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_call_that_broke_the_context_is_not_taken_for_one_that_a_graph_cannot_hold(
    is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = []

    def replay(*arguments: Any, **options: Any) -> float:
        failed.append(True)
        raise RuntimeError("operation not permitted when stream is capturing")

    def synchronize() -> None:
        if failed and is_broken:
            raise torch.AcceleratorError("device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(triton.testing, "do_bench_cudagraph", replay)
    with pytest.raises(torch.AcceleratorError) if is_broken else nullcontext():
        assert microseconds(lambda: None) is None
    assert failed


def test_the_product_is_that_of_every_position(inputs: Inputs) -> None:
    assert inputs.product(2)().shape == (2 * 3, 64)


def test_every_tiling_gives_the_same_attention(inputs: Inputs) -> None:
    attention = Attention(inputs, 2, 7, 20)
    outputs = []
    for tiling in (None, Tiling(64, 128, 8, 2, 1), Tiling(16, 32, 4, 1, 1)):
        attention.output.fill_(float("nan"))
        attention.ours(tiling)()
        outputs.append(attention.output.float().cpu())
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=2e-3, atol=2e-3)


@pytest.mark.skipif(INTERPRETED, reason="SGLang's kernel runs on a GPU only")
def test_sglangs_attention_is_the_same(inputs: Inputs) -> None:
    pytest.importorskip("sglang", reason="needs SGLang")
    attention = Attention(inputs, 2, 7, 20)
    attention.ours()()
    ours = attention.output.float().cpu()
    attention.sglangs()()
    torch.testing.assert_close(attention.output.float().cpu(), ours, rtol=2e-3, atol=2e-3)
