"""stepscope: see what a training run consumes, and what holds it back.

    import stepscope

    stepscope.mark("epoch", 3)            # an event on the clock of the samples
    with stepscope.phase("eval"): ...     # a stretch of time with a name
    with stepscope.watch("my run"): ...   # watch this process from here to there
    stepscope.open_run("runs/...")        # read any run
    stepscope.trial("resnet18", cpus=4)   # train a workload in isolation, and measure it
    stepscope.fit("resnet50").batch_size  # the largest batch that fits and is still fast
    stepscope.study("design.yaml")        # many trials, each once, and what they teach
    stepscope.open_study("studies/...")   # what a study tells

Names are loaded when they are first used: importing stepscope imports no framework and no pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "fit",
    "latest_run",
    "mark",
    "open_run",
    "open_study",
    "phase",
    "study",
    "trial",
    "watch",
]

_HOMES = {
    "mark": "stepscope.marks",
    "phase": "stepscope.marks",
    "trial": "stepscope.api",
    "fit": "stepscope.api",
    "study": "stepscope.api",
    "open_study": "stepscope.api",
    "watch": "stepscope.capture.watch",
    "open_run": "stepscope.runs.reader",
    "latest_run": "stepscope.runs.reader",
}

if TYPE_CHECKING:
    from stepscope.api import fit, open_study, study, trial
    from stepscope.capture.watch import watch
    from stepscope.marks import mark, phase
    from stepscope.runs.reader import latest_run, open_run


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stepscope' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
