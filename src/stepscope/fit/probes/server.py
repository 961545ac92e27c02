"""The probe server: builds a workload once, and forks a disposable process for each probe.

    python -m stepscope.fit.probes.server FOLDER DESCRIPTOR

DESCRIPTOR is its end of a connection. The server first sends a `Subject`, or the error of the
build. It then accepts `StartProbe` and `KillProbe`, and sends the number and the exit code of each
probe that ended; the results of a probe are in `FOLDER/<number>.json`. The server imports the
framework but never uses the GPU, so a probe costs only a fork and a CUDA context. When the server
exits, the kernel ends its children.
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
from stepscope.runs.files import replace_atomically
from stepscope.trials.child import exit_with_parent
from stepscope.workloads.custom import describe_error
from stepscope.workloads.frameworks.contract import BuiltWorkload, check_capabilities
from stepscope.workloads.frameworks.registry import get_framework
from stepscope.workloads.probing import ProbeResult
from stepscope.workloads.spec import Workload

_NO_PRELOAD = "STEPSCOPE_PROBES_NO_PRELOAD"
"""Set if preloading modules is known to break CUDA in forks."""


def main(folder_name: str, descriptor: str) -> int:
    exit_with_parent()
    folder, client = Path(folder_name), Connection(int(descriptor))
    workload = loads(Workload, (folder / "workload.json").read_bytes())
    try:
        framework = get_framework(workload.framework)
        framework.load()
        check_capabilities(framework, workload)
        if not os.environ.get(_NO_PRELOAD) and not framework.load_for_probes():
            # The preloaded modules initialized CUDA. Restart without them.
            os.environ[_NO_PRELOAD] = "1"
            os.execv(sys.executable, sys.orig_argv)
        os.set_inheritable(client.fileno(), False)  # not for child programs
        built = framework.build(workload)
        subject = built.subject
    except Exception as error:
        traceback.print_exc()
        client.send(describe_error(error, workload))
        return 1
    gc.collect()
    gc.freeze()  # keeps pages shared between forks
    client.send(subject)
    _serve(built, folder, client)
    return 0


def _serve(built: BuiltWorkload, folder: Path, client: Connection) -> None:
    """Fork a child for each request and report its exit code, until the client disconnects."""
    children: dict[int, tuple[int, int]] = {}  # PID and pidfd by number
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
                os._exit(_run_probe(built, folder, request))
            children[request.number] = pid, os.pidfd_open(pid)
            selector.register(children[request.number][1], selectors.EVENT_READ, request.number)


def _run_probe(built: BuiltWorkload, folder: Path, request: StartProbe) -> int:
    code = 1
    file = folder / f"{request.number}.json"
    results: list[ProbeResult] = []

    def notify(result: ProbeResult) -> None:
        results.append(result)
        replace_atomically(file, dumps(results))

    try:
        exit_with_parent()
        # Output of user code goes to the log of the probe.
        sys.stdout.flush()
        sys.stderr.flush()
        log = os.open(file.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        faulthandler.enable()  # writes the stack of a native crash to the log
        built.probe(request.probe, notify, file.with_suffix(".trace"), request.group)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
