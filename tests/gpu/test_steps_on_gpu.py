"""The steps around the two forwards on a GPU: the same results as on the CPU, and no wait for the host.

Run by anyone with a GPU host: pytest -m gpu tests/gpu/test_steps_on_gpu.py. Needs torch alone. Not part of CI.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from ddtree_appliance.ddtree.head import HeadShard  # noqa: E402
from ddtree_appliance.ddtree.kernels import TORCH, Kernels, kernels_for  # noqa: E402
from ddtree_appliance.ddtree.kv_buffers import KVBuffers  # noqa: E402
from ddtree_appliance.ddtree.limits import words_for  # noqa: E402
from ddtree_appliance.ddtree.sampling import Sampling  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BLOCK, VOCABULARY, HIDDEN = 16, 4096, 256


@contextmanager
def host_waits_are_errors() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            # torch warns that the mode does not see every wait; pytest would make that an error that leaves it on.
            warnings.filterwarnings("ignore", message="Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def one_step(
    device: str, batch: int, budget: int, candidates: Any, prefix_lens: Any, predict: Any, buffers: KVBuffers
) -> dict[str, Any]:
    """Every step after the candidates are known, with inputs on `device`. buffers: a row for every slot."""
    kernels = kernels_for(device)
    trees = kernels.build_trees(*candidates, budget)
    accepted = kernels.accept(trees, predict, min(BLOCK, budget + 1))
    slots = torch.arange(batch * (budget + BLOCK), device=device).view(batch, -1)
    requests = torch.arange(batch, device=device)
    req_to_token = torch.arange(batch * 4096, device=device, dtype=torch.int32).view(batch, -1)
    bonus = trees.token_ids[:, -1].contiguous()
    rows = torch.zeros_like(req_to_token)
    block = kernels.draft_inputs(bonus, prefix_lens, requests, req_to_token, 7, BLOCK, budget + BLOCK, rows)
    bits = torch.zeros((batch, budget + 1, words_for(budget + 1)), dtype=torch.int32, device=device)
    verify = kernels.verify_inputs(trees, bonus, prefix_lens, 4096 * batch, bits_out=bits)
    kernels.move_kv(buffers, slots, accepted.path)
    return {
        "token_ids": trees.token_ids,
        "parents": trees.parents,
        "depths": trees.depths,
        "block_ids": block.block_ids,
        "block_positions": block.positions,
        "slots": block.slots,
        "rows": rows,
        "verify_tokens": verify.token_ids,
        "positions": verify.positions,
        "mask": verify.mask,
        "bits": bits,
        "path": accepted.path,
        "tokens": accepted.tokens,
        "bonus": accepted.bonus,
        "moved": buffers.tensors[0],
        "hidden": kernels.gather_path(trees.depths.view(-1, 1).expand(-1, 8).float(), accepted),
    }


def deep_walk(trees: Any) -> Any:
    """A prediction, made on the CPU: after each node the last of those children that lead deepest."""
    batch, width = trees.token_ids.shape
    predict, requests = torch.zeros((batch, width), dtype=torch.int64), torch.arange(batch)
    height = torch.zeros((batch, width), dtype=torch.int64)
    # A child comes after its parent. Padding adds to nothing.
    for node in range(width - 1, 0, -1):
        rows = requests[trees.parents[:, node] >= 0]
        parent = trees.parents[rows, node]
        is_deeper = height[rows, node] + 1 > height[rows, parent]
        rows, parent = rows[is_deeper], parent[is_deeper]
        height[rows, parent] = height[rows, node] + 1
        predict[rows, parent] = trees.token_ids[rows, node]
    return predict


@pytest.mark.parametrize("budget", [1, 7, 16, 64, 128])
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_steps_on_the_gpu_equal_the_cpu_and_wait_for_nothing(batch: int, budget: int) -> None:
    generator = torch.Generator().manual_seed(batch * 1000 + budget)
    # Few distinct values, so that ties are everywhere.
    logits = torch.randint(0, 40, (batch, BLOCK - 1, VOCABULARY), generator=generator).float() / 4
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    candidates = values[..., :16].contiguous(), ids[..., :16].contiguous()
    prefix_lens = torch.randint(1, 2000, (batch,), generator=generator)

    rows = torch.arange(batch * (budget + BLOCK) * 8, dtype=torch.int32).view(-1, 1, 8)
    kv, kv_on_gpu = KVBuffers.of([rows.clone()]), KVBuffers.of([rows.cuda()])

    predict = deep_walk(kernels_for("cpu").build_trees(*candidates, budget))
    expected = one_step("cpu", batch, budget, candidates, prefix_lens, predict, kv)
    assert budget < 16 or not torch.equal(kv.tensors[0], rows), "nothing was moved"
    on_gpu = tuple(tensor.cuda() for tensor in candidates)
    prefix_on_gpu, predict_on_gpu = prefix_lens.cuda(), predict.cuda()
    with host_waits_are_errors():
        got = one_step("cuda", batch, budget, on_gpu, prefix_on_gpu, predict_on_gpu, kv_on_gpu)
    for name, tensor in expected.items():
        assert torch.equal(got[name].cpu(), tensor), name


@pytest.mark.parametrize("topk", [1, 16, 64])
def test_top_candidates_on_the_gpu_wait_for_nothing_and_rank_ties_by_token_id(topk: int) -> None:
    hidden = torch.randn(8, BLOCK - 1, HIDDEN, device="cuda", dtype=torch.bfloat16)
    # Every row twice: each candidate ties with its twin.
    half = torch.randn(VOCABULARY // 2, HIDDEN, device="cuda", dtype=torch.bfloat16)
    weight = torch.cat([half, half])
    kernels = kernels_for("cuda")
    with host_waits_are_errors():
        logprobs, ids = kernels.top_candidates(hidden, HeadShard.whole(weight), topk)
    logits = torch.matmul(hidden, weight.T).float()
    full = logits.log_softmax(-1)
    order = full.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    assert torch.equal(ids, order)
    torch.testing.assert_close(logprobs, full.gather(-1, order), rtol=1e-6, atol=2e-6)  # as in tests/kernels


def sampling_of(device: str, batch: int) -> Sampling:
    column = torch.arange(batch)
    return Sampling(
        temperatures=(0.5 + column / batch).view(-1, 1).to(device),
        top_ks=torch.where(column % 4 == 0, 1, 200).to(device, torch.int32),
        top_ps=torch.full((batch,), 0.9, device=device),
        min_ps=torch.full((batch,), 0.001, device=device),
        seeds=(column * 977 - 5).to(device),
        is_filtered=True,
    )


@pytest.mark.parametrize("batch", [1, 8])
def test_draws_on_the_gpu_equal_the_cpu_and_wait_for_nothing(batch: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    logits = 3 * torch.randn(batch, 65, VOCABULARY, generator=generator)
    depths = torch.randint(0, BLOCK, (batch, 65), generator=generator)
    prefix_lens = torch.randint(1, 2000, (batch,), generator=generator)
    expected = kernels_for("cpu").sample_nodes(logits, depths, prefix_lens, BLOCK - 1, sampling_of("cpu", batch))
    on_gpu = logits.cuda(), depths.cuda(), prefix_lens.cuda(), BLOCK - 1, sampling_of("cuda", batch)
    with host_waits_are_errors():
        got = kernels_for("cuda").sample_nodes(*on_gpu)
    # Sums round differently: a token at the edge of a filter may go either way, and others' chances with it.
    assert (got.cpu() == expected).float().mean() >= 0.99


@pytest.mark.parametrize("table", [TORCH, kernels_for("cuda")], ids=["sorted", "fused"])
@pytest.mark.parametrize("nodes", [65, 129])
def test_draws_from_a_real_vocabulary_are_the_same_alone_and_in_a_batch(nodes: int, table: Kernels) -> None:
    """The sorted draw, a prefill's, works there in several parts, and each is summed at its own size."""
    generator = torch.Generator("cuda").manual_seed(nodes)
    logits = 3 * torch.randn(4, nodes, 151_936, device="cuda", generator=generator)
    depths = torch.randint(0, BLOCK, (4, nodes), device="cuda", generator=generator)
    prefix_lens = torch.randint(1, 2000, (4,), device="cuda", generator=generator)
    sampling = sampling_of("cuda", 4)
    together = table.sample_nodes(logits, depths, prefix_lens, BLOCK - 1, sampling)
    for row in range(4):
        one = slice(row, row + 1)
        for cut in (slice(None), slice(0, 1)):  # one row alone is summed by another kernel
            asked = logits[one, cut], depths[one, cut], prefix_lens[one], BLOCK - 1, sampling.part(one)
            assert torch.equal(table.sample_nodes(*asked), together[one, cut])


def test_the_check_catches_a_wait() -> None:
    value = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError), host_waits_are_errors():
        value.item()
