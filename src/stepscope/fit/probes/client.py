"""Forked probes for the GPU: the client of the probe server.

This process never imports a framework. Processes that run out of memory, crash or hang are children
of the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from stepscope.errors import TrialError, WorkloadError
from stepscope.fit.probes import server
from stepscope.fit.probes.contract import KillProbe, ProbeOutcome, StartProbe
from stepscope.records.codec import dumps, loads
from stepscope.sensors import procfs
from stepscope.workloads.probing import HEARTBEAT, WAITING, ProbeRequest, ProbeResult, Subject
from stepscope.workloads.spec import Workload

_LOG_LINES = 12
_CHECK_INTERVAL_S = 2.0
_FOLDER_PREFIX = "stepscope-fit-"


class ForkedProbes:
    """Context manager that starts the server: `with ForkedProbes(workload, env) as probes`."""

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
        self._server, server_end = Pipe()
        with server_end, (self._folder / "server.log").open("ab") as log:
            descriptor = server_end.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", server.__name__, str(self._folder), str(descriptor)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                pass_fds=(descriptor,),
            )
        try:
            reply: Subject | tuple[str, str] | None = self._receive(self._stall_timeout_s)
            if reply is None:
                raise TrialError(
                    f"Building {self._workload.model} took longer than {self._stall_timeout_s:g} s",
                    "Allow more time with --stall-timeout SECONDS",
                )
            if isinstance(reply, tuple):
                raise WorkloadError(*reply)
            self.subject = reply
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # its children end with it
        self._server.close()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, requests: Sequence[ProbeRequest]) -> list[ProbeOutcome]:
        group = tuple(range(self._number + 1, self._number + len(requests) + 1))
        for number, request in zip(group, requests, strict=True):
            self._send(StartProbe(number, request, group))
        codes = self._wait_for(group)
        outcomes = []
        for request, number in zip(requests, group, strict=True):
            file, status = self._folder / f"{number}.json", codes[number]
            results = loads(list[ProbeResult], file.read_bytes()) if file.exists() else []
            if status != 0 or not results:
                batch = request.batches[min(len(results), len(request.batches) - 1)]
                results.append(self._failed_result(batch, number, status))
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
        """Return the next message from the server, or None after `timeout` seconds."""
        try:
            return self._server.recv() if self._server.poll(timeout) else None
        except (EOFError, OSError):
            raise self._server_ended() from None

    def _wait_for(self, numbers: Sequence[int]) -> dict[int, int]:
        """Return exit codes by number, and end probes that stall."""
        codes: dict[int, int] = {}
        start = time.time()
        while len(codes) < len(numbers):
            ended = self._receive(min(self._stall_timeout_s, _CHECK_INTERVAL_S))
            if ended is not None:
                number, code = ended
                codes[number] = code
                continue
            for number in set(numbers) - set(codes):
                if time.time() - self._last_heartbeat(number, start) > self._stall_timeout_s:
                    self._timed_out.add(number)
                    self._send(KillProbe(number))
        return codes

    def _last_heartbeat(self, number: int, start: float) -> float:
        """Return the time of the last heartbeat. A probe that waits for its turn does not stall."""
        if (self._folder / f"{number}.{WAITING}").exists():
            return time.time()
        try:
            return (self._folder / f"{number}.{HEARTBEAT}").stat().st_mtime
        except OSError:
            return start

    def _server_ended(self) -> TrialError:
        """Return the error for a server that crashed or was killed."""
        code = self._process.wait()
        lines = _last_lines(self._folder / "server.log")
        return TrialError(
            f"The probe server of {self._workload.model} {_exit_text(code)}",
            "Last lines of its log:\n" + "\n".join(lines) if lines else "",
        )

    def _failed_result(self, batch: int, number: int, status: int) -> ProbeResult:
        """Return the result of a probe that ended without one."""
        if number in self._timed_out:
            message = f"no progress for {self._stall_timeout_s:g} s"
            return ProbeResult(batch, "timeout", message=message)
        if status == -signal.SIGKILL:
            message = "the process was killed, possibly by the kernel because host memory ran out"
            return ProbeResult(batch, "killed", message=message)
        lines = _last_lines(self._folder / f"{number}.log")
        is_last_line = status >= 0 and lines
        message = lines[-1] if is_last_line else f"the process {_exit_text(status)}"
        return ProbeResult(batch, "error", message=message)


def _exit_text(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def _last_lines(log: Path) -> list[str]:
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-_LOG_LINES:]


def probe_folder() -> Path:
    """Create a temporary folder `stepscope-fit-<pid>-<namespace>-…`.

    Folders that killed processes of this user left behind are deleted.
    """
    namespace = procfs.pid_home()  # machines and containers may share the temporary folder
    pattern = re.compile(rf"{_FOLDER_PREFIX}(\d+)-{namespace}-\w+")
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        match = pattern.fullmatch(folder.name)
        if not match or procfs.exists(int(match[1])):
            continue
        with contextlib.suppress(OSError):  # another process has deleted it
            status = folder.lstat()  # anybody can create files and links in the temporary folder
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-{namespace}-"))
