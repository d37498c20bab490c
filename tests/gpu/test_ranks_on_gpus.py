"""Two tensor-parallel ranks on two GPUs, judged as test_engine_on_gpu judges one.

Run by anyone with two GPUs: pytest -m gpu tests/gpu/test_ranks_on_gpus.py -s. Not part of CI, where two CPU ranks serve
(tests/rehearsal/test_tensor_parallel.py).
"""

from collections.abc import Iterator

import pytest

from ddtree_appliance.rehearsal.prompts import heldout_prompts
from ddtree_appliance.rehearsal.server import RehearsalServer
from tests.gpu.test_engine_on_gpu import run_servers
from tests.gpu.tree_server import TREE, assert_steps_agree_with_the_reference, assert_tokens_equal_plain_decoding

torch = pytest.importorskip("torch", reason="needs torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

NAME = "two ranks"
PROMPTS = heldout_prompts(24, 96)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RehearsalServer]]:
    kinds = {"plain": (None, ()), NAME: ("DDTREE", (*TREE, "--tp-size", "2"))}
    yield from run_servers(kinds, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("concurrency", [1, 8])
def test_greedy_tokens_equal_plain_decoding_up_to_near_ties(
    concurrency: int, servers: dict[str, RehearsalServer]
) -> None:
    assert_tokens_equal_plain_decoding(NAME, servers[NAME], servers["plain"], PROMPTS, concurrency)


def test_each_step_accepts_what_the_engine_free_reference_accepts(servers: dict[str, RehearsalServer]) -> None:
    assert_steps_agree_with_the_reference(NAME, servers[NAME], PROMPTS)
