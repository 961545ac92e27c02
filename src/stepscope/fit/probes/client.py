"""Probes on a GPU: starts the process that holds the workload, and has it fork one for each probe.

Nothing of a framework happens in this process, so that no probe can harm it: what runs out of
memory, crashes or hangs is a child of a child.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from stepscope.errors import BadWorkload, CannotTry
from stepscope.fit.probes import server
from stepscope.fit.probes.contract import KillProbe, ProbeOutcome, StartProbe
from stepscope.records.codec import dumps, loads
from stepscope.sensors import procfs
from stepscope.workloads.probing import BEAT, WAITS, ProbeRequest, ProbeResult, Subject
from stepscope.workloads.spec import Workload

_LAST_LINES = 12
_CHECK_EVERY_S = 2.0
_FOLDER = "stepscope-fit-"


class ForkedProbes:
    """`with ForkedProbes(workload, environment) as probes`: run as many as you like."""

    def __init__(
        self, workload: Workload, environment: Mapping[str, str], stall_timeout_s: float = 300.0
    ) -> None:
        self._workload = workload
        self._environment = dict(environment)
        self._stall_timeout_s = stall_timeout_s
        self._number = 0
        self._timed_out: set[int] = set()

    def __enter__(self) -> ForkedProbes:
        self._folder = probe_folder()
        (self._folder / "workload.json").write_text(dumps(self._workload), encoding="utf-8")
        self._server, theirs = Pipe()
        with theirs, (self._folder / "server.log").open("ab") as log:
            end = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", server.__name__, str(self._folder), str(end)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                pass_fds=(end,),
            )
        try:
            held: Subject | tuple[str, str] | None = self._receive(self._stall_timeout_s)
            if held is None:
                raise CannotTry(
                    f"Building {self._workload.model} was not done after "
                    f"{self._stall_timeout_s:g} s",
                    "Give it longer with --hang S",
                )
            if isinstance(held, tuple):
                raise BadWorkload(*held)
            self.subject = held
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Also the children: they die with the one that forked them."""
        self._process.kill()
        self._server.close()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, requests: Sequence[ProbeRequest]) -> list[ProbeOutcome]:
        beside = tuple(range(self._number + 1, self._number + len(requests) + 1))
        for number, request in zip(beside, requests, strict=True):
            self._send(StartProbe(number, request, beside))
        codes = self._wait_for(beside)
        outcomes = []
        for request, number in zip(requests, beside, strict=True):
            file, status = self._folder / f"{number}.json", codes[number]
            results = loads(list[ProbeResult], file.read_bytes()) if file.exists() else []
            if status != 0 or not results:
                batch = request.batches[min(len(results), len(request.batches) - 1)]
                results.append(self._silent(batch, number, status))
            trace, trace_file = None, file.with_suffix(".trace")
            if status == 0 and trace_file.exists():
                trace = tuple(json.loads(trace_file.read_bytes()))
            outcomes.append(ProbeOutcome(request, tuple(results), trace))
        return outcomes

    def _send(self, message: StartProbe | KillProbe) -> None:
        self._number = max(self._number, message.number)
        try:
            self._server.send(message)
        except OSError:
            raise self._server_ended() from None

    def _receive(self, timeout: float) -> Any:
        """The next message of the server; None where there is none in time."""
        try:
            return self._server.recv() if self._server.poll(timeout) else None
        except (EOFError, OSError):
            raise self._server_ended() from None

    def _wait_for(self, numbers: Sequence[int]) -> dict[int, int]:
        """The exit code of each; one that did nothing for too long is ended."""
        codes: dict[int, int] = {}
        began = time.time()
        while len(codes) < len(numbers):
            ended = self._receive(min(self._stall_timeout_s, _CHECK_EVERY_S))
            if ended is not None:
                number, code = ended
                codes[number] = code
                continue
            for number in set(numbers) - set(codes):
                if time.time() - self._last_beat(number, began) > self._stall_timeout_s:
                    self._timed_out.add(number)
                    self._send(KillProbe(number))
        return codes

    def _last_beat(self, number: int, began: float) -> float:
        """When a probe last did something. That another trains meanwhile is not its fault."""
        if (self._folder / f"{number}.{WAITS}").exists():
            return time.time()
        try:
            return (self._folder / f"{number}.{BEAT}").stat().st_mtime
        except OSError:
            return began

    def _server_ended(self) -> CannotTry:
        """A crash while it built the model, or somebody killed it."""
        code = self._process.wait()
        lines = _last_lines(self._folder / "server.log")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with {code}"
        return CannotTry(
            f"The process that holds {self._workload.model} {how}",
            "Its last words:\n" + "\n".join(lines) if lines else "",
        )

    def _silent(self, batch: int, number: int, status: int) -> ProbeResult:
        if number in self._timed_out:
            said = f"nothing was heard of it for {self._stall_timeout_s:g} s"
            return ProbeResult(batch, "timeout", message=said)
        if status == -signal.SIGKILL:
            said = "it was killed, perhaps by the kernel for want of host memory"
            return ProbeResult(batch, "killed", message=said)
        lines = _last_lines(self._folder / f"{number}.log")
        said = lines[-1] if lines else f"it left with {status}"
        if status < 0:
            said = f"it died of {signal.Signals(-status).name}"
        return ProbeResult(batch, "error", message=said)


def _last_lines(log: Path) -> list[str]:
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]


def probe_folder() -> Path:
    """A new temporary folder, `stepscope-fit-<pid>-<place>-…`. Before, those go which processes of
    this user left behind when they were killed."""
    place = procfs.pid_home()  # machines and containers may share a folder
    named = re.compile(rf"{_FOLDER}(\d+)-{place}-\w+")
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        found = named.fullmatch(folder.name)
        if not found or procfs.exists(int(found[1])):
            continue
        try:
            is_own = folder.lstat().st_uid == os.getuid()
        except OSError:  # another process removes it, too
            continue
        if is_own:
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-{place}-"))
