"""Loading of run folders: of a real training, and of incomplete ones."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import STEPSCOPE
from stepscope.analysis.bottleneck.breakdown import breakdown_of
from stepscope.analysis.bottleneck.case import Case
from stepscope.analysis.bottleneck.explain import explain
from stepscope.analysis.bottleneck.inputs import data_wait
from stepscope.analysis.run.data import RunData, TrainerSettings
from stepscope.inject import events
from stepscope.records import Outcome
from stepscope.runs.load import load
from stepscope.runs.paths import RunPaths
from stepscope.runs.reader import latest_run, open_run
from synthetic import BEGIN_NS, write_empty_run

TRAIN = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.distributed.elastic.multiprocessing.errors import record

class Remote(Dataset):
    def __len__(self):
        return 600

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.zeros(8), index % 2

def collate(samples):
    time.sleep(0.004)
    return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])

@record
def main():
    torch.set_num_threads(1)
    loader = DataLoader(Remote(), batch_size=4, num_workers=2, prefetch_factor=3,
                        collate_fn=collate, persistent_workers=True)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            time.sleep(0.002)
            if x.sum() > 1:
                print(loss)

main()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """A real monitored training that waits for two loader workers, which sleep."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "train.py").write_text(TRAIN)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STEPSCOPE_")}
    done = subprocess.run(
        [*STEPSCOPE, "run", "--quiet", "--out", "runs", "--", sys.executable, "train.py"],
        cwd=folder,
        env=clean,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return load(open_run(latest_run(folder / "runs")))


def test_loader_with_its_line_of_code(trained: RunData) -> None:
    (trainer,) = trained.trainers
    (loader,) = trainer.loaders.values()
    assert (loader.workers, loader.prefetch, loader.batch_size) == (2, 3, 4)
    assert loader.persists and not loader.pins
    number = TRAIN.splitlines().index(next(t for t in TRAIN.splitlines() if "DataLoader(R" in t))
    location = loader.location
    assert location is not None and location.where == f"train.py:{number + 1}"
    assert location.code.startswith("loader = DataLoader(Remote()")


def test_preparation_times_of_all_workers(trained: RunData) -> None:
    assert 20 <= len(trained.preparation) == len(trained.collation) <= 300
    assert (np.diff(trained.preparation.t) >= 0).all()
    assert (trained.preparation.wall >= 0.02).all()
    assert np.median(trained.preparation.blocked) > 0.018
    assert (trained.collation.wall >= 0.004).all()


def test_stack_samples_of_the_training_thread(trained: RunData) -> None:
    (trainer,) = trained.trainers
    breakdown = breakdown_of(trainer)
    assert breakdown is not None
    assert breakdown.sampled_seconds == pytest.approx(breakdown.seconds, abs=2.5)
    assert breakdown.share("loader") > 0.5
    line = next(n for n, text in enumerate(TRAIN.splitlines(), 1) if "for x, y in loader" in text)
    location = breakdown.location("loader")
    assert location is not None and location.where == f"train.py:{line}"


def test_recorded_main_is_not_communication(trained: RunData) -> None:
    """`@record` of torch.distributed is in every stack of such a script."""
    assert {location.part for location in trained.trainers[0].stack_samples.places} <= {
        "",
        "loader",
        "forward",
        "backward",
        "optimizer",
    }


def test_settings_of_pytorch(trained: RunData) -> None:
    settings = trained.trainers[0].settings
    assert settings.threads == 1
    assert (settings.optimizer, settings.device) == ("SGD", "cpu")
    assert settings.parameters == 18


def test_machine_and_exit_status(trained: RunData) -> None:
    machine = trained.facts.environment
    assert machine.cpu.logical == os.cpu_count()
    assert machine.memory.total_bytes and machine.memory.total_bytes > 1e8
    assert trained.exit_status is not None and trained.exit_status.outcome == Outcome.OK


def test_data_wait_is_caused_by_fetching(trained: RunData) -> None:
    """Only the data wait is tested: other processes may use this machine and be named."""
    finding = data_wait(Case(trained))
    assert finding is not None and finding.cause == "input.fetch"
    assert not explain(trained).without_steps


# Incomplete folders


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run without data. Events are written now, which is not the time of the synthetic run."""
    times = itertools.count(BEGIN_NS, 1_000)
    monkeypatch.setattr(events, "_now", lambda: next(times))
    return write_empty_run(tmp_path / "run")


def load_run(paths: RunPaths) -> RunData:
    return load(open_run(paths.folder))


def write_step(paths: RunPaths) -> events.Writer:
    """Write a step, which makes the process a trainer."""
    writer = events.Writer(str(paths.events))
    writer.write(events.STEP, a=1)
    return writer


def test_empty_run(paths: RunPaths) -> None:
    data = load_run(paths)
    assert data.trainers == () and not len(data.preparation)
    assert explain(data).without_steps


def test_process_without_steps_is_not_a_trainer(paths: RunPaths) -> None:
    events.Writer(str(paths.events)).seen("torch", "2.14")
    assert load_run(paths).trainers == ()


def test_marks_alone_make_a_trainer(paths: RunPaths) -> None:
    events.Writer(str(paths.events)).mark(events.MARK, "step", 1)
    assert len(load_run(paths).trainers) == 1


def test_preparation_times_are_sorted_over_processes(paths: RunPaths) -> None:
    own, shared = write_step(paths), events.Writer(str(paths.events), "workers-77.bin")
    for writer in (shared, own, shared):
        writer.prepared((5_000_000, 1_000_000, 2_000_000), (7_000_000, 7_000_000, 0))
    data = load_run(paths)
    assert (np.diff(data.preparation.t) > 0).all()
    assert data.preparation.wall.tolist() == [0.005] * 3
    assert data.preparation.cpu.tolist() == [0.001] * 3
    assert data.preparation.without_cpu.tolist() == [0.002] * 3
    assert data.preparation.blocked == pytest.approx([0.002] * 3)
    assert data.collation.wall.tolist() == [0.007] * 3


def test_truncated_worker_file_loses_only_its_last_record(paths: RunPaths) -> None:
    write_step(paths)
    shared = events.Writer(str(paths.events), "workers-77.bin")
    for _ in range(3):
        shared.prepared((1, 1, 1), (1, 1, 1))
    file = paths.events / "workers-77.bin"
    file.write_bytes(file.read_bytes()[:-5])
    (paths.events / "workers-78.bin").write_bytes(b"\xff" * 77)
    data = load_run(paths)
    assert (len(data.preparation), len(data.collation)) == (3, 2)


def test_stack_locations_are_parsed(paths: RunPaths) -> None:
    writer = write_step(paths)
    text = "train.py:3\tmodel(x)\ttorch/nn/modules/linear.py:forward\tF.linear(x)\tforward"
    for location, microseconds in ((text, 300_000), ("train.py:4\tx", 200_000), (text, 500_000)):
        writer.write_named(events.WHERE, location, b=microseconds)
    samples = load_run(paths).trainers[0].stack_samples
    spent = {location.where: s for location, s in samples.between(0, 2**62).items()}
    assert spent == pytest.approx({"train.py:3": 0.8, "train.py:4": 0.2})
    (linear,) = [each for each in samples.places if each.where == "train.py:3"]
    assert (linear.code, linear.inner_code, linear.part) == ("model(x)", "F.linear(x)", "forward")


@pytest.mark.parametrize("text", ["{not json", "[1, 2]", ""])
def test_invalid_settings_are_ignored(paths: RunPaths, text: str) -> None:
    write_step(paths).write_named(events.SETTINGS, text)
    assert load_run(paths).trainers[0].settings == TrainerSettings()


def test_loader_without_a_batch_size_or_a_line(paths: RunPaths) -> None:
    write_step(paths).write(events.LOADER, events.LOADER_PINS, 3, 4 | 2 << 16, -1)
    loader = load_run(paths).trainers[0].loaders[3]
    assert (loader.workers, loader.prefetch, loader.batch_size) == (4, 2, None)
    assert (loader.pins, loader.persists, loader.location) == (True, False, None)
