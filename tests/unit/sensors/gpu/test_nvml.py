"""GPU facts and readable reasons for NVML errors."""

from __future__ import annotations

import pytest

from fake_nvml import FakeNvml
from gpus import fake_library
from stepscope.records import Gpu
from stepscope.sensors.gpu.nvml import Nvml, NvmlUnavailable, Unreadable, unreadable


@pytest.mark.parametrize(
    ("code", "reason"),
    [(9, "not loaded"), (12, "no NVIDIA driver"), (18, "updated"), (4, "permission")],
)
def test_failed_initialization_has_a_reason(code: int, reason: str) -> None:
    with pytest.raises(NvmlUnavailable, match=reason):
        Nvml(FakeNvml({"init": code, "gpus": []}))


def test_gpu_facts() -> None:
    library = fake_library()
    (gpu,) = library.gpus
    assert gpu.facts.model == "NVIDIA H200"
    assert gpu.facts.label == "GPU 0"
    assert gpu.facts.memory_bytes == pytest.approx(150.75e9, rel=0.01)
    assert gpu.facts.power_limit_watts == 700
    assert gpu.facts.link_bytes_per_s == pytest.approx(63e9, rel=0.01)
    assert library.driver.startswith("580.")


def test_gpu_that_cannot_be_opened_is_skipped() -> None:
    broken = {"errors": {"nvmlDeviceGetHandleByIndex": {"code": 15}}}
    assert [gpu.facts.index for gpu in fake_library({"gpus": [broken, {}]}).gpus] == [1]


def test_unavailable_facts_are_none() -> None:
    errors = {
        name: {"code": 3}
        for name in (
            "nvmlDeviceGetEnforcedPowerLimit",
            "nvmlDeviceGetPciInfo",
            "nvmlDeviceGetMaxPcieLinkWidth",
            "nvmlDeviceGetMemoryInfo",
        )
    }
    (gpu,) = fake_library({"gpus": [{"errors": errors}]}).gpus
    facts = gpu.facts
    assert facts.bus is facts.memory_bytes is facts.power_limit_watts is None
    assert facts.link_bytes_per_s is None


def test_unknown_pcie_generation_has_no_link_speed() -> None:
    assert Gpu("GPU-1", "GPU 0", pcie_generation=9, pcie_width=16).link_bytes_per_s is None


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x00, (False, False, False)),
        (0x01, (False, False, False)),  # idle is not throttling
        (0x04, (True, False, False)),
        (0x80 | 0x08, (True, False, False)),
        (0x40 | 0x08, (False, True, False)),
        (0x20 | 0x04, (True, True, False)),
        (0x08, (False, False, True)),
        (0x02, (False, False, True)),
        (0x200, (False, False, True)),
    ],
)
def test_throttle_reasons(bits: int, expected: tuple[bool, ...]) -> None:
    fake = FakeNvml({"gpus": [{}]})
    (gpu,) = Nvml(fake).gpus
    fake.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: bits  # type: ignore[method-assign]
    assert gpu.throttled_by() == expected


@pytest.mark.parametrize(
    ("code", "lost", "permanent"),
    [
        (3, False, True),
        (4, False, True),
        (15, True, False),
        (999, False, False),
        (10, False, False),
    ],
)
def test_error_codes_are_classified(code: int, lost: bool, permanent: bool) -> None:
    error = unreadable(code)
    assert isinstance(error, Unreadable)
    assert (error.lost, error.permanent) == (lost, permanent)
    assert str(error)


def test_close_shuts_down_the_library() -> None:
    fake = FakeNvml({"gpus": [{}]})
    library = Nvml(fake)
    assert fake.open
    library.close()
    assert not fake.open
