"""The KV buffers as the move of accepted rows sees them: rows of equal whole words, or a refusal."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")

from ddtree_appliance.ddtree.kv_buffers import KVBuffers  # noqa: E402

Tensor = Any  # torch may be missing where these annotations are read


@pytest.mark.parametrize(
    "row,dtype,words",
    [
        ((2, 3), torch.float32, 6),
        ((8, 128), torch.bfloat16, 512),
        ((1, 2), torch.float16, 1),
        ((1, 4), torch.uint8, 1),
        ((2, 64), torch.float8_e4m3fn, 32),
        ((3, 2), torch.float64, 12),
    ],
)
def test_a_row_is_counted_in_words_of_its_own_type(row: tuple[int, int], dtype: Any, words: int) -> None:
    buffers = KVBuffers.of([torch.zeros(5, *row, dtype=dtype) for _ in range(3)])
    assert buffers.words_per_row == words


@pytest.mark.parametrize("count", [1, 4])
def test_the_pointers_are_where_each_buffer_begins_in_the_given_order(count: int) -> None:
    whole = torch.zeros(8, 6, 2, 4)
    tensors = [whole[layer] for layer in range(count - 1, -1, -1)]  # views: not where their storage begins
    buffers = KVBuffers.of(tensors)
    assert buffers.pointers.tolist() == [tensor.data_ptr() for tensor in tensors]
    assert (buffers.pointers.dtype, buffers.pointers.device) == (torch.int64, whole.device)
    assert [tensor.data_ptr() for tensor in buffers.tensors] == buffers.pointers.tolist()


def test_the_buffers_are_shared_not_copied() -> None:
    layers = [torch.zeros(4, 1, 2), torch.zeros(4, 1, 2)]
    buffers = KVBuffers.of(layers)
    layers[1][3] = 7.0
    assert buffers.tensors[1][3].tolist() == [[7.0, 7.0]]


def test_buffers_of_other_heads_with_rows_of_one_size_are_good() -> None:
    buffers = KVBuffers.of([torch.zeros(4, 2, 6), torch.zeros(9, 3, 4), torch.zeros(4, 2, 12, dtype=torch.bfloat16)])
    assert buffers.words_per_row == 12


@pytest.mark.parametrize(
    "tensors,message",
    [
        ([(4, 2, 3), (4, 2, 4)], r"rows of one size .* not of \[24, 32\] bytes"),
        ([], r"rows of one size .* not of \[\] bytes"),
    ],
)
def test_rows_of_several_sizes_are_refused(tensors: list[tuple[int, int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVBuffers.of([torch.zeros(shape) for shape in tensors])


@pytest.mark.parametrize(
    "scattered",
    [
        lambda: torch.zeros(2, 4, 3).transpose(0, 1),  # heads before slots
        lambda: torch.zeros(4, 2, 6)[..., :3],
        lambda: torch.zeros(8, 2, 3)[::2],
    ],
)
def test_a_buffer_with_holes_is_refused_wherever_it_stands(scattered: Any) -> None:
    for tensors in ([scattered(), torch.zeros(4, 2, 3)], [torch.zeros(4, 2, 3), scattered()]):
        with pytest.raises(ValueError, match="contiguous buffers"):
            KVBuffers.of(tensors)


@pytest.mark.parametrize(
    "row,dtype,size", [((1, 3), torch.bfloat16, 6), ((2, 3), torch.uint8, 6), ((1, 1), torch.int8, 1)]
)
def test_rows_that_are_no_whole_words_are_refused(row: tuple[int, int], dtype: Any, size: int) -> None:
    with pytest.raises(ValueError, match=f"whole 4-byte words, not of {size} bytes"):
        KVBuffers.of([torch.zeros(4, *row, dtype=dtype)])
