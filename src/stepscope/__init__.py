"""stepscope: monitor neural-network training and find its bottleneck.

    import stepscope

    stepscope.mark("epoch", 3)            # report an epoch
    with stepscope.phase("eval"): ...     # report a time span
    with stepscope.watch("my run"): ...   # monitor this process during the block
    stepscope.open_run("runs/...")        # read a run
    stepscope.trial("resnet18", cpus=4)   # train a workload in isolation and measure it
    stepscope.fit("resnet50").batch_size  # find the recommended batch size
    stepscope.study("design.yaml")        # run the trials of a study and analyze them
    stepscope.open_study("studies/...")   # read the results of a study

Names are loaded on first use, so importing stepscope does not import a framework or pyarrow.
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

_MODULES = {
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
    if name not in _MODULES:
        raise AttributeError(f"module 'stepscope' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Keeps `stepscope.fit` a function after a module of the package `stepscope.fit` is imported.
    The import system would replace it with the package."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
