"""Like `loop`, but the first attempts at some trials are killed, as by an external cause.

PLANTED_KILLED   an expression of the settings: whether this trial is killed
PLANTED_KILLS    number of attempts that are killed
"""

from __future__ import annotations

import os
import signal

from made_up import loop
from stepscope.records.codec import to_json
from stepscope.workloads.reporting import RankPlacement, RankReport
from stepscope.workloads.spec import Workload


class Killed(loop.MadeUp):
    def train(self, workload: Workload, placement: RankPlacement, report: RankReport) -> None:
        attempt = int(placement.facts.parent.parent.name.partition("a")[2])
        is_killed = loop._formula("PLANTED_KILLED", to_json(workload), False)
        if is_killed and attempt <= int(os.environ["PLANTED_KILLS"]):
            os.kill(os.getpid(), signal.SIGKILL)
        super().train(workload, placement, report)


FRAMEWORK = Killed()
