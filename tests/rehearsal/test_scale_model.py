"""A scaled pair in the real engine: the tokens, and in each verify step the accepted tokens, are the bundled pair's."""
# ruff: noqa: E402 - what imports torch has to come after the check that torch is there

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")

from ddtree_appliance.rehearsal.scaling.folder import write_pair
from ddtree_appliance.rehearsal.scaling.models import plan_pair
from ddtree_appliance.rehearsal.scaling.sizes import ScaleSizes
from ddtree_appliance.rehearsal.server import RehearsalServer
from tests.rehearsal.conftest import NEW_TOKENS, ServerPool, tree

pytestmark = pytest.mark.rehearsal

BUDGET = 32
PROMPTS = 6


@pytest.fixture(scope="module")
def scaled_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ScaleSizes(
        layers=6, hidden=512, heads=12, kv_heads=3, head_dim=256, intermediate=1536, vocabulary=4160, drafter_layers=3
    )
    out = tmp_path_factory.mktemp("scaled") / "pair"
    write_pair(out, plan_pair(sizes, torch.float32, torch.device("cpu")), lambda text: None)
    return out


@pytest.fixture(scope="module")
def scaled_server(pool: ServerPool, scaled_pair: Path) -> RehearsalServer:
    # The last of two equal flags counts.
    paths = ("--model-path", str(scaled_pair / "target"), "--speculative-draft-model-path", str(scaled_pair / "dflash"))
    kind = tree(BUDGET, *paths)
    pool.start([tree(BUDGET), kind])
    return pool[kind]


def test_the_engine_writes_and_accepts_what_it_does_with_the_small_pair(
    pool: ServerPool, scaled_server: RehearsalServer, prompts: list[list[int]]
) -> None:
    for prompt in prompts[:PROMPTS]:
        expected = pool[tree(BUDGET)].stream_runs(prompt, NEW_TOKENS)
        assert scaled_server.stream_runs(prompt, NEW_TOKENS) == expected


def test_the_engine_runs_the_scaled_pair(scaled_server: RehearsalServer, scaled_pair: Path) -> None:
    assert scaled_server.get("/get_model_info").json()["model_path"] == str(scaled_pair / "target")
