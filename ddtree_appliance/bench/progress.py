"""What a benchmark says while it runs, on stderr: a bar on a terminal, a line per measured cell elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from ddtree_appliance.bench.records import Cell

_WAIT_LINE_EVERY_S = 30.0


class Progress:
    """Counts cells (a variant's repeat) up to `total`."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._said_waiting_s = 0.0
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return self  # lines do as well
            self._bar = tqdm(total=self._total, unit="cell", file=sys.stderr, dynamic_ncols=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def say(self, text: str) -> None:
        """One line that stays."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def waiting(self, seconds: float, names: list[str]) -> None:
        """Servers that are not ready yet."""
        text = f"starting, {seconds:.0f} s: {', '.join(names)}"
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        elif seconds < self._said_waiting_s or seconds - self._said_waiting_s >= _WAIT_LINE_EVERY_S:
            self._said_waiting_s = seconds
            self.say(text)

    def measuring(self, what: str, cell: Cell | None) -> None:
        """`what` begins; with a cell it is done."""
        if cell is None:
            if self._bar is not None:
                self._bar.set_postfix_str(what)
            return
        self._done += 1
        if self._bar is not None:
            self._bar.update(1)
            self._bar.set_postfix_str(f"{what}: {cell.tok_s:.0f} tok/s")
        else:
            self.say(f"[{self._done}/{self._total}] {what}: {cell.tok_s:.1f} tok/s")
