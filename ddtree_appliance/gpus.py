"""The GPUs that this process can see, as NVML tells; imported nowhere before a check needs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ddtree_appliance.errors import HostError

# The image's torch, kernels and compilers are CUDA 13.0's; drivers of that branch begin with 580.
MIN_CUDA = (13, 0)
MIN_DRIVER = "580"
# What is served: Hopper, and the Blackwells of servers and workstations. sglang-kernel 0.4.5 holds machine code and no
# PTX: sm_80, sm_89, sm_90(a), sm_100a, sm_103a and sm_120a, and code for an "a" runs on exactly that one: 11.0 (Thor)
# and 12.1 (DGX Spark) have none. 8.x and 10.3 have, but nobody has tried DDTREE there.
CAPABILITIES = ((9, 0), (10, 0), (12, 0))


@dataclass(frozen=True)
class Gpu:
    """One visible GPU or MIG slice.

    name_in_cdi: as `gpus` of the configuration names it by place: "0", or "0:1" for a slice. users: processes that
    hold its memory, as (pid, bytes); inside a container those of others are hidden.
    """

    name_in_cdi: str
    uuid: str
    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    users: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Driver:
    """The installed driver and the newest CUDA version that it runs."""

    version: str
    cuda: tuple[int, int]


# NVML's return codes whose remedy is known (nvml.h).
REMEDIES = {
    4: "no permission: with SELinux enforcing, setsebool -P container_use_devices=1, or unit.selinux: disabled",
    9: "the driver is not loaded: modprobe nvidia, or install it; inside a container: is the GPU passed in?",
    12: "libnvidia-ml.so.1 is missing: inside a container it comes with the CDI device (nvidia-ctk cdi generate)",
    15: "a GPU has fallen off the bus: look for Xid 79 in the kernel log; the host needs a reboot",
    16: "a GPU waits for a reset: nvidia-smi --gpu-reset, or reboot the host",
    18: "the driver and its library differ: reboot after a driver update, then nvidia-ctk cdi generate",
}


@contextmanager
def open_nvml() -> Iterator[Any]:
    """pynvml, with NVML open inside `with`. Raises HostError if it does not start: NVML's own words and a remedy."""
    try:
        import pynvml
    except ImportError as error:
        raise HostError("nvidia-ml-py is not installed", "pip install nvidia-ml-py") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise _no_answer("NVML does not start", error) from error
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def see_gpus() -> tuple[Driver, list[Gpu]]:
    """The driver and every visible GPU in PCI order. Raises HostError with NVML's own words and a remedy."""
    with open_nvml() as nvml:
        try:
            cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
            driver = Driver(str(nvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10))
            found = [gpu for index in range(nvml.nvmlDeviceGetCount()) for gpu in _gpus_of(nvml, index)]
            return driver, found
        except nvml.NVMLError as error:
            raise _no_answer("NVML", error) from error


def _no_answer(what: str, error: Any) -> HostError:
    remedy = REMEDIES.get(error.value, "nvidia-smi on the host should say more; so may its kernel log")
    return HostError(f"{what}: {error}", remedy)


def _gpus_of(nvml: Any, index: int) -> Iterator[Gpu]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    if not _is_split(nvml, handle):
        yield _gpu(nvml, handle, str(index), capability)
        return
    # The whole card's memory is nobody's once it is split; only slices can be computed on.
    for slice_index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            slice_handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slice_index)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_NO_PERMISSION):
                continue  # not made, or not passed into this container
            raise
        yield _gpu(nvml, slice_handle, f"{index}:{slice_index}", capability)


def _is_split(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NO_PERMISSION):
            return False
        raise


def _gpu(nvml: Any, handle: Any, name_in_cdi: str, capability: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        processes = []  # only names who is in the way; some drivers and slices do not tell
    return Gpu(
        name_in_cdi=name_in_cdi,
        uuid=str(nvml.nvmlDeviceGetUUID(handle)),
        name=str(nvml.nvmlDeviceGetName(handle)),
        capability=capability,
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        users=tuple((int(process.pid), int(process.usedGpuMemory or 0)) for process in processes),
    )


def named_gpus(gpus: Sequence[Gpu], names: Sequence[str]) -> tuple[list[Gpu], list[str]]:
    """Those of `gpus` that `names` (as in the configuration) mean, in that order, and the names that mean none."""
    by_name = {key: gpu for gpu in gpus for key in (gpu.name_in_cdi, gpu.uuid)}
    found = [by_name[name] for name in names if name in by_name]
    return found, [name for name in names if name not in by_name]
