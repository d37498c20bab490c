"""A user without rights, for what root would be allowed anyway."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

Prepared = TypeVar("Prepared")
NOBODY = 65534


@contextmanager
def as_nobody(prepare: Callable[[Path], Prepared]) -> Iterator[Prepared]:
    """What `prepare` makes of a new folder that all may enter; inside the block this process is not root."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        prepared = prepare(Path(name))
        try:
            if user == 0:
                os.setresuid(NOBODY, NOBODY, user)  # the real one, too: access(2) asks for it
            yield prepared
        finally:
            os.setresuid(user, user, user)
