"""Which rows of the output embedding a rank holds, against the heads that SGLang itself makes and loads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.engine import import_sglang

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")

from ddtree_appliance.ddtree.head import HeadShard, target_head  # noqa: E402
from ddtree_appliance.ddtree.torch_ops import top_candidates  # noqa: E402

Tensor = Any  # torch may be missing where these annotations are read

HIDDEN = 4
# Vocabulary, ranks. SGLang pads a vocabulary to a multiple of 64 and cuts that evenly.
SHARDED = [
    (256, 2),
    (200, 2),  # 128 and 72
    (129, 2),  # 96 and 33
    (65, 2),  # 64 and 1
    (1000, 4),
    (300, 3),  # padded to 384 on the CPU: 128, 128, 44
    (50257, 8),
    (151936, 8),
]


class Ranks:
    """A tensor-parallel group whose ranks are threads of this process."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._given: list[Tensor] = [None] * count
        self._barrier = Barrier(count, timeout=10)

    def group(self, rank: int) -> Any:
        return SimpleNamespace(world_size=self.count, rank_in_group=rank, all_gather=partial(self._all_gather, rank))

    def _all_gather(self, rank: int, values: Tensor, dim: int = -1) -> Tensor:
        assert values.is_contiguous(), "a collective reads the memory as it lies"
        self._given[rank] = values
        self._barrier.wait()
        gathered = torch.cat(self._given, dim)
        self._barrier.wait()
        return gathered

    def together(self, work: Any) -> list[Any]:
        """work(rank) of every rank at once."""
        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(work, range(self.count)))


def whole_weight(vocabulary: int) -> Tensor:
    """Small whole numbers, whose products are exact in any order."""
    generator = torch.Generator().manual_seed(vocabulary)
    return torch.randint(-4, 5, (vocabulary, HIDDEN), generator=generator).float()


def sglang_head(monkeypatch: pytest.MonkeyPatch, vocabulary: int, rank: int, ranks: int, **options: Any) -> Any:
    """SGLang's own head of one rank, loaded by its own loader from `whole_weight`."""
    module = import_sglang("sglang.srt.layers.vocab_parallel_embedding")
    monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(tp_rank=rank, tp_size=ranks))
    head = module.ParallelLMHead(vocabulary, HIDDEN, params_dtype=torch.float32, **options)
    head.weight_loader(head.weight, whole_weight(head.org_vocab_size))
    return head


def shard_of(monkeypatch: pytest.MonkeyPatch, head: Any, group: Any, vocabulary: int | None = None) -> HeadShard:
    monkeypatch.setattr(import_sglang("sglang.srt.distributed"), "get_tp_group", lambda: group)
    return target_head(SimpleNamespace(lm_head=head, config=SimpleNamespace(vocab_size=vocabulary)))


def shards(monkeypatch: pytest.MonkeyPatch, vocabulary: int, ranks: Ranks) -> list[HeadShard]:
    return [
        shard_of(monkeypatch, sglang_head(monkeypatch, vocabulary, rank, ranks.count), ranks.group(rank), vocabulary)
        for rank in range(ranks.count)
    ]


def plain_head(weight: Tensor, **attributes: Any) -> Any:
    return SimpleNamespace(weight=weight, **attributes)


@pytest.mark.parametrize("vocabulary,ranks", SHARDED)
def test_the_shards_are_the_vocabulary_cut_in_order_without_padding(
    vocabulary: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = shards(monkeypatch, vocabulary, Ranks(ranks))
    assert torch.equal(torch.cat([part.weight for part in parts]), whole_weight(vocabulary))
    first = 0
    for rank, part in enumerate(parts):
        assert (part.first_id, part.rank, part.vocabulary) == (first, rank, vocabulary)
        first += len(part.weight)
    # The same on every rank: the candidates' chunks, and so the number of exchanges, follow from it.
    assert {part.largest_shard for part in parts} == {max(len(part.weight) for part in parts)}


@pytest.mark.parametrize(
    "vocabulary,ranks",
    [
        (200, 2),
        (1000, 4),
        (300, 3),
        (65, 2),  # a rank with fewer rows than candidates are asked for
    ],
)
def test_ranks_find_the_candidates_of_the_whole_head(
    vocabulary: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Ranks(ranks)
    parts = shards(monkeypatch, vocabulary, group)
    hidden = torch.randint(-2, 3, (2, 3, HIDDEN), generator=torch.Generator().manual_seed(1)).float()
    logprobs, ids = top_candidates(hidden, HeadShard.whole(whole_weight(vocabulary)), 16)
    for got_logprobs, got_ids in group.together(lambda rank: top_candidates(hidden, parts[rank], 16)):
        assert got_ids.tolist() == ids.tolist()
        assert torch.allclose(got_logprobs, logprobs, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_exchange_gives_every_rank_all_parts_in_rank_order(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Ranks(ranks)
    parts = shards(monkeypatch, 256 * ranks, group)
    given = [torch.arange(10).view(5, 2).T + 100 * rank for rank in range(ranks)]  # not contiguous
    for gathered in group.together(lambda rank: parts[rank].all_gather(given[rank])):  # type: ignore[misc]
        assert gathered.tolist() == [part.tolist() for part in given]


@pytest.mark.parametrize("vocabulary", [64, 100, 1000])
def test_the_head_of_one_rank_is_whole_and_without_padding(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    head = sglang_head(monkeypatch, vocabulary, rank=0, ranks=1)
    shard = shard_of(monkeypatch, head, Ranks(1).group(0))
    assert torch.equal(shard.weight, whole_weight(vocabulary))
    assert shard.weight.data_ptr() == head.weight.data_ptr()
    facts = (shard.first_id, shard.rank, shard.vocabulary, shard.largest_shard, shard.all_gather)
    assert facts == (0, 0, vocabulary, vocabulary, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_head_that_says_nothing_of_shards_is_whole_on_one_rank(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = whole_weight(30).to(dtype)
    shard = shard_of(monkeypatch, plain_head(weight), Ranks(1).group(0))
    assert shard.weight is weight
    assert (shard.first_id, shard.vocabulary, shard.largest_shard, shard.all_gather) == (0, 30, 30, None)


@pytest.mark.parametrize(
    "weight",
    [
        None,
        torch.zeros(8, HIDDEN, dtype=torch.float8_e4m3fn),
        torch.zeros(8, HIDDEN, dtype=torch.int8),
        torch.zeros(8, HIDDEN // 2, dtype=torch.uint8),
        torch.zeros(8, HIDDEN, dtype=torch.int32),
        torch.zeros(8, HIDDEN, dtype=torch.float64),
    ],
    ids=lambda weight: str(getattr(weight, "dtype", weight)),
)
def test_a_quantised_weight_is_refused(weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unquantised lm_head"):
        shard_of(monkeypatch, plain_head(weight), Ranks(1).group(0))


@pytest.mark.parametrize("model", [SimpleNamespace(), SimpleNamespace(lm_head=SimpleNamespace())])
def test_a_model_without_a_head_weight_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_sglang("sglang.srt.distributed"), "get_tp_group", lambda: Ranks(1).group(0))
    with pytest.raises(ValueError, match="unquantised lm_head"):
        target_head(model)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_head_that_says_nothing_of_shards_is_refused_on_several_ranks(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="which rows of lm_head are on which rank"):
        shard_of(monkeypatch, plain_head(whole_weight(30)), Ranks(ranks).group(0), 30)


# On two ranks all added rows are the first one's.
@pytest.mark.parametrize("rank,ranks", [(0, 1), (0, 2), (1, 2)])
def test_an_added_vocabulary_is_refused(rank: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    head = sglang_head(monkeypatch, 1010 + 16, rank=rank, ranks=ranks, org_num_embeddings=1010)
    with pytest.raises(ValueError, match="added rows"):
        shard_of(monkeypatch, head, Ranks(ranks).group(0), 1010 + 16)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_vocabulary_that_leaves_a_rank_without_a_token_is_refused_on_every_rank(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = sglang_head(monkeypatch, 100, rank=rank, ranks=3)
    with pytest.raises(ValueError, match="leaves the last of 3 ranks none"):
        shard_of(monkeypatch, head, Ranks(3).group(rank), 100)
