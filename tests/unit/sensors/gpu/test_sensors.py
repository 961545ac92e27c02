"""GPU sensors with one GPU, several GPUs, MIG slices and errors, with the fake NVML."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from fake_nvml import BEFORE_HOPPER, MIG, SAMPLES_ONLY, TWO_GPUS, FakeNvml
from gpus import (
    LOST,
    NAMES,
    NO_PERMISSION,
    NOT_SUPPORTED,
    Clock,
    fake_library,
    fake_sensor,
    recorded_mean,
    refusing,
)
from stepscope.metrics import of_scope
from stepscope.records import Reading
from stepscope.sensors.gpu.nvml import Nvml
from stepscope.sensors.gpu.pcie import PcieSensor
from stepscope.sensors.gpu.registry import gpu_sensors
from stepscope.sensors.gpu.selection import select_gpus
from stepscope.sensors.gpu.sensors import (
    ActivitySensor,
    GpuMemorySensor,
    MonitoredGpu,
    PowerSensor,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock.of_gpus(monkeypatch)


def monitored(library: Nvml) -> list[MonitoredGpu]:
    return [MonitoredGpu(gpu) for gpu in library.gpus]


def values(readings: list[Reading]) -> dict[str, float | None]:
    (reading,) = readings
    return reading.values


def one_gpu(**spec: Any) -> dict[str, Any]:
    return {"gpus": [spec]}


def rates(
    sensor: ActivitySensor | PcieSensor, clock: Clock, pause: float = 0.3
) -> dict[str, float]:
    """Return the rates of the counters, from two readings."""
    first = values(sensor.read())
    clock.sleep(pause)
    last = values(sensor.read())
    return {key: ((last[key] or 0.0) - (first[key] or 0.0)) / pause for key in last}


def test_the_sensors_cover_all_gpu_metrics() -> None:
    sensors = [*gpu_sensors(fake_library().gpus), PcieSensor([])]
    assert {key for s in sensors for key in s.metrics} == {m.key for m in of_scope("gpu")}
    assert {s.name for s in sensors} == {*NAMES, "gpu pcie"}


@pytest.mark.parametrize("load", ["matmul", "d2d", "h2d", "d2h", "idle"])
def test_activity_matches_the_recording(load: str, clock: Clock) -> None:
    sensor = ActivitySensor(monitored(fake_library(one_gpu(load=load))))
    grew = rates(sensor, clock)
    for metric, number, unit, noise in (
        ("gpu_sm", 2, 0.01, 1e-3),
        ("gpu_tensor", 5, 0.01, 1e-3),
        ("gpu_dram", 10, 0.01, 1e-3),
        ("gpu_pcie_received", 21, 2**20, 1e8),
        ("gpu_pcie_sent", 20, 2**20, 1e8),
    ):
        expected = recorded_mean(load, number) * unit
        assert grew[metric] == pytest.approx(expected, rel=0.1, abs=noise)
    sensor.close()


def test_copies_appear_in_their_direction(clock: Clock) -> None:
    into = rates(ActivitySensor(monitored(fake_library(one_gpu(load="h2d")))), clock)
    out = rates(ActivitySensor(monitored(fake_library(one_gpu(load="d2h")))), clock)
    assert into["gpu_pcie_received"] > 10 * into["gpu_pcie_sent"]
    assert out["gpu_pcie_sent"] > 10 * out["gpu_pcie_received"]


def test_samples_too_close_together_are_merged_without_loss(clock: Clock) -> None:
    sensor = ActivitySensor(monitored(fake_library(one_gpu(load="h2d"))))
    first, begun = values(sensor.read()), clock.now_s
    assert sensor.read() == []
    clock.sleep(0.25)
    last, seconds = values(sensor.read()), clock.now_s - begun
    grew = (last["gpu_pcie_received"] or 0.0) - (first["gpu_pcie_received"] or 0.0)
    assert grew / seconds == pytest.approx(recorded_mean("h2d", 21) * 2**20, rel=0.1)


def test_temporary_failure_leaves_no_gap_in_counters(clock: Clock) -> None:
    errors = {"nvmlGpmSampleGet": {"code": 999, "after": 0.1, "until": 0.4}}
    sensor = ActivitySensor(monitored(fake_library(one_gpu(load="h2d", errors=errors))))
    first, begun = values(sensor.read()), clock.now_s
    clock.sleep(0.25)
    assert sensor.read() == []
    assert "gpu_sm" in sensor.missing
    clock.sleep(0.3)
    last, seconds = values(sensor.read()), clock.now_s - begun
    grew = (last["gpu_pcie_received"] or 0.0) - (first["gpu_pcie_received"] or 0.0)
    assert grew / seconds == pytest.approx(recorded_mean("h2d", 21) * 2**20, rel=0.1)
    assert sensor.notes == []


def test_unsupported_unit_is_missing_alone(clock: Clock) -> None:
    errors = {"gpm 60": {"code": NOT_SUPPORTED}, "gpm 61": {"code": NOT_SUPPORTED}}
    sensor = ActivitySensor(monitored(fake_library(one_gpu(errors=errors))))
    sensor.read()
    clock.sleep(0.22)
    found = values(sensor.read())
    assert found["gpu_nvlink_received"] is None and found["gpu_nvlink_sent"] is None
    assert found["gpu_sm"]
    assert "not supported" in sensor.missing["gpu_nvlink_sent"]


def test_lost_gpu_loses_only_its_own_values(clock: Clock) -> None:
    library = fake_library(
        {"gpus": [{"errors": {"*": {"code": LOST, "after": 0.2}}}, {"load": "idle"}]}
    )
    gpus = monitored(library)
    power, memory = PowerSensor(gpus), GpuMemorySensor(gpus)
    assert len(power.read()) == len(memory.read()) == 2
    clock.sleep(0.25)
    assert [r.entity.name for r in power.read()] == [library.gpus[1].facts.uuid]
    assert [r.entity.name for r in memory.read()] == [library.gpus[1].facts.uuid]
    (remark,) = power.notes
    assert "GPU 0" in remark and "fallen off the bus" in remark
    assert memory.notes == [], "reported once"
    assert "fallen off the bus" in power.missing["gpu_power"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("code", "expected"),
    [(NOT_SUPPORTED, "not supported"), (NO_PERMISSION, "permission"), (LOST, "bus")],
)
def test_error_becomes_a_reason(name: str, code: int, expected: str) -> None:
    sensor = fake_sensor(name, refusing(code))
    for _ in range(3):
        assert sensor.read() == []
    assert set(sensor.missing) == set(sensor.metrics)
    if name != "gpu activity":
        assert all(expected in reason for reason in sensor.missing.values())


def test_pcie_falls_back_without_permission_for_counters() -> None:
    errors = {"nvmlGpmSampleGet": {"code": NO_PERMISSION}}
    sensors = gpu_sensors(fake_library(one_gpu(pcie=[3, 16], load="tiny", errors=errors)).gpus)
    (pcie,) = [s for s in sensors if isinstance(s, PcieSensor)]
    assert pcie.read()
    assert "permission" in next(s for s in sensors if s.name == "gpu activity").missing["gpu_sm"]


def test_query_is_not_repeated_after_a_permanent_error() -> None:
    library = fake_library(refusing(NOT_SUPPORTED))
    calls: list[Any] = []
    gpu = library.gpus[0]
    query = gpu._lib.nvmlDeviceGetTotalEnergyConsumption

    def counted(handle: Any) -> Any:
        calls.append(handle)
        return query(handle)

    gpu._lib.nvmlDeviceGetTotalEnergyConsumption = counted
    sensor = next(s for s in gpu_sensors([gpu]) if s.name == "gpu energy")
    for _ in range(4):
        sensor.read()
    assert len(calls) == 1


def test_power_falls_back_to_the_mean_on_older_gpus() -> None:
    errors = {"field 186": {"code": NOT_SUPPORTED}}
    sensor = PowerSensor(monitored(fake_library(one_gpu(load="d2h", errors=errors))))
    assert values(sensor.read())["gpu_power"] == pytest.approx(130.5, abs=3)


def test_all_gpus_are_read() -> None:
    library = fake_library(TWO_GPUS)
    for sensor in gpu_sensors(library.gpus):
        found = sensor.read()
        assert [r.entity.name for r in found] == [gpu.facts.uuid for gpu in library.gpus]
        sensor.close()


def test_mig_slices_have_memory_and_activity_only(clock: Clock) -> None:
    library = fake_library(MIG)
    labels = [gpu.facts.label for gpu in library.gpus]
    assert labels == ["GPU 0", "GPU 0 slice 0", "GPU 0 slice 1"]
    assert [gpu.facts.mig_of for gpu in library.gpus][1:] == [library.gpus[0].facts.uuid] * 2
    read = {s.name: {r.entity.name for r in s.read()} for s in gpu_sensors(library.gpus)}
    whole, *slices = (gpu.facts.uuid for gpu in library.gpus)
    assert read["gpu memory"] == {whole, *slices}
    assert read["gpu power"] == read["gpu energy"] == {whole}
    clock.sleep(0.22)
    activity = ActivitySensor(monitored(library))
    activity.read()
    assert {r.entity.name for r in activity.read()} <= set(slices)
    clock.sleep(0.22)
    assert {r.entity.name for r in activity.read()} == set(slices)


def test_before_hopper_pcie_uses_a_counter_that_cannot_wrap(clock: Clock) -> None:
    sensors = gpu_sensors(fake_library(BEFORE_HOPPER).gpus)
    (pcie,) = [s for s in sensors if isinstance(s, PcieSensor)]
    grew = rates(pcie, clock, 0.15)
    expected = recorded_mean("tiny", 21) * 2**20
    assert grew["gpu_pcie_received"] == pytest.approx(expected, rel=0.1)
    assert pcie.estimated == {}
    (activity,) = [s for s in sensors if isinstance(s, ActivitySensor)]
    assert "Hopper" in activity.missing["gpu_sm"]


def test_counter_that_may_have_wrapped_is_rejected(clock: Clock) -> None:
    (gpu,) = fake_library(BEFORE_HOPPER).gpus
    pcie = PcieSensor([MonitoredGpu(gpu)])
    pcie.read()
    clock.sleep(0.4)
    assert pcie.read() == []
    assert "too late" in pcie.missing["gpu_pcie_received"]
    clock.sleep(0.1)
    assert pcie.read() != []


def test_counter_continues_after_a_wraparound(clock: Clock) -> None:
    spec = {**BEFORE_HOPPER["gpus"][0], "load": "h2d"}
    (gpu,) = fake_library({"gpus": [spec]}).gpus
    pcie = PcieSensor([MonitoredGpu(gpu)])
    total = 0.0
    for _ in range(20):  # 60 GB/s: wraps around in 73 ms, read every 20 ms
        clock.sleep(0.02)
        now = values(pcie.read())["gpu_pcie_received"]
        assert now is not None and now > total
        total = now
    assert total > 2 * 2**32


def test_without_a_counter_the_driver_is_sampled_in_a_thread(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    throughput, threads = FakeNvml.nvmlDeviceGetPcieThroughput, set()

    def recording(*arguments: Any) -> int:
        threads.add(threading.current_thread())
        return throughput(*arguments)

    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetPcieThroughput", recording)
    sensors = gpu_sensors(fake_library(SAMPLES_ONLY).gpus)
    (pcie,) = [s for s in sensors if isinstance(s, PcieSensor)]
    while not values(pcie.read())["gpu_pcie_received"]:  # until the first sample
        time.sleep(0.01)
        clock.sleep(0.1)
    grew = rates(pcie, clock, 0.5)
    assert threads and threading.current_thread() not in threads, "reading must not block"
    expected = recorded_mean("h2d", 21) * 2**20
    assert grew["gpu_pcie_received"] == pytest.approx(expected, rel=0.1)
    assert grew["gpu_pcie_sent"] < 0.2 * grew["gpu_pcie_received"]
    assert "20 ms" in pcie.estimated["gpu_pcie_sent"]
    pcie.close()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1]),
        ("", []),
        ("1", [1]),
        ("1,0", [1, 0]),
        ("-1", []),
        ("0,-1,1", [0]),
        ("NoDevFiles", []),
        ("GPU-00000001", [1]),
        ("7", []),
    ],
)
def test_cuda_visible_devices(visible: str | None, expected: list[int]) -> None:
    gpus = fake_library(TWO_GPUS).gpus
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu.facts.index for gpu in select_gpus(gpus, environment).gpus] == expected


def test_indices_are_ambiguous_for_different_gpus() -> None:
    gpus = fake_library({"gpus": [{}, {"name": "Tesla T4"}]}).gpus
    ambiguous = select_gpus(gpus, {"CUDA_VISIBLE_DEVICES": "1"})
    assert (len(ambiguous.gpus), ambiguous.is_certain) == (2, False)
    by_bus = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert [gpu.facts.model for gpu in select_gpus(gpus, by_bus).gpus] == ["Tesla T4"]
