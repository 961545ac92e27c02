"""The configuration of a trial in a study: settings and limits by name.

Its key is a hash of the settings that differ from their defaults. The key is therefore the same on
every machine, and stays the same when a later version adds settings. It names the trial's folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stepscope.analysis.study.records import Factor, Level
from stepscope.errors import WorkloadError
from stepscope.trials.limits.spec import (
    Limits,
    MachineResources,
    check_limits,
    parse_gpus,
    parse_size,
    size_text,
)
from stepscope.workloads.code_reference import parse_reference
from stepscope.workloads.spec import (
    SETTINGS,
    Workload,
    make_workload,
    nearest,
    setting_default,
    trial_command,
)

LIMITS: dict[str, str] = {
    "cpus": "a number of CPUs such as 2 or 1.5",
    "memory": "a size such as 8GiB",
    "gpu_memory": "a size such as 16GiB",
    "gpus": 'a number of GPUs, or a list of them in quotes such as "0,2"',
    "timeout": "a number of seconds greater than 0",
    "stall_timeout": "a number of seconds greater than 0",
}
"""The limits that a design may set, with their valid values."""
SIZES = ("memory", "gpu_memory")
NAMES = ("model", *SETTINGS, *LIMITS)
_KEY_LENGTH = 12
_DEFAULT_STALL_TIMEOUT_S = Limits().stall_timeout_s
_MAX_GPUS = 1024
_ANY_MACHINE = MachineResources(math.inf, 1 << 62)
"""Only limits that no machine can provide are invalid; the rest depends on the machine."""
DEFAULTS: dict[str, Level] = {
    **{name: setting_default(name) for name in SETTINGS},
    **dict.fromkeys(LIMITS),
    "stall_timeout": _DEFAULT_STALL_TIMEOUT_S,
}
"""The defaults of all settings and limits; `model` has none."""


@dataclass(frozen=True)
class TrialSpec:
    """A checked configuration. `make_spec` returns one."""

    settings: Mapping[str, Level]
    """The settings and limits that differ from their defaults, by name; sizes in bytes."""
    workload: Workload
    limits: Limits

    @cached_property
    def key(self) -> str:
        text = json.dumps(self.settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:_KEY_LENGTH]

    def get(self, name: str) -> Level:
        """Return a setting or limit, or its default."""
        if name in self.settings:
            return self.settings[name]
        return None if name in LIMITS else getattr(self.workload, name)

    def command(self) -> list[str]:
        """Return the command that runs the same trial outside of the study."""
        options = {name: value for name, value in self.settings.items() if name != "model"}
        gpus = options.get("gpus")
        if isinstance(gpus, int):
            options["gpus"] = ",".join(map(str, range(gpus)))
        return trial_command(self.workload.model, options)


def make_spec(settings: Mapping[str, Any]) -> TrialSpec:
    """Return a checked configuration; raise StepscopeError if it is invalid."""
    for name in settings:
        if name not in NAMES:
            raise WorkloadError(f"Unknown setting or limit {name!r}", nearest(name, NAMES))
    model = settings.get("model")
    if not isinstance(model, str):
        raise WorkloadError("`model` is missing" if model is None else f"Invalid model {model!r}")
    given = {name: value for name, value in settings.items() if name in SETTINGS}
    # Trials may have run with another torchvision; reading a new design checks the model.
    workload = make_workload(model, given, allow_unknown_model=True)
    limits = {name: checked_limit(name, settings[name]) for name in LIMITS if name in settings}
    values = {"model": model, **{name: getattr(workload, name) for name in given}, **limits}
    changed = {name: value for name, value in values.items() if value != DEFAULTS.get(name)}
    return TrialSpec(dict(sorted(changed.items())), workload, _limits(limits))


def checked_level(name: str, value: Any) -> Level:
    """Return a level in the type of its setting or limit; raise StepscopeError if invalid."""
    if name == "model":
        make_spec({"model": value})
        return str(value)
    if name in LIMITS:
        return checked_limit(name, value)
    # Checked together with a suitable model: only a custom workload has custom data.
    is_custom_data = name == "data" and isinstance(value, str) and value.split(":")[-1] == "custom"
    model = "train.py:workload" if is_custom_data else "cnn"
    try:
        return getattr(make_workload(model, {name: value}), name)  # type: ignore[no-any-return]
    except OverflowError:
        raise WorkloadError(f"`{name}` is too large") from None


def checked_limit(name: str, value: Any) -> Level:
    """Return a limit in its type; None is unlimited. Raise StepscopeError if it is invalid."""
    if value is None:
        return None
    level: Level = None
    if isinstance(value, bool):
        pass
    elif name in SIZES and isinstance(value, int | str):
        level = min(parse_size(value), _ANY_MACHINE.memory + 1)
    elif name == "gpus" and isinstance(value, int) and 0 <= value <= _MAX_GPUS:
        level = value
    elif name == "gpus" and isinstance(value, str) and value.strip():
        level = ",".join(parse_gpus(value))
    elif name not in (*SIZES, "gpus") and isinstance(value, int | float) and 0 < value < 1e18:
        level = float(value)
    if level is None:
        raise WorkloadError(f"Invalid value {value!r} for `{name}`", f"Use {LIMITS[name]}")
    check_limits(_limits({name: level}), _ANY_MACHINE)
    return level


def _limits(limits: Mapping[str, Any]) -> Limits:
    gpus = limits.get("gpus")
    if isinstance(gpus, int):
        gpus = tuple(map(str, range(gpus)))
    elif gpus is not None:
        gpus = parse_gpus(gpus)
    stall_timeout = limits.get("stall_timeout")
    return Limits(
        limits.get("cpus"),
        limits.get("memory"),
        limits.get("gpu_memory"),
        gpus,
        limits.get("timeout"),
        _DEFAULT_STALL_TIMEOUT_S if stall_timeout is None else stall_timeout,
    )


def resolved(workload: Workload, base: Path) -> Workload:
    """Return the workload with the paths that exist relative to the design's folder resolved."""
    changed: dict[str, str] = {}
    if workload.is_custom:
        source, function = parse_reference(workload.model)
        if (base / source).is_file():
            changed["model"] = f"{(base / source).resolve()}:{function}"
    if workload.data_path is not None and (base / workload.data_path).is_dir():
        changed["data_path"] = str((base / workload.data_path).resolve())
    return dataclasses.replace(workload, **changed) if changed else workload  # type: ignore[arg-type]


def with_setting_names(text: str) -> str:
    """Replace options by the names that a design uses: `--batch-size` becomes `batch_size`."""

    def setting_name(option: re.Match[str]) -> str:
        name = option[1].replace("-", "_")
        return name if name in NAMES else option[0]

    return re.sub(r"--([a-z][a-z-]*)", setting_name, text)


def setting(settings: Mapping[str, Level], name: str) -> Level:
    """Return one of a spec's settings, or its default."""
    return settings.get(name, setting_default(name) if name in SETTINGS else None)


def level_text(name: str, value: Level) -> str:
    """Format a level: `2 GiB`, `1.5`, `yes`."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in SIZES and isinstance(value, int):
        return size_text(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def levels_text(levels: Mapping[str, Level]) -> str:
    """Format several levels: `batch_size 64, cpus 2`."""
    return ", ".join(
        level_text(name, value) if name == "model" else f"{name} {level_text(name, value)}"
        for name, value in levels.items()
    )


def trial_text(spec: TrialSpec, factors: Sequence[Factor]) -> str:
    """Format the levels of a trial's factors: `batch_size 32, cpus 1`."""
    levels = {factor.name: spec.get(factor.name) for factor in factors}
    return levels_text(levels) or spec.workload.short_name
