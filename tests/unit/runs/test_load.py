"""From a run folder to what is explained: what a real training told, and what is torn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import STEPSCOPE
from stepscope.analysis.bottleneck.account import account_of
from stepscope.analysis.bottleneck.case import Case
from stepscope.analysis.bottleneck.explain import explain
from stepscope.analysis.bottleneck.inputs import data_wait
from stepscope.analysis.run.data import RunData, TrainerSettings
from stepscope.inject import events
from stepscope.records import Outcome
from stepscope.runs.load import load
from stepscope.runs.paths import RunPaths
from stepscope.runs.reader import latest_run, open_run
from synthetic import write_empty_run

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

def together(samples):
    time.sleep(0.004)
    return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])

@record
def main():
    torch.set_num_threads(1)
    loader = DataLoader(Remote(), batch_size=4, num_workers=2, prefetch_factor=3,
                        collate_fn=together, persistent_workers=True)
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
    """A real training, watched: two workers wait for their samples, and so does it."""
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


def test_the_loader_is_known_with_the_line_that_made_it(trained: RunData) -> None:
    (trainer,) = trained.trainers
    (loader,) = trainer.loaders.values()
    assert (loader.workers, loader.prefetch, loader.batch_size) == (2, 3, 4)
    assert loader.persists and not loader.pins
    number = TRAIN.splitlines().index(next(t for t in TRAIN.splitlines() if "DataLoader(R" in t))
    location = loader.location
    assert location is not None and location.where == f"train.py:{number + 1}"
    assert location.code.startswith("loader = DataLoader(Remote()")


def test_the_work_of_all_workers_is_known(trained: RunData) -> None:
    assert 20 <= len(trained.preparation) == len(trained.collation) <= 300
    assert (np.diff(trained.preparation.t) >= 0).all()
    assert (trained.preparation.wall >= 0.02).all()
    assert np.median(trained.preparation.blocked) > 0.018
    assert (trained.collation.wall >= 0.004).all()


def test_where_the_training_thread_was_is_known(trained: RunData) -> None:
    (trainer,) = trained.trainers
    account = account_of(trainer)
    assert account is not None
    assert account.sampled == pytest.approx(account.seconds, abs=2.5)
    assert account.share("loader") > 0.5
    line = next(n for n, text in enumerate(TRAIN.splitlines(), 1) if "for x, y in loader" in text)
    location = account.location("loader")
    assert location is not None and location.where == f"train.py:{line}"


def test_a_main_that_torchrun_records_is_not_communication(trained: RunData) -> None:
    """`@record` of torch.distributed stands below everything that such a script does."""
    assert {place.part for place in trained.trainers[0].stack_samples.places} <= {
        "",
        "loader",
        "forward",
        "backward",
        "optimizer",
    }


def test_what_pytorch_is_set_to_is_known(trained: RunData) -> None:
    settings = trained.trainers[0].settings
    assert settings.threads == 1
    assert (settings.optimizer, settings.device) == ("SGD", "cpu")
    assert settings.parameters == 18


def test_the_machine_and_the_ending_are_known(trained: RunData) -> None:
    machine = trained.facts.environment
    assert machine.cpu.logical == os.cpu_count()
    assert machine.memory.total_bytes and machine.memory.total_bytes > 1e8
    assert trained.ending is not None and trained.ending.outcome == Outcome.OK


def test_it_waits_for_what_its_workers_wait_for(trained: RunData) -> None:
    """Of the data alone: others may use the machine that this runs on, and would be named."""
    found = data_wait(Case(trained))
    assert found is not None
    assert (found.cause, found.confidence) == ("input.fetch", "medium"), "no bytes are read"
    assert not explain(trained).weak


# Folders as they may be found


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return write_empty_run(tmp_path / "run")


def seen(paths: RunPaths) -> RunData:
    return load(open_run(paths.folder))


def a_step(paths: RunPaths) -> events.Writer:
    """A process that has stepped: only those train."""
    writer = events.Writer(str(paths.events))
    writer.write(events.STEP, a=1)
    return writer


def test_a_run_without_anything_is_seen(paths: RunPaths) -> None:
    found = seen(paths)
    assert found.trainers == () and not len(found.preparation)
    assert explain(found).weak


def test_a_process_that_only_says_hello_does_not_train(paths: RunPaths) -> None:
    events.Writer(str(paths.events)).seen("torch", "2.14")
    assert seen(paths).trainers == ()


def test_marks_alone_make_a_trainer(paths: RunPaths) -> None:
    events.Writer(str(paths.events)).mark(events.MARK, "step", 1)
    assert len(seen(paths).trainers) == 1


def test_the_work_of_workers_and_of_the_training_process_is_put_in_order(paths: RunPaths) -> None:
    own, shared = a_step(paths), events.Writer(str(paths.events), "workers-77.bin")
    for writer in (shared, own, shared):
        writer.prepared((5_000_000, 1_000_000, 2_000_000), (7_000_000, 7_000_000, 0))
    found = seen(paths)
    assert (np.diff(found.preparation.t) > 0).all()
    assert found.preparation.wall.tolist() == [0.005] * 3
    assert found.preparation.cpu.tolist() == [0.001] * 3
    assert found.preparation.without_cpu.tolist() == [0.002] * 3
    assert found.preparation.blocked == pytest.approx([0.002] * 3)
    assert found.collation.wall.tolist() == [0.007] * 3


def test_a_torn_file_of_workers_loses_its_last_record_alone(paths: RunPaths) -> None:
    a_step(paths)
    shared = events.Writer(str(paths.events), "workers-77.bin")
    for _ in range(3):
        shared.prepared((1, 1, 1), (1, 1, 1))
    file = paths.events / "workers-77.bin"
    file.write_bytes(file.read_bytes()[:-5])
    (paths.events / "workers-78.bin").write_bytes(b"\xff" * 77)
    found = seen(paths)
    assert (len(found.preparation), len(found.collation)) == (3, 2)


def test_places_are_taken_apart(paths: RunPaths) -> None:
    writer = a_step(paths)
    text = "train.py:3\tmodel(x)\ttorch/nn/modules/linear.py:forward\tF.linear(x)\tforward"
    for place, microseconds in ((text, 300_000), ("train.py:4\tx", 200_000), (text, 500_000)):
        writer.write_named(events.WHERE, place, b=microseconds)
    looks = seen(paths).trainers[0].stack_samples
    spent = {place.where: s for place, s in looks.between(0, 2**62).items()}
    assert spent == pytest.approx({"train.py:3": 0.8, "train.py:4": 0.2})
    (linear,) = [place for place in looks.places if place.where == "train.py:3"]
    assert (linear.code, linear.inner_code, linear.part) == ("model(x)", "F.linear(x)", "forward")


@pytest.mark.parametrize("text", ["{not json", "[1, 2]", ""])
def test_settings_that_cannot_be_read_are_none(paths: RunPaths, text: str) -> None:
    a_step(paths).write_named(events.SETTINGS, text)
    assert seen(paths).trainers[0].settings == TrainerSettings()


def test_a_loader_without_a_batch_size_or_a_line_is_known(paths: RunPaths) -> None:
    a_step(paths).write(events.LOADER, events.LOADER_PINS, 3, 4 | 2 << 16, -1)
    loader = seen(paths).trainers[0].loaders[3]
    assert (loader.workers, loader.prefetch, loader.batch_size) == (4, 2, None)
    assert (loader.pins, loader.persists, loader.location) == (True, False, None)
