"""Stand-in for sglang-kernel on a machine without a GPU: what SGLang's CPU engine calls while serving, in torch.

Goes first on PYTHONPATH (scheduler processes import `sgl_kernel` before plugins load). Any other kernel can be
imported, as SGLang does at start, but raises NotImplementedError when it is called.
"""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch

__version__ = "0.4.5+rehearsal"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new slots into its row: req_to_token[r, start:end] = its part of `out_cache_loc`.

    Raises IndexError if a range leaves the row, where the GPU kernel would write into the next request's row.
    """
    for request, start, end, offset in _ranges(req_pool_indices, start_offset, end_offset):
        if end > pool_len:
            raise IndexError(f"slots {start}..{end} leave the req_to_token row of {pool_len}")
        req_to_token[request, start:end] = out_cache_loc[offset : offset + end - start].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The inverse: collect req_to_token[r, start:end] of every request into `out_cache_loc`, in order."""
    for request, start, end, offset in _ranges(req_pool_indices, start_offset, end_offset):
        if end > pool_len:
            raise IndexError(f"slots {start}..{end} leave the req_to_token row of {pool_len}")
        out_cache_loc[offset : offset + end - start] = req_to_token[request, start:end].to(out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Move KV rows in every layer's buffers. All sources are read before any target is written.

    data_ptrs: [buffers] addresses; strides: [buffers] bytes per row; tgt_loc, src_loc: [n] row numbers.
    """
    if src_loc.numel() == 0:
        return
    source, target = src_loc.numpy(), tgt_loc.numpy()
    rows = int(max(source.max(), target.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = np.ctypeslib.as_array(memory).reshape(rows, stride)
        buffer[target] = buffer[source]  # fancy indexing copies the right side first


def _ranges(requests: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> Iterator[tuple[int, int, int, int]]:
    offset = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield request, start, end, offset
        offset += end - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in in the rehearsal; it needs a GPU")

    return missing
