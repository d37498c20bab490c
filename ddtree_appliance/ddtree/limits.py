"""The tree sizes that the engine accepts; apart from the algorithm, so that a host without numpy can check them."""

MAX_BUDGET = 128
MAX_TOPK = 64
