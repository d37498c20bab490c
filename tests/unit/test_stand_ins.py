"""The stand-in kernels of the rehearsal against obvious loops. Loaded by path, so that no other test sees them."""

from __future__ import annotations

import importlib.util
import sys
from itertools import product
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the rehearsal environment (torch)")

from ddtree_appliance.rehearsal.server import STAND_INS  # noqa: E402

POOL_LEN = 12
# start and end in each request's row; a request may get nothing
RANGES = [
    ([0], [5], [9]),
    ([2, 0], [0, 3], [4, 5]),
    ([3, 1, 0], [2, 7, 0], [2, POOL_LEN, 1]),
    ([1, 2], [0, 0], [POOL_LEN, POOL_LEN]),
    ([], [], []),
]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stand_in_sgl_kernel", STAND_INS / "sgl_kernel" / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(dtype: Any) -> Any:
    return torch.arange(100, 100 + 4 * POOL_LEN, dtype=dtype).view(4, POOL_LEN)


# Slots in and out of the request table


@pytest.mark.parametrize("requests,starts,ends", RANGES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_new_slots_are_written_into_their_rows_and_nowhere_else(
    kernels: ModuleType, requests: list[int], starts: list[int], ends: list[int], dtype: Any
) -> None:
    rows = table(torch.int32)
    slots = torch.arange(sum(ends) - sum(starts), dtype=dtype)
    expected = rows.tolist()
    remaining = iter(slots.tolist())
    for request, start, end in zip(requests, starts, ends, strict=True):
        for column in range(start, end):
            expected[request][column] = next(remaining)

    kernels.assign_req_to_token_pool_cpu(
        torch.tensor(requests, dtype=dtype),
        rows,
        torch.tensor(starts, dtype=dtype),
        torch.tensor(ends, dtype=dtype),
        slots,
        POOL_LEN,
    )

    assert rows.tolist() == expected
    assert rows.dtype == torch.int32


@pytest.mark.parametrize("requests,starts,ends", RANGES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_are_collected_in_request_order(
    kernels: ModuleType, requests: list[int], starts: list[int], ends: list[int], dtype: Any
) -> None:
    rows = table(torch.int32)
    expected = [
        value
        for request, start, end in zip(requests, starts, ends, strict=True)
        for value in rows[request, start:end].tolist()
    ]
    # Longer than needed, as SGLang's buffer may be; the rest stays as it is.
    out = torch.full((len(expected) + 3,), -7, dtype=dtype)

    kernels.assign_extend_cache_locs_cpu(
        torch.tensor(requests), rows, torch.tensor(starts), torch.tensor(ends), out, POOL_LEN
    )

    assert out.tolist() == [*expected, -7, -7, -7]
    assert torch.equal(rows, table(torch.int32))


@pytest.mark.parametrize("name", ["assign_req_to_token_pool_cpu", "assign_extend_cache_locs_cpu"])
def test_a_range_that_leaves_its_row_is_an_error(kernels: ModuleType, name: str) -> None:
    assign = getattr(kernels, name)
    for end, is_good in ((POOL_LEN, True), (POOL_LEN + 1, False)):
        arguments = (
            torch.tensor([1]),
            table(torch.int64),
            torch.tensor([POOL_LEN - 2]),
            torch.tensor([end]),
            torch.zeros(3, dtype=torch.int64),
            POOL_LEN,
        )
        if is_good:
            assign(*arguments)
        else:
            with pytest.raises(IndexError, match=r"slots 10\.\.13 leave the req_to_token row of 12"):
                assign(*arguments)


# Moving KV


@pytest.mark.parametrize(
    "target,source",
    [
        ([4, 5], [1, 2]),  # apart
        ([3, 4, 5], [4, 5, 6]),  # each source is the next one's target
        ([4, 5, 6], [3, 4, 5]),  # row by row, the first row would run through
        ([1, 2], [2, 1]),  # a swap
        ([0, 1, 2, 3], [0, 1, 2, 3]),  # onto themselves
        ([7], [0]),
        ([], []),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_every_buffer_move_as_if_at_once(
    kernels: ModuleType, target: list[int], source: list[int], dtype: Any
) -> None:
    # Layers may differ in their row size; there are keys and values.
    buffers = [torch.randn(8, heads, 4).to(dtype) for heads in (2, 2, 3)]
    before = [buffer.clone() for buffer in buffers]

    kernels.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64),
        torch.tensor([buffer[0].numel() * buffer.element_size() for buffer in buffers], dtype=torch.int64),
        torch.tensor(target, dtype=torch.int64),
        torch.tensor(source, dtype=torch.int64),
    )

    moves = dict(zip(target, source, strict=True))
    for (buffer, old), row in product(zip(buffers, before, strict=True), range(8)):
        assert torch.equal(buffer[row], old[moves.get(row, row)])


# Everything else


def test_an_unknown_kernel_can_be_imported_but_not_called(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stand_in_sgl_kernel", kernels)
    namespace: dict[str, Any] = {}
    exec("from stand_in_sgl_kernel import some_gpu_kernel", namespace)
    with pytest.raises(NotImplementedError, match=r"^sgl_kernel\.some_gpu_kernel has no stand-in in the rehearsal"):
        namespace["some_gpu_kernel"](1, flag=True)


def test_unknown_module_attributes_stay_unknown(kernels: ModuleType) -> None:
    # Python's import machinery asks for these and must hear the truth.
    with pytest.raises(AttributeError, match="__wrapped__"):
        kernels.__wrapped__  # noqa: B018


def test_the_version_says_that_it_is_a_stand_in(kernels: ModuleType) -> None:
    assert kernels.__version__.endswith("+rehearsal")


def test_loading_by_path_leaves_the_import_path_alone(kernels: ModuleType) -> None:
    assert sys.modules.get("sgl_kernel") is not kernels
