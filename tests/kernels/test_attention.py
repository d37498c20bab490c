"""The verify attention equals a plain softmax over what a token sees, on random trees, whole blocks and prefixes.

Tolerances, of the norm: fp32 products are exact to rounding (1e-5); fp16 and bf16 round each weight before the product
with the values (2e-3, 1e-2).
"""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
from ddtree_appliance.ddtree.fused import attention  # noqa: E402
from ddtree_appliance.ddtree.inputs import ancestor_bits  # noqa: E402
from ddtree_appliance.ddtree.limits import words_for  # noqa: E402
from tests.kernels.test_fused import (  # noqa: E402
    DEVICE,
    FUSED,
    INTERPRETED,
    on_device,
    pytestmark,  # noqa: F401
    torch_ops,
    trees_of,
)


def reference(query: Any, keys: Any, values: Any, allowed: Any, scale: float) -> Any:
    """One request in float64: [V, heads, dim], [n, kv_heads, dim] twice, [V, n] bool."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.double().repeat_interleave(group, 1), values.double().repeat_interleave(group, 1)
    scores = torch.einsum("vhd,nhd->hvn", query.double(), keys) * scale
    scores = scores.masked_fill(~allowed, float("-inf"))
    return torch.einsum("hvn,nhd->vhd", scores.softmax(-1), values)


def run(
    prefixes: list[int],
    budget: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: Any,
    drop_mask: bool = False,
    is_block: bool = False,
    tiling: attention.Tiling | None = None,
) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(sum(prefixes) + budget)
    batch, width = len(prefixes), budget + 1
    ancestors = trees_of((batch, 7, 4), budget, "continuous").ancestors
    slots = torch.randperm(sum(prefixes) + batch * width + 5, generator=generator)
    count = len(slots)

    def rows(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(dtype)

    # Queries are a part of a wider row, as after a fused projection.
    query = rows(batch * width, heads * dim + 8)[:, : heads * dim].view(batch * width, heads, dim)
    key_pool, value_pool = rows(count, kv_heads, dim), rows(count, kv_heads, dim)
    # Garbage behind what a request holds, and behind the batch.
    step_rows = torch.full((batch + 2, max(prefixes) + width + 3), 2**31 - 1, dtype=torch.int32)
    used = list(slots[: sum(prefixes) + batch * width].split([prefix + width for prefix in prefixes]))
    for row, own in zip(step_rows, used, strict=False):
        row[: len(own)] = own
    written = torch.ones_like(ancestors).tril() if drop_mask else ancestors
    output = torch.empty((batch * width, heads, dim), dtype=dtype, device=DEVICE)
    tensors = (query, key_pool, value_pool, torch.tensor(prefixes))
    bits = None if is_block else ancestor_bits(written).to(DEVICE)
    attend = attention.VerifyAttention(DEVICE, step_rows.to(DEVICE), bits, tiling)
    for _ in range(2):  # a call leaves the next one what it found
        attend(*(each.to(DEVICE) for each in tensors), not is_block, dim**-0.5, width, output.fill_(float("nan")))

    expected = []
    for at, prefix in enumerate(prefixes):
        seen = torch.ones_like(ancestors[at]) if is_block else ancestors[at]
        allowed = torch.cat([torch.ones(width, prefix, dtype=torch.bool), seen], dim=1)
        part = query[at * width :][:width]
        expected.append(reference(part, key_pool[used[at]], value_pool[used[at]], allowed, dim**-0.5))
    return output.cpu().double(), torch.cat(expected)


def error(got: Any, expected: Any) -> float:
    return float((got - expected).norm() / expected.norm())


CASES = [
    # prefixes, budget, heads, KV heads, head size
    ([3], 1, 2, 1, 16),
    ([200], 30, 8, 2, 16),
    ([0, 70], 7, 4, 4, 24),
    ([1, 130, 65], 16, 4, 1, 32),
    # Trees of two, three and four words of bits, over the edge of a tile.
    ([5], 33, 2, 1, 16),
    ([100], 70, 2, 1, 16),
    ([60], 128, 1, 1, 16),
    # Tiles that end just behind the prefix, at it, and just before it.
    ([126, 128, 129], 5, 2, 1, 16),
]
if not INTERPRETED:
    CASES += [([96 + 32 * n for n in range(8)], 15, 32, 8, 128)]  # a batch between few rows and many
    CASES += [([1], 64, 32, 8, 128), ([5000, 3], 128, 32, 8, 128), ([50 * n for n in range(32)], 64, 32, 8, 128)]


@pytest.mark.parametrize("prefixes,budget,heads,kv_heads,dim", CASES)
# The interpreter has no product of bf16 numbers.
@pytest.mark.parametrize(
    "dtype,tolerance", [(torch.float32, 1e-5), (torch.float16, 2e-3) if INTERPRETED else (torch.bfloat16, 1e-2)]
)
def test_attention_equals_a_plain_softmax(
    prefixes: list[int], budget: int, heads: int, kv_heads: int, dim: int, dtype: Any, tolerance: float
) -> None:
    got, expected = run(prefixes, budget, heads, kv_heads, dim, dtype)
    assert error(got, expected) < tolerance


@pytest.mark.parametrize("prefixes,budget,heads,kv_heads,dim", CASES)
def test_without_a_mask_every_token_sees_its_whole_block(
    prefixes: list[int], budget: int, heads: int, kv_heads: int, dim: int
) -> None:
    got, expected = run(prefixes, budget, heads, kv_heads, dim, torch.float32, is_block=True)
    assert error(got, expected) < 1e-5


def test_a_step_attends_to_what_it_wrote_before_the_forward() -> None:
    """The scheduler's table changes after the step has begun, and the batch's order is not the table's."""
    generator = torch.Generator().manual_seed(3)
    prefixes, width, heads, dim = [40, 3], 21, 2, 16
    trees = trees_of((2, 7, 4), width - 1, "continuous")
    moved = torch_ops.TreeBatch(*on_device(trees.token_ids, trees.parents, trees.depths, trees.ancestors))
    req_to_token = torch.randperm(4 * 80, generator=generator).view(4, 80).to(torch.int32)
    requests, lens, bonus = torch.tensor([3, 1]), torch.tensor(prefixes), torch.tensor([5, 6])
    rows = torch.zeros((3, 80), dtype=torch.int32, device=DEVICE)
    bits = torch.zeros((3, width, words_for(width)), dtype=torch.int32, device=DEVICE)
    table = req_to_token.clone().to(DEVICE)
    FUSED.draft_inputs(*on_device(bonus, lens, requests), table, 9, 16, width, rows)
    FUSED.verify_inputs(moved, *on_device(bonus, lens), sum(prefixes), bits_out=bits)
    table.fill_(0)

    query = torch.randn(2 * width, heads, dim, generator=generator)
    keys, values = (torch.randn(4 * 80, 1, dim, generator=generator) for _ in range(2))
    output = torch.empty_like(query, device=DEVICE)
    attend = attention.VerifyAttention(DEVICE, rows, bits)
    attend(*on_device(query, keys, values, lens), True, dim**-0.5, width, output)

    for at, (request, prefix) in enumerate(zip(requests.tolist(), prefixes, strict=True)):
        used = req_to_token[request, : prefix + width].long()
        allowed = torch.cat([torch.ones(width, prefix, dtype=torch.bool), trees.ancestors[at]], dim=1)
        own = slice(at * width, (at + 1) * width)
        expected = reference(query[own], keys[used], values[used], allowed, dim**-0.5)
        assert error(output[own].cpu().double(), expected) < 1e-5


@pytest.mark.parametrize(
    "width,bits,requests,is_tree,complaint",
    [
        (64, None, 1, True, "64 nodes needs"),
        (64, (1, 5, 1), 1, True, "64 nodes needs"),
        (64, (1, 64, 1), 1, True, "64 nodes needs"),
        (130, (1, 130, 5), 1, True, "up to 129"),
        (64, (2, 64, 2), 3, True, "2 requests, not of 3"),
        (16, None, 5, False, "4 requests, not of 5"),
    ],
)
def test_what_the_buffers_do_not_hold_is_refused(
    width: int, bits: tuple[int, ...] | None, requests: int, is_tree: bool, complaint: str
) -> None:
    slots = torch.zeros((4, 300), dtype=torch.int32)
    kept = None if bits is None else torch.zeros(bits, dtype=torch.int32)
    rows = torch.zeros(requests * width, 1, 16)
    with pytest.raises(ValueError, match=complaint):
        attention.VerifyAttention("cpu", slots, kept)(rows, rows, rows, torch.ones(requests), is_tree, 1.0, width, rows)


def test_a_dropped_mask_would_be_noticed() -> None:
    got, expected = run([40], 20, 2, 1, 16, torch.float32, drop_mask=True)
    assert error(got, expected) > 0.05


# rows, keys and least tiles of a part; parts; tiles up to which blocks are smaller and keys not cut
CUTS = [
    (64, 64, 1, 1, 0),
    (64, 64, 1, 2, 0),
    (64, 64, 1, 16, 0),
    (16, 32, 1, 16, 0),
    (16, 32, 3, 4, 0),
    (64, 16, 2, 4, 0),
    (128, 64, 9, 8, 0),
    (32, 32, 1, 4, 1),  # the request without a prefix alone
    (32, 32, 1, 2, 9),
    (64, 32, 1, 4, 9),
    (64, 32, 1, 2, 9),  # too few parts for blocks of 16 rows
    (16, 32, 1, 8, 9),
]


@pytest.mark.parametrize("rows,keys,part_tiles,parts,short_tiles", CUTS)
def test_the_cut_does_not_change_the_result(
    rows: int, keys: int, part_tiles: int, parts: int, short_tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "parts_for", lambda blocks, programs: parts)
    tiling = attention.Tiling(rows, keys, 4, 2, part_tiles, short_tiles=short_tiles)
    got, expected = run([150, 2, 0], 19, 4, 2, 16, torch.float32, tiling=tiling)
    assert error(got, expected) < 1e-5


@pytest.mark.parametrize("blocks,parts", [(1, 16), (8, 16), (33, 8), (132, 2), (133, 1), (264, 1), (5000, 1)])
def test_parts_fill_a_gpu_and_no_more(blocks: int, parts: int) -> None:
    assert attention.parts_for(blocks, 264) == parts


@pytest.mark.parametrize(
    "batch,rows,tile",
    [
        (1, 64, 16),
        (2, 64, 16),
        (4, 64, 32),
        (1, 256, 32),
        (8, 64, 32),
        (9, 64, 64),
        (2, 256, 32),
        (3, 256, 64),
        (32, 256, 64),
    ],
)
def test_the_fewer_rows_a_batch_has_the_finer_they_are_cut(batch: int, rows: int, tile: int) -> None:
    assert attention.tiling_for(batch, rows, kv_heads=8).rows == tile


@pytest.mark.parametrize(
    "head_dim,value_dim,dtype,served",
    [
        (128, 128, torch.bfloat16, True),
        (64, 128, torch.float16, True),
        (80, 80, torch.bfloat16, True),
        (192, 128, torch.bfloat16, False),
        (256, 256, torch.bfloat16, False),
        (8, 8, torch.bfloat16, False),
        (128, 128, torch.float32, False),
    ],
)
def test_heads_that_do_not_fit_every_gpu_are_left_to_sglangs_kernel(
    head_dim: int, value_dim: int, dtype: Any, served: bool
) -> None:
    assert attention.serves(head_dim, value_dim, dtype) is served
