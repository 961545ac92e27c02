"""The preparation times of real loaders, and that loaders otherwise stay unchanged."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from stepscope.inject import events, finder
from stepscope.runs.events import ProcessEvents, Records, parse, read_folder

EACH = 0.005
SAMPLES, BATCH = 24, 4
SITE = Path(finder.__file__).parent / "site"


def sleep() -> None:
    time.sleep(EACH)


def compute() -> None:
    end = time.thread_time() + EACH
    while time.thread_time() < end:
        sum(range(100))


def nothing() -> None:
    pass


class Numbers(Dataset):  # type: ignore[type-arg]
    """Does some work for each sample."""

    def __init__(self, work: Callable[[], None] = nothing, samples: int = SAMPLES) -> None:
        self.work = work
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        self.work()
        return torch.full((2,), index)


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, every = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, SAMPLES, every):
            self.work()
            yield torch.full((2,), index)


def slow_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(4 * EACH)
    return torch.stack(samples)


@dataclass(frozen=True)
class LoaderEvents:
    """The events of loaders in all processes."""

    folder: Path

    @property
    def process(self) -> ProcessEvents:
        (process,) = [each for each in read_folder(self.folder) if each.pid == os.getpid()]
        return process

    def lines(self) -> list[str]:
        """The lines of code that created loaders."""
        process = self.process
        return [process.name(record["a"]) for record in process.of(events.LOADER_MADE)]

    def of(self, kind: int) -> Records:
        records = [parse(path.read_bytes()) for path in self.folder.glob("*.bin")]
        return np.concatenate([each[each["kind"] == kind] for each in records])

    def seconds(self, kind: int) -> tuple[Any, Any, Any]:
        """Wall time, CPU time and time without a CPU of each batch."""
        records = self.of(kind)
        return records["a"] / 1e9, records["b"] / 1e9, records["number"] / 1e6


@pytest.fixture
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoaderEvents]:
    """Monitor this process and time every batch."""
    finder.attach_to_imported()
    monkeypatch.setattr(sys.modules["_stepscope_batch_timing"], "COST_FACTOR", 0)
    before = events.report_to(str(tmp_path))
    yield LoaderEvents(tmp_path)
    events.report_with(before)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_sleeping_data_set_is_blocked(reported: LoaderEvents, kind: Any, workers: int) -> None:
    assert len(list(DataLoader(kind(sleep), BATCH, num_workers=workers))) == SAMPLES / BATCH
    wall, cpu, cpu_wait = reported.seconds(events.PREPARED)
    assert len(wall) == SAMPLES / BATCH
    assert (wall >= BATCH * EACH).all()
    assert wall.min() < 3 * BATCH * EACH, "load only adds to it"
    assert np.median(cpu) < 0.3 * BATCH * EACH
    assert np.median(wall - cpu - cpu_wait) > 0.7 * BATCH * EACH


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_computing_data_set_takes_cpu_time(reported: LoaderEvents, kind: Any, workers: int) -> None:
    list(DataLoader(kind(compute), BATCH, num_workers=workers))
    wall, cpu, cpu_wait = reported.seconds(events.PREPARED)
    assert (cpu >= 0.98 * BATCH * EACH).all()
    assert (wall >= 0.98 * cpu).all()
    assert np.median(cpu) < 1.5 * BATCH * EACH
    assert np.median(np.clip(wall - cpu - cpu_wait, 0, None) / wall) < 0.25


@pytest.mark.parametrize("workers", [0, 2])
def test_collation_is_timed_separately(reported: LoaderEvents, workers: int) -> None:
    list(DataLoader(Numbers(), BATCH, num_workers=workers, collate_fn=slow_collate))
    samples, _, _ = reported.seconds(events.PREPARED)
    wall, cpu, _ = reported.seconds(events.COLLATED)
    assert len(samples) == len(wall) == SAMPLES / BATCH
    assert (wall >= 4 * EACH).all() and np.median(cpu) < EACH
    assert samples.min() < EACH


def test_workers_of_one_process_share_a_file(reported: LoaderEvents) -> None:
    for _ in range(2):
        list(DataLoader(Numbers(), BATCH, num_workers=2))
    names = {path.name for path in reported.folder.iterdir()}
    assert names == {f"{os.getpid()}.bin", f"workers-{os.getpid()}.bin"}
    assert len(reported.of(events.PREPARED)) == 2 * SAMPLES / BATCH


def test_sample_counts_as_a_batch_without_batching(reported: LoaderEvents) -> None:
    list(DataLoader(Numbers(sleep), batch_size=None))
    wall, _, _ = reported.seconds(events.PREPARED)
    assert len(wall) == SAMPLES and (wall >= EACH).all()


def test_exception_of_the_data_set_is_unchanged(reported: LoaderEvents) -> None:
    def fail() -> None:
        raise KeyError("sample 7")

    with pytest.raises(KeyError, match="sample 7"):
        next(iter(DataLoader(Numbers(fail), BATCH)))
    assert not len(reported.of(events.PREPARED))


def test_settings_and_line_of_a_loader_are_reported_once(reported: LoaderEvents) -> None:
    loader = DataLoader(Numbers(), BATCH, num_workers=2, prefetch_factor=3)
    number = sys._getframe().f_lineno - 1
    for _ in range(2):
        list(loader)
    (record,) = reported.of(events.LOADER)
    assert (record["a"] & 0xFFFF, record["a"] >> 16, record["b"]) == (2, 3, BATCH)
    assert record["flags"] == 0
    (line,) = reported.lines()
    where, _, code = line.partition("\t")
    assert where.endswith(f"test_hook.py:{number}")
    assert code == "loader = DataLoader(Numbers(), BATCH, num_workers=2, prefetch_factor=3)"


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"num_workers": 1, "persistent_workers": True}, events.LOADER_PERSISTS),
        ({"pin_memory": True}, events.LOADER_PINS),
    ],
)
@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_flags_of_a_loader(reported: LoaderEvents, options: dict[str, Any], flags: int) -> None:
    list(DataLoader(Numbers(), BATCH, **options))
    (record,) = reported.of(events.LOADER)
    assert record["flags"] == flags


@pytest.mark.parametrize("workers", [0, 2])
def test_collate_fn_of_the_user_is_unchanged(reported: LoaderEvents, workers: int) -> None:
    loader = DataLoader(Numbers(), BATCH, num_workers=workers, collate_fn=slow_collate)
    list(loader)
    assert loader.collate_fn is slow_collate


def test_loaders_and_data_sets_can_be_pickled_and_copied(reported: LoaderEvents) -> None:
    loader = DataLoader(Numbers(), BATCH, collate_fn=slow_collate)
    before = set(vars(loader))
    list(loader)
    assert set(vars(loader)) == before
    for other in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):
        assert [b.tolist() for b in other] == [b.tolist() for b in loader]
    assert pickle.loads(pickle.dumps(loader.dataset)).samples == SAMPLES


def test_subclass_with_its_own_init(reported: LoaderEvents) -> None:
    class Mine(DataLoader):  # type: ignore[type-arg]
        def __init__(self, name: str) -> None:
            super().__init__(Numbers(), batch_size=3)
            self.name = name

    loader = Mine("mine")
    assert (loader.name, len(list(loader))) == ("mine", 8)
    (record,) = reported.of(events.LOADER)
    assert record["b"] == 3
    assert "super().__init__(Numbers(), batch_size=3)" in reported.lines()[0]


def test_unhashable_loader(reported: LoaderEvents) -> None:
    class Odd(DataLoader):  # type: ignore[type-arg]
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    assert len(list(Odd(Numbers(), BATCH))) == SAMPLES / BATCH
    assert len(reported.of(events.BATCH)) == SAMPLES / BATCH


def test_signatures_are_unchanged(reported: LoaderEvents) -> None:
    """Lightning and Accelerate recreate loaders from their signature."""
    parameters = list(inspect.signature(DataLoader.__init__).parameters)
    assert parameters[:3] == ["self", "dataset", "batch_size"] and "collate_fn" in parameters
    assert DataLoader.__init__.__qualname__ == "DataLoader.__init__"


def test_nothing_is_reported_if_not_monitored(reported: LoaderEvents) -> None:
    events.report_to(None)
    loader = DataLoader(Numbers(), BATCH, num_workers=1)
    assert len(list(loader)) == SAMPLES / BATCH
    assert list(reported.folder.iterdir()) == []


SPAWN_SCRIPT = """
import time
import torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.full((2,), index)

def collate(samples):
    time.sleep(0.02)
    return torch.stack(samples)

if __name__ == "__main__":
    loader = DataLoader(Slow(), 4, num_workers=1, collate_fn=collate,
                        multiprocessing_context="spawn")
    print(sum(int(batch.sum()) for batch in loader))
"""


def test_spawned_workers_report_too(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "train.py").write_text(SPAWN_SCRIPT)
    monitored = {"PYTHONPATH": str(SITE), "STEPSCOPE_EVENTS": str(tmp_path / "events")}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, **monitored},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.split() == ["240"], done.stderr
    records = LoaderEvents(tmp_path / "events")
    wall, cpu, _ = records.seconds(events.PREPARED)
    assert 1 <= len(wall) <= 4 and (wall >= 0.02).all() and np.median(cpu) < 0.01
    assert (records.seconds(events.COLLATED)[0] >= 0.02).all()
    (record,) = records.of(events.LOADER)
    assert record["a"] & 0xFFFF == 1


def test_only_some_fast_batches_are_timed(
    reported: LoaderEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["_stepscope_batch_timing"], "COST_FACTOR", 1000)
    batches = len(list(DataLoader(Numbers(samples=3000), 1)))
    assert 1 <= len(reported.of(events.PREPARED)) < batches / 10
    assert len(reported.of(events.BATCH)) == batches
