"""Trains batches, each in a fresh process: a fork of this one, which has PyTorch and the model.

This process never starts CUDA, so that its forks can. Several are alive at once, for starting CUDA
takes longer than training; but only one trains at a time, where speed counts. It knows nothing of
how `stepscope fit` probes: it is what that is held against.
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
from stepscope.workloads.frameworks.torch.data import build_data
from stepscope.workloads.frameworks.torch.models import build_model, shape_of
from stepscope.workloads.frameworks.torch.user import load_own
from stepscope.workloads.probing import taking_turns
from stepscope.workloads.spec import make_workload

AT_ONCE = 3
PATIENCE_S = 120
"""A process that takes longer is ended."""
SMALLER = 0.4
"""The last batch of an epoch, as a part of the others."""
FEW = 8
"""Different samples in a batch: the rest repeats them."""
CHUNK_BYTES = 128 << 20
"""Pinned memory that batches are copied from, piece by piece: pinning a whole one takes longer."""
MEMORY_ERRORS = (
    "out of memory",
    "_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "unable to find an engine",
)
"""How PyTorch, cuBLAS and cuDNN say that there was no memory."""

Told = dict[str, Any]


@dataclass(frozen=True)
class Limit:
    """What a process may take. Without a GPU there is only a pretended limit, of samples."""

    device: str
    cap: int
    most: int | None = None
    """Samples in a batch that a dry run lets pass."""

    def impose(self) -> None:
        if self.device == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.cap / total), 0)

    def refuse(self, batch: int) -> None:
        """A dry run's way to run out of memory, in the words of the real one."""
        if self.most is not None and batch > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. There is no GPU: a dry run says so.")

    def stats(self, batch: int) -> Told:
        """What the allocator counted; a dry run pretends, its rate too: a busy CPU's is noise."""
        if self.device != "cuda":
            short = self.most is not None and batch > 0.93 * self.most
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
class Ask:
    """What a process shall train."""

    batch: int
    limit: Limit
    steps: int = 20
    evaluations: tuple[int, ...] = (10,)
    """After which steps, each the last of an epoch and of a smaller batch."""
    alone: bool = True
    """Whether its speed counts: then nothing else of ours trains at the same time."""
    timed: int = 8
    """Steps at the end whose median tells the speed."""


@dataclass(frozen=True)
class Subject:
    """A model on the CPU, and what training it takes."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    few: Any
    """A batch of few samples."""
    precision: str


def build(case: Case, model: str | None = None) -> Subject:
    """The subject of a case; `model` in its place, for a dry run."""
    workload = make_workload(
        model or case.argument,
        {"precision": case.precision, "samples": FEW, "batch_size": FEW},
    )
    if workload.is_own:
        built = load_own(workload)
        assert built.own is not None
        data, collate = built.own.data, built.own.collate or default_collate
    else:
        shape = shape_of(workload)
        built = build_model(workload, shape)
        data, collate = build_data(workload, shape).dataset, default_collate
    optimizer = built.own.optimizer if built.own and built.own.optimizer else sgd
    few = collate([data[place] for place in range(FEW)])
    return Subject(built.model, built.loss, optimizer, few, case.precision)


def prepare_to_fork() -> None:
    """No pool of threads may be there when we fork: the child would wait for it."""
    torch.set_num_threads(1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def use_numbers(precision: str) -> None:
    """As stepscope's fp32 and tf32: TF32, which PyTorch takes in convolutions unasked, or not."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


def is_memory_error(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in MEMORY_ERRORS)


# ---- in the child ----


class Source:
    """Batches on the device, made of few samples, copied there anew for every step."""

    def __init__(self, few: Any, ask: Ask) -> None:
        self._batch, self._device = ask.batch, ask.limit.device
        self._chunks = mapped(self._chunk, few)

    def next(self, part: float = 1.0) -> Any:
        """A batch, or the part of one that is left at the end of an epoch."""
        size = max(min(2, self._batch), round(part * self._batch))
        return mapped(lambda chunk: self._whole(chunk, size), self._chunks)

    def _chunk(self, few: torch.Tensor) -> torch.Tensor:
        each = max(1, few[0].numel() * few.element_size())
        count = max(1, min(self._batch, CHUNK_BYTES // each))
        chunk = torch.empty(
            (count, *few.shape[1:]), dtype=few.dtype, pin_memory=self._device == "cuda"
        )
        return chunk.copy_(few[torch.arange(count) % len(few)])

    def _whole(self, chunk: torch.Tensor, size: int) -> torch.Tensor:
        whole = torch.empty((size, *chunk.shape[1:]), dtype=chunk.dtype, device=self._device)
        for at in range(0, size, len(chunk)):
            part = whole[at : at + len(chunk)]
            part.copy_(chunk[: len(part)], non_blocking=True)
        return whole


def mapped(change: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """A batch of any nesting with its tensors changed."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: mapped(change, value) for key, value in batch.items()}
    return type(batch)(mapped(change, value) for value in batch)


class Training:
    """The steps of a process, and how far they went."""

    def __init__(self, subject: Subject, ask: Ask) -> None:
        self.where = "start"
        self._subject, self._ask = subject, ask
        self._marks: list[Any] = []
        ask.limit.impose()
        use_numbers(subject.precision)
        self._model = subject.model.to(ask.limit.device)
        self._optimizer = subject.optimizer(list(self._model.parameters()))
        self._source = Source(subject.few, ask)

    def run(self) -> None:
        self._model.train()
        for step in range(1, self._ask.steps + 1):
            self.where = f"step {step}"
            last = step in self._ask.evaluations
            self._mark()
            self._step(SMALLER if last else 1.0)
            self._mark()
            if last:
                self.where = f"evaluation after step {step}"
                self._evaluate()
        self.where = "end"
        if self._ask.limit.device == "cuda":
            torch.cuda.synchronize()

    def rate(self) -> float:
        """Samples per second by the median of the last steps."""
        begun, ended = self._marks[0::2], self._marks[1::2]
        seconds = [_seconds(a, b) for a, b in zip(begun, ended, strict=True)]
        return self._ask.batch / statistics.median(seconds[-self._ask.timed :])

    def _autocast(self) -> Any:
        reduced = self._subject.precision == "bf16"
        return torch.autocast(self._ask.limit.device, torch.bfloat16, enabled=reduced)

    def _step(self, part: float) -> None:
        batch = self._source.next(part)
        self._ask.limit.refuse(self._ask.batch)
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
        if self._ask.limit.device != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)


def _seconds(begun: Any, ended: Any) -> float:
    return float(ended - begun if isinstance(begun, float) else begun.elapsed_time(ended) / 1000)


def attempt(subject: Subject, ask: Ask, wait: Callable[[], None]) -> Told:
    """Train a batch as asked, and tell how that went."""
    told: Told = {"batch": ask.batch, "passed": False, "rate": None, "memory": False, "message": ""}
    training = None
    try:
        training = Training(subject, ask)
        wait()
        with taking_turns(alone=ask.alone):
            began = time.monotonic()
            try:
                training.run()
                told |= {"passed": True, "rate": round(training.rate(), 2)}
            finally:
                told["seconds"] = round(time.monotonic() - began, 3)
    except Exception as error:  # whatever it is, somebody wants to read it
        told |= {"memory": is_memory_error(error), "message": f"{type(error).__name__}: {error}"}
        told["message"] = told["message"][:300]
    told["where"] = training.where if training else "start"
    return {**told, **ask.limit.stats(ask.batch)}


def _live(subject: Subject, ask: Ask, go: int, out: int) -> None:
    def wait() -> None:
        os.write(out, b"ready\n")
        if not os.read(go, 1):
            os._exit(1)  # nobody wants to know any more

    told = attempt(subject, ask, wait)
    if ask.limit.device == "cuda":  # the next one may begin as soon as we have told
        gc.collect()
        torch.cuda.empty_cache()
    os.write(out, (json.dumps(told) + "\n").encode())


# ---- in the parent ----


@dataclass
class _Child:
    ask: Ask
    pid: int
    go: int
    out: int
    born: float
    said: bytes = b""
    state: str = "starting"
    told: Told = field(default_factory=dict)

    def hear(self) -> None:
        heard = os.read(self.out, 1 << 16)
        if not heard:
            self.state = "ended"
        self.said += heard
        *lines, self.said = self.said.split(b"\n")
        for line in lines:
            if line == b"ready":
                self.state = "ready"
            else:
                self.told, self.state = json.loads(line), "told"

    def close(self) -> Told:
        os.close(self.go)
        os.close(self.out)
        _, status = os.waitpid(self.pid, 0)
        if self.told:
            return self.told
        message = f"the process ended without a word ({os.waitstatus_to_exitcode(status)})"
        return {"batch": self.ask.batch, "passed": False, "memory": False, "message": message}


def _fork(subject: Subject, ask: Ask) -> _Child:
    go_read, go_write = os.pipe()
    out_read, out_write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of numpy's threads: they sleep
        pid = os.fork()
    if pid == 0:
        try:
            os.close(go_write)
            os.close(out_read)
            _live(subject, ask, go_read, out_write)
        finally:
            os._exit(0)
    os.close(go_read)
    os.close(out_write)
    return _Child(ask, pid, go_write, out_read, time.monotonic())


def train_all(
    subject: Subject,
    next_ask: Callable[[Sequence[int]], Ask | None],
    tell: Callable[[Told], None],
    *,
    alone: bool = True,
) -> None:
    """Train what `next_ask` wants, given the batches under way, until it wants no more.

    `alone`: one trains at a time, the others only get ready.
    """
    children: list[_Child] = []
    try:
        while True:
            while len(children) < AT_ONCE:
                ask = next_ask([child.ask.batch for child in children])
                if ask is None:
                    break
                children.append(_fork(subject, ask))
            if not children:
                return
            _let_go(children, alone)
            _listen(children)
            for child in [child for child in children if child.state == "ended"]:
                children.remove(child)
                tell(child.close())
    finally:
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
            child.close()


def _let_go(children: list[_Child], alone: bool) -> None:
    for child in children:
        if alone and any(other.state == "training" for other in children):
            return
        if child.state == "ready":
            os.write(child.go, b"g")
            child.state = "training"


def _listen(children: list[_Child]) -> None:
    heard, _, _ = select.select([child.out for child in children], [], [], 1.0)
    for child in children:
        if child.out in heard:
            child.hear()
        elif time.monotonic() - child.born > PATIENCE_S:
            os.kill(child.pid, signal.SIGKILL)
