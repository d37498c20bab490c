"""Every Triton kernel equals its torch twin, on random, tied and -inf inputs.

On a CPU through Triton's interpreter, which is chosen for a whole process: TRITON_INTERPRET=1 pytest tests/kernels (as
scripts/test does). On a GPU host, without that variable, the same tests run the compiled kernels.
"""

import os
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs TRITON_INTERPRET=1 or an NVIDIA GPU", allow_module_level=True)

from ddtree_appliance.ddtree import kernels, torch_ops  # noqa: E402
from ddtree_appliance.ddtree.fused import candidates as fused_candidates  # noqa: E402
from ddtree_appliance.ddtree.head import HeadShard  # noqa: E402
from ddtree_appliance.ddtree.kv_buffers import KVBuffers  # noqa: E402
from ddtree_appliance.ddtree.limits import words_for  # noqa: E402
from tests.unit.test_torch_ops import LEVELS, candidates  # noqa: E402

# Triton 3.6's interpreter, with the numpy that SGLang pins; and NaN on purpose, computed by numpy there.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

DEVICE = "cpu" if INTERPRETED else "cuda"
FUSED = kernels.fused()
TWIN = kernels.TORCH
INF = float("inf")
# (b, D, K): one request, several, K that is no power of two, one candidate, the largest K.
SHAPES = [(1, 15, 16), (2, 7, 5), (1, 15, 1), (1, 3, 64), (2, 1, 3)]
BUDGETS = [1, 7, 16, 64, 128]


def on_device(*tensors: Any) -> list[Any]:
    return [tensor.to(DEVICE) for tensor in tensors]


def assert_same(got: Any, expected: Any, what: str) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape, what
    assert torch.equal(got.cpu(), expected.cpu()), what


def trees_of(shape: tuple[int, int, int], budget: int, kind: str, seed: int = 0) -> Any:
    return TWIN.build_trees(*candidates(seed, shape, LEVELS[kind]), budget)


@pytest.mark.parametrize("kind", LEVELS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_builder_equals_its_twin(budget: int, kind: str) -> None:
    # The interpreter takes seconds for a large tree: there, one shape of them for each kind of values.
    for seed, shape in enumerate(SHAPES if budget < 64 or not INTERPRETED else SHAPES[:1]):
        logprobs, ids = candidates(seed, shape, LEVELS[kind])
        got, expected = FUSED.build_trees(*on_device(logprobs, ids), budget), TWIN.build_trees(logprobs, ids, budget)
        for field in ("token_ids", "parents", "depths", "ancestors"):
            assert_same(getattr(got, field), getattr(expected, field), f"{field}, {shape}")


def test_the_builder_tells_scores_apart_that_differ_in_the_last_bit() -> None:
    """The child, at -1, comes before the sibling just below it, though a tie would go to the shallower."""
    below = torch.nextafter(torch.tensor(-1.0), torch.tensor(-2.0)).item()
    logprobs, ids = torch.tensor([[[-0.5, below], [-0.5, -9.0]]]), torch.tensor([[[5, 6], [7, 8]]])
    got, expected = FUSED.build_trees(*on_device(logprobs, ids), 3), TWIN.build_trees(logprobs, ids, 3)
    assert expected.depths.tolist() == [[0, 1, 2, 1]]
    assert_same(got.depths, expected.depths, "depths")
    assert_same(got.token_ids, expected.token_ids, "token_ids")


def test_the_builder_reads_odd_values_as_its_twin_does() -> None:
    values = torch.tensor([[[0.5, -0.0, 0.0, float("nan")], [-1e-45, -3e38, -INF, float("nan")]]])
    ids = torch.tensor([[[4, 3, 2, 1], [1, 2, 3, 4]]])
    got, expected = FUSED.build_trees(*on_device(values, ids), 9), TWIN.build_trees(values, ids, 9)
    for field in ("token_ids", "parents", "depths", "ancestors"):
        assert_same(getattr(got, field), getattr(expected, field), field)


@pytest.mark.parametrize("into_a_buffer", [False, True])
@pytest.mark.parametrize("budget", [1, 20, 33, 96, 128])
@pytest.mark.parametrize("prefixes", [[5], [1, 40, 7], [0, 300, 2, 2, 9]])
def test_what_the_verify_reads_equals_its_twin(prefixes: list[int], budget: int, into_a_buffer: bool) -> None:
    batch, width = len(prefixes), budget + 1
    trees = trees_of((batch, 4, 3), budget, "with minus infinity")
    moved = torch_ops.TreeBatch(*on_device(trees.token_ids, trees.parents, trees.depths, trees.ancestors))
    lens, bonus = torch.tensor(prefixes), torch.arange(batch) + 77
    bound = sum(prefixes) + 11
    outs: list[dict[str, Any]] = [{}, {}]
    if into_a_buffer:
        mask = torch.randint(0, 2, (width * (bound + batch * width) + 5,), dtype=torch.uint8)
        bits = torch.randint(-9, 9, (batch + 2, width, words_for(width)), dtype=torch.int32)
        outs = [{"mask_out": mask.to(device), "bits_out": bits.to(device)} for device in (DEVICE, "cpu")]
        outs[1] = {name: each.clone() for name, each in outs[1].items()}
        outs[0] = {name: each.clone() for name, each in outs[0].items()}
    got = FUSED.verify_inputs(moved, *on_device(bonus, lens), bound, **outs[0])
    expected = TWIN.verify_inputs(trees, bonus, lens, bound, **outs[1])
    for field in ("token_ids", "positions", "mask"):
        assert_same(getattr(got, field), getattr(expected, field), field)
    if into_a_buffer:
        assert got.mask is outs[0]["mask_out"]
        assert_same(outs[0]["bits_out"], outs[1]["bits_out"], "bits")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block_size,step_slots", [(16, 16), (16, 65), (5, 8), (1, 129)])
def test_what_the_drafter_reads_equals_its_twin(block_size: int, step_slots: int, dtype: Any) -> None:
    lens, requests, bonus = torch.tensor([0, 70, 3], dtype=dtype), torch.tensor([4, 0, 2]), torch.tensor([9, 8, 7])
    req_to_token = torch.randperm(5 * 200).view(5, 200).to(torch.int32)
    arguments = (bonus, lens, requests, req_to_token)
    rows = torch.full((4, 200), -7, dtype=torch.int32)
    for outs in ((None, None), (rows.clone().to(DEVICE), rows)):
        got = FUSED.draft_inputs(*on_device(*arguments), 151_669, block_size, step_slots, outs[0])
        expected = TWIN.draft_inputs(*arguments, 151_669, block_size, step_slots, outs[1])
        for field in ("block_ids", "positions", "slots"):
            assert_same(getattr(got, field), getattr(expected, field), field)
    assert_same(outs[0], rows, "rows")


def test_rows_longer_than_one_program_copies_equal_their_twins() -> None:
    lens, requests, bonus = torch.tensor([5000, 2040, 1]), torch.tensor([0, 2, 1]), torch.tensor([1, 2, 3])
    req_to_token = torch.arange(3 * 6000, dtype=torch.int32).view(3, 6000)
    got, expected = (torch.zeros(3, 6000, dtype=torch.int32, device=device) for device in (DEVICE, "cpu"))
    FUSED.draft_inputs(*on_device(bonus, lens, requests, req_to_token), 9, 4, 16, got)
    TWIN.draft_inputs(bonus, lens, requests, req_to_token, 9, 4, 16, expected)
    assert_same(got, expected, "rows")


def test_more_requests_than_a_buffer_has_rows_are_refused() -> None:
    trees = trees_of((3, 4, 3), 7, "continuous")
    bonus, lens, rows = torch.arange(3), torch.arange(3), torch.zeros((2, 40), dtype=torch.int32)
    with pytest.raises(ValueError, match="2 requests, not for 3"):
        FUSED.draft_inputs(bonus, lens, bonus, rows, 9, 4, 16, rows)
    with pytest.raises(ValueError, match="2 requests, not for 3"):
        FUSED.verify_inputs(trees, bonus, lens, 9, bits_out=torch.zeros((2, 8, 1), dtype=torch.int32))


def test_the_mask_of_more_requests_than_are_summed_at_once_equals_its_twin() -> None:
    batch = 140
    trees = trees_of((batch, 1, 2), 2, "continuous")
    moved = torch_ops.TreeBatch(*on_device(trees.token_ids, trees.parents, trees.depths, trees.ancestors))
    lens, bonus = torch.arange(batch) % 7, torch.arange(batch)
    got = FUSED.verify_inputs(moved, *on_device(bonus, lens), int(lens.sum()))
    assert_same(got.mask, TWIN.verify_inputs(trees, bonus, lens, int(lens.sum())).mask, "mask")


def predictions(trees: Any, seed: int) -> Any:
    """What a target might answer: for each node, one of its children's tokens, or a token that no child has."""
    generator = torch.Generator().manual_seed(seed)
    batch, width = trees.token_ids.shape
    predict = torch.full((batch, width), 10_000)
    for request in range(batch):
        for node in range(width):
            children = trees.token_ids[request][trees.parents[request] == node].tolist()
            pick = int(torch.randint(0, 4 * len(children) + 1, (1,), generator=generator))
            if children and pick < 4 * len(children):
                predict[request, node] = children[pick % len(children)]
    return predict


@pytest.mark.parametrize("kind", ["continuous", "one level", "mostly minus infinity"])
@pytest.mark.parametrize("budget", [1, 6, 15, 64, 128])
def test_the_accept_walk_and_what_follows_it_equal_their_twins(budget: int, kind: str) -> None:
    lengths = set()
    for seed, shape in enumerate([(1, 15, 16), (5, 15, 4), (3, 7, 1), (4, 2, 3)]):
        trees = trees_of(shape, budget, kind, seed)
        predict = predictions(trees, seed)
        run = min(shape[1], budget) + 1
        moved = torch_ops.TreeBatch(*on_device(trees.token_ids, trees.parents, trees.depths, trees.ancestors))
        got = FUSED.accept(moved, predict.to(DEVICE), run)
        expected = TWIN.accept(trees, predict, run)
        for field in ("path", "num_correct", "tokens", "bonus"):
            assert_same(getattr(got, field), getattr(expected, field), f"{field}, {shape}")
        lengths.update(expected.num_correct.tolist())
        rows = torch.randn(shape[0] * (budget + 1), 2100)
        assert_same(FUSED.gather_path(rows.to(DEVICE), got), TWIN.gather_path(rows, expected), "rows")
    assert kind != "continuous" or budget < 6 or len(lengths) > 2, "the walks were all alike"


@pytest.mark.parametrize("dtype,heads,size", [("bfloat16", 8, 128), ("float16", 2, 6), ("float32", 1, 5)])
def test_the_move_of_overlapping_rows_equals_its_twin(dtype: str, heads: int, size: int) -> None:
    batch, budget, run = 3, 40, 16
    trees = trees_of((batch, 15, 4), budget, "continuous", 3)
    accepted = TWIN.accept(trees, predictions(trees, 5), run)
    order = torch.randperm(batch * (budget + 1) + 9, generator=torch.Generator().manual_seed(1))
    slots = order[: batch * (budget + 1)].view(batch, -1)
    source, target = torch_ops.path_slots(slots, accepted.path)
    assert (source != target).any() and len(set(source.flatten().tolist()) & set(target.flatten().tolist())) > 3
    before = [torch.randn(len(order), heads, size).to(getattr(torch, dtype)) for _ in range(6)]
    expected = [tensor.clone() for tensor in before]
    got = [tensor.clone().to(DEVICE) for tensor in before]
    TWIN.move_kv(KVBuffers.of(expected), slots, accepted.path)
    FUSED.move_kv(KVBuffers.of(got), *on_device(slots, accepted.path))
    for one, other, old in zip(got, expected, before, strict=True):
        assert_same(one, other, "buffer")
        assert not torch.equal(one.cpu(), old)


# 20,000 tokens: several blocks, the last one short.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("vocabulary", [1, 100, 20_000])
def test_the_best_tokens_equal_their_twin(vocabulary: int, dtype: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, vocabulary, generator=generator).to(getattr(torch, dtype))
    logits[0, 1] = 1.0
    logits[0, 2] = -INF
    logits[1, 0, vocabulary // 2 :] = logits.max() + 1
    logits[1, 1, vocabulary // 3] = INF
    assert_same(FUSED.best_tokens(*on_device(logits)), TWIN.best_tokens(logits), "best tokens")
    unpadded = logits[..., : vocabulary - vocabulary // 3]
    got = FUSED.best_tokens(logits.to(DEVICE)[..., : unpadded.shape[-1]])
    assert_same(got, TWIN.best_tokens(unpadded), "best tokens of a padded vocabulary")


@pytest.mark.parametrize("place", [0, 9000, 19_999])
def test_what_is_no_number_is_found_as_the_twin_finds_it(place: int) -> None:
    logits = torch.zeros(1, 2, 20_000)
    logits[0, 1, place] = float("nan")
    assert_same(FUSED.best_tokens(*on_device(logits)), TWIN.best_tokens(logits), "best tokens")


def check_candidates(hidden: Any, weight: Any, topk: int, shards: int = 1) -> None:
    expected_values, expected_ids = TWIN.top_candidates(hidden, HeadShard.whole(weight), topk)
    for values, ids in run_shards(hidden, weight, topk, shards):
        assert (values.dtype, ids.dtype) == (torch.float32, torch.int64)
        assert values.shape == ids.shape == expected_ids.shape
        assert_same(ids, expected_ids, "ids")
        assert torch.allclose(values.cpu(), expected_values, rtol=1e-6, atol=2e-6)


def run_shards(hidden: Any, weight: Any, topk: int, shards: int, steps: Any = FUSED) -> Sequence[Any]:
    """What each of `shards` ranks finds; the ranks run one after another, until every exchange has all its parts."""
    if shards == 1:
        return [steps.top_candidates(*on_device(hidden), HeadShard.whole(weight.to(DEVICE)), topk)]
    rows = -(-len(weight) // shards)
    sent: list[list[Any]] = []

    class Unfinished(Exception):
        pass

    def rank_run(rank: int) -> Any:
        exchange = 0

        def all_gather(values: Any) -> Any:
            nonlocal exchange
            if len(sent) <= exchange:
                sent.append([None] * shards)
            sent[exchange][rank] = values.clone()
            if any(part is None for part in sent[exchange]):
                raise Unfinished
            exchange += 1
            return torch.stack(sent[exchange - 1])

        part = weight[rank * rows : (rank + 1) * rows].to(DEVICE)
        head = HeadShard(part, rank * rows, len(weight), rows, rank, all_gather)
        return steps.top_candidates(*on_device(hidden), head, topk)

    while True:
        results = []
        for rank in range(shards):
            try:
                results.append(rank_run(rank))
            except Unfinished:
                continue
        if len(results) == shards:
            return results


# Whole numbers: equal logits on every device, whatever the order of the sum, and ties everywhere.
def whole_numbers(vocabulary: int, seed: int = 0) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-2, 3, (2, 3, 16), generator=generator).float()
    return hidden, torch.randint(-2, 3, (vocabulary, 16), generator=generator).float()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks in a vocabulary that the interpreter's sort can take."""
    if INTERPRETED:
        monkeypatch.setattr(fused_candidates, "CHUNK", 32)


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("topk", [1, 5])
@pytest.mark.parametrize("vocabulary", [3, 32, 100 if INTERPRETED else 9001])
@pytest.mark.usefixtures("small_chunks")
def test_candidates_equal_their_twin_with_ties_at_every_rank(vocabulary: int, topk: int, shards: int) -> None:
    check_candidates(*whole_numbers(vocabulary), topk, shards)


@pytest.mark.usefixtures("small_chunks")
def test_the_largest_number_of_candidates_equals_its_twin() -> None:
    hidden, weight = whole_numbers(80 if INTERPRETED else 9001)
    check_candidates(hidden[:1, :1], weight, 64)


@pytest.mark.parametrize("shards", [2, 3])
def test_the_twin_finds_the_same_candidates_in_shards(shards: int) -> None:
    hidden, weight = whole_numbers(1000)
    expected_values, expected_ids = TWIN.top_candidates(hidden, HeadShard.whole(weight), 16)
    for values, ids in run_shards(hidden, weight, 16, shards, TWIN):
        assert_same(ids, expected_ids, "ids")
        assert torch.allclose(values.cpu(), expected_values, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("bad", [float("nan"), INF])
@pytest.mark.usefixtures("small_chunks")
def test_a_position_without_a_distribution_has_no_finite_candidate(bad: float) -> None:
    hidden, weight = whole_numbers(50 if INTERPRETED else 5000)
    hidden[1, 1, 3] = bad
    weight[:, 3] = weight[:, 3].abs() + 1
    values, ids = (
        tensor.cpu() for tensor in FUSED.top_candidates(*on_device(hidden), HeadShard.whole(weight.to(DEVICE)), 4)
    )
    assert values[1, 1].tolist() == [-INF] * 4
    assert ids[1, 1].tolist() == [0, 1, 2, 3]
    assert values[0].isfinite().all()


@pytest.mark.usefixtures("small_chunks")
def test_a_chunk_without_a_finite_logit_takes_nothing_from_the_others() -> None:
    weight = torch.full((2 * fused_candidates.CHUNK, 4), -INF)
    weight[:3] = torch.tensor([[1.0], [3.0], [2.0]])
    hidden = torch.ones(1, 1, 4)
    values, ids = FUSED.top_candidates(hidden.to(DEVICE), HeadShard.whole(weight.to(DEVICE)), 5)
    assert ids.flatten().tolist() == [1, 2, 0, 3, 4]
    assert torch.allclose(values.flatten()[:3].exp().sum().cpu(), torch.tensor(1.0))
    assert values.flatten()[3:].tolist() == [-INF, -INF]
