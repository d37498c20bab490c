"""The KV pool as the move of accepted rows sees it: every layer's K and V buffer, and where each begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

BYTES_PER_WORD = 4


@dataclass(frozen=True)
class KVBuffers:
    """tensors: each [slots, heads, head_dim], contiguous, all with rows of `words_per_row` 32-bit words.

    pointers: [len(tensors)] int64, the tensors' addresses, on their device.
    """

    tensors: tuple[torch.Tensor, ...]
    pointers: torch.Tensor
    words_per_row: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> KVBuffers:
        """Raises ValueError for buffers whose rows cannot be moved as equal runs of 32-bit words."""
        row_bytes = {tensor[0].numel() * tensor.element_size() for tensor in tensors}
        if len(row_bytes) != 1 or not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError(
                f"DDTREE moves KV rows of one size in contiguous buffers, not of {sorted(row_bytes)} bytes"
            )
        (size,) = row_bytes
        if size % BYTES_PER_WORD:
            raise ValueError(f"DDTREE moves KV rows of whole {BYTES_PER_WORD}-byte words, not of {size} bytes")
        pointers = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=tensors[0].device)
        return cls(tuple(tensors), pointers, size // BYTES_PER_WORD)
