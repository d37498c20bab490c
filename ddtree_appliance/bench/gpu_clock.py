"""At which clock the GPU ran during a repeat, and what held it back.

Variants draw different power, and a GPU at its limit lowers its clock for the one that draws more: a reader of a ratio
should know. Read through NVML by the client, a few times a second; the servers know nothing of it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import fmean
from types import TracebackType
from typing import Any

from ddtree_appliance.bench.records import GpuClock
from ddtree_appliance.errors import HostError
from ddtree_appliance.gpus import open_nvml

PERIOD_S = 0.2
# NVML's bits (nvml.h, nvmlClocksThrottleReasons). Idleness holds nothing back; it is seen between two requests.
REASONS = {
    0x02: "application clocks",
    0x04: "power limit",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}


@dataclass(frozen=True)
class Sample:
    """mhz: of the SMs; watts: None where the GPU does not tell; reasons: why the clock is not higher."""

    mhz: int
    watts: float | None
    reasons: tuple[str, ...]


def summary_of(samples: list[Sample]) -> GpuClock | None:
    """None without a sample."""
    if not samples:
        return None
    watts = [sample.watts for sample in samples if sample.watts is not None]
    counts = Counter(reason for sample in samples for reason in sample.reasons)
    return GpuClock(
        samples=len(samples),
        mhz=fmean(sample.mhz for sample in samples),
        lowest_mhz=min(sample.mhz for sample in samples),
        watts=fmean(watts) if watts else None,
        held_back={reason: count / len(samples) for reason, count in sorted(counts.items())},
    )


class ClockWatch:
    """Samples in a thread of its own inside `with`. read: one sample; an OSError ends the watching."""

    def __init__(self, read: Callable[[], Sample], period_s: float = PERIOD_S) -> None:
        self._read = read
        self._period_s = period_s
        self._is_over = threading.Event()
        self._samples: list[Sample] = []
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ClockWatch:
        self._is_over.clear()
        self._samples = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._thread is not None
        self._is_over.set()
        self._thread.join()

    def seen(self) -> GpuClock | None:
        """What the last `with` ran at; None if the GPU did not answer once."""
        return summary_of(self._samples)

    def _watch(self) -> None:
        with contextlib.suppress(OSError):
            # The first after a period: the clock has risen by then.
            while not self._is_over.wait(self._period_s):
                self._samples.append(self._read())


@contextmanager
def gpu_watched(say: Callable[[str], None], environment: Mapping[str, str] = os.environ) -> Iterator[ClockWatch | None]:
    """A watch over the first GPU that the servers see; None, and why in one line, where NVML does not tell its clock.

    CUDA_VISIBLE_DEVICES is read in NVML's order, which is that of nvidia-smi. With several ranks it is rank 0's GPU.
    """
    with ExitStack() as stack:
        watch = None
        try:
            nvml = stack.enter_context(open_nvml())
            handle = _handle(nvml, environment.get("CUDA_VISIBLE_DEVICES", ""))
            _read(nvml, handle)
            watch = ClockWatch(lambda: _read(nvml, handle))
        except (HostError, OSError) as error:
            say(f"the GPU's clock is not recorded: {error}")
        yield watch


def _handle(nvml: Any, visible: str) -> Any:
    first = visible.split(",")[0].strip() or "0"
    is_uuid = first.startswith(("GPU-", "MIG-"))
    if not is_uuid and not first.isdecimal():
        raise OSError(f"CUDA_VISIBLE_DEVICES={visible} names no GPU")
    try:
        return nvml.nvmlDeviceGetHandleByUUID(first) if is_uuid else nvml.nvmlDeviceGetHandleByIndex(int(first))
    except nvml.NVMLError as error:
        raise OSError(f"CUDA_VISIBLE_DEVICES={visible}: {error}") from error


def _read(nvml: Any, handle: Any) -> Sample:
    try:
        watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    except nvml.NVMLError:
        watts = None
    try:
        bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    except nvml.NVMLError:
        bits = 0
    try:
        mhz = int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
    except nvml.NVMLError as error:
        raise OSError(f"no clock: {error}") from error
    return Sample(mhz, watts, tuple(name for bit, name in REASONS.items() if bits & bit))
