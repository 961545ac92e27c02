"""Like `loop`, but the trial leaves something behind, as the words in `PLANTED_LEAVES` say.

    orphan    a process with an empty environment, in its own session, whose parent has exited
    workers   two forks named like loader workers, and a rank
    shm       a file in /dev/shm, named like a framework's

`PLANTED_LEFT` names a file that lists them: the word, and a pid or the name of the file.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from pathlib import Path

from made_up import loop
from stepscope.workloads.reporting import RankPlacement, RankReport
from stepscope.workloads.spec import Workload


class Leaves(loop.MadeUp):
    def train(self, workload: Workload, placement: RankPlacement, report: RankReport) -> None:
        words = os.environ.get("PLANTED_LEAVES", "").split()
        if "orphan" in words:
            middle = os.fork()
            if middle == 0:
                os.setsid()
                orphan = os.fork()
                if orphan == 0:
                    os.execve("/bin/sleep", ["sleep", "300"], {})
                _note("orphan", orphan)
                os._exit(0)
            os.waitpid(middle, 0)
        if "workers" in words:
            for name in ("pt_data_worker", "pt_data_worker", "rank"):
                worker = os.fork()
                if worker == 0:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    Path("/proc/self/comm").write_text(name)
                    time.sleep(300)
                    os._exit(0)
                _note(name, worker)
        if "shm" in words:
            file = Path(f"/dev/shm/psm_{secrets.token_hex(4)}")
            file.write_bytes(bytes(100))
            _note("shm", file)
        super().train(workload, placement, report)


FRAMEWORK = Leaves()


def _note(word: str, what: object) -> None:
    with open(os.environ["PLANTED_LEFT"], "a") as file:
        file.write(f"{word} {what}\n")
