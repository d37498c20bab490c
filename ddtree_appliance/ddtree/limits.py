"""The tree sizes that the engine accepts, and what follows from one: for hosts without numpy or torch, too."""

MAX_BUDGET = 128
MAX_TOPK = 64
# Of what `inputs.ancestor_bits` keeps of each node: a bit for every node but the root.
BITS_PER_WORD = 32


def words_for(width: int) -> int:
    """The words of `inputs.ancestor_bits` per node. width: V."""
    return max(1, -(-(width - 1) // BITS_PER_WORD))
