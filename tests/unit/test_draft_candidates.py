"""The candidates of a drafter pass: the capture hook leaves in its buffers what ranking afterwards returns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")

from ddtree_appliance.ddtree.draft_candidates import DraftCandidates  # noqa: E402
from ddtree_appliance.ddtree.head import HeadShard  # noqa: E402
from ddtree_appliance.ddtree.kernels import TORCH  # noqa: E402

Tensor = Any  # torch may be missing where these annotations are read

TOPK, BLOCK, MAX_BATCH, HIDDEN, VOCABULARY = 3, 5, 4, 6, 40


def head(vocabulary: int = VOCABULARY) -> HeadShard:
    return HeadShard.whole(torch.randn(vocabulary, HIDDEN, generator=torch.Generator().manual_seed(1)))


def candidates(topk: int = TOPK, vocabulary: int = VOCABULARY, max_batch: int = MAX_BATCH) -> DraftCandidates:
    return DraftCandidates(TORCH, head(vocabulary), topk, BLOCK, max_batch)


def hidden_states(batch: int, seed: int = 2) -> Tensor:
    return torch.randn(batch * BLOCK, HIDDEN, generator=torch.Generator().manual_seed(seed))


def assert_equal(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for each, other in zip(got, expected, strict=True):
        assert each.dtype == other.dtype
        assert each.tolist() == other.tolist()


@pytest.mark.parametrize("batch", [1, 2, MAX_BATCH])
def test_each_position_of_each_block_is_ranked_by_the_step_of_the_table(batch: int) -> None:
    asked = []

    def top_candidates(hidden: Tensor, shard: HeadShard, topk: int) -> tuple[Tensor, Tensor]:
        asked.append((hidden.tolist(), shard, topk))
        return TORCH.top_candidates(hidden, shard, topk)

    shard, rows = head(), hidden_states(batch)
    ranking = DraftCandidates(replace(TORCH, top_candidates=top_candidates), shard, TOPK, BLOCK, MAX_BATCH)
    logprobs, ids = ranking.rank(rows)

    assert logprobs.shape == ids.shape == (batch, BLOCK - 1, TOPK)
    assert asked == [([rows[at * BLOCK + 1 : (at + 1) * BLOCK].tolist() for at in range(batch)], shard, TOPK)]
    assert_equal((logprobs, ids), TORCH.top_candidates(rows.view(batch, BLOCK, HIDDEN)[:, 1:], shard, TOPK))


def test_row_0_of_a_block_is_never_ranked() -> None:
    rows = hidden_states(2)
    expected = candidates().rank(rows)
    rows[::BLOCK] = float("nan")
    assert_equal(candidates().rank(rows), expected)
    rows[1] = float("nan")
    with pytest.raises(AssertionError):
        assert_equal(candidates().rank(rows), expected)


@pytest.mark.parametrize("topk,vocabulary", [(TOPK, VOCABULARY), (1, VOCABULARY), (8, 7), (7, 7)])
@pytest.mark.parametrize("batch", range(1, MAX_BATCH + 1))
def test_the_hook_leaves_in_the_buffers_what_ranking_returns(batch: int, topk: int, vocabulary: int) -> None:
    hook = candidates(topk, vocabulary)
    hook(hidden_states(batch))
    assert_equal(hook.captured(batch), candidates(topk, vocabulary).rank(hidden_states(batch)))


def test_the_hook_takes_the_inputs_that_sglang_passes_and_returns_nothing() -> None:
    hook = candidates()
    assert hook(hidden_states(1), torch.zeros(BLOCK, dtype=torch.int64)) is None
    assert_equal(hook.captured(1), hook.rank(hidden_states(1)))


@pytest.mark.parametrize("first,second", [(4, 4), (4, 2), (1, 3)])
def test_a_second_replay_overwrites_the_first_in_the_same_place(first: int, second: int) -> None:
    hook = candidates()
    hook(hidden_states(first, seed=3))
    places = [buffer.data_ptr() for buffer in hook.captured(1)]
    hook(hidden_states(second, seed=4))
    assert_equal(hook.captured(second), hook.rank(hidden_states(second, seed=4)))
    assert [buffer.data_ptr() for buffer in hook.captured(second)] == places


def test_what_was_captured_outlives_a_later_ranking() -> None:
    hook = candidates()
    hook(hidden_states(2, seed=3))
    hook.rank(hidden_states(2, seed=4))
    assert_equal(hook.captured(2), candidates().rank(hidden_states(2, seed=3)))


def test_a_replay_of_more_requests_than_the_buffers_hold_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="size"):
        candidates(max_batch=2)(hidden_states(3))
