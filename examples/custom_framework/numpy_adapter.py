"""A custom framework for stepscope: a multi-layer perceptron in plain NumPy.

stepscope trial mlp --framework examples/custom_framework/numpy_adapter.py:ADAPTER --steps 200
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepscope.errors import WorkloadError
from stepscope.steplog import Step, StepLog
from stepscope.workloads.frameworks.contract import Capabilities, Framework, failure_kind
from stepscope.workloads.probing import ProbeRequest, ProbeResult, Subject
from stepscope.workloads.reporting import RankPlacement, RankReport
from stepscope.workloads.spec import DEFAULT_SECONDS, LEAST_STEPS, SETTINGS, Workload

Array = NDArray[np.float32]
_INPUTS, _HIDDEN, _CLASSES, _SAMPLES = 784, 128, 10, 10_000
_SUPPORTED = {
    "framework", "device", "precision", "data", "batch_size", "lr", "classes", "samples", "seed",
    "epochs", "steps", "seconds",
}  # fmt: skip


class Mlp:
    """Two linear layers with ReLU, softmax and cross entropy."""

    def __init__(self, classes: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        sizes = ((_INPUTS, _HIDDEN), (_HIDDEN, classes))
        self.weights: list[Array] = [
            (random.standard_normal(size) / np.sqrt(size[0])).astype(np.float32) for size in sizes
        ]

    def loss_and_gradients(self, x: Array, y: NDArray[np.int64]) -> tuple[float, list[Array]]:
        first, second = self.weights
        hidden = np.maximum(x @ first, 0)
        scores = hidden @ second
        exponents = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities = exponents / exponents.sum(axis=1, keepdims=True)
        rows = np.arange(len(y))
        loss = float(-np.log(probabilities[rows, y] + 1e-12).mean())
        probabilities[rows, y] -= 1
        gradient = probabilities / len(y)
        back = (gradient @ second.T) * (hidden > 0)
        return loss, [x.T @ back, hidden.T @ gradient]

    def step(self, x: Array, y: NDArray[np.int64], lr: float) -> float:
        loss, gradients = self.loss_and_gradients(x, y)
        for number, gradient in enumerate(gradients):
            self.weights[number] -= lr * gradient
        return loss


class RandomData:
    """Random samples with a class that can be learned."""

    def __init__(self, workload: Workload) -> None:
        random = np.random.default_rng(workload.seed)
        count, classes = workload.samples or _SAMPLES, workload.classes or _CLASSES
        self.x = random.standard_normal((count, _INPUTS), dtype=np.float32)
        self.y = self.x[:, :classes].argmax(axis=1)

    def batches(self, size: int) -> Iterator[tuple[Array, NDArray[np.int64]]]:
        while True:
            for start in range(0, len(self.x) - size + 1, size):
                yield self.x[start : start + size], self.y[start : start + size]


@dataclass(frozen=True)
class BuiltMlp:
    """The model and data of a probe in host memory; each probe is a fork with a copy."""

    workload: Workload
    model: Mlp
    data: RandomData

    @property
    def subject(self) -> Subject:
        return Subject(
            device="cpu",
            device_name="CPU",
            parameters=sum(weight.size for weight in self.model.weights),
            sample_bytes=self.data.x[0].nbytes,
            samples=len(self.data.x),
            layers=len(self.model.weights),
            optimizer="sgd",
            versions={"numpy": np.__version__},
        )

    def probe(
        self,
        request: ProbeRequest,
        notify: Callable[[ProbeResult], None],
        trace: Path,
        beside: Sequence[int] = (),
    ) -> None:
        for size in request.batches:
            seconds: list[float] = []
            try:
                rows = np.arange(size) % len(self.data.x)
                x, y = self.data.x[rows], self.data.y[rows]
                for _ in range(request.steps + (request.steps_after if request.cycle else 0)):
                    started = time.perf_counter()
                    self.model.step(x, y, self.workload.lr)
                    seconds.append(time.perf_counter() - started)
            except Exception as error:
                kind = failure_kind(ADAPTER, error)
                notify(ProbeResult(size, kind, f"step {len(seconds) + 1}", message=str(error)))
                return
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            notify(ProbeResult(size, "ok", "", peak, peak, step_s=tuple(seconds)))


class NumpyFramework(Framework):
    name = "NumPy"
    capabilities = Capabilities(fixed_settings=frozenset(SETTINGS) - _SUPPORTED, probes=True)

    def build(self, workload: Workload) -> BuiltMlp:
        if workload.model != "mlp" or workload.data not in ("", "random"):
            raise WorkloadError(
                "This framework supports only the model mlp with random data",
                "Use the model mlp, without `--data`",
            )
        model = Mlp(workload.classes or _CLASSES, workload.seed)
        return BuiltMlp(workload, model, RandomData(workload))

    def train(self, workload: Workload, placement: RankPlacement, report: RankReport) -> None:
        with report.phase("build"):
            built = self.build(workload)
        per_epoch = len(built.data.x) // workload.batch_size
        if not per_epoch:
            raise WorkloadError(
                f"The batch size {workload.batch_size} exceeds the {len(built.data.x)} samples",
                "Reduce `--batch-size` or increase `--samples`",
            )
        report.update(
            device="cpu",
            device_name="CPU",
            versions={"numpy": np.__version__},
            model={"name": workload.model, "parameters": built.subject.parameters},
            data={"name": "random", "samples": len(built.data.x)},
            batch={"per_rank": workload.batch_size, "global": workload.batch_size},
            steps_per_epoch=per_epoch,
            samples_per_epoch=per_epoch * workload.batch_size,
            phase="training",
        )
        total = workload.steps or (workload.epochs * per_epoch if workload.epochs else None)
        until = time.monotonic() + (workload.seconds or DEFAULT_SECONDS)
        batches, log = built.data.batches(workload.batch_size), StepLog(placement.steps)
        loss, taken = 0.0, 0
        while taken < (total or LEAST_STEPS) or (total is None and time.monotonic() < until):
            started = time.monotonic_ns()
            x, y = next(batches)
            ready = time.monotonic_ns()
            loss = built.model.step(x, y, workload.lr)
            done = time.monotonic_ns()
            log.add(Step(done, taken, ready - started, 0, done - ready, ready - started))
            taken += 1
        log.close()
        samples = taken * workload.batch_size
        report.update(steps=taken, samples=samples, last_loss=loss, phase="closing", done=True)


ADAPTER = NumpyFramework()
