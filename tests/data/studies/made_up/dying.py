"""As `loop`, but some trials are killed on their first attempts, as by something around them.

PLANTED_DIES     an expression of the knobs: whether this trial is one of them
PLANTED_DEATHS   on how many attempts
"""

from __future__ import annotations

import os
import signal
from typing import Any

from made_up import loop


def train(workload: Any, place: Any, report: Any) -> None:
    attempt = int(place.facts.parent.parent.name.partition("a")[2])
    dies = loop._formula("PLANTED_DIES", workload.as_dict(), False)
    if dies and attempt <= int(os.environ["PLANTED_DEATHS"]):
        os.kill(os.getpid(), signal.SIGKILL)
    loop.train(workload, place, report)
