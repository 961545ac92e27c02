"""Whom `fit` asks: starts the process that holds the workload, and has it probe batches.

Nothing of a framework happens in this process, so that no probe can harm it: what runs out of
memory, crashes or hangs is a child of a child.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stepscope.advice import probeserver
from stepscope.advice.scratch import swept_folder
from stepscope.analysis.memory_model import Trace
from stepscope.errors import BadWorkload, CannotTry
from stepscope.workloads.probing import BEAT, WAITS, Ask, Layer, Subject, Told
from stepscope.workloads.spec import Workload

_LAST_LINES = 12
_LOOKS_EVERY_S = 2.0


@dataclass(frozen=True)
class Probed:
    """What one probe told of its batches, in their order; the last may have failed."""

    ask: Ask
    told: tuple[Told, ...]
    seconds: float
    trace: Trace | None = None

    @property
    def last(self) -> Told:
        return self.told[-1]


class Probes(Protocol):
    """Whoever can tell how batches go: processes on a GPU, or a model of one in a test."""

    subject: Subject

    def ask(self, asks: Sequence[Ask]) -> list[Probed]: ...

    def layers(self) -> list[Layer]: ...


class Prober:
    """`with Prober(workload) as prober`: ask it as often as you like."""

    def __init__(
        self, workload: Workload, environment: Mapping[str, str], hang_s: float = 300.0
    ) -> None:
        self._workload = workload
        self._environment = dict(environment)
        self._hang_s = hang_s
        self._number = 0
        self._heard = b""
        self._timed_out: set[int] = set()

    def __enter__(self) -> Prober:
        self._folder = swept_folder("stepscope-fit-")
        (self._folder / "workload.json").write_text(
            json.dumps(self._workload.as_dict()), encoding="utf-8"
        )
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", probeserver.MODULE, str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        try:
            self.subject = self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Also the children: they die with the one that forked them."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # what was still to be said to it
                pass
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def ask(self, asks: Sequence[Ask]) -> list[Probed]:
        """All of them at once; the answers in their order."""
        began = time.monotonic()
        beside = list(range(self._number + 1, self._number + len(asks) + 1))
        numbers = [self._request({"ask": ask.as_dict(), "beside": beside}) for ask in asks]
        ended = self._wait_for(numbers)
        return [
            self._probed(ask, number, *ended[number], began)
            for ask, number in zip(asks, numbers, strict=True)
        ]

    def layers(self) -> list[Layer]:
        number = self._request({"layers": True})
        self._wait_for([number])
        file = self._folder / f"{number}.json"
        return [Layer(**each) for each in json.loads(file.read_text())] if file.exists() else []

    def _request(self, request: dict[str, Any]) -> int:
        self._number += 1
        self._write({"number": self._number, **request})
        return self._number

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            raise self._gone() from None

    def _wait_until_ready(self) -> Subject:
        message = self._hear(time.monotonic() + self._hang_s)
        if message is None:
            raise CannotTry(
                f"Building {self._workload.model} was not done after {self._hang_s:g} s",
                "Give it longer with --hang S",
            )
        if not message.get("ready"):
            raise BadWorkload(message["error"]["message"], message["error"]["hint"])
        return Subject.of(message["subject"])

    def _wait_for(self, numbers: Sequence[int]) -> dict[int, tuple[int, float]]:
        """The exit code of each and when it ended; of whom nothing is heard too long is ended."""
        ended: dict[int, tuple[int, float]] = {}
        began = time.time()
        while len(ended) < len(numbers):
            message = self._hear(time.monotonic() + min(self._hang_s, _LOOKS_EVERY_S))
            if message is not None:
                ended[message["number"]] = message["status"], time.monotonic()
                continue
            for number in set(numbers) - set(ended):
                if time.time() - self._heard_of(number, began) > self._hang_s:
                    self._timed_out.add(number)
                    self._write({"kill": number})
        return ended

    def _heard_of(self, number: int, began: float) -> float:
        """When a probe last did something. That another trains meanwhile is not its fault."""
        if (self._folder / f"{number}.{WAITS}").exists():
            return time.time()
        try:
            return (self._folder / f"{number}.{BEAT}").stat().st_mtime
        except OSError:
            return began

    def _hear(self, deadline: float) -> dict[str, Any] | None:
        """The next line of the server; None at the deadline."""
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        while b"\n" not in self._heard:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([source], [], [], left)[0]:
                return None
            heard = os.read(source, 65536)
            if not heard:
                raise self._gone()
            self._heard += heard
        line, _, self._heard = self._heard.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _gone(self) -> CannotTry:
        """The server itself ended: a crash while it built the model, or somebody killed it."""
        code = self._process.wait()
        lines = _last_lines(self._folder / "server.log")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with {code}"
        return CannotTry(
            f"The process that holds {self._workload.model} {how}",
            "Its last words:\n" + "\n".join(lines) if lines else "",
        )

    def _probed(self, ask: Ask, number: int, status: int, ended: float, began: float) -> Probed:
        file = self._folder / f"{number}.json"
        told = [Told.of(each) for each in json.loads(file.read_text())] if file.exists() else []
        if status != 0 or not told:
            told.append(self._silent(ask, number, status, len(told)))
        trace_file = file.with_suffix(".trace")
        trace = None
        if status == 0 and trace_file.exists():
            trace = Trace(tuple(json.loads(trace_file.read_text())))
        return Probed(ask, tuple(told), ended - began, trace)

    def _silent(self, ask: Ask, number: int, status: int, done: int) -> Told:
        """A probe that ended without a word of how its batch went."""
        batch = ask.batches[min(done, len(ask.batches) - 1)]
        lines = _last_lines(self._folder / f"{number}.log")
        if number in self._timed_out:
            said = f"nothing was heard of it for {self._hang_s:g} s"
            return Told(batch, "timeout", message=said)
        if status == -signal.SIGKILL:
            said = "it was killed, perhaps by the kernel for want of host memory"
            return Told(batch, "killed", message=said)
        said = f"it died of {signal.Signals(-status).name}" if status < 0 else ""
        said = said or (lines[-1] if lines else f"it left with {status}")
        return Told(batch, "error", message=said)


def _last_lines(log: Path) -> list[str]:
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]
