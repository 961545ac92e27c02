"""What one trial of a study is: settings of knobs and limits alike, by name.

Its key is a hash of the settings that are not as they would be anyway, so that it stays the same on
another machine, and when a later stepscope has more knobs. It names the folder of its trials.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stepscope.analysis.study.records import Level
from stepscope.errors import BadWorkload, StepscopeError
from stepscope.trials.limits import Limits, Room, check_limits, parse_size, size_text
from stepscope.workloads.own import is_place
from stepscope.workloads.spec import KNOBS, Workload, knob_default, make_workload, nearest

LIMITS: dict[str, str] = {
    "cpus": "How many CPUs; 1.5 is possible.",
    "memory": "Host memory, say 8GiB.",
    "gpu_memory": "GPU memory, say 16GiB.",
    "gpus": 'How many GPUs, the first ones; or which, as text: "0,2".',
    "timeout": "End a trial after so many seconds.",
    "hang": "End a trial when nothing was heard of it for so many seconds.",
}
"""What a design may set besides knobs, as `stepscope trial` has them."""
SIZES = ("memory", "gpu_memory")
NAMES = ("model", *KNOBS, *LIMITS)
_KEY_LENGTH = 12
_USUAL_HANG_S = Limits().hang_s
_MOST_GPUS = 1024
_ANYWHERE = Room(math.inf, 1 << 62)
"""What can be had on no machine is refused at once; the rest is for the machine to say."""
DEFAULTS: dict[str, Level] = {
    **{name: knob_default(name) for name in KNOBS},
    **dict.fromkeys(LIMITS),
    "hang": _USUAL_HANG_S,
}
"""What a setting is where it was not said; only a model must be."""


@dataclass(frozen=True)
class Spec:
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


def make_spec(settings: Mapping[str, Any]) -> Spec:
    """A checked configuration; an error for people says what is wrong with it."""
    for name in settings:
        if name not in NAMES:
            raise BadWorkload(f"{name!r} is neither a knob nor a limit", nearest(name, NAMES))
    model = settings.get("model")
    if not isinstance(model, str):
        raise BadWorkload("No model was named" if model is None else f"{model!r} is no model")
    knobs = {name: value for name, value in settings.items() if name in KNOBS}
    workload = make_workload(model, knobs)
    bounds = {name: checked_limit(name, settings[name]) for name in LIMITS if name in settings}
    told: dict[str, Level] = {"model": model}
    told |= {
        name: getattr(workload, name) for name in knobs if getattr(workload, name) != DEFAULTS[name]
    }
    told |= {name: value for name, value in bounds.items() if value is not None}
    if told.get("hang") == _USUAL_HANG_S:
        del told["hang"]
    return Spec(dict(sorted(told.items())), workload, _limits(bounds))


def checked_level(name: str, value: Any) -> Level:
    """A level of a knob or a limit, in its own type; an error for people where it cannot be."""
    if name == "model":
        make_spec({"model": value})
        return str(value)
    if name in LIMITS:
        return checked_limit(name, value)
    if name not in KNOBS:
        raise BadWorkload(f"{name!r} is neither a knob nor a limit", nearest(name, NAMES))
    try:
        return getattr(make_workload(_model_for(name, value), {name: value}), name)  # type: ignore[no-any-return]
    except OverflowError:
        raise BadWorkload(f"{name} is too large") from None


def _model_for(name: str, value: Any) -> str:
    """One that goes with a level by itself: only a user's workload has data of its own."""
    has_own_data = name == "data" and isinstance(value, str) and value.split(":")[-1] == "own"
    return "train.py:workload" if has_own_data else "cnn"


def checked_limit(name: str, value: Any) -> Level:
    """A limit that can be had somewhere, in its own type; None is as much as there is."""
    if value is None:
        return None
    wrong = BadWorkload(f"{name} {value!r} cannot be", LIMITS[name])
    if isinstance(value, bool):
        raise wrong
    level = _typed_limit(name, value, wrong)
    check_limits(_limits({name: level}), _ANYWHERE)
    return level


def _typed_limit(name: str, value: Any, wrong: StepscopeError) -> Level:
    if name in SIZES:
        if not isinstance(value, int | str):
            raise wrong
        return min(parse_size(value), _ANYWHERE.memory + 1)
    if name == "gpus":
        return _checked_gpus(value, wrong)
    if not isinstance(value, int | float) or not 0 < value < 1e18:
        raise wrong
    return float(value)


def _checked_gpus(value: Any, wrong: StepscopeError) -> Level:
    if isinstance(value, int) and 0 <= value <= _MOST_GPUS:
        return value
    if isinstance(value, str) and value.strip():
        return ",".join(part.strip() for part in value.split(","))
    raise wrong


def _limits(bounds: Mapping[str, Any]) -> Limits:
    gpus = bounds.get("gpus")
    if isinstance(gpus, int):
        gpus = tuple(map(str, range(gpus)))
    elif gpus is not None:
        gpus = tuple(gpus.split(","))
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
    if is_place(workload.model):
        named, _, function = workload.model.rpartition(":")
        if (base / named).is_file():
            changed["model"] = f"{(base / named).resolve()}:{function}"
    if workload.data_path is not None and (base / workload.data_path).is_dir():
        changed["data_path"] = str((base / workload.data_path).resolve())
    return dataclasses.replace(workload, **changed) if changed else workload  # type: ignore[arg-type]


def in_design_words(text: str) -> str:
    """What is said of options, said of the settings of a design: `--batch-size` is batch_size."""
    return re.sub(r"--([a-z][a-z-]*)", _setting_word, text)


def _setting_word(option: re.Match[str]) -> str:
    name = option[1].replace("-", "_")
    return name if name in NAMES else option[0]


def setting(settings: Mapping[str, Level], name: str) -> Level:
    """A setting of a spec's settings, also where it was left as it would be."""
    if name in settings or name in LIMITS or name not in KNOBS:
        return settings.get(name)
    return knob_default(name)  # type: ignore[no-any-return]


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
