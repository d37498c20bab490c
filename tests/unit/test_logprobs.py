"""Log-probabilities in parts are those of SGLang's code in one piece, whoever asks for what."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")

from tests.unit.engine import import_sglang  # noqa: E402

REQUESTS, WIDTH, RUN, VOCABULARY = 5, 6, 4, 30
FIELDS = [f"next_token_{kind}_logprobs_{column}" for kind in ("top", "token_ids") for column in ("val", "idx")]


@pytest.fixture
def logprobs() -> Any:
    """The module under test, which takes SGLang."""
    return import_sglang("ddtree_appliance.ddtree.logprobs")


def plain(value: Any) -> Any:
    return value.tolist() if torch.is_tensor(value) else value


def batch_of(top: list[int] | None, token_ids: list[list[int] | None] | None, is_all_greedy: bool) -> SimpleNamespace:
    temperatures = torch.linspace(0.5, 1.5, REQUESTS).unsqueeze(1)
    return SimpleNamespace(
        seq_lens=torch.arange(REQUESTS) + 9,
        sampling_info=SimpleNamespace(is_all_greedy=is_all_greedy, temperatures=temperatures),
        top_logprobs_nums=top,
        token_ids_logprobs=token_ids,
    )


def inputs() -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(REQUESTS * WIDTH, VOCABULARY, generator=generator)
    choice = torch.randint(VOCABULARY, (REQUESTS * WIDTH,), generator=generator)
    path = torch.randint(WIDTH, (REQUESTS, RUN), generator=generator)
    return logits, choice, path + torch.arange(REQUESTS).unsqueeze(1) * WIDTH


ASKED = {
    "nothing more": (None, None, True),
    "empty lists": ([0] * REQUESTS, [None] * REQUESTS, False),
    "some top": ([0, 3, 0, 0, 1], [None] * REQUESTS, False),
    "some ids": ([0] * REQUESTS, [None, None, [7, 2], None, [5]], False),
    "all of both": ([2, 1, 4, 3, 1], [[1], [2, 3], [4], [5, 6, 7], [8]], True),
}


@pytest.mark.parametrize("requests_at_once", [1, 2, 5])
@pytest.mark.parametrize("asked", ASKED)
def test_parts_give_what_sglang_gives_in_one_piece(
    asked: str, requests_at_once: int, logprobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_one_piece = logprobs.compute_spec_v2_logprobs
    logits, choice, rows = inputs()
    batch = batch_of(*ASKED[asked])
    expected, got = (SimpleNamespace(next_token_logits=logits) for _ in range(2))
    in_one_piece(batch, expected, choice, rows, RUN - 1)
    most, seen = logprobs.BYTES_PER_LOGIT * VOCABULARY * RUN * requests_at_once, []
    monkeypatch.setattr(logprobs, "DRAW_BYTES", most)
    monkeypatch.setattr(
        logprobs,
        "compute_spec_v2_logprobs",
        lambda *args: seen.append(args[3].shape) or in_one_piece(*args),
    )
    logprobs.add_logprobs(batch, got, choice, rows)

    assert len(seen) == -(-REQUESTS // requests_at_once) and max(seen)[0] == requests_at_once
    torch.testing.assert_close(got.next_token_logprobs, expected.next_token_logprobs, rtol=1e-6, atol=0)
    assert got.next_token_logprobs.shape == (REQUESTS, RUN)
    for field in FIELDS:
        assert hasattr(got, field) == hasattr(expected, field), field
        if hasattr(expected, field):
            rows_got, rows_expected = getattr(got, field), getattr(expected, field)
            assert len(rows_got) == len(rows_expected) == REQUESTS * RUN
            for one, other in zip(rows_got, rows_expected, strict=True):
                # A place that nobody asked for is empty, in which form does not matter.
                assert plain(one) == pytest.approx(plain(other), rel=1e-6), field


def test_a_batch_wider_than_the_bound_still_works_one_request_at_a_time(
    logprobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, choice, rows = inputs()
    monkeypatch.setattr(logprobs, "DRAW_BYTES", 1)
    output = SimpleNamespace(next_token_logits=logits)
    logprobs.add_logprobs(batch_of(None, None, True), output, choice, rows)
    assert output.next_token_logprobs.shape == (REQUESTS, RUN)
