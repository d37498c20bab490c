"""Flashinfer verifies trees with their masks too, judged as test_engine_on_gpu judges Triton's attention.

Run by anyone with a GPU host: pytest -m gpu tests/gpu/test_flashinfer_on_gpu.py -s. Not part of CI. Flashinfer compiles
its kernels at a host's first start, for minutes.
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
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

NAME = "flashinfer"
PROMPTS = heldout_prompts(24, 96)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RehearsalServer]]:
    kinds = {"plain": (None, ()), NAME: ("DDTREE", (*TREE, "--attention-backend", "flashinfer"))}
    yield from run_servers(kinds, tmp_path_factory.mktemp("flashinfer"))


@pytest.mark.parametrize("concurrency", [1, 8])
def test_greedy_tokens_equal_plain_decoding_up_to_near_ties(
    concurrency: int, servers: dict[str, RehearsalServer]
) -> None:
    assert_tokens_equal_plain_decoding(NAME, servers[NAME], servers["plain"], PROMPTS, concurrency)


def test_each_step_accepts_what_the_engine_free_reference_accepts(servers: dict[str, RehearsalServer]) -> None:
    assert_steps_agree_with_the_reference(NAME, servers[NAME], PROMPTS)
