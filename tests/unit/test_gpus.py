"""What NVML tells, on a machine without a GPU: its Python binding is real, its answers are not."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from ddtree_appliance.errors import HostError
from ddtree_appliance.gpus import CAPABILITIES, REMEDIES, Driver, Gpu, named_gpus, see_gpus

GIB = 1 << 30


def refused(code: int) -> Any:
    def function(*arguments: Any) -> Any:
        raise pynvml.NVMLError(code)

    return function


@dataclass
class FakeCard:
    """One card, or one MIG slice of it."""

    uuid: str
    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    total: int = 140 * GIB
    free: int = 139 * GIB
    processes: tuple[tuple[int, int | None], ...] = ()
    slices: tuple[FakeCard | None, ...] | None = None


@dataclass
class FakeNvml:
    cards: list[FakeCard]
    cuda: int = 13000
    stopped: list[bool] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        def slice_of(card: FakeCard, index: int) -> FakeCard:
            found = (card.slices or ())[index]
            return found if found is not None else refused(pynvml.NVML_ERROR_NOT_FOUND)()

        def processes(card: FakeCard) -> list[Any]:
            return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in card.processes]

        functions = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: self.stopped.append(True),
            "nvmlSystemGetCudaDriverVersion_v2": lambda: self.cuda,
            "nvmlSystemGetDriverVersion": lambda: "580.159.04",
            "nvmlDeviceGetCount": lambda: len(self.cards),
            "nvmlDeviceGetHandleByIndex": lambda index: self.cards[index],
            "nvmlDeviceGetCudaComputeCapability": lambda card: list(card.capability),
            "nvmlDeviceGetMigMode": lambda card: [int(card.slices is not None)] * 2,
            "nvmlDeviceGetMaxMigDeviceCount": lambda card: len(card.slices),
            "nvmlDeviceGetMigDeviceHandleByIndex": slice_of,
            "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(total=card.total, free=card.free),
            "nvmlDeviceGetUUID": lambda card: card.uuid,
            "nvmlDeviceGetName": lambda card: card.name,
            "nvmlDeviceGetComputeRunningProcesses": processes,
        }
        for name, function in {**functions, **changes}.items():
            monkeypatch.setattr(pynvml, name, function)


def test_every_card_is_seen_with_its_memory_and_users(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [
        FakeCard("GPU-a", free=100 * GIB, processes=((17, 39 * GIB), (18, None))),
        FakeCard("GPU-b", "NVIDIA RTX PRO 6000 Blackwell", (12, 0), 96 * GIB, 95 * GIB),
    ]
    nvml = FakeNvml(cards, cuda=13020)
    nvml.install(monkeypatch)
    assert see_gpus() == (
        Driver("580.159.04", (13, 2)),
        [
            Gpu("0", "GPU-a", "NVIDIA H200", (9, 0), 140 * GIB, 100 * GIB, ((17, 39 * GIB), (18, 0))),
            Gpu("1", "GPU-b", "NVIDIA RTX PRO 6000 Blackwell", (12, 0), 96 * GIB, 95 * GIB),
        ],
    )
    assert nvml.stopped == [True]


def test_a_split_card_is_its_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = (FakeCard("MIG-a", total=35 * GIB, free=34 * GIB), None, FakeCard("MIG-c", total=35 * GIB, free=30 * GIB))
    FakeNvml([FakeCard("GPU-a", slices=slices), FakeCard("GPU-b")]).install(monkeypatch)
    _, found = see_gpus()
    assert [(gpu.name_in_cdi, gpu.uuid, gpu.free_bytes // GIB) for gpu in found] == [
        ("0:0", "MIG-a", 34),
        ("0:2", "MIG-c", 30),
        ("1", "GPU-b", 139),
    ]
    assert found[0].capability == (9, 0)


def test_slices_that_were_not_passed_in_are_not_there_and_other_errors_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = FakeNvml([FakeCard("GPU-a", slices=(FakeCard("MIG-a"),))])
    nvml.install(monkeypatch, nvmlDeviceGetMigDeviceHandleByIndex=refused(pynvml.NVML_ERROR_NO_PERMISSION))
    assert see_gpus()[1] == []
    nvml.install(monkeypatch, nvmlDeviceGetMigDeviceHandleByIndex=refused(pynvml.NVML_ERROR_GPU_IS_LOST))
    with pytest.raises(HostError, match="GPU is lost"):
        see_gpus()


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION])
def test_what_a_card_cannot_tell_is_left_out(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = {"nvmlDeviceGetMigMode": refused(code), "nvmlDeviceGetComputeRunningProcesses": refused(code)}
    FakeNvml([FakeCard("GPU-a", processes=((1, 1),))]).install(monkeypatch, **silent)
    _, found = see_gpus()
    assert [(gpu.name_in_cdi, gpu.users) for gpu in found] == [("0", ())]


@pytest.mark.parametrize("code", sorted(REMEDIES))
@pytest.mark.parametrize("where", ["nvmlInit", "nvmlDeviceGetHandleByIndex"])
def test_an_nvml_error_comes_with_its_own_words_and_a_remedy(
    where: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeNvml([FakeCard("GPU-a")]).install(monkeypatch, **{where: refused(code)})
    with pytest.raises(HostError) as caught:
        see_gpus()
    words = str(pynvml.NVMLError(code))
    assert caught.value.message == (f"NVML does not start: {words}" if where == "nvmlInit" else f"NVML: {words}")
    assert caught.value.hint == REMEDIES[code]


@pytest.mark.parametrize("code", [1, 2, 19, 999, 12345])
@pytest.mark.parametrize("where", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetMigMode", "nvmlDeviceGetMemoryInfo"])
def test_any_other_nvml_error_is_a_host_error_too(where: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml([FakeCard("GPU-a")]).install(monkeypatch, **{where: refused(code)})
    with pytest.raises(HostError) as caught:
        see_gpus()
    assert "nvidia-smi" in (caught.value.hint or "")


def test_a_shutdown_that_fails_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {"nvmlDeviceGetMemoryInfo": refused(15), "nvmlShutdown": refused(1)}
    FakeNvml([FakeCard("GPU-a")]).install(monkeypatch, **lost)
    with pytest.raises(HostError, match="GPU is lost"):
        see_gpus()


def test_without_the_library_the_remedy_names_cdi() -> None:
    """The real NVML, on a machine that has none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        with pytest.raises(HostError) as caught:
            see_gpus()
        assert caught.value.message == "NVML does not start: NVML Shared Library Not Found"
        assert "nvidia-ctk cdi generate" in (caught.value.hint or "")
    else:
        pynvml.nvmlShutdown()
        pytest.skip("this machine has an NVIDIA driver")


def test_gpus_are_found_by_place_and_by_uuid() -> None:
    gpus = [Gpu(place, uuid, "x", (9, 0), 1, 1) for place, uuid in (("0", "GPU-a"), ("1:0", "MIG-b"), ("2", "GPU-c"))]
    assert named_gpus(gpus, ["GPU-c", "0", "1:0"]) == ([gpus[2], gpus[0], gpus[1]], [])
    assert named_gpus(gpus, ["MIG-b", "7", "GPU-z"]) == ([gpus[1]], ["7", "GPU-z"])


def test_what_is_served_is_what_the_design_names() -> None:
    assert CAPABILITIES == ((9, 0), (10, 0), (12, 0))
