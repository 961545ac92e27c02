"""Probes on a GPU: starts the process that holds the workload, and has it fork one for each probe.

Nothing of a framework happens in this process, so that no probe can harm it: what runs out of
memory, crashes or hangs is a child of a child.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepscope.analysis.memory.caching_allocator import AllocationTrace
from stepscope.errors import BadWorkload, CannotTry
from stepscope.fit.probes import server
from stepscope.fit.probes.contract import ProbeOutcome
from stepscope.records.codec import from_json, loads, to_json
from stepscope.sensors import procfs
from stepscope.workloads.probing import BEAT, WAITS, Layer, ProbeRequest, ProbeResult, Subject
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
        self._heard = b""
        self._timed_out: set[int] = set()

    def __enter__(self) -> ForkedProbes:
        self._folder = probe_folder()
        (self._folder / "workload.json").write_text(
            json.dumps(to_json(self._workload)), encoding="utf-8"
        )
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", server.__name__, str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        try:
            message = self._read(time.monotonic() + self._stall_timeout_s)
            if message is None:
                raise CannotTry(
                    f"Building {self._workload.model} was not done after "
                    f"{self._stall_timeout_s:g} s",
                    "Give it longer with --hang S",
                )
            if "error" in message:
                raise BadWorkload(message["error"]["message"], message["error"]["hint"])
            self.subject = from_json(Subject, message["subject"])
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

    def run(self, requests: Sequence[ProbeRequest]) -> list[ProbeOutcome]:
        beside = list(range(self._number + 1, self._number + len(requests) + 1))
        numbers = [
            self._send({"probe": to_json(request), "beside": beside}) for request in requests
        ]
        codes = self._wait_for(numbers)
        outcomes = []
        for request, number in zip(requests, numbers, strict=True):
            file, status = self._folder / f"{number}.json", codes[number]
            results = loads(list[ProbeResult], file.read_bytes()) if file.exists() else []
            if status != 0 or not results:
                batch = request.batches[min(len(results), len(request.batches) - 1)]
                results.append(self._silent(batch, number, status))
            trace, trace_file = None, file.with_suffix(".trace")
            if status == 0 and trace_file.exists():
                trace = AllocationTrace(tuple(json.loads(trace_file.read_bytes())))
            outcomes.append(ProbeOutcome(request, tuple(results), trace))
        return outcomes

    def layers(self) -> list[Layer]:
        number = self._send({"layers": True})
        self._wait_for([number])
        file = self._folder / f"{number}.json"
        return loads(list[Layer], file.read_bytes()) if file.exists() else []

    def _send(self, request: dict[str, Any]) -> int:
        self._number += 1
        self._write({"number": self._number, **request})
        return self._number

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            raise self._server_ended() from None

    def _wait_for(self, numbers: Sequence[int]) -> dict[int, int]:
        codes: dict[int, int] = {}
        began = time.time()
        while len(codes) < len(numbers):
            message = self._read(time.monotonic() + min(self._stall_timeout_s, _CHECK_EVERY_S))
            if message is not None:
                codes[message["number"]] = message["status"]
                continue
            for number in set(numbers) - set(codes):
                if time.time() - self._last_beat(number, began) > self._stall_timeout_s:
                    self._timed_out.add(number)
                    self._write({"kill": number})
        return codes

    def _last_beat(self, number: int, began: float) -> float:
        """When a probe last did something. That another trains meanwhile is not its fault."""
        if (self._folder / f"{number}.{WAITS}").exists():
            return time.time()
        try:
            return (self._folder / f"{number}.{BEAT}").stat().st_mtime
        except OSError:
            return began

    def _read(self, deadline: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        while b"\n" not in self._heard:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([source], [], [], left)[0]:
                return None
            heard = os.read(source, 65536)
            if not heard:
                raise self._server_ended()
            self._heard += heard
        line, _, self._heard = self._heard.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

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
    # Machines and containers may share a folder: a number means the same process only within one.
    place = f"{zlib.crc32(f'{socket.gethostname()} {procfs.pid_namespace()}'.encode()):08x}"
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
