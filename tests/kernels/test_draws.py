"""The draw without a sort takes the twin's tokens, on random, tied, peaked, flat and impossible logits.

Equal as long as no sum comes within rounding of top_p: here none does.
"""

from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
from ddtree_appliance.ddtree.fused import sampling as fused  # noqa: E402
from tests.kernels.test_fused import DEVICE, FUSED, TWIN, pytestmark  # noqa: E402, F401
from tests.unit.test_sampling import ALL, HASHES, INF, Sampling, asking, seed_with_hash  # noqa: E402

BLOCK = 64
WIDTH, DEPTH = 3, 5
KINDS = {
    "random": lambda noise: 2 * noise,
    "tied": lambda noise: (2 * noise).round(),
    "peaked": lambda noise: 12 * noise,
    "flat": lambda noise: 0.05 * noise,
    "mostly impossible": lambda noise: torch.where(noise > 1.3, noise, -INF),
}
# Of requests side by side: top-k, top-p, min-p.
FILTERS = [
    *product([2, 7, ALL], [0.3137, 0.913, 1.0], [0.0, 0.0471]),
    (ALL, 0.0003, 0.0),
    (40, 1.0, 0.613),
    (1, 0.5, 0.1),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a row of few tokens has several blocks."""
    monkeypatch.setattr(fused, "BLOCK", BLOCK)


def on_device(sampling: Sampling) -> Sampling:
    tensors = (sampling.temperatures, sampling.top_ks, sampling.top_ps, sampling.min_ps, sampling.seeds)
    return Sampling(*(tensor.to(DEVICE) for tensor in tensors), sampling.is_filtered)


def both(logits: Any, sampling: Sampling, seed: int = 0) -> tuple[Any, Any]:
    """The kernel's tokens and the twin's. logits: [b, V, vocabulary]."""
    generator = torch.Generator().manual_seed(seed)
    batch, width, _ = logits.shape
    depths = torch.randint(0, DEPTH + 1, (batch, width), generator=generator)
    prefix_lens = torch.randint(1, 5000, (batch,), generator=generator)
    given = logits.contiguous(), depths, prefix_lens
    got = FUSED.sample_nodes(*(tensor.to(DEVICE) for tensor in given), DEPTH, on_device(sampling))
    expected = TWIN.sample_nodes(*given, DEPTH, sampling)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    return got.cpu(), expected


def logits_of(kind: str, batch: int, vocabulary: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    logits = KINDS[kind](torch.randn(batch, WIDTH, vocabulary, generator=generator))
    logits[..., 3] = logits[..., 3].clamp(min=-5)  # one token at least is possible
    return logits


@pytest.mark.parametrize("vocabulary", [5, 2 * BLOCK, 150])
@pytest.mark.parametrize("kind", KINDS)
def test_filtered_draws_equal_the_twin(kind: str, vocabulary: int) -> None:
    top_ks, top_ps, min_ps = (list(column) for column in zip(*FILTERS, strict=True))
    temperatures = [0.5 + 0.04 * at for at in range(len(FILTERS))]
    sampling = asking(torch.arange(len(FILTERS)) * 977 - 5, temperatures, top_ks, top_ps, min_ps)
    got, expected = both(logits_of(kind, len(FILTERS), vocabulary, vocabulary), sampling)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_draws_without_filters_and_greedy_choices_equal_the_twin(kind: str) -> None:
    sampling = asking(
        torch.arange(6) << 33, [1.0, 1.0, 0.7, 1.6, 1.0, 0.2], [ALL, 1, ALL, ALL, 1, ALL], is_filtered=False
    )
    got, expected = both(logits_of(kind, 6, 150, 1), sampling)
    assert torch.equal(got, expected)


def test_a_greedy_request_gets_the_argmax_of_its_logits_where_the_temperature_would_make_a_tie() -> None:
    logits = torch.zeros((1, 1, 100))
    logits[..., 5] = 2 - 3 * 2.0**-22
    logits[..., 80] = torch.nextafter(logits[..., 5], torch.tensor(3.0))
    asked = asking([0], [1.7], [1], is_filtered=True)
    assert (logits / 1.7).argmax() == 5 and logits.argmax() == 80, "no tie to be broken"
    assert both(logits, asked)[0].item() == 80


def test_filters_that_are_left_out_would_be_noticed() -> None:
    logits = logits_of("random", 4, 200, 2)
    filtered, free = (asking(torch.arange(4), 1.0, 7, is_filtered=is_filtered) for is_filtered in (True, False))
    assert (both(logits, filtered)[1] != both(logits, free)[0]).float().mean() > 0.2


@pytest.mark.parametrize("wanted", HASHES)
@pytest.mark.parametrize("is_filtered", [False, True])
def test_the_only_possible_token_is_drawn_whatever_its_noise(is_filtered: bool, wanted: int) -> None:
    logits = torch.full((1, 1, 2 * BLOCK), -INF)
    logits[..., 70] = 1.5
    seed = seed_with_hash(wanted, position=100, token=70)
    asked = on_device(asking([seed], is_filtered=is_filtered))
    where = torch.zeros((1, 1), dtype=torch.int64, device=DEVICE), torch.tensor([100], device=DEVICE)
    assert FUSED.sample_nodes(logits.to(DEVICE), *where, 0, asked).item() == 70


@pytest.mark.parametrize("broken", [float("nan"), -INF, INF])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_logits_that_are_no_numbers_end_in_some_token(share: float, broken: float) -> None:
    """SGLang passes such logits on; a search without an end would take the GPU with it."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, WIDTH, 200, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < share] = broken
    asked = on_device(asking(torch.arange(4), 1.0, [2, ALL, 5, 1], [0.9, 0.5, 1.0, 0.99], [0.0, 0.1, 0.2, 0.0]))
    where = torch.zeros((4, WIDTH), dtype=torch.int64, device=DEVICE), torch.full((4,), 9, device=DEVICE)
    tokens = FUSED.sample_nodes(logits.to(DEVICE), *where, 0, asked)
    assert ((tokens >= 0) & (tokens < 200)).all()


def test_no_request_draws_nothing() -> None:
    asked = on_device(asking(torch.arange(0)))
    where = torch.zeros((0, WIDTH), dtype=torch.int64, device=DEVICE), torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert FUSED.sample_nodes(torch.zeros((0, WIDTH, 50), device=DEVICE), *where, 0, asked).shape == (0, WIDTH)
