"""SGLang's own classes for unit tests that check our rules against them."""

import os
import sys
import warnings
from types import ModuleType

import pytest

from ddtree_appliance.rehearsal.server import STAND_INS


def import_sglang(name: str) -> ModuleType:
    """A module of SGLang as the CPU rehearsal imports it: its kernels are the stand-ins, its warnings its own.

    Called by tests only, never while they are collected: other tests show that SGLang is not imported.
    """
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sys.path.insert(0, str(STAND_INS))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module: ModuleType = pytest.importorskip(name, reason="needs the rehearsal environment (SGLang)")
    finally:
        sys.path.remove(str(STAND_INS))
    return module
