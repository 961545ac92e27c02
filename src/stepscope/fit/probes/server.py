"""The process that holds a workload, and forks a disposable one for each probe.

    python -m stepscope.fit.probes.server FOLDER

It reads requests from its standard input, a line of JSON each, and answers on its standard output
when a probe has ended; the results of a probe are in `FOLDER/<number>.json`. It imports the
framework once and leaves the GPU alone, so that a probe costs a fork and the start of a context.
When it dies, its children die too.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepscope.records.codec import dumps, from_json, to_json
from stepscope.runs.paths import replace_atomically
from stepscope.trials.child import die_with_parent
from stepscope.workloads.frameworks.contract import BuiltWorkload, check_capabilities
from stepscope.workloads.frameworks.registry import get_framework
from stepscope.workloads.own import explain
from stepscope.workloads.probing import ProbeRequest, ProbeResult
from stepscope.workloads.spec import Workload

_COLD = "STEPSCOPE_PROBES_COLD"
"""Set where imports ahead of time are known to do harm."""


def main(folder: str) -> int:
    die_with_parent()
    place = Path(folder)
    answers = os.dup(1)
    _redirect(place / "server.log")
    workload = Workload(**json.loads((place / "workload.json").read_text(encoding="utf-8")))
    try:
        framework = get_framework(workload.framework)
        framework.load()
        check_capabilities(framework, workload)
        if not os.environ.get(_COLD) and not framework.load_for_probes():
            # What was imported to save time has cost us the GPU: once more, without it.
            os.dup2(answers, 1)
            os.environ[_COLD] = "1"
            os.execv(sys.executable, sys.orig_argv)
        built = framework.build(workload)
        subject = to_json(built.subject)
    except Exception as error:
        traceback.print_exc()
        message, hint = explain(error, workload)
        _write(answers, {"error": {"message": message, "hint": hint}})
        return 1
    gc.collect()
    gc.freeze()  # what children only read stays shared
    _write(answers, {"subject": subject})
    _Server(built, place, answers).serve()
    return 0


def _redirect(log: Path) -> None:
    """What a user's code prints goes into a file; only our answers go to the client."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _write(to: int, message: dict[str, Any]) -> None:
    os.write(to, json.dumps(message).encode() + b"\n")


class _Server:
    def __init__(self, built: BuiltWorkload, place: Path, answers: int) -> None:
        self._built, self._place, self._answers = built, place, answers
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ, None)
        self._children: dict[int, tuple[int, int]] = {}
        """By number: process and its descriptor."""
        self._read = b""

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    if not self._read_requests():
                        return
                    continue
                pid, descriptor = self._children.pop(key.data)
                self._selector.unregister(descriptor)
                os.close(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _write(self._answers, {"number": key.data, "status": code})

    def _read_requests(self) -> bool:
        read = os.read(0, 65536)
        *lines, self._read = (self._read + read).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "kill" in request:
                if request["kill"] in self._children:
                    os.kill(self._children[request["kill"]][0], signal.SIGKILL)
                continue
            number, beside = request["number"], request.get("beside", ())
            # Decoded here, so that the decoder is imported once and not in every child.
            probe = from_json(ProbeRequest, request["probe"]) if "probe" in request else None
            pid = os.fork()
            if pid == 0:
                os._exit(self._live(number, probe, beside))
            descriptor = os.pidfd_open(pid)
            self._children[number] = pid, descriptor
            self._selector.register(descriptor, selectors.EVENT_READ, number)
        return bool(read)

    def _live(self, number: int, probe: ProbeRequest | None, beside: Sequence[int]) -> int:
        code = 1
        file = self._place / f"{number}.json"
        results: list[ProbeResult] = []

        def tell(result: ProbeResult) -> None:
            results.append(result)
            replace_atomically(file, dumps(results))

        try:
            die_with_parent()
            os.close(self._answers)
            _redirect(self._place / f"{number}.log")
            faulthandler.enable()  # a crash in native code leaves its stack in the log
            if probe is None:
                replace_atomically(file, dumps(self._built.layers()))
            else:
                self._built.probe(probe, tell, file.with_suffix(".trace"), beside)
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
