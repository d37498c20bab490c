"""Rehearsal: the same server on a machine without a GPU, with the bundled pair, for CI and for trying things out."""
