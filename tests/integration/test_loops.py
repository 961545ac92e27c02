"""Common training loops: epochs, steps and samples are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.summary import summarize
from stepscope.inject import events, finder
from stepscope.records import Summary
from stepscope.runs.events import read_folder
from stepscope.runs.timelines import timeline_of

SAMPLES, BATCH, EPOCHS = 32, 4, 3
DATA = TensorDataset(torch.zeros(SAMPLES, 2))


def make_optimizer(cls: type[torch.optim.SGD] = torch.optim.SGD) -> torch.optim.SGD:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    return cls([parameter], lr=0.1)


@pytest.fixture
def summary_of(tmp_path: Path) -> Iterator[Callable[[Callable[[], None]], Summary]]:
    finder.load_hook()
    finder.attach_to_imported()

    def monitored(loop: Callable[[], None]) -> Summary:
        folder = tmp_path / loop.__name__
        folder.mkdir()
        before = events.report_to(str(folder))
        loop()
        events.report_with(before)
        timelines = [timeline_of(process) for process in read_folder(folder)]
        first = min(int(p.records["t"][0]) for p in read_folder(folder))
        last = max(int(p.records["t"][-1]) for p in read_folder(folder))
        return summarize(RunData({}, timelines, first, last))

    yield monitored
    events.report_to(None)


def plain() -> None:
    loader, optimizer = DataLoader(DATA, BATCH), make_optimizer()
    for _ in range(EPOCHS):
        for _batch in loader:
            optimizer.step()


def with_evaluation_in_the_middle() -> None:
    loader, test, optimizer = DataLoader(DATA, BATCH), DataLoader(DATA, 16), make_optimizer()
    for _ in range(EPOCHS):
        for index, _batch in enumerate(loader):
            optimizer.step()
            if index == 3:
                list(test)


def one_batch_ahead() -> None:
    """As in Accelerate and Lightning: the last step follows the end of the loader."""
    loader, optimizer = DataLoader(DATA, BATCH), make_optimizer()
    for _ in range(EPOCHS):
        source = iter(loader)
        current = next(source, None)
        while current is not None:
            following = next(source, None)
            optimizer.step()
            current = following


def ahead_with_evaluation() -> None:
    loader, test, optimizer = DataLoader(DATA, BATCH), DataLoader(DATA, 16), make_optimizer()
    for _ in range(EPOCHS):
        source = iter(loader)
        current = next(source, None)
        while current is not None:
            following = next(source, None)
            optimizer.step()
            current = following
        list(test)


def own_iter() -> None:
    class Loader(DataLoader):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return self._get_iterator()

    loader, optimizer = Loader(DATA, BATCH), make_optimizer()
    for _ in range(EPOCHS):
        for _batch in loader:
            optimizer.step()


def endless_pass() -> None:
    """One iterator for all epochs, as in the loaders of timm."""

    class Repeat:
        def __init__(self, sampler: Any) -> None:
            self.sampler = sampler

        def __iter__(self) -> Any:
            while True:
                yield from iter(self.sampler)

    class Loader(DataLoader):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
            self.source = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)  # type: ignore[union-attr, attr-defined]

        def __iter__(self) -> Any:
            for _ in range(len(self)):
                yield next(self.source)

    loader, optimizer = Loader(DATA, BATCH), make_optimizer()
    for _ in range(EPOCHS):
        for _batch in loader:
            optimizer.step()


def one_batch_per_pass() -> None:
    loader, optimizer = DataLoader(DATA, BATCH, shuffle=True), make_optimizer()
    for _ in range(EPOCHS * SAMPLES // BATCH):
        next(iter(loader))
        optimizer.step()


def two_optimizers() -> None:
    loader, generator, critic = DataLoader(DATA, BATCH), make_optimizer(), make_optimizer()
    for _ in range(EPOCHS):
        for _batch in loader:
            critic.step()
            generator.step()


def new_objects_in_every_epoch() -> None:
    for _ in range(EPOCHS):
        loader, optimizer = DataLoader(DATA, BATCH), make_optimizer()
        for _batch in loader:
            optimizer.step()


def unhashable_optimizer() -> None:
    class Optimizer(torch.optim.SGD):
        def __hash__(self) -> int:
            raise RuntimeError("no")

    loader, optimizer = DataLoader(DATA, BATCH), make_optimizer(Optimizer)
    for _ in range(EPOCHS):
        for _batch in loader:
            optimizer.step()


def iterator_without_attributes() -> None:
    class Loader(DataLoader):  # type: ignore[type-arg]
        def _get_iterator(self) -> Any:
            inner = super()._get_iterator()
            return (batch for batch in inner)

    loader, optimizer = Loader(DATA, BATCH), make_optimizer()
    for _ in range(EPOCHS):
        for _batch in loader:
            optimizer.step()


def lists_of_images() -> None:
    """Detection: images differ in size, so a batch is a list of images."""
    images = [torch.zeros(3, 8 + i, 8) for i in range(SAMPLES)]
    loader = DataLoader(
        [(image, {"boxes": torch.zeros(2, 4)}) for image in images],  # type: ignore[arg-type]
        BATCH,
        collate_fn=lambda batch: tuple(zip(*batch, strict=True)),
    )
    optimizer = make_optimizer()
    for _ in range(EPOCHS):
        for _batch in loader:
            optimizer.step()


def several_inputs() -> None:
    loader = DataLoader(
        [((torch.zeros(5), torch.zeros(6)), (torch.zeros(1), torch.zeros(1)))] * SAMPLES,  # type: ignore[arg-type]
        BATCH,
    )
    optimizer = make_optimizer()
    for _ in range(EPOCHS):
        for _batch in loader:
            optimizer.step()


def dictionaries() -> None:
    loader = DataLoader([{"ids": torch.zeros(7), "label": 1}] * SAMPLES, BATCH)  # type: ignore[arg-type]
    optimizer = make_optimizer()
    for _ in range(EPOCHS):
        for _batch in loader:
            optimizer.step()


LOOPS = [
    plain,
    with_evaluation_in_the_middle,
    one_batch_ahead,
    ahead_with_evaluation,
    own_iter,
    endless_pass,
    one_batch_per_pass,
    two_optimizers,
    new_objects_in_every_epoch,
    unhashable_optimizer,
    iterator_without_attributes,
    lists_of_images,
    several_inputs,
    dictionaries,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_epochs_steps_and_samples_are_exact(
    summary_of: Callable[[Callable[[], None]], Summary], loop: Callable[[], None]
) -> None:
    summary = summary_of(loop)

    assert [row.steps for row in summary.epochs] == [SAMPLES // BATCH] * EPOCHS
    assert [row.samples for row in summary.epochs] == [SAMPLES] * EPOCHS
    assert summary.steps == EPOCHS * SAMPLES // BATCH
    assert summary.samples == EPOCHS * SAMPLES
    evaluations = sum(count for name, count, _ in summary.phases if name == "evaluation")
    assert evaluations == (EPOCHS if "evaluation" in loop.__name__ else 0)


def test_gradient_accumulation(summary_of: Callable[[Callable[[], None]], Summary]) -> None:
    def accumulates() -> None:
        loader, optimizer = DataLoader(DATA, BATCH), make_optimizer()
        for _ in range(EPOCHS):
            for index, _batch in enumerate(loader):
                if index % 4 == 3:
                    optimizer.step()

    summary = summary_of(accumulates)
    assert [row.steps for row in summary.epochs] == [2] * EPOCHS
    assert [row.samples for row in summary.epochs] == [SAMPLES] * EPOCHS


def test_single_batch_per_epoch_fetched_ahead(
    summary_of: Callable[[Callable[[], None]], Summary],
) -> None:
    def tiny() -> None:
        loader, optimizer = DataLoader(DATA, SAMPLES), make_optimizer()
        for _ in range(EPOCHS):
            source = iter(loader)
            next(source)
            next(source, None)
            optimizer.step()

    assert [row.steps for row in summary_of(tiny).epochs] == [1] * EPOCHS
