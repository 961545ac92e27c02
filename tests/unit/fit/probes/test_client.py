"""Forked probes in real processes on the CPU: user code affects neither the client nor others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from stepscope.errors import TrialError, WorkloadError
from stepscope.fit.probes.client import ForkedProbes
from stepscope.workloads.probing import ProbeRequest, ProbeResult, training_lock
from stepscope.workloads.spec import make_workload

WORKLOAD = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch import nn

HERE = Path(__file__)
RAISES, KILLS, EXITS, HANGS = 101, 103, 105, 107
processes = set()

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower, self.upper = nn.Linear(8, 4), nn.Linear(4, 2)
        self.drop = nn.Dropout()
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, inputs):
        if self.training:
            self.steps += 1
        return self.upper(self.drop(self.lower(inputs)))

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.full((8,), index / 4096), index % 2

def step(model, batch):
    inputs, targets = batch
    size = len(inputs)
    print('{"number": 1, "status": 0}', flush=True)
    os.write(1, b"{\\n")
    if os.getpid() not in processes and model.steps > 0:
        raise RuntimeError("this model was already trained")
    processes.add(os.getpid())
    if size == RAISES:
        raise ValueError("Target 7 is out of bounds.")
    if size == KILLS:
        os.kill(os.getpid(), signal.SIGKILL)
    if size == EXITS:
        print("the last line", file=sys.stderr)
        os._exit(3)
    if size == HANGS:
        (HERE.parent / "hangs").write_text(str(os.getpid()))
        time.sleep(600)
    loss = nn.functional.cross_entropy(model(inputs), targets)
    with (HERE.parent / f"losses-{os.getpid()}").open("a") as file:
        file.write(f"{loss.item()!r}\\n")
    return loss

def workload():
    print("building")
    import torch._dynamo  # slow, and every optimizer imports it: import it once
    return plain()

def plain():
    return {"model": Counting(), "step": step, "data": Numbers()}

def breaks():
    return {"model": nn.Linear(1, 1)}["modle"]

def crashes():
    print("out of luck", file=sys.stderr, flush=True)
    os._exit(5)

def sleeps():
    time.sleep(600)
"""
RAISES, KILLS, EXITS, HANGS = 101, 103, 105, 107


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(WORKLOAD)
    return path


@pytest.fixture(scope="module", autouse=True)
def _own_turns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Do not wait for probes outside of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("turns")))
        yield


@pytest.fixture(scope="module")
def prober(file: Path) -> Iterator[ForkedProbes]:
    """One server for all tests: no probe may affect another one."""
    with ForkedProbes(make_workload(f"{file}:workload", {}), os.environ) as started:
        yield started


def probe(prober: ForkedProbes, *batches: int, **more: object) -> tuple[ProbeResult, ...]:
    return prober.run([ProbeRequest(batches, **more)])[0].results  # type: ignore[arg-type]


def still_works(prober: ForkedProbes) -> bool:
    return probe(prober, 6)[0].is_ok


def test_the_subject_is_known_without_a_probe(prober: ForkedProbes) -> None:
    subject = prober.subject
    assert (subject.device, subject.samples, subject.variable_size) == ("cpu", 4096, False)
    assert subject.parameters == 8 * 4 + 4 + 4 * 2 + 2 and subject.layers == 3
    assert subject.sample_bytes == 8 * 4 + 8
    assert subject.versions["torch"] and not subject.custom_optimizer


def test_each_batch_of_a_probe_has_its_own_result(prober: ForkedProbes) -> None:
    probed = prober.run([ProbeRequest((4, 16), steps=3, steps_after=2)])[0]
    assert [result.batch for result in probed.results] == [4, 16]
    for result in probed.results:
        assert result.is_ok and len(result.step_s) == 5
        assert len(result.allocated_bytes) == len(result.reserved_bytes) == 5
        assert min(result.step_s) > 0 and result.samples_per_second
        parts = result.parts
        assert parts.inputs_bytes == result.batch * 40
        assert parts.weights_bytes == 46 * 4 + 4 and parts.gradients_bytes == 46 * 4
    assert probed.trace is None


def test_outcomes_are_in_the_order_of_the_requests(prober: ForkedProbes) -> None:
    probed = prober.run([ProbeRequest((batch,), cycle=False) for batch in (32, 4, 8)])
    assert [each.last.batch for each in probed] == [32, 4, 8]
    assert all(each.last.is_ok and len(each.last.step_s) == 3 for each in probed)


def test_an_error_of_user_code_has_a_hint_and_ends_the_probe(prober: ForkedProbes) -> None:
    results = probe(prober, 4, RAISES, 8)
    assert [each.kind for each in results] == ["ok", "error"]
    assert results[-1].batch == RAISES and results[-1].phase == "step 1"
    assert "Target 7 is out of bounds." in results[-1].message
    assert results[-1].hint.startswith("A label is out of range")
    assert still_works(prober)


def test_an_error_of_user_code_has_its_line(prober: ForkedProbes) -> None:
    line = 1 + WORKLOAD.splitlines().index('        raise ValueError("Target 7 is out of bounds.")')
    assert f"mine.py:{line} in step" in probe(prober, RAISES)[0].message


def test_a_killed_probe_is_reported_and_others_continue(prober: ForkedProbes) -> None:
    killed, other = prober.run([ProbeRequest((4, KILLS)), ProbeRequest((8,))])
    assert [result.kind for result in killed.results] == ["ok", "killed"]
    assert killed.last.batch == KILLS and not killed.last.is_oom and "killed" in killed.last.message
    assert other.last.is_ok and still_works(prober)


def test_a_probe_that_exits_is_reported_with_its_last_line(prober: ForkedProbes) -> None:
    result = probe(prober, EXITS)[0]
    assert (result.batch, result.kind, result.message) == (EXITS, "error", "the last line")
    assert still_works(prober)


def test_a_probe_that_stalls_is_ended(
    prober: ForkedProbes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prober, "_stall_timeout_s", 1.0)
    start = time.monotonic()
    result = probe(prober, HANGS)[0]
    assert result.kind == "timeout" and result.message == "no progress for 1 s"
    assert 1 <= time.monotonic() - start < 100
    monkeypatch.undo()
    assert still_works(prober)


def test_probes_do_not_affect_each_other(prober: ForkedProbes, file: Path) -> None:
    """The workload fails if its model was already trained, and losses with dropout are equal only
    if weights and random numbers are."""
    before = set(file.parent.glob("losses-*"))
    first, second = probe(prober, 32), probe(prober, 32)
    assert first[0].is_ok and second[0].is_ok, (first, second)
    one, other = (path.read_text() for path in set(file.parent.glob("losses-*")) - before)
    assert one == other and len(set(one.split())) > 3
    assert first[0].parts.weights_bytes == second[0].parts.weights_bytes


def test_layers_are_those_of_the_model(prober: ForkedProbes) -> None:
    (result,) = probe(prober, 4, layers=True)
    layers = [
        (each.name, each.kind, each.parameter_bytes, each.output_bytes) for each in result.layers
    ]
    assert result.is_ok and layers == [
        ("lower", "Linear", (8 * 4 + 4) * 4, 16),
        ("drop", "Dropout", 0, 16),
        ("upper", "Linear", (4 * 2 + 2) * 4, 8),
    ]
    assert still_works(prober)


def test_waiting_for_a_turn_is_not_a_stall(
    prober: ForkedProbes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prober, "_stall_timeout_s", 3.0)
    holds, held_s = threading.Event(), 5.0

    def hold() -> None:
        with training_lock(exclusive=True):
            holds.set()
            time.sleep(held_s)

    other = threading.Thread(target=hold)
    other.start()
    assert holds.wait(20)
    start = time.monotonic()
    result = prober.run([ProbeRequest((4,), exclusive=True)])[0].last
    other.join()
    assert result.is_ok and time.monotonic() - start > 0.8 * held_s


def test_a_built_in_model_is_probed_with_random_samples(tmp_path: Path) -> None:
    with ForkedProbes(make_workload("cnn", {}), os.environ) as started:
        assert started.subject.samples is None and started.subject.parameters > 10_000
        assert probe(started, 4, cycle=False)[0].is_ok
        folder = started._folder
        assert folder.is_dir()
    assert not folder.exists()


def test_a_distributed_rank_is_probed_in_a_process_group_of_one(file: Path) -> None:
    with ForkedProbes(make_workload(f"{file}:workload", {"ranks": 2}), os.environ) as started:
        probed = started.run([ProbeRequest((4,)), ProbeRequest((8,))])
        assert [each.last.kind for each in probed] == ["ok", "ok"], probed


# A server that fails to start


def test_an_error_in_the_workload_function_has_its_line(file: Path) -> None:
    line = 2 + WORKLOAD.splitlines().index("def breaks():")
    with (
        pytest.raises(WorkloadError) as refused,
        ForkedProbes(make_workload(f"{file}:breaks", {}), os.environ),
    ):
        pass
    assert f"mine.py:{line}" in str(refused.value) and "modle" in str(refused.value)


def test_a_server_that_crashes_is_reported_with_its_log(file: Path) -> None:
    with (
        pytest.raises(TrialError, match="exited with code 5") as refused,
        ForkedProbes(make_workload(f"{file}:crashes", {}), os.environ),
    ):
        pass
    assert "out of luck" in refused.value.hint


def test_a_build_that_stalls_is_ended(file: Path) -> None:
    with (
        pytest.raises(TrialError, match=r"took longer than 0\.5 s"),
        ForkedProbes(make_workload(f"{file}:sleeps", {}), os.environ, stall_timeout_s=0.5),
    ):
        pass


def test_a_killed_server_is_reported(file: Path) -> None:
    with ForkedProbes(make_workload(f"{file}:plain", {}), os.environ) as started:
        os.kill(started._process.pid, signal.SIGKILL)
        with pytest.raises(TrialError, match="was killed by SIGKILL"):
            probe(started, 4)


CLIENT = """
import os, sys
from stepscope.fit.probes.client import ForkedProbes
from stepscope.workloads.probing import ProbeRequest
from stepscope.workloads.spec import make_workload

with ForkedProbes(make_workload(sys.argv[1], {}), os.environ) as prober:
    print(prober._process.pid, flush=True)
    prober.run([ProbeRequest((107,))])
"""


def test_a_killed_client_leaves_no_processes(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(WORKLOAD)
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, f"{file}:workload"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        assert client.stdout is not None
        server = int(client.stdout.readline())
        assert wait_until((tmp_path / "hangs").exists)
        child = int((tmp_path / "hangs").read_text())
        assert is_alive(server) and is_alive(child)
    finally:
        client.kill()
        client.communicate()
    assert wait_until(lambda: not is_alive(server) and not is_alive(child))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(true: object, seconds: float = 40.0) -> bool:
    assert callable(true)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if true():
            return True
        time.sleep(0.05)
    return False
