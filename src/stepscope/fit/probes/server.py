"""The process that holds a workload, and forks a disposable one for each probe.

    python -m stepscope.fit.probes.server FOLDER DESCRIPTOR

DESCRIPTOR is its end of a connection: it first tells what it holds, or why it cannot, then takes
`StartProbe` and `KillProbe`, and answers with the number and the exit code when a probe has ended;
the results of a probe are in `FOLDER/<number>.json`. It imports the framework once and leaves the
GPU alone, so that a probe costs a fork and the start of a context. When it dies, its children die
too.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import selectors
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from stepscope.fit.probes.contract import KillProbe, StartProbe
from stepscope.records.codec import dumps, loads
from stepscope.runs.paths import replace_atomically
from stepscope.trials.child import die_with_parent
from stepscope.workloads.frameworks.contract import BuiltWorkload, check_capabilities
from stepscope.workloads.frameworks.registry import get_framework
from stepscope.workloads.own import explain
from stepscope.workloads.probing import ProbeResult
from stepscope.workloads.spec import Workload

_COLD = "STEPSCOPE_PROBES_COLD"
"""Set where imports ahead of time are known to do harm."""


def main(folder: str, descriptor: str) -> int:
    die_with_parent()
    place, client = Path(folder), Connection(int(descriptor))
    workload = loads(Workload, (place / "workload.json").read_bytes())
    try:
        framework = get_framework(workload.framework)
        framework.load()
        check_capabilities(framework, workload)
        if not os.environ.get(_COLD) and not framework.load_for_probes():
            # What was imported to save time has cost us the GPU: once more, without it.
            os.environ[_COLD] = "1"
            os.execv(sys.executable, sys.orig_argv)
        os.set_inheritable(client.fileno(), False)  # no program that is started here gets it
        built = framework.build(workload)
        subject = built.subject
    except Exception as error:
        traceback.print_exc()
        client.send(explain(error, workload))
        return 1
    gc.collect()
    gc.freeze()  # what children only read stays shared
    client.send(subject)
    _serve(built, place, client)
    return 0


def _serve(built: BuiltWorkload, place: Path, client: Connection) -> None:
    """Fork a child for each request, and answer when it has ended, until the client is gone."""
    children: dict[int, tuple[int, int]] = {}  # by number: process and its descriptor
    selector = selectors.DefaultSelector()
    selector.register(client.fileno(), selectors.EVENT_READ, None)
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                pid, descriptor = children.pop(key.data)
                selector.unregister(descriptor)
                os.close(descriptor)
                client.send((key.data, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                continue
            try:
                request = client.recv()
            except (EOFError, OSError):
                return
            if isinstance(request, KillProbe):
                if request.number in children:
                    os.kill(children[request.number][0], signal.SIGKILL)
                continue
            pid = os.fork()
            if pid == 0:
                client.close()
                os._exit(_live(built, place, request))
            children[request.number] = pid, os.pidfd_open(pid)
            selector.register(children[request.number][1], selectors.EVENT_READ, request.number)


def _live(built: BuiltWorkload, place: Path, request: StartProbe) -> int:
    code = 1
    file = place / f"{request.number}.json"
    results: list[ProbeResult] = []

    def tell(result: ProbeResult) -> None:
        results.append(result)
        replace_atomically(file, dumps(results))

    try:
        die_with_parent()
        # What a user's code prints goes into a file of the probe.
        sys.stdout.flush()
        sys.stderr.flush()
        log = os.open(file.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        faulthandler.enable()  # a crash in native code leaves its stack in the log
        built.probe(request.probe, tell, file.with_suffix(".trace"), request.beside)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
