"""The contract of framework adapters. To check another adapter, add it to ADAPTERS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import WorkloadError
from stepscope.records.codec import from_json
from stepscope.runs.paths import RunPaths
from stepscope.steplog import RECORD, Step
from stepscope.workloads.frameworks.contract import (
    AllocatorStats,
    Capabilities,
    Framework,
    check_capabilities,
    failure_kind,
)
from stepscope.workloads.frameworks.registry import FRAMEWORKS, framework_name, get_framework
from stepscope.workloads.probing import ProbeResult, Subject
from stepscope.workloads.reporting import RankPlacement
from stepscope.workloads.spec import DEVICES, PRECISIONS, SETTINGS, Workload, make_workload

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_framework" / "numpy_adapter.py"
STEPS = 20


@dataclass(frozen=True)
class Adapter:
    setting: str
    model: str

    @property
    def framework(self) -> Framework:
        return get_framework(self.setting)

    @property
    def workload(self) -> Workload:
        return make_workload(self.model, {"framework": self.setting})


ADAPTERS = [Adapter("torch", "cnn"), Adapter(f"{EXAMPLE}:ADAPTER", "mlp")]
OTHER_VALUES: dict[str, Any] = {
    "data_path": "/tmp",
    "device": "cuda",
    "precision": "bf16",
    "page_cache": "warm",
    "optimizer": "adam",
    "data": "jpeg",
}
"""Values other than the default. For other numbers it is 3, for a switch the opposite."""


@pytest.fixture(params=ADAPTERS, ids=lambda adapter: adapter.framework.name)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    adapter: Adapter = request.param
    if adapter.setting == "torch":
        pytest.importorskip("torch")
    return adapter


def test_every_registered_framework_is_checked() -> None:
    assert set(FRAMEWORKS) <= {adapter.setting for adapter in ADAPTERS}


def test_name_and_capabilities(adapter: Adapter) -> None:
    framework = adapter.framework
    can = framework.capabilities
    assert framework.name and isinstance(can, Capabilities)
    assert set(can.devices) <= set(DEVICES) and "auto" not in can.devices
    assert set(can.precisions) <= set(PRECISIONS)
    assert can.fixed_settings <= set(SETTINGS) - {"device", "precision"}
    assert framework_name(adapter.setting) in (framework.name, adapter.setting)


def test_a_trial_takes_the_requested_steps(adapter: Adapter, trial: Callable[..., Any]) -> None:
    done = trial(
        adapter.model, "--framework", adapter.setting, "--steps", str(STEPS), "--batch-size", "16"
    )
    assert done.code == 0, done.err
    assert done.told["outcome"] == "ok" and done.told["steps"] == STEPS
    assert done.told["global_batch"] == 16
    file = RunPaths(done.run.path).trial_steps(0)
    steps = [Step(*record) for record in RECORD.iter_unpack(file.read_bytes())]
    assert [step.step for step in steps] == list(range(STEPS))
    assert all(a.end_ns < b.end_ns for a, b in zip(steps, steps[1:], strict=False))
    assert all(step.wait_ns >= 0 and step.compute_ns > 0 for step in steps)


def test_a_trial_with_an_unsupported_setting_is_an_error(trial: Callable[..., Any]) -> None:
    done = trial("mlp", "--framework", f"{EXAMPLE}:ADAPTER", "--ranks", "2")
    assert done.code == WorkloadError.exit_code
    assert "NumPy does not support multiple ranks. Remove --ranks" in done.err


PROBE = """
import dataclasses, json, sys
from pathlib import Path
from stepscope.workloads.frameworks.registry import get_framework
from stepscope.workloads.probing import ProbeRequest
from stepscope.workloads.spec import make_workload

setting, model, folder, batches = sys.argv[1:]
framework = get_framework(setting)
framework.load()
assert framework.load_for_probes()
built = framework.build(make_workload(model, {"device": "cpu", "framework": setting}))
results = []
request = ProbeRequest(tuple(json.loads(batches)), layers=True)
notify = lambda result: results.append(dataclasses.asdict(result))
built.probe(request, notify, Path(folder) / "1.trace")
print(json.dumps([dataclasses.asdict(built.subject), results]))
"""


def probe(adapter: Adapter, folder: Path, batches: list[int]) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, adapter.setting, adapter.model, folder, json.dumps(batches)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_probe_reports_every_batch_size_and_running_out_of_memory(
    adapter: Adapter, tmp_path: Path
) -> None:
    if not adapter.framework.capabilities.probes:
        with pytest.raises(WorkloadError):
            adapter.framework.build(adapter.workload)
        return
    subject, reported = probe(adapter, tmp_path, [4, 8, 1 << 40])
    assert from_json(Subject, subject).parameters > 0 and not from_json(Subject, subject).on_gpu
    results = [from_json(ProbeResult, each) for each in reported]
    kinds = [(result.batch, result.kind) for result in results]
    assert kinds == [(4, "ok"), (8, "ok"), (1 << 40, "host_oom")]
    fitting = results[:2]
    assert all(result.reserved_peak_bytes >= result.allocated_peak_bytes > 0 for result in fitting)
    assert all(len(result.step_s) == 5 and result.samples_per_second for result in fitting)
    assert all(layer.output_bytes > 0 for result in fitting for layer in result.layers)


def test_kinds_of_failures(adapter: Adapter) -> None:
    framework = adapter.framework
    assert failure_kind(framework, MemoryError()) == "host_oom"
    assert failure_kind(framework, ValueError("an error about memory")) == "error"
    assert failure_kind(framework, WorkloadError("invalid")) == "workload"
    assert not framework.is_out_of_memory(MemoryError(), "gpu")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB", "gpu_oom"),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "gpu_oom"),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory", "host_oom"),
        ("Caught MemoryError in DataLoader worker process 0.", "host_oom"),
        ("unable to find an engine to execute this computation", "error"),
        ("CUDA error: an illegal memory access was encountered", "error"),
    ],
)
def test_failure_messages_of_pytorch_and_its_libraries(text: str, kind: str) -> None:
    assert failure_kind(get_framework("torch"), RuntimeError(text)) == kind


def test_ranks_are_launched_or_an_error(adapter: Adapter) -> None:
    framework = adapter.framework
    if "ranks" in framework.capabilities.fixed_settings:
        with pytest.raises(WorkloadError, match="ranks"):
            framework.launch(2, "some.module", ["spec.json"])
    else:
        command = framework.launch(2, "some.module", ["spec.json"])
        assert command[0] == sys.executable and command[-2:] == ["some.module", "spec.json"]


def test_allocator_stats_are_none_without_a_device(adapter: Adapter) -> None:
    stats = adapter.framework.allocator_stats()
    assert stats is None or isinstance(stats, AllocatorStats)


def test_unsupported_settings_are_an_error(adapter: Adapter) -> None:
    framework, can = adapter.framework, adapter.framework.capabilities
    default = adapter.workload
    check_capabilities(framework, default)
    unsupported = set()
    for setting in set(SETTINGS) - {"framework"}:
        value = getattr(default, setting)
        other = not value if isinstance(value, bool) else OTHER_VALUES.get(setting, 3)
        try:
            check_capabilities(framework, replace(default, **{setting: other}))
        except WorkloadError as error:
            assert framework.name in error.message
            unsupported.add(setting)
    expected = set(can.fixed_settings)
    expected |= {"device"} - ({"device"} if "cuda" in can.devices else set())
    expected |= {"precision"} - ({"precision"} if "bf16" in can.precisions else set())
    assert unsupported == expected


@pytest.mark.parametrize(
    ("requested", "capability"),
    [
        ({"profiled_steps": 5}, "profiling"),
        ({"gpu_memory": 1}, "memory_cap"),
        ({"cycle": True}, "cycle"),
    ],
)
def test_unsupported_requests_are_an_error(
    adapter: Adapter, requested: dict[str, Any], capability: str
) -> None:
    placement = RankPlacement(Path(), Path(), Path(), Path(), **requested)
    workload = adapter.workload
    if getattr(adapter.framework.capabilities, capability):
        check_capabilities(adapter.framework, workload, placement)
    else:
        with pytest.raises(WorkloadError, match=adapter.framework.name):
            check_capabilities(adapter.framework, workload, placement)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("missing.py:ADAPTER", "No such file: missing.py"),
        (f"{EXAMPLE}:OTHER", "No adapter 'OTHER' in"),
        ("no_such_package.module:ADAPTER", "No module 'no_such_package' for `--framework"),
    ],
)
def test_missing_adapters(setting: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        get_framework(setting)


def test_the_install_command_does_not_need_a_released_stepscope() -> None:
    program = """
import sys
sys.modules["torch"] = None
from stepscope.errors import WorkloadError
from stepscope.workloads.frameworks.registry import get_framework
try: get_framework("torch").load()
except WorkloadError as error: print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    hint = "Install it with: pip install torch torchvision"
    assert done.stdout.strip() == f"torch is not installed for {sys.executable}. {hint}"


def test_the_registry_imports_no_framework() -> None:
    program = (
        "import sys; from stepscope.workloads.frameworks.registry import framework_name as name;"
        "assert name('torch') == 'PyTorch' and name('a.b:C') == 'a.b:C';"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=dict(os.environ), timeout=60)
