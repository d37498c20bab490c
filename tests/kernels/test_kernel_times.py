"""What `scripts/bench-kernels` times can be called: every step, fused and twin, and the attention under a tiling.

At small sizes, through the interpreter or on a GPU; the times themselves are no matter of a test.
"""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
from ddtree_appliance.ddtree.fused.attention import Tiling  # noqa: E402
from ddtree_appliance.ddtree.kernel_times import Attention, Inputs, Sizes  # noqa: E402
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
