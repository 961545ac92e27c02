"""What every framework adapter must do. To check another one, add it to ADAPTERS."""

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

from stepscope.errors import BadWorkload
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
from stepscope.workloads.spec import DEVICES, PRECISIONS, SETTINGS, make_workload

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_framework" / "numpy_adapter.py"
STEPS = 20


@dataclass(frozen=True)
class Adapter:
    setting: str
    model: str

    @property
    def framework(self) -> Framework:
        return get_framework(self.setting)


ADAPTERS = [Adapter("torch", "cnn"), Adapter(f"{EXAMPLE}:ADAPTER", "mlp")]
OTHER_VALUES: dict[str, Any] = {
    "data_path": "/tmp",
    "device": "cuda",
    "precision": "bf16",
    "cache": "warm",
    "optimizer": "adam",
    "data": "jpeg",
}
"""Values that are not the default; of other numbers it is 3, of a switch the other way."""


@pytest.fixture(params=ADAPTERS, ids=lambda adapter: adapter.framework.name)
def adapter(request: pytest.FixtureRequest) -> Adapter:
    found: Adapter = request.param
    if found.setting == "torch":
        pytest.importorskip("torch")
    return found


def test_every_registered_framework_is_checked_here() -> None:
    assert set(FRAMEWORKS) <= {adapter.setting for adapter in ADAPTERS}


def test_it_declares_its_name_and_capabilities(adapter: Adapter) -> None:
    framework = adapter.framework
    can = framework.capabilities
    assert framework.name and isinstance(can, Capabilities)
    assert set(can.devices) <= set(DEVICES) and "auto" not in can.devices
    assert set(can.precisions) <= set(PRECISIONS)
    assert can.fixed_settings <= set(SETTINGS) - {"device", "precision"}
    assert framework_name(adapter.setting) in (framework.name, adapter.setting)


def test_a_trial_takes_the_steps_it_was_asked_for(
    adapter: Adapter, trial: Callable[..., Any]
) -> None:
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


def test_a_trial_of_what_it_cannot_do_is_refused(trial: Callable[..., Any]) -> None:
    done = trial("mlp", "--framework", f"{EXAMPLE}:ADAPTER", "--ranks", "2")
    assert done.code == BadWorkload.exit_code
    assert "NumPy cannot" in done.err


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
told = []
request = ProbeRequest(tuple(json.loads(batches)), layers=True)
tell = lambda result: told.append(dataclasses.asdict(result))
built.probe(request, tell, Path(folder) / "1.trace")
print(json.dumps([dataclasses.asdict(built.subject), told]))
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


def test_a_probe_tells_of_each_batch_and_of_one_that_does_not_fit(
    adapter: Adapter, tmp_path: Path
) -> None:
    if not adapter.framework.capabilities.probes:
        with pytest.raises(BadWorkload):
            adapter.framework.build(make_workload(adapter.model, {}))
        return
    subject, told = probe(adapter, tmp_path, [4, 8, 1 << 40])
    assert from_json(Subject, subject).parameters > 0 and not from_json(Subject, subject).on_gpu
    results = [from_json(ProbeResult, each) for each in told]
    kinds = [(result.batch, result.kind) for result in results]
    assert kinds == [(4, "ok"), (8, "ok"), (1 << 40, "host_oom")]
    fitting = results[:2]
    assert all(result.reserved_peak >= result.allocated_peak > 0 for result in fitting)
    assert all(len(result.step_s) == 5 and result.samples_per_second for result in fitting)
    assert all(layer.output > 0 for result in fitting for layer in result.layers)


def test_it_tells_memory_from_other_errors(adapter: Adapter) -> None:
    framework = adapter.framework
    assert failure_kind(framework, MemoryError()) == "host_oom"
    assert failure_kind(framework, ValueError("memory is a strange thing")) == "error"
    assert failure_kind(framework, BadWorkload("no")) == "workload"
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
def test_torch_and_the_libraries_below_it_have_their_own_words(text: str, kind: str) -> None:
    assert failure_kind(get_framework("torch"), RuntimeError(text)) == kind


def test_ranks_are_launched_or_refused(adapter: Adapter) -> None:
    framework = adapter.framework
    if "ranks" in framework.capabilities.fixed_settings:
        with pytest.raises(BadWorkload, match="ranks"):
            framework.launch(2, "some.module", ["spec.json"])
    else:
        command = framework.launch(2, "some.module", ["spec.json"])
        assert command[0] == sys.executable and command[-2:] == ["some.module", "spec.json"]


def test_allocator_stats_are_none_without_a_device(adapter: Adapter) -> None:
    stats = adapter.framework.allocator_stats()
    assert stats is None or isinstance(stats, AllocatorStats)


def test_settings_it_does_not_declare_are_refused(adapter: Adapter) -> None:
    framework, can = adapter.framework, adapter.framework.capabilities
    usual = make_workload(adapter.model, {})
    check_capabilities(framework, usual)
    refused = set()
    for setting in set(SETTINGS) - {"framework"}:
        value = getattr(usual, setting)
        other = not value if isinstance(value, bool) else OTHER_VALUES.get(setting, 3)
        try:
            check_capabilities(framework, replace(usual, **{setting: other}))
        except BadWorkload as error:
            assert framework.name in error.message
            refused.add(setting)
    expected = set(can.fixed_settings)
    expected |= {"device"} - ({"device"} if "cuda" in can.devices else set())
    expected |= {"precision"} - ({"precision"} if "bf16" in can.precisions else set())
    assert refused == expected


@pytest.mark.parametrize(
    ("wanted", "capability"),
    [
        ({"profiled_steps": 5}, "profiling"),
        ({"gpu_memory": 1}, "memory_cap"),
        ({"cycle": True}, "cycle"),
    ],
)
def test_requests_it_does_not_declare_are_refused(
    adapter: Adapter, wanted: dict[str, Any], capability: str
) -> None:
    placement = RankPlacement(Path(), Path(), Path(), Path(), **wanted)
    workload = make_workload(adapter.model, {})
    if getattr(adapter.framework.capabilities, capability):
        check_capabilities(adapter.framework, workload, placement)
    else:
        with pytest.raises(BadWorkload, match=adapter.framework.name):
            check_capabilities(adapter.framework, workload, placement)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("missing.py:ADAPTER", "There is no file missing.py"),
        (f"{EXAMPLE}:OTHER", "There is no OTHER in"),
        ("no_such_package.module:ADAPTER", "There is no module no_such_package"),
    ],
)
def test_an_adapter_that_is_not_there(setting: str, said: str) -> None:
    with pytest.raises(BadWorkload, match=said):
        get_framework(setting)


def test_the_registry_imports_no_framework() -> None:
    program = (
        "import sys; from stepscope.workloads.frameworks.registry import framework_name as name;"
        "assert name('torch') == 'PyTorch' and name('a.b:C') == 'a.b:C';"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=dict(os.environ), timeout=60)
