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

import sys
from types import ModuleType
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
    "watch": "stepscope.block",
    "open_run": "stepscope.opened_run",
    "latest_run": "stepscope.runs.reader",
}

if TYPE_CHECKING:
    from stepscope.api import fit, open_study, study, trial
    from stepscope.block import watch
    from stepscope.marks import mark, phase
    from stepscope.opened_run import open_run
    from stepscope.runs.reader import latest_run


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stepscope' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """`stepscope.fit` is the function, also once a module of the package `stepscope.fit` is
    imported: the import system would put the package into its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
