"""The process that holds a workload, and forks a throw-away one for each probe.

    python -m stepscope.advice.probeserver FOLDER

It reads requests from its standard input, a line of JSON each, and answers on its standard output
when a probe has ended; what a probe told is in `FOLDER/<number>.json`. It imports the framework
once and never starts CUDA, so that a probe costs a fork and the start of a context. Whoever dies,
its children die too.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import selectors
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from stepscope.errors import BadWorkload
from stepscope.runs.paths import replace_atomically
from stepscope.trials.child import die_with_parent
from stepscope.workloads.own import find_own, hint_for, where_in
from stepscope.workloads.probing import Ask, Told
from stepscope.workloads.reporting import failure_kind
from stepscope.workloads.spec import Workload

MODULE = "stepscope.advice.probeserver"
_COLD = "STEPSCOPE_PROBES_COLD"
"""Set where imports ahead of time are known to do harm."""
READY = {"ready": True}
"""The first line, once everything is built."""


def main(folder: str) -> int:
    die_with_parent()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asked otherwise, the driver starts
    place = Path(folder)
    say = os.dup(1)
    _redirect(place / "server.log")
    workload = Workload(**json.loads((place / "workload.json").read_text(encoding="utf-8")))
    try:
        adapter = import_module(f"stepscope.workloads.frameworks.{workload.framework}.probe")
        if not os.environ.get(_COLD) and not adapter.warm_up():
            _begin_again(say)
        held = adapter.hold(workload)
        subject = vars(held.subject)
    except Exception as error:
        traceback.print_exc()
        _write(say, {"ready": False, "error": _error(workload, error)})
        return 1
    gc.collect()
    gc.freeze()  # what children only look at stays shared
    _write(say, {**READY, "subject": subject})
    _Server(held, place, say).serve()
    return 0


def _begin_again(say: int) -> None:
    """What was imported to save time has cost us the GPU: once more, without it."""
    os.dup2(say, 1)
    os.environ[_COLD] = "1"
    os.execv(sys.executable, sys.orig_argv)


def _redirect(log: Path) -> None:
    """What a user's code prints goes into a file; ours alone goes to whoever started us."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _write(to: int, message: dict[str, Any]) -> None:
    os.write(to, json.dumps(message, default=str).encode() + b"\n")


def _error(workload: Workload, error: Exception) -> dict[str, str]:
    if isinstance(error, BadWorkload):
        return {"kind": "workload", "message": error.message, "hint": error.hint}
    where = where_in(error, find_own(workload.model).file) if workload.is_own else None
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    kind = failure_kind(error)
    return {
        "kind": kind,
        "message": f"{where}: {said}" if where else said,
        "hint": hint_for(error),
    }


class _Server:
    """Forks a child for each request, and tells when it has ended."""

    def __init__(self, held: Any, place: Path, say: int) -> None:
        self._held, self._place, self._say = held, place, say
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ, None)
        self._children: dict[int, tuple[int, int]] = {}
        """By number: process and its descriptor."""
        self._heard = b""

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._bury(key.data)
                elif not self._listen():
                    return

    def _listen(self) -> bool:
        heard = os.read(0, 65536)
        *lines, self._heard = (self._heard + heard).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "kill" in request:
                self._kill(request["kill"])
            else:
                self._start(request)
        return bool(heard)

    def _start(self, request: dict[str, Any]) -> None:
        number = int(request["number"])
        pid = os.fork()
        if pid == 0:
            os._exit(self._live(number, request))
        descriptor = os.pidfd_open(pid)
        self._children[number] = pid, descriptor
        self._selector.register(descriptor, selectors.EVENT_READ, number)

    def _live(self, number: int, request: dict[str, Any]) -> int:
        """The child's whole life."""
        code = 1
        try:
            die_with_parent()
            os.close(self._say)
            _redirect(self._place / f"{number}.log")
            faulthandler.enable()  # a crash in native code leaves its stack in the log
            file = self._place / f"{number}.json"
            if request.get("layers"):
                replace_atomically(file, json.dumps([vars(x) for x in self._held.layers()]))
            else:
                self._probe(Ask.of(request["ask"]), file, request["beside"])
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        return code

    def _probe(self, ask: Ask, file: Path, beside: list[int]) -> None:
        told: list[dict[str, Any]] = []

        def tell(each: Told) -> None:
            told.append(each.as_dict())
            replace_atomically(file, json.dumps(told))

        self._held.probe(ask, tell, file.with_suffix(".trace"), beside)

    def _bury(self, number: int) -> None:
        pid, descriptor = self._children.pop(number)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        _write(self._say, {"number": number, "status": os.waitstatus_to_exitcode(status)})

    def _kill(self, number: int) -> None:
        if number in self._children:
            os.kill(self._children[number][0], signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
