"""The draw per node: its noise against a plain MurmurHash3, its filters against a loop, its tokens in any company."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")

from ddtree_appliance.ddtree import sampling  # noqa: E402
from ddtree_appliance.ddtree.sampling import Sampling, draw, exponentials, hashed_positions, sample_nodes  # noqa: E402

Tensor = Any  # torch may be missing where these annotations are read

WORD = (1 << 32) - 1
ALL = 1 << 30  # SGLang's top_k of a request that gave none
INF = float("inf")


# The noise


def rotated(value: int, bits: int) -> int:
    return (value << bits | value >> (32 - bits)) & WORD


def scrambled(word: int) -> int:
    return rotated(word * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD


def murmur3(key: bytes, seed: int) -> int:
    """MurmurHash3_x86_32, as published."""
    state, whole = seed, len(key) // 4 * 4
    for (word,) in struct.iter_unpack("<I", key[:whole]):
        state = (rotated(state ^ scrambled(word), 13) * 5 + 0xE6546B64) & WORD
    if key[whole:]:
        state ^= scrambled(int.from_bytes(key[whole:], "little"))
    state ^= len(key)
    state = (state ^ state >> 16) * 0x85EBCA6B & WORD
    state = (state ^ state >> 13) * 0xC2B2AE35 & WORD
    return state ^ state >> 16


def key_of(seed: int, position: int, token: int) -> bytes:
    return struct.pack("<QII", seed & (1 << 64) - 1, position & WORD, token)


def exponential_of(seed: int, position: int, token: int) -> float:
    return -float(np.log((murmur3(key_of(seed, position, token), 0) + 0.5) / 2.0**32))


def seed_with_hash(wanted: int, position: int, token: int, low: int = 7) -> int:
    """The seed of low word `low` whose hash at (position, token) is `wanted`: every step of the hash is a bijection."""

    def inverse(factor: int) -> int:
        return pow(factor, -1, 1 << 32)

    def without(state: int) -> int:
        return rotated((state - 0xE6546B64) * inverse(5) & WORD, 19)

    state = wanted ^ wanted >> 16
    state = state * inverse(0xC2B2AE35) & WORD
    state ^= state >> 13 ^ state >> 26
    state = state * inverse(0x85EBCA6B) & WORD
    state ^= state >> 16 ^ 16
    for word in (token, position):
        state = without(state) ^ scrambled(word)
    first = (rotated(scrambled(low), 13) * 5 + 0xE6546B64) & WORD
    product_of_high = (without(state) ^ first) * inverse(0x1B873593) & WORD
    high = rotated(product_of_high, 17) * inverse(0xCC9E2D51) & WORD
    seed = high << 32 | low
    return seed - (1 << 64) if seed >> 63 else seed


@pytest.mark.parametrize(
    ("key", "seed", "expected"),
    [
        (b"", 0, 0),
        (b"", 1, 0x514E28B7),
        (b"\xff\xff\xff\xff", 0, 0x76293B50),
        (b"\x21\x43\x65\x87", 0x5082EDEE, 0x2362F9DE),
        (b"hello, world", 0, 0x149BBB7F),
        (b"The quick brown fox jumps over the lazy dog", 0, 0x2E4FF723),
    ],
)
def test_the_plain_hash_gives_the_published_values(key: bytes, seed: int, expected: int) -> None:
    assert murmur3(key, seed) == expected


def test_the_plain_hash_passes_the_authors_own_verification() -> None:
    """SMHasher's: of the hashes of all keys 0, 1, ... n - 1 with seed 256 - n, among them the one of 16 bytes."""
    hashes = b"".join(struct.pack("<I", murmur3(bytes(range(length)), 256 - length)) for length in range(256))
    assert murmur3(hashes, 0) == 0xB0F57EE3


SEEDS = [0, 1, -1, -2, 42, 2**31, 2**32 - 1, 2**32, 2**62 + 12345, 2**63 - 1, -(2**63), -(2**40) - 3]
POSITIONS = [0, 1, 4095, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33 + 5]


def noise_of(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    return exponentials(hashed_positions(seeds, positions), vocabulary)


def test_the_noise_is_the_plain_hash_of_seed_position_and_token() -> None:
    vocabulary = 37
    noise = noise_of(torch.tensor(SEEDS), torch.tensor([POSITIONS] * len(SEEDS)), vocabulary)
    assert (noise.shape, noise.dtype) == ((len(SEEDS), len(POSITIONS), vocabulary), torch.float32)
    expected = [
        [[exponential_of(seed, position, token) for token in range(vocabulary)] for position in POSITIONS]
        for seed in SEEDS
    ]
    # fp32 keeps 2^24 steps of the unit interval, which are coarse for large variates: those that never win a race.
    error = np.abs(noise.numpy() - np.array(expected))
    assert (error <= 1e-6 * np.array(expected) + 2.0**-24 * np.exp(expected)).all()


def test_the_noise_of_a_large_token_id_is_the_plain_hash() -> None:
    noise = noise_of(torch.tensor([-3]), torch.tensor([[9]]), 150_000)[0, 0]
    for token in (149_999, 65_536, 131_071):
        assert noise[token].item() == pytest.approx(exponential_of(-3, 9, token), rel=1e-6)


# Of 2^32 hashes, the ends and where fp32 begins to round.
HASHES = [0, 1, 127, 128, 129, 255, 256, 2**24, 2**31 - 1, 2**31, WORD - 256, WORD - 128, WORD - 1, WORD]


@pytest.mark.parametrize("wanted", HASHES)
def test_every_hash_gives_positive_finite_noise(wanted: int) -> None:
    seed = seed_with_hash(wanted, position=100, token=5)
    assert murmur3(key_of(seed, 100, 5), 0) == wanted
    noise = noise_of(torch.tensor([seed]), torch.tensor([[100]]), 8)[0, 0, 5].item()
    assert 0.0 < noise < INF
    exact = -np.log((wanted + 0.5) / 2.0**32)
    # Of the largest variates only the size matters.
    assert noise == pytest.approx(exact, rel=1e-6 if wanted >= 2**24 else 0.35)


@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize("wanted", HASHES)
def test_the_only_possible_token_is_drawn_whatever_its_noise(wanted: int, is_filtered: bool) -> None:
    """What a grammar leaves may be one token; any other would be illegal."""
    seed = seed_with_hash(wanted, position=100, token=5)
    logits = torch.full((1, 1, 8), -INF)
    logits[..., 5] = 1.5
    asked = asking(seeds=[seed], is_filtered=is_filtered)
    assert sample_nodes(logits, torch.zeros((1, 1), dtype=torch.int64), torch.tensor([100]), 0, asked).item() == 5


def test_noise_is_exponential_with_mean_one() -> None:
    noise = noise_of(torch.arange(-32, 32), torch.arange(8).expand(64, -1), 4096).double()
    count = noise.numel()
    assert abs(noise.mean().item() - 1) < 5 / count**0.5
    edges = -torch.log1p(-torch.arange(1, 16) / 16)
    cells = torch.bincount(torch.bucketize(noise.flatten(), edges.double()), minlength=16)
    statistic = ((cells - count / 16) ** 2 / (count / 16)).sum()
    assert torch.special.gammaincc(torch.tensor(7.5).double(), statistic / 2).item() > 1e-6


def test_streams_of_other_seeds_and_positions_share_no_noise() -> None:
    """Neighbours of every kind: plus one, the other sign, one bit of either word, the words exchanged."""
    seeds = torch.tensor([5, 6, 7, -5, -6, 5 + 2**32, 6 + 2**32, 5 << 32, 5 ^ 1 << 31, 5 ^ 1 << 62, 5 - 2**63])
    positions = torch.tensor([0, 1, 2, 5, 6, 100, 101]).expand(len(seeds), -1)
    vocabulary = 4096
    streams = noise_of(seeds, positions, vocabulary).flatten(0, 1)
    count = len(streams)
    correlation = torch.corrcoef(streams.double()) - torch.eye(count)
    assert correlation.abs().max().item() < 6 / vocabulary**0.5
    # Nor shifted by a few tokens.
    for shift in (1, 2, 3):
        moved = torch.corrcoef(torch.cat([streams, streams.roll(shift, 1)]).double())[:count, count:]
        assert moved.abs().max().item() < 6 / vocabulary**0.5
    equal = sum(int((streams[first] == streams[first + 1 :]).sum()) for first in range(count))
    # fp32 leaves about 2^25 values, so that chance alone makes 12.1 M pairs meet less than once.
    assert equal <= 8


# What a request asks


def asking(
    seeds: list[int] | Tensor,
    temperatures: float | list[float] = 1.0,
    top_ks: int | list[int] = ALL,
    top_ps: float | list[float] = 1.0,
    min_ps: float | list[float] = 0.0,
    is_filtered: bool | None = None,
) -> Sampling:
    """One request per seed; a value that is no list holds for all of them."""
    seeds = torch.as_tensor(seeds)

    def column(value: Any, dtype: Any) -> Tensor:
        return torch.as_tensor(value, dtype=dtype).expand(len(seeds)).clone()

    sampled = column(top_ks, torch.int32), column(top_ps, torch.float32), column(min_ps, torch.float32)
    # As SGLang's batches have it, in which a greedy request counts as one with top-k.
    filters = bool((sampled[0] != ALL).any() or (sampled[1] != 1).any() or (sampled[2] > 0).any())
    return Sampling(
        column(temperatures, torch.float32).unsqueeze(1),
        *sampled,
        seeds,
        filters if is_filtered is None else is_filtered,
    )


# The filters


def naive_kept(probabilities: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Joint top-k, top-p and min-p of one row: each judges the whole distribution."""
    order = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))
    kept, before = set(), 0.0
    for rank, token in enumerate(order):
        probability = probabilities[token]
        in_nucleus = before <= top_p or top_p >= 1
        if rank < top_k and in_nucleus and probability >= np.float32(probabilities[order[0]]) * np.float32(min_p):
            kept.add(token)
        before += probability
    return kept


def kept_by_draw(row: Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that win when chance favours them as much as it can. row: [vocabulary]."""
    vocabulary = len(row)
    noise = torch.ones((vocabulary, vocabulary)).fill_diagonal_(1e-30)
    asked = asking([0], top_ks=top_k, top_ps=top_p, min_ps=min_p, is_filtered=True)
    winners = draw(row.expand(1, vocabulary, -1), noise.unsqueeze(0), asked)[0]
    return set(torch.nonzero(winners == torch.arange(vocabulary)).flatten().tolist())


FILTERS = list(product([2, 3, 7, ALL], [1e-6, 0.25, 0.5, 0.9375, 1.0], [0.0, 0.125, 0.5, 1.0]))


def tied_rows() -> Iterator[Tensor]:
    """Multiples of 1/64, so that sums are exact: top-p is met to the bit, and many tokens tie."""
    source = np.random.default_rng(3)
    for tokens in (4, 9, 20):
        yield torch.from_numpy(source.multinomial(64, source.dirichlet(np.full(tokens, 0.7))).astype(np.float32) / 64)
    yield torch.full((16,), 1 / 16)
    yield torch.tensor([0.125, 0.25, 0.25, 0.125, 0.25])
    yield torch.tensor([0.0, 0.0, 1.0, 0.0])


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_tied_probabilities_are_filtered_as_a_loop_filters_them(top_k: int, top_p: float, min_p: float) -> None:
    for row in tied_rows():
        possible = set(torch.nonzero(row).flatten().tolist())
        assert kept_by_draw(row, top_k, top_p, min_p) == naive_kept(row.tolist(), top_k, top_p, min_p) & possible


def test_random_probabilities_are_filtered_as_a_loop_filters_them() -> None:
    source = np.random.default_rng(4)
    sizes = set()
    for _ in range(300):
        row = torch.from_numpy(source.dirichlet(np.full(48, source.choice([0.1, 1.0, 10.0])))).float()
        top_k, top_p, min_p = (
            int(source.choice([2, 5, 20, ALL])),
            source.uniform(0.05, 1),
            source.choice([0, 0.05, 0.4]),
        )
        sums = np.cumsum(np.sort(row.numpy().astype(np.float64))[::-1])
        if np.abs(sums - top_p).min() < 1e-5:  # fp32 and the loop may round a sum to either side of such a top-p
            top_p += 3e-5
        possible = set(torch.nonzero(row).flatten().tolist())
        expected = naive_kept(row.tolist(), top_k, float(np.float32(top_p)), float(min_p)) & possible
        assert kept_by_draw(row, top_k, float(top_p), float(min_p)) == expected
        sizes.add(len(expected))
    assert {1, 2, 5, 20} < sizes, "the table holds too few sizes to be worth its name"


def test_each_request_of_a_batch_is_filtered_by_its_own_parameters() -> None:
    rows = torch.from_numpy(np.random.default_rng(5).dirichlet(np.full(24, 0.5), len(FILTERS))).float()
    top_ks, top_ps, min_ps = (list(column) for column in zip(*FILTERS, strict=True))
    noise = torch.ones((24, 24)).fill_diagonal_(1e-30).expand(len(FILTERS), -1, -1)
    asked = asking([0] * len(FILTERS), top_ks=top_ks, top_ps=top_ps, min_ps=min_ps)
    winners = draw(rows.unsqueeze(1).expand(-1, 24, -1), noise, asked)
    for row, own, filters in zip(rows, winners, FILTERS, strict=True):
        assert set(torch.nonzero(own == torch.arange(24)).flatten().tolist()) == kept_by_draw(row, *filters)


def test_a_top_p_of_one_keeps_every_token_where_the_sum_rounds_above_one() -> None:
    row = torch.full((3000,), 1 / 3000)
    row[:1500] *= 1 + 1e-6
    ranked = row.sort(descending=True).values
    assert (ranked.cumsum(0) - ranked)[-1] > 1 - 1 / 3000 and row.sum() > 1
    row = torch.cat([torch.tensor([1.0, 2.0**-20]), row * 2.0**-12])
    assert (row.cumsum(0) - row > 1).any(), "nothing of this row comes after a sum above 1"
    favoured = [1, 2, 1500, 3001]
    noise = torch.ones((1, len(favoured), len(row)))
    noise[0, range(len(favoured)), favoured] = 1e-30
    asked = asking([0], is_filtered=True)
    assert draw(row.expand(1, len(favoured), -1), noise, asked)[0].tolist() == favoured


@pytest.mark.parametrize(
    "filters",
    [{"top_ps": 1e-6}, {"top_ps": 1e-30}, {"min_ps": 1.0}, {"top_ks": 2, "top_ps": 1e-6, "min_ps": 1.0}],
)
def test_the_most_probable_token_always_stays(filters: dict[str, Any]) -> None:
    """With the strictest filters it is all that stays, however much chance speaks against it."""
    probabilities = torch.softmax(torch.randn((1, 200, 64), generator=torch.Generator().manual_seed(1)) * 3, dim=-1)
    best = probabilities.argmax(dim=-1)
    noise = torch.full_like(probabilities, 1e-6).scatter_(2, best.unsqueeze(2), 20.0)
    assert torch.equal(draw(probabilities, noise, asking([0], **filters, is_filtered=True)), best)


# The tokens of a request in any company

VOCABULARY = 300


def random_logits(batch: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn((batch, width, VOCABULARY), generator=torch.Generator().manual_seed(seed)) * 2


COMPANY: list[dict[str, Any]] = [
    {"temperatures": 0.8},
    {"top_ks": 1},  # greedy
    {"top_ps": 0.7, "temperatures": 1.3},
    {"top_ks": 5},
    {"min_ps": 0.1},
    {"top_ks": 40, "top_ps": 0.9, "min_ps": 0.02, "temperatures": 0.6},
    {},
]
DEFAULTS = {"temperatures": 1.0, "top_ks": ALL, "top_ps": 1.0, "min_ps": 0.0}
COMPANY_SEEDS = [3, -4, 2**62 + 1, 17, -(2**63), 2**32, 5]


def company() -> tuple[Tensor, Tensor, Tensor, Sampling]:
    """Logits, depths and prefix lengths of seven requests of all sorts, and what they ask."""
    columns = {name: [request.get(name, default) for request in COMPANY] for name, default in DEFAULTS.items()}
    depths = torch.tensor([0, 1, 1, 2, 2, 3, 0]).expand(len(COMPANY), -1)
    return random_logits(7, 7), depths, torch.tensor([10, 3, 900, 2, 77, 4000, 10]), asking(COMPANY_SEEDS, **columns)


def test_a_request_draws_the_same_tokens_alone_and_among_others() -> None:
    logits, depths, prefixes, asked = company()
    together = sample_nodes(logits, depths, prefixes, 3, asked)
    assert (together.shape, together.dtype) == (depths.shape, torch.int64)
    for row, request in enumerate(COMPANY):
        only = slice(row, row + 1)
        alone = asking([COMPANY_SEEDS[row]], **request)
        assert alone.is_filtered == bool(request.keys() & {"top_ks", "top_ps", "min_ps"})
        assert torch.equal(sample_nodes(logits[only], depths[only], prefixes[only], 3, alone), together[only])


def test_an_unfiltered_request_draws_the_same_tokens_beside_a_filtering_one() -> None:
    """Ten thousand draws: filtering takes another way through the code."""
    logits = random_logits(2, 5000, seed=6)
    depths = torch.arange(5000).expand(2, -1)
    prefixes = torch.tensor([3, 9])
    alone = sample_nodes(logits, depths, prefixes, 4999, asking([8, 9]))
    beside = sample_nodes(logits, depths, prefixes, 4999, asking([8, 9], is_filtered=True))
    assert torch.equal(alone, beside)


@pytest.mark.parametrize("is_filtered", [False, True])
def test_a_node_draws_the_same_token_in_any_tree(is_filtered: bool) -> None:
    chain = random_logits(1, 6)  # of the nodes on one path
    asked = asking([-7], top_ps=0.9 if is_filtered else 1.0)
    prefix = torch.tensor([50])
    narrow = sample_nodes(chain, torch.arange(6).unsqueeze(0), prefix, 5, asked)
    # The same path inside a tree of 64 nodes, at other indices, in a batch that may be deeper.
    places = torch.tensor([0, 2, 9, 31, 40, 63])
    wide, depths = random_logits(1, 64, seed=9), torch.randint(1, 16, (1, 64))
    wide[:, places], depths[:, places] = chain, torch.arange(6)
    assert torch.equal(sample_nodes(wide, depths, prefix, 15, asked)[:, places], narrow)


def test_a_nodes_token_depends_on_its_position_and_not_on_prefix_and_depth() -> None:
    """So that a step may end anywhere, and decoding without trees draws the same."""
    logits = random_logits(1, 1).expand(1, 12, -1)
    from_tree = sample_nodes(logits, torch.arange(12).unsqueeze(0), torch.tensor([30]), 11, asking([1]))[0]
    one_by_one = [
        sample_nodes(logits[:, :1], torch.zeros((1, 1), dtype=torch.int64), torch.tensor([30 + depth]), 0, asking([1]))
        for depth in range(12)
    ]
    assert from_tree.tolist() == [token.item() for token in one_by_one]
    assert len(set(from_tree.tolist())) > 3


@pytest.mark.parametrize("nodes_at_once", [0, 1, 2, 3, 6, 7, 8, 14, 20, 48, 49])
def test_tokens_drawn_in_chunks_are_those_drawn_at_once(nodes_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the requests, and where memory holds not even one of them, of its nodes."""
    *inputs, asked = company()
    at_once = sample_nodes(*inputs, 3, asked)
    sizes = []

    def counted(probabilities: Tensor, noise: Tensor, asked: Sampling) -> Tensor:
        sizes.append(probabilities.shape[0] * probabilities.shape[1])
        return draw(probabilities, noise, asked)

    monkeypatch.setattr(sampling, "draw", counted)
    monkeypatch.setattr(sampling, "DRAW_BYTES", nodes_at_once * sampling.BYTES_PER_PROBABILITY * VOCABULARY)
    assert torch.equal(sample_nodes(*inputs, 3, asked), at_once)
    assert sum(sizes) == at_once.numel()
    assert max(sizes) <= max(1, nodes_at_once)


def test_no_request_draws_nothing() -> None:
    empty = torch.zeros((0, 3), dtype=torch.int64)
    drawn = sample_nodes(torch.zeros((0, 3, 8)), empty, torch.zeros(0, dtype=torch.int64), 2, asking(empty[:, 0]))
    assert (drawn.shape, drawn.dtype) == ((0, 3), torch.int64)


def test_a_greedy_request_gets_the_argmax_of_its_logits_where_softmax_would_tie() -> None:
    logits = torch.zeros((3, 2, VOCABULARY))
    logits[..., 200] = 1e-9
    logits[..., 201] = 1e-8
    assert torch.softmax(logits, dim=-1).argmax(dim=-1).unique().tolist() != [201], "softmax does not tie here"
    asked = asking([1, 2, 3], top_ks=[1, ALL, 1])
    drawn = sample_nodes(logits, torch.tensor([[0, 1]] * 3), torch.tensor([4, 4, 4]), 1, asked)
    assert drawn[0].tolist() == drawn[2].tolist() == [201, 201]
    assert drawn[1].tolist() != [201, 201]


def test_a_greedy_request_gets_the_first_of_equal_logits() -> None:
    logits = torch.zeros((1, 1, VOCABULARY))
    logits[..., [7, 90]] = 2.0
    zero = torch.zeros((1, 1), dtype=torch.int64)
    assert sample_nodes(logits, zero, torch.tensor([4]), 0, asking([1], top_ks=1)).item() == 7


# SGLang's own noise


def test_unfiltered_tokens_are_those_of_sglangs_deterministic_inference() -> None:
    """argmax of log p - log(-log(h / (2^32 - 1))) in float64, with the same hash h of seed, position and token."""
    draws, vocabulary = 20_000, 64
    source = np.random.default_rng(8)
    seeds = source.integers(-(2**63), 2**63 - 1, draws)
    positions = source.integers(0, 1 << 20, draws)
    logits = torch.from_numpy(source.normal(0, 2, (draws, 1, vocabulary))).float()

    state = np.zeros((draws, 1), dtype=np.uint32)
    words = np.stack([seeds & WORD, seeds >> 32 & WORD, positions], axis=1).astype(np.uint32)
    tokens = np.arange(vocabulary, dtype=np.uint32)
    for word in (words[:, :1], words[:, 1:2], words[:, 2:], tokens):
        word = word * np.uint32(0xCC9E2D51)
        word = (word << 15 | word >> 17) * np.uint32(0x1B873593)
        state = state ^ word
        state = (state << 13 | state >> 19) * np.uint32(5) + np.uint32(0xE6546B64)
    state = state ^ np.uint32(16)
    state = (state ^ state >> 16) * np.uint32(0x85EBCA6B)
    state = (state ^ state >> 13) * np.uint32(0xC2B2AE35)
    hashes = state ^ state >> 16
    assert hashes[3, 5] == murmur3(key_of(int(seeds[3]), int(positions[3]), 5), 0)

    gumbel = -np.log(-np.log(hashes.astype(np.float64) / WORD))
    expected = (torch.log_softmax(logits.double(), dim=-1).squeeze(1).numpy() + gumbel).argmax(axis=1)
    depths = torch.zeros((draws, 1), dtype=torch.int64)
    drawn = sample_nodes(logits, depths, torch.from_numpy(positions), 0, asking(torch.from_numpy(seeds)))
    assert (drawn.squeeze(1).numpy() == expected).mean() >= 0.999
