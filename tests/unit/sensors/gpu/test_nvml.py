"""What is known about GPUs, and how NVML's refusals become words."""

from __future__ import annotations

import pytest

from fake_nvml import FakeNvml
from gpus import fake_library
from stepscope.records import Gpu
from stepscope.sensors.gpu.nvml import Nvml, NvmlUnavailable, Unreadable, unreadable


@pytest.mark.parametrize(
    ("code", "words"),
    [(9, "not loaded"), (12, "no NVIDIA driver"), (18, "updated"), (4, "permission")],
)
def test_a_library_that_cannot_be_opened_says_why(code: int, words: str) -> None:
    with pytest.raises(NvmlUnavailable, match=words):
        Nvml(FakeNvml({"init": code, "gpus": []}))


def test_facts_of_a_gpu() -> None:
    library = fake_library()
    (gpu,) = library.gpus
    assert gpu.facts.model == "NVIDIA H200"
    assert gpu.facts.label == "GPU 0"
    assert gpu.facts.memory_bytes == pytest.approx(150.75e9, rel=0.01)
    assert gpu.facts.power_limit_watts == 700
    assert gpu.facts.link_bytes_per_s == pytest.approx(63e9, rel=0.01)
    assert library.driver.startswith("580.")


def test_a_gpu_that_cannot_be_opened_is_left_out() -> None:
    broken = {"errors": {"nvmlDeviceGetHandleByIndex": {"code": 15}}}
    assert [gpu.facts.index for gpu in fake_library({"gpus": [broken, {}]}).gpus] == [1]


def test_facts_that_are_not_told_are_none() -> None:
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


def test_an_unknown_generation_of_pcie_has_no_speed() -> None:
    assert Gpu("GPU-1", "GPU 0", pcie_generation=9, pcie_width=16).link_bytes_per_s is None


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x00, (False, False, False)),
        (0x01, (False, False, False)),  # idle holds nothing down
        (0x04, (True, False, False)),
        (0x80 | 0x08, (True, False, False)),
        (0x40 | 0x08, (False, True, False)),
        (0x20 | 0x04, (True, True, False)),
        (0x08, (False, False, True)),
        (0x02, (False, False, True)),
        (0x200, (False, False, True)),
    ],
)
def test_what_holds_the_clocks_down(bits: int, expected: tuple[bool, ...]) -> None:
    fake = FakeNvml({"gpus": [{}]})
    (gpu,) = Nvml(fake).gpus
    fake.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: bits  # type: ignore[method-assign]
    assert gpu.slowed_by() == expected


@pytest.mark.parametrize(
    ("code", "lost", "for_good"),
    [
        (3, False, True),
        (4, False, True),
        (15, True, False),
        (999, False, False),
        (10, False, False),
    ],
)
def test_refusals_are_told_apart(code: int, lost: bool, for_good: bool) -> None:
    error = unreadable(code)
    assert isinstance(error, Unreadable)
    assert (error.lost, error.for_good) == (lost, for_good)
    assert str(error)


def test_closing_ends_the_library() -> None:
    fake = FakeNvml({"gpus": [{}]})
    library = Nvml(fake)
    assert fake.open
    library.close()
    assert not fake.open
