"""As `loop`, but some trials are killed on their first attempts, as by something around them.

PLANTED_DIES     an expression of the knobs: whether this trial is one of them
PLANTED_DEATHS   on how many attempts
"""

from __future__ import annotations

import os
import signal

from made_up import loop
from stepscope.records.codec import to_json
from stepscope.workloads.reporting import RankPlacement, RankReport
from stepscope.workloads.spec import Workload


class Dying(loop.MadeUp):
    def train(self, workload: Workload, placement: RankPlacement, report: RankReport) -> None:
        attempt = int(placement.facts.parent.parent.name.partition("a")[2])
        dies = loop._formula("PLANTED_DIES", to_json(workload), False)
        if dies and attempt <= int(os.environ["PLANTED_DEATHS"]):
            os.kill(os.getpid(), signal.SIGKILL)
        super().train(workload, placement, report)


FRAMEWORK = Dying()
