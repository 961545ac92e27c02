"""What one trial of a study is: settings and limits alike, by name.

Its key is a hash of the settings that are not as they would be anyway, so that it stays the same on
another machine, and when a later stepscope has more settings. It names the folder of its trials.
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
from stepscope.errors import BadWorkload
from stepscope.trials.limits.spec import (
    Limits,
    MachineResources,
    check_limits,
    parse_gpus,
    parse_size,
    size_text,
)
from stepscope.workloads.code_place import parse_place
from stepscope.workloads.spec import (
    SETTINGS,
    Workload,
    make_workload,
    nearest,
    setting_default,
    trial_command,
)

LIMITS: dict[str, str] = {
    "cpus": "How many CPUs; 1.5 is possible.",
    "memory": "Host memory, say 8GiB.",
    "gpu_memory": "GPU memory, say 16GiB.",
    "gpus": 'How many GPUs, the first ones; or which, as text: "0,2".',
    "timeout": "End a trial after so many seconds.",
    "hang": "End a trial when nothing was heard of it for so many seconds.",
}
"""What a design may set besides settings, as `stepscope trial` has them."""
SIZES = ("memory", "gpu_memory")
NAMES = ("model", *SETTINGS, *LIMITS)
_KEY_LENGTH = 12
_USUAL_HANG_S = Limits().stall_timeout_s
_MOST_GPUS = 1024
_ANYWHERE = MachineResources(math.inf, 1 << 62)
"""What can be had on no machine is refused at once; the rest is for the machine to say."""
DEFAULTS: dict[str, Level] = {
    **{name: setting_default(name) for name in SETTINGS},
    **dict.fromkeys(LIMITS),
    "hang": _USUAL_HANG_S,
}
"""What a setting is where it was not said; only a model must be."""


@dataclass(frozen=True)
class TrialSpec:
    """A configuration, checked. `make_spec` is how to make one."""

    settings: Mapping[str, Level]
    """Those that were said and are not as they would be anyway, by name; sizes in bytes."""
    workload: Workload
    limits: Limits

    @cached_property
    def key(self) -> str:
        text = json.dumps(self.settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:_KEY_LENGTH]

    def get(self, name: str) -> Level:
        """A setting, also where it was left as it would be."""
        if name in self.settings:
            return self.settings[name]
        return None if name in LIMITS else getattr(self.workload, name)

    def command(self) -> list[str]:
        """What runs the same trial alone."""
        options = {name: value for name, value in self.settings.items() if name != "model"}
        gpus = options.get("gpus")
        if isinstance(gpus, int):
            options["gpus"] = ",".join(map(str, range(gpus)))
        return trial_command(self.workload.model, options)


def make_spec(settings: Mapping[str, Any]) -> TrialSpec:
    """A checked configuration; an error for people says what is wrong with it."""
    for name in settings:
        if name not in NAMES:
            raise BadWorkload(f"{name!r} is neither a setting nor a limit", nearest(name, NAMES))
    model = settings.get("model")
    if not isinstance(model, str):
        raise BadWorkload("No model was named" if model is None else f"{model!r} is no model")
    given = {name: value for name, value in settings.items() if name in SETTINGS}
    workload = make_workload(model, given)
    bounds = {name: checked_limit(name, settings[name]) for name in LIMITS if name in settings}
    said = {"model": model, **{name: getattr(workload, name) for name in given}, **bounds}
    changed = {name: value for name, value in said.items() if value != DEFAULTS.get(name)}
    return TrialSpec(dict(sorted(changed.items())), workload, _limits(bounds))


def checked_level(name: str, value: Any) -> Level:
    """A level of a setting or a limit, in its own type; an error for people where it cannot be."""
    if name == "model":
        make_spec({"model": value})
        return str(value)
    if name in LIMITS:
        return checked_limit(name, value)
    # Checked with a model that goes with it: only a user's workload has data of its own.
    is_own_data = name == "data" and isinstance(value, str) and value.split(":")[-1] == "own"
    model = "train.py:workload" if is_own_data else "cnn"
    try:
        return getattr(make_workload(model, {name: value}), name)  # type: ignore[no-any-return]
    except OverflowError:
        raise BadWorkload(f"{name} is too large") from None


def checked_limit(name: str, value: Any) -> Level:
    """A limit that can be had somewhere, in its own type; None is as much as there is."""
    if value is None:
        return None
    level: Level = None
    if isinstance(value, bool):
        pass
    elif name in SIZES and isinstance(value, int | str):
        level = min(parse_size(value), _ANYWHERE.memory + 1)
    elif name == "gpus" and isinstance(value, int) and 0 <= value <= _MOST_GPUS:
        level = value
    elif name == "gpus" and isinstance(value, str) and value.strip():
        level = ",".join(parse_gpus(value))
    elif name not in (*SIZES, "gpus") and isinstance(value, int | float) and 0 < value < 1e18:
        level = float(value)
    if level is None:
        raise BadWorkload(f"{name} {value!r} cannot be", LIMITS[name])
    check_limits(_limits({name: level}), _ANYWHERE)
    return level


def _limits(bounds: Mapping[str, Any]) -> Limits:
    gpus = bounds.get("gpus")
    if isinstance(gpus, int):
        gpus = tuple(map(str, range(gpus)))
    elif gpus is not None:
        gpus = parse_gpus(gpus)
    hang = bounds.get("hang")
    return Limits(
        bounds.get("cpus"),
        bounds.get("memory"),
        bounds.get("gpu_memory"),
        gpus,
        bounds.get("timeout"),
        _USUAL_HANG_S if hang is None else hang,
    )


def resolved(workload: Workload, base: Path) -> Workload:
    """With files of the user's as seen from the folder of the design, where they are there."""
    changed: dict[str, str] = {}
    if workload.is_own:
        source, function = parse_place(workload.model)
        if (base / source).is_file():
            changed["model"] = f"{(base / source).resolve()}:{function}"
    if workload.data_path is not None and (base / workload.data_path).is_dir():
        changed["data_path"] = str((base / workload.data_path).resolve())
    return dataclasses.replace(workload, **changed) if changed else workload  # type: ignore[arg-type]


def in_design_words(text: str) -> str:
    """What is said of options, said of the settings of a design: `--batch-size` is batch_size."""

    def word(option: re.Match[str]) -> str:
        name = option[1].replace("-", "_")
        return name if name in NAMES else option[0]

    return re.sub(r"--([a-z][a-z-]*)", word, text)


def setting(settings: Mapping[str, Level], name: str) -> Level:
    """A setting of a spec's settings, also where it was left as it would be."""
    return settings.get(name, setting_default(name) if name in SETTINGS else None)


def level_text(name: str, value: Level) -> str:
    """A level as people write it: `2 GiB`, `1.5`, `yes`."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name in SIZES and isinstance(value, int):
        return size_text(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def levels_text(levels: Mapping[str, Level]) -> str:
    """Several, in a line: `batch_size 64, cpus 2`."""
    return ", ".join(
        level_text(name, value) if name == "model" else f"{name} {level_text(name, value)}"
        for name, value in levels.items()
    )


def trial_text(spec: TrialSpec, factors: Sequence[Factor]) -> str:
    """A trial by the levels of its factors: `batch_size 32, cpus 1`."""
    levels = {factor.name: spec.get(factor.name) for factor in factors}
    return levels_text(levels) or spec.workload.short_name
