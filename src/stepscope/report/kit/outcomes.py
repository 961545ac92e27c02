"""Display label and tone of each outcome. Kept free of heavy imports."""

from __future__ import annotations

from typing import Literal

from stepscope.records import Outcome

Tone = Literal["good", "bad", "warning", "neutral"]

OUTCOMES: dict[Outcome, tuple[str, Tone]] = {
    Outcome.OK: ("ok", "good"),
    Outcome.GPU_OOM: ("out of GPU memory", "bad"),
    Outcome.HOST_OOM: ("out of host memory", "bad"),
    Outcome.SHM_FULL: ("shared memory full", "bad"),
    Outcome.TIMEOUT: ("timed out", "warning"),
    Outcome.CRASHED: ("crashed", "bad"),
    Outcome.INTERRUPTED: ("interrupted", "warning"),
    Outcome.LOST: ("lost", "warning"),
    Outcome.RUNNING: ("running", "neutral"),
    Outcome.SKIPPED: ("skipped", "neutral"),
}
