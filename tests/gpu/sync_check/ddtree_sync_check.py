"""An SGLang plugin for one test: every decode step of DDTREE runs with waits for the device made errors.

The test puts this folder on the server's PYTHONPATH and reads in the file DDTREE_SYNC_COUNT how many steps were
checked. With DDTREE_SYNC_FAULT the checked part of a step reads a device value on the host, and the server must die.
"""

import functools
import os
import warnings
from pathlib import Path
from typing import Any

# Kernels are loaded, and buffers made, in a server's first steps.
UNCHECKED_STEPS = 50


def register() -> None:
    from ddtree_appliance.ddtree import algorithm

    create = algorithm.DDTreeAlgorithm.create_worker

    @functools.wraps(create)
    def create_worker(self: Any, *args: Any, **kwargs: Any) -> Any:
        worker_class = create(self, *args, **kwargs)
        if not hasattr(worker_class, "sync_checked"):
            worker_class.sync_checked = True
            worker_class.forward_batch_generation = checked(worker_class.forward_batch_generation)
        return worker_class

    algorithm.DDTreeAlgorithm.create_worker = create_worker


def checked(step: Any) -> Any:
    import torch

    warnings.filterwarnings("ignore", message="Synchronization debug mode")
    done = 0

    @functools.wraps(step)
    def with_check(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            return step(self, batch, *args, **kwargs)
        done += 1
        if done <= UNCHECKED_STEPS:
            return step(self, batch, *args, **kwargs)
        torch.cuda.set_sync_debug_mode("error")
        if done % 100 == 0:
            Path(os.environ["DDTREE_SYNC_COUNT"]).write_text(str(done - UNCHECKED_STEPS))
        try:
            if os.environ.get("DDTREE_SYNC_FAULT"):
                batch.seq_lens.cpu()
            return step(self, batch, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return with_check
