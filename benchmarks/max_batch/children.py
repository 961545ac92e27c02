"""Trains batches, each in a fresh process: a fork of this one, which has PyTorch and the model.

This process never initializes CUDA, so that its forks can. Several forks run at once, because
initializing CUDA takes longer than training; but only one trains at a time if speed is measured.
It is independent of the probes of `stepscope fit`, because it provides the reference for them.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from max_batch.cases import Case
from stepscope.workloads.frameworks.torch.custom import load_custom
from stepscope.workloads.frameworks.torch.data import build_data
from stepscope.workloads.frameworks.torch.models import build_model, shape_of
from stepscope.workloads.probing import training_lock
from stepscope.workloads.spec import make_workload

AT_ONCE = 3
TIMEOUT_S = 120
"""Seconds after which a process is ended."""
SMALLER = 0.4
"""Size of the last batch of an epoch, as a share of the batch size."""
SAMPLES = 8
"""Different samples in a batch; the rest repeats them."""
CHUNK_BYTES = 128 << 20
"""Pinned memory from which batches are copied in chunks: pinning a whole batch takes longer."""
MEMORY_ERRORS = (
    "out of memory",
    "_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "unable to find an engine",
)
"""Messages of PyTorch, cuBLAS and cuDNN when memory runs out."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Limit:
    """The memory limit of a process. A dry run without a GPU simulates it by a batch size."""

    device: str
    cap: int
    max_batch: int | None = None
    """The largest batch that passes in a dry run."""

    def apply(self) -> None:
        if self.device == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.cap / total), 0)

    def check(self, batch: int) -> None:
        """Raise an out-of-memory error in a dry run, as PyTorch would."""
        if self.max_batch is not None and batch > self.max_batch:
            raise torch.OutOfMemoryError("CUDA out of memory. Simulated by a dry run.")

    def stats(self, batch: int) -> Record:
        """Return allocator statistics; a dry run simulates them and the throughput."""
        if self.device != "cuda":
            short = self.max_batch is not None and batch > 0.93 * self.max_batch
            rate = 900.0 if short else 1000.0
            return {"retries": int(short), "ooms": 0, "allocated": 0, "reserved": 0, "rate": rate}
        stats = torch.cuda.memory_stats()
        return {
            "retries": int(stats.get("num_alloc_retries", 0)),
            "ooms": int(stats.get("num_ooms", 0)),
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }


@dataclass(frozen=True)
class Request:
    """What a process trains."""

    batch: int
    limit: Limit
    steps: int = 20
    evaluations: tuple[int, ...] = (10,)
    """Steps that are followed by an evaluation; each trains a smaller batch."""
    exclusive: bool = True
    """Whether no other process of this benchmark may train at the same time."""
    timed: int = 8
    """Number of last steps whose median gives the throughput."""


@dataclass(frozen=True)
class Subject:
    """A model on the CPU with its loss, optimizer and samples."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    samples: Any
    """A batch of a few samples."""
    precision: str


def build(case: Case, model: str | None = None) -> Subject:
    """Build the subject of a case; `model` replaces its model in a dry run."""
    workload = make_workload(
        model or case.argument,
        {"precision": case.precision, "samples": SAMPLES, "batch_size": SAMPLES},
    )
    if workload.is_custom:
        built = load_custom(workload)
        assert built.custom is not None
        data, collate = built.custom.data, built.custom.collate or default_collate
    else:
        shape = shape_of(workload)
        built = build_model(workload, shape)
        data, collate = build_data(workload, shape).dataset, default_collate
    optimizer = built.custom.optimizer if built.custom and built.custom.optimizer else sgd
    samples = collate([data[i] for i in range(SAMPLES)])
    return Subject(built.model, built.loss, optimizer, samples, case.precision)


def prepare_to_fork() -> None:
    """Avoid a thread pool before a fork: the child would deadlock."""
    torch.set_num_threads(1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def set_precision(precision: str) -> None:
    """Set fp32 or tf32 as stepscope does; PyTorch uses TF32 in convolutions by default."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def is_memory_error(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in MEMORY_ERRORS)


# ---- in the child ----


class Source:
    """Batches on the device, made of a few samples and copied for every step."""

    def __init__(self, samples: Any, request: Request) -> None:
        self._batch, self._device = request.batch, request.limit.device
        self._chunks = mapped(self._chunk, samples)

    def next(self, share: float = 1.0) -> Any:
        """Return a batch, or the smaller one at the end of an epoch."""
        size = max(min(2, self._batch), round(share * self._batch))
        return mapped(lambda chunk: self._whole(chunk, size), self._chunks)

    def _chunk(self, samples: torch.Tensor) -> torch.Tensor:
        each = max(1, samples[0].numel() * samples.element_size())
        count = max(1, min(self._batch, CHUNK_BYTES // each))
        chunk = torch.empty(
            (count, *samples.shape[1:]), dtype=samples.dtype, pin_memory=self._device == "cuda"
        )
        return chunk.copy_(samples[torch.arange(count) % len(samples)])

    def _whole(self, chunk: torch.Tensor, size: int) -> torch.Tensor:
        whole = torch.empty((size, *chunk.shape[1:]), dtype=chunk.dtype, device=self._device)
        for at in range(0, size, len(chunk)):
            part = whole[at : at + len(chunk)]
            part.copy_(chunk[: len(part)], non_blocking=True)
        return whole


def mapped(change: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Apply a function to all tensors of a nested batch."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: mapped(change, value) for key, value in batch.items()}
    return type(batch)(mapped(change, value) for value in batch)


class Training:
    """The training of a process, and its current position."""

    def __init__(self, subject: Subject, request: Request) -> None:
        self.where = "start"
        self._subject, self._request = subject, request
        self._marks: list[Any] = []
        request.limit.apply()
        set_precision(subject.precision)
        self._model = subject.model.to(request.limit.device)
        self._optimizer = subject.optimizer(list(self._model.parameters()))
        self._source = Source(subject.samples, request)

    def run(self) -> None:
        self._model.train()
        for step in range(1, self._request.steps + 1):
            self.where = f"step {step}"
            last = step in self._request.evaluations
            self._mark()
            self._step(SMALLER if last else 1.0)
            self._mark()
            if last:
                self.where = f"evaluation after step {step}"
                self._evaluate()
        self.where = "end"
        if self._request.limit.device == "cuda":
            torch.cuda.synchronize()

    def rate(self) -> float:
        """Return samples per second of the median of the last steps."""
        starts, ends = self._marks[0::2], self._marks[1::2]
        seconds = [_seconds(a, b) for a, b in zip(starts, ends, strict=True)]
        return self._request.batch / statistics.median(seconds[-self._request.timed :])

    def _autocast(self) -> Any:
        is_bf16 = self._subject.precision == "bf16"
        return torch.autocast(self._request.limit.device, torch.bfloat16, enabled=is_bf16)

    def _step(self, share: float) -> None:
        batch = self._source.next(share)
        self._request.limit.check(self._request.batch)
        with self._autocast():
            loss = self._subject.loss(self._model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _evaluate(self) -> None:
        batch = self._source.next()
        self._model.eval()
        with torch.no_grad(), self._autocast():
            self._subject.loss(self._model, batch)
        self._model.train()

    def _mark(self) -> None:
        if self._request.limit.device != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)


def _seconds(start: Any, end: Any) -> float:
    return float(end - start if isinstance(start, float) else start.elapsed_time(end) / 1000)


def attempt(subject: Subject, request: Request, wait: Callable[[], None]) -> Record:
    """Train a batch and return the result."""
    result: Record = {"batch": request.batch, "passed": False, "rate": None}
    result |= {"memory": False, "message": ""}
    training = None
    try:
        training = Training(subject, request)
        wait()
        with training_lock(request.exclusive):
            started = time.monotonic()
            try:
                training.run()
                result |= {"passed": True, "rate": round(training.rate(), 2)}
            finally:
                result["seconds"] = round(time.monotonic() - started, 3)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"[:300]
        result |= {"memory": is_memory_error(error), "message": message}
    result["where"] = training.where if training else "start"
    return {**result, **request.limit.stats(request.batch)}


def _run_child(subject: Subject, request: Request, go: int, out: int) -> None:
    def wait() -> None:
        os.write(out, b"ready\n")
        if not os.read(go, 1):
            os._exit(1)  # the parent has exited

    result = attempt(subject, request, wait)
    if request.limit.device == "cuda":  # the next child may start after the result is sent
        gc.collect()
        torch.cuda.empty_cache()
    os.write(out, (json.dumps(result) + "\n").encode())


# ---- in the parent ----


@dataclass
class _Child:
    request: Request
    pid: int
    go: int
    out: int
    started: float
    buffer: bytes = b""
    state: str = "starting"
    result: Record = field(default_factory=dict)

    def read(self) -> None:
        data = os.read(self.out, 1 << 16)
        if not data:
            self.state = "ended"
        self.buffer += data
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            if line == b"ready":
                self.state = "ready"
            else:
                self.result, self.state = json.loads(line), "done"

    def close(self) -> Record:
        os.close(self.go)
        os.close(self.out)
        _, status = os.waitpid(self.pid, 0)
        if self.result:
            return self.result
        message = f"the process ended without a result ({os.waitstatus_to_exitcode(status)})"
        return {"batch": self.request.batch, "passed": False, "memory": False, "message": message}


def _fork(subject: Subject, request: Request) -> _Child:
    go_read, go_write = os.pipe()
    out_read, out_write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's threads are idle
        pid = os.fork()
    if pid == 0:
        try:
            os.close(go_write)
            os.close(out_read)
            _run_child(subject, request, go_read, out_write)
        finally:
            os._exit(0)
    os.close(go_read)
    os.close(out_write)
    return _Child(request, pid, go_write, out_read, time.monotonic())


def train_all(
    subject: Subject,
    next_request: Callable[[Sequence[int]], Request | None],
    notify: Callable[[Record], None],
    *,
    exclusive: bool = True,
) -> None:
    """Train what `next_request` returns, given the running batches, until it returns None.

    With `exclusive`, only one process trains at a time while others get ready.
    """
    children: list[_Child] = []
    try:
        while True:
            while len(children) < AT_ONCE:
                request = next_request([child.request.batch for child in children])
                if request is None:
                    break
                children.append(_fork(subject, request))
            if not children:
                return
            _start_ready(children, exclusive)
            _read_all(children)
            for child in [child for child in children if child.state == "ended"]:
                children.remove(child)
                notify(child.close())
    finally:
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
            child.close()


def _start_ready(children: list[_Child], exclusive: bool) -> None:
    for child in children:
        if exclusive and any(other.state == "training" for other in children):
            return
        if child.state == "ready":
            os.write(child.go, b"g")
            child.state = "training"


def _read_all(children: list[_Child]) -> None:
    readable, _, _ = select.select([child.out for child in children], [], [], 1.0)
    for child in children:
        if child.out in readable:
            child.read()
        elif time.monotonic() - child.started > TIMEOUT_S:
            os.kill(child.pid, signal.SIGKILL)
