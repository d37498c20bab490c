"""The GPU's clock during a repeat: which GPU, what is summed up, and what is said where nothing can be read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from ddtree_appliance.bench.gpu_clock import ClockWatch, Sample, gpu_watched, summary_of
from ddtree_appliance.bench.records import GpuClock

BUSY = Sample(1980, 650.0, ())
LIMITED = Sample(1900, 700.0, ("power limit",))


def refusing(code: int) -> Callable[..., Any]:
    def refuse(*arguments: Any) -> Any:
        raise pynvml.NVMLError(code)

    return refuse


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs two GPUs, 1800 and 1900 MHz; keywords replace functions."""

    def install(**changes: Any) -> None:
        functions = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetHandleByIndex": lambda index: (1800, 1900)[index],
            "nvmlDeviceGetHandleByUUID": lambda uuid: {"GPU-b": 1900}[uuid],
            "nvmlDeviceGetClockInfo": lambda mhz, kind: mhz if kind == pynvml.NVML_CLOCK_SM else 0,
            "nvmlDeviceGetPowerUsage": lambda mhz: 512_300,
            # Idle, which holds nothing back, and at the power limit.
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda mhz: 0x5,
        }
        for name, function in {**functions, **changes}.items():
            monkeypatch.setattr(pynvml, name, function)

    return install


def watched(watch: ClockWatch) -> GpuClock | None:
    with watch:
        end = time.monotonic() + 30
        while watch.seen() is None and time.monotonic() < end:
            time.sleep(0.001)
    return watch.seen()


@pytest.mark.parametrize(("visible", "mhz"), [("", 1800), ("0", 1800), ("1,0", 1900), ("GPU-b", 1900)])
def test_the_first_visible_gpu_is_watched(nvml: Callable[..., None], visible: str, mhz: int) -> None:
    nvml()
    said: list[str] = []
    with gpu_watched(said.append, {"CUDA_VISIBLE_DEVICES": visible}) as watch:
        assert watch is not None
        watch._period_s = 0.001
        clock = watched(watch)
    assert clock is not None and (clock.mhz, clock.lowest_mhz, clock.watts) == (mhz, mhz, 512.3)
    assert clock.held_back == {"power limit": 1.0}
    assert said == []


@pytest.mark.parametrize(
    ("changes", "visible", "word"),
    [
        ({"nvmlInit": refusing(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)}, "0", "not found"),
        ({"nvmlDeviceGetClockInfo": refusing(pynvml.NVML_ERROR_NOT_SUPPORTED)}, "0", "no clock"),
        ({"nvmlDeviceGetHandleByIndex": refusing(pynvml.NVML_ERROR_INVALID_ARGUMENT)}, "7", "=7: "),
        ({}, "-1", "names no gpu"),
    ],
)
def test_where_nothing_can_be_read_it_is_said(
    nvml: Callable[..., None], changes: dict[str, Any], visible: str, word: str
) -> None:
    nvml(**changes)
    said: list[str] = []
    with gpu_watched(said.append, {"CUDA_VISIBLE_DEVICES": visible}) as watch:
        assert watch is None
    assert len(said) == 1 and "not recorded" in said[0] and word in said[0].lower()


def test_a_gpu_that_tells_its_clock_alone_is_watched(nvml: Callable[..., None]) -> None:
    silent = refusing(pynvml.NVML_ERROR_NOT_SUPPORTED)
    nvml(nvmlDeviceGetPowerUsage=silent, nvmlDeviceGetCurrentClocksThrottleReasons=silent)
    with gpu_watched(print, {}) as watch:
        assert watch is not None
        watch._period_s = 0.001
        clock = watched(watch)
    assert clock is not None and (clock.mhz, clock.watts, clock.held_back) == (1800, None, {})


def test_samples_are_summed_up() -> None:
    assert summary_of([]) is None
    assert summary_of([BUSY, LIMITED, LIMITED, LIMITED]) == GpuClock(
        samples=4, mhz=1920.0, lowest_mhz=1900, watts=687.5, held_back={"power limit": 0.75}
    )


def test_a_gpu_that_stops_answering_ends_the_watching_and_not_the_repeat() -> None:
    answers = [BUSY]

    def read() -> Sample:
        if not answers:
            raise OSError("gone")
        return answers.pop()

    clock = watched(ClockWatch(read, period_s=0.001))
    assert clock is not None and clock.mhz == 1980


def test_a_repeat_that_fails_ends_its_watch() -> None:
    watch = ClockWatch(lambda: BUSY, period_s=0.001)
    with pytest.raises(RuntimeError), watch:
        raise RuntimeError
    assert watch._thread is not None and not watch._thread.is_alive()


def test_each_watch_begins_anew() -> None:
    reading = BUSY
    watch = ClockWatch(lambda: reading, period_s=0.001)
    for reading in (LIMITED, BUSY):
        clock = watched(watch)
        assert clock is not None and clock.mhz == reading.mhz
