"""Probes in real processes, on the CPU: what a user's code does there harms nobody."""

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

from stepscope.errors import BadWorkload, CannotTry
from stepscope.fit.probes.client import ForkedProbes
from stepscope.workloads.probing import ProbeRequest, ProbeResult, taking_turns
from stepscope.workloads.spec import make_workload

WORKLOAD = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch import nn

HERE = Path(__file__)
RAISES, KILLS, LEAVES, HANGS = 101, 103, 105, 107
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
        raise RuntimeError("somebody has trained this model before")
    processes.add(os.getpid())
    if size == RAISES:
        raise ValueError("Target 7 is out of bounds.")
    if size == KILLS:
        os.kill(os.getpid(), signal.SIGKILL)
    if size == LEAVES:
        print("these were my last words", file=sys.stderr)
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
    import torch._dynamo  # takes long, and every optimizer wants it: here it is done once
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
RAISES, KILLS, LEAVES, HANGS = 101, 103, 105, 107


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(WORKLOAD)
    return path


@pytest.fixture(scope="module", autouse=True)
def _own_turns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Probes that are not of these tests are not waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("turns")))
        yield


@pytest.fixture(scope="module")
def prober(file: Path) -> Iterator[ForkedProbes]:
    """One server for all: what one probe does, none of the others may notice."""
    with ForkedProbes(make_workload(f"{file}:workload", {}), os.environ) as started:
        yield started


def asked(prober: ForkedProbes, *batches: int, **more: object) -> tuple[ProbeResult, ...]:
    return prober.run([ProbeRequest(batches, **more)])[0].results  # type: ignore[arg-type]


def goes_on(prober: ForkedProbes) -> bool:
    return asked(prober, 6)[0].is_ok


def test_a_subject_is_told_without_a_probe(prober: ForkedProbes) -> None:
    subject = prober.subject
    assert (subject.device, subject.samples, subject.varies) == ("cpu", 4096, False)
    assert subject.parameters == 8 * 4 + 4 + 4 * 2 + 2 and subject.layers == 3
    assert subject.sample_bytes == 8 * 4 + 8
    assert subject.versions["torch"] and not subject.own_optimizer


def test_batches_of_one_ask_are_told_one_by_one_with_their_steps(prober: ForkedProbes) -> None:
    probed = prober.run([ProbeRequest((4, 16), steps=3, again=2)])[0]
    assert [told.batch for told in probed.results] == [4, 16]
    for told in probed.results:
        assert told.is_ok and len(told.step_s) == len(told.kept) == len(told.reserved) == 5
        assert min(told.step_s) > 0 and told.samples_per_second
        assert told.parts.inputs == told.batch * 40
        assert told.parts.weights == 46 * 4 + 4 and told.parts.gradients == 46 * 4
    assert probed.trace is None


def test_several_asks_are_answered_in_their_order(prober: ForkedProbes) -> None:
    probed = prober.run([ProbeRequest((batch,), cycle=False) for batch in (32, 4, 8)])
    assert [each.last.batch for each in probed] == [32, 4, 8]
    assert all(each.last.is_ok and len(each.last.step_s) == 3 for each in probed)


def test_a_users_error_is_told_with_what_to_do_and_ends_the_ask(prober: ForkedProbes) -> None:
    told = asked(prober, 4, RAISES, 8)
    assert [each.kind for each in told] == ["ok", "error"]
    assert told[-1].batch == RAISES and told[-1].phase == "step 1"
    assert "Target 7 is out of bounds." in told[-1].message
    assert told[-1].hint.startswith("A label is no class of the model")
    assert goes_on(prober)


def test_a_users_error_is_told_with_its_line(prober: ForkedProbes) -> None:
    line = 1 + WORKLOAD.splitlines().index('        raise ValueError("Target 7 is out of bounds.")')
    assert f"mine.py:{line} in step" in asked(prober, RAISES)[0].message


def test_a_probe_that_is_killed_is_told_so_and_the_others_go_on(prober: ForkedProbes) -> None:
    killed, other = prober.run([ProbeRequest((4, KILLS)), ProbeRequest((8,))])
    assert [told.kind for told in killed.results] == ["ok", "killed"]
    assert killed.last.batch == KILLS and not killed.last.is_oom and "killed" in killed.last.message
    assert other.last.is_ok and goes_on(prober)


def test_a_probe_that_leaves_is_told_with_its_last_words(prober: ForkedProbes) -> None:
    told = asked(prober, LEAVES)[0]
    assert (told.batch, told.kind, told.message) == (LEAVES, "error", "these were my last words")
    assert goes_on(prober)


def test_a_probe_that_hangs_is_ended(prober: ForkedProbes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prober, "_stall_timeout_s", 1.0)
    began = time.monotonic()
    told = asked(prober, HANGS)[0]
    assert told.kind == "timeout" and "nothing was heard of it for 1 s" in told.message
    assert 1 <= time.monotonic() - began < 100
    monkeypatch.undo()
    assert goes_on(prober)


def test_no_probe_sees_what_another_has_done(prober: ForkedProbes, file: Path) -> None:
    """The workload fails where its model was trained before; and losses with dropout are the same
    only where weights and random numbers are."""
    before = set(file.parent.glob("losses-*"))
    first, second = asked(prober, 32), asked(prober, 32)
    assert first[0].is_ok and second[0].is_ok, (first, second)
    one, other = (path.read_text() for path in set(file.parent.glob("losses-*")) - before)
    assert one == other and len(set(one.split())) > 3
    assert first[0].parts.weights == second[0].parts.weights


def test_layers_are_those_of_the_model(prober: ForkedProbes) -> None:
    (told,) = asked(prober, 4, layers=True)
    layers = [(each.name, each.kind, each.parameters, each.output) for each in told.layers]
    assert told.is_ok and layers == [
        ("lower", "Linear", (8 * 4 + 4) * 4, 16),
        ("drop", "Dropout", 0, 16),
        ("upper", "Linear", (4 * 2 + 2) * 4, 8),
    ]
    assert goes_on(prober)


def test_a_probe_waits_for_its_turn_and_is_not_taken_to_hang(
    prober: ForkedProbes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prober, "_stall_timeout_s", 3.0)
    holds, held_s = threading.Event(), 5.0

    def hold() -> None:
        with taking_turns(alone=True):
            holds.set()
            time.sleep(held_s)

    other = threading.Thread(target=hold)
    other.start()
    assert holds.wait(20)
    began = time.monotonic()
    told = prober.run([ProbeRequest((4,), turn=True)])[0].last
    other.join()
    assert told.is_ok and time.monotonic() - began > 0.8 * held_s


def test_a_model_of_ours_is_probed_with_made_up_samples(tmp_path: Path) -> None:
    with ForkedProbes(make_workload("cnn", {}), os.environ) as started:
        assert started.subject.samples is None and started.subject.parameters > 10_000
        assert asked(started, 4, cycle=False)[0].is_ok
        folder = started._folder
        assert folder.is_dir()
    assert not folder.exists()


def test_a_rank_of_several_is_probed_in_a_group_of_its_own(file: Path) -> None:
    with ForkedProbes(make_workload(f"{file}:workload", {"ranks": 2}), os.environ) as started:
        probed = started.run([ProbeRequest((4,)), ProbeRequest((8,))])
        assert [each.last.kind for each in probed] == ["ok", "ok"], probed


# A server that does not come to life


def test_what_is_wrong_with_a_function_is_told_with_its_line(file: Path) -> None:
    line = 2 + WORKLOAD.splitlines().index("def breaks():")
    with (
        pytest.raises(BadWorkload) as refused,
        ForkedProbes(make_workload(f"{file}:breaks", {}), os.environ),
    ):
        pass
    assert f"mine.py:{line}" in str(refused.value) and "modle" in str(refused.value)


def test_a_server_that_crashes_is_told_with_its_last_words(file: Path) -> None:
    with (
        pytest.raises(CannotTry, match="left with 5") as refused,
        ForkedProbes(make_workload(f"{file}:crashes", {}), os.environ),
    ):
        pass
    assert "out of luck" in refused.value.hint


def test_a_model_that_is_never_built_is_not_waited_for(file: Path) -> None:
    with (
        pytest.raises(CannotTry, match=r"not done after 0\.5 s"),
        ForkedProbes(make_workload(f"{file}:sleeps", {}), os.environ, stall_timeout_s=0.5),
    ):
        pass


def test_a_server_that_is_killed_is_told(file: Path) -> None:
    with ForkedProbes(make_workload(f"{file}:plain", {}), os.environ) as started:
        os.kill(started._process.pid, signal.SIGKILL)
        with pytest.raises(CannotTry, match="was killed by SIGKILL"):
            asked(started, 4)


CLIENT = """
import os, sys
from stepscope.fit.probes.client import ForkedProbes
from stepscope.workloads.probing import ProbeRequest
from stepscope.workloads.spec import make_workload

with ForkedProbes(make_workload(sys.argv[1], {}), os.environ) as prober:
    print(prober._process.pid, flush=True)
    prober.run([ProbeRequest((107,))])
"""


def test_nothing_is_left_of_a_client_that_is_killed(tmp_path: Path) -> None:
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
