"""The fake `pynvml`, for processes with this folder at the front of PYTHONPATH."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

_spec = importlib.util.spec_from_file_location(
    "fake_nvml", Path(__file__).parents[1] / "fake_nvml.py"
)
assert _spec is not None and _spec.loader is not None
_module = sys.modules.setdefault("fake_nvml", importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(_module)
_fake = _module.from_environment()


def __getattr__(name: str) -> Any:
    return getattr(_fake, name)
