"""Rewrites the generated parts of the docs: metrics, commands, settings, causes, JSON keys, …

    python docs/generate.py            rewrite the pages that have generated parts
    python docs/generate.py --check    change nothing; exit code 1 where a page is stale

A generated part stands between `<!-- generated: NAME -->` and `<!-- end generated -->`. All else in
a page is written by hand and stays as it is.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import typer.main
from json_keys import Rows, literal_keys, record_keys
from messages import collect

import stepscope.sensors
from stepscope.analysis.bottleneck.causes import CAUSES
from stepscope.analysis.bottleneck.thresholds import THRESHOLDS
from stepscope.analysis.memory.model import MemoryLine, Parts
from stepscope.analysis.run.gpus import GpuFigures, GpuRow
from stepscope.analysis.run.progress import EpochNow, LiveThroughput
from stepscope.analysis.study import records as study_records
from stepscope.cli import doctor as doctor_command
from stepscope.cli.app import app
from stepscope.cli.console import EXIT_CODES
from stepscope.doctor.checks import CheckResult
from stepscope.doctor.machine import MachineRemark
from stepscope.doctor.run import DoctorReport, SensorState
from stepscope.errors import StepscopeError
from stepscope.fit import result as fit_records
from stepscope.metrics import DERIVED, Metric, Scope, of_scope
from stepscope.records import EpochRow, ExitStatus, Gpu, Outcome, Statistic, Summary
from stepscope.records import profile as profile_records
from stepscope.report.bottleneck import json as bottleneck_json
from stepscope.report.bottleneck.messages import CAUSE_TEXTS
from stepscope.report.bottleneck.view import quantity_text
from stepscope.report.fit import json as fit_json
from stepscope.report.live.view import frame_dict
from stepscope.report.run.json import summary_dict
from stepscope.report.study import export as study_json
from stepscope.report.study.configurations import ConfigurationRow
from stepscope.report.study.plan import PlanView
from stepscope.report.study.view import BlockLine, SkippedGroup
from stepscope.report.trial import json as trial_json
from stepscope.sensors.contract import Sensor
from stepscope.workloads.probing import ProbeResult, Subject
from stepscope.workloads.spec import SETTINGS, Setting, setting_default, setting_type

DOCS = Path(__file__).parent
PAGES = sorted(page for page in DOCS.glob("*.md") if "<!-- generated: " in page.read_text("utf-8"))

FORMAT_KEY = ("format", "Schema version")
METRIC_HEAD = ("key", "shown as", "unit", "kind", "sensor", "meaning")
PLAIN_CODES = (
    (
        0,
        "Success. `run`: the exit code of the command was 0. `watch`: monitoring ended, even if "
        "the process failed",
    ),
    (
        1,
        "Any other stepscope error, such as a report that cannot be written. `doctor`: a sensor is "
        "wrong",
    ),
    (
        2,
        "Invalid command line: an unknown or missing option or argument, or text where a number is "
        "expected",
    ),
    (130, "`doctor`, `fit` or `study run` was interrupted"),
)
CODES_OF_FIT = (
    (Outcome.GPU_OOM, "not even a batch of 1 fits in GPU memory"),
    (Outcome.HOST_OOM, "not even a batch of 1 fits in host memory"),
    (Outcome.CRASHED, "no result because of a memory leak"),
)
CODES_OF_TRIAL = (
    (3, "`study.json` is damaged"),
    (
        5,
        "The same for a size, time or interval that cannot be used, a limit above what the machine "
        "has, and a run folder that cannot be written. `fit`: a probe stalled",
    ),
    (125, "`watch`: the process cannot be monitored. `doctor`: the self-test could not be run"),
)

_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end generated -->)", re.DOTALL)


def metrics_of(scope: Scope) -> str:
    """A row for every column of `<scope>.arrows`."""
    return table(
        METRIC_HEAD, (_metric_row(metric, _readers(metric.key)) for metric in of_scope(scope))
    )


def derived_metrics() -> str:
    """A row for every metric that no sensor reads."""

    def source(metric: Metric) -> str:
        return "import hook" if metric.key.startswith("gpu_") else "none: computed"

    return table(METRIC_HEAD, (_metric_row(metric, source(metric)) for metric in DERIVED))


def sensors() -> str:
    """A row for every sensor, those that read most often first."""
    found = sorted(sensor_classes(), key=lambda sensor: (sensor.period, sensor.name))
    return table(
        ("sensor", "read", "CPU limit", "what it reads"),
        (
            (
                sensor.name,
                f"every {sensor.period:g} s" if sensor.period else "with every sample",
                f"{sensor.share * 100:g}% of one core",
                first_sentence(sensor.__doc__),
            )
            for sensor in found
        ),
    )


def commands() -> str:
    """Every command with its arguments and options."""
    group: Any = typer.main.get_command(app)
    return "\n\n".join(_command(name, command) for name, command in _leaves(group))


def _leaves(group: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """All commands, those of groups by their whole name: `study run`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _leaves(command, f"{above}{name} ")
        else:
            yield f"{above}{name}", command


def exit_codes() -> str:
    """The codes that are not the command's own."""
    kinds = [error for error in _all_below(StepscopeError) if "exit_code" in vars(error)]
    kinds.remove(StepscopeError)
    meanings: dict[int, list[str]] = {}
    for code, meaning in (
        *PLAIN_CODES,
        *((error.exit_code, first_sentence(error.__doc__)) for error in kinds),
        *CODES_OF_TRIAL,
        *((code, f"`trial`: `{outcome.value}`") for outcome, code in EXIT_CODES.items()),
        *((EXIT_CODES[outcome], f"`fit`: {words}") for outcome, words in CODES_OF_FIT),
    ):
        meanings.setdefault(code, []).append(meaning)
    return table(
        ("code", "meaning"),
        ((str(code), ". ".join(texts)) for code, texts in sorted(meanings.items())),
    )


def settings() -> str:
    """A row for every setting of a workload."""
    return table(
        ("setting", "values", "default", "meaning"),
        (
            (f"`{name}`", _values(name, setting), _default(setting_default(name)), setting.help)
            for name, setting in SETTINGS.items()
        ),
    )


_HEALTHY = {"healthy": "Healthy. "}


def causes() -> str:
    """A row for every cause that can be named."""
    return table(
        ("cause", "shown as", "meaning"),
        (
            (f"`{key}`", words.title, f"{_HEALTHY.get(CAUSES[key].kind, '')}{words.meaning}")
            for key, words in CAUSE_TEXTS.items()
        ),
    )


def thresholds() -> str:
    """A row for every number that decides."""
    return table(
        ("threshold", "value", "why"),
        (
            (f"`{each.key}`", quantity_text(each.value, each.unit), each.reason)
            for each in THRESHOLDS.values()
        ),
    )


def proofs() -> str:
    """What the scripts with planted causes gave, from the results of benchmarks/explain.py."""
    rows = []
    results = (DOCS.parent / "benchmarks" / "results").glob("*_explain_[cg]pu_*.json")
    newest = {path.name.split("_")[2]: path for path in sorted(results)}  # names begin with dates
    for path in newest.values():
        figures = json.loads(path.read_text())["figures"]
        for case in figures["cases"]:
            bound, measured = case["predicted"], case["measured"]
            rows.append(
                (
                    f"`{case['script']}`",
                    f"`{case['planted']}`",
                    ", ".join(f"`{name}`" for name in dict.fromkeys(case["named"])),
                    f"{bound:.2f}×" if bound and measured else "",
                    f"{measured:.2f}×" if measured else "",
                    f"{measured / bound - 1:+.0%}".replace("%", "%") if bound and measured else "",
                )
            )
    head = ("script", "planted cause", "first finding", "speed-up bound", "measured", "difference")
    return table(head, rows)


def messages() -> str:
    """Every message template with its file and line, by file."""
    parts = []
    for file, found in itertools.groupby(collect(), key=lambda message: message.file):
        lines = "\n".join(f"{message.line:>4}  {message.text}" for message in found)
        parts.append(f"## {file}\n\n```text\n{lines}\n```")
    return "\n\n".join(parts)


def plain_keys(keys: Iterable[tuple[str, str]]) -> str:
    """A row for every key of a JSON object."""
    return table(("key", "content"), ((f"`{key}`", meaning) for key, meaning in keys))


def json_objects(objects: dict[str, Rows]) -> str:
    """A table for the outermost object, and one for each object inside of it."""
    return "\n\n".join(
        (
            f"Each object in `{name}`:\n\n"
            if name.endswith("[]")
            else f"`{name}`:\n\n"
            if name
            else ""
        )
        + plain_keys(rows.items())
        for name, rows in objects.items()
    )


def summary_keys() -> str:
    figures = record_keys(GpuFigures)
    expand = {"to_json(view.gpu_use.overall)": figures, "to_json(row.figures)": figures}
    computed = (Gpu, GpuRow, EpochRow, Summary, ExitStatus)
    return json_objects(
        {
            "": literal_keys(summary_dict, computed, expand),
            "epochs[]": record_keys(EpochRow),
            "statistics[]": record_keys(Statistic, more={"unit": "unit of the metric"}),
        }
    )


def fit_keys() -> str:
    def keys(record: type, **more: str) -> Rows:
        return record_keys(record, dict.fromkeys(fit_json.OMITTED.get(record, ()), ""), more)

    fit = fit_records
    return json_objects(
        {
            "": {
                **dict([FORMAT_KEY]),
                "batch_size": "Batch size to use: `recommended_batch`, or else `max_batch`",
                **keys(fit.FitResult, environment="`gpu`: the GPU that probes ran on"),
            },
            "budget": keys(fit.MemoryBudget),
            "budget.other_processes[]": keys(fit.OtherProcess),
            "subject": keys(Subject),
            "cost": keys(fit.SearchCost),
            "max_batch` and `recommended_batch": keys(
                fit.Batch,
                batch_above="the next larger batch size that failed; null if none did",
                shortfall_bytes="lower bound of the bytes missing there; null if unknown",
                failure_above="how that batch size failed, as text",
            ),
            "curve[]": keys(fit.ProbedBatch),
            "memory_breakdown": keys(
                fit.MemoryBreakdown, recommendation="what to change to fit a larger batch"
            ),
            "memory_breakdown.parts": keys(Parts),
            "minimum_memory` and `retry_free_memory": keys(MemoryLine),
            "predictions[]": keys(fit.GpuPrediction),
            "what_ifs[]": keys(
                fit.WhatIf, change="the change, as text", reason="what the estimate is based on"
            ),
            "loader": keys(fit.LoaderMemory),
            "linear2019": keys(fit.Linear2019, note="what the estimate leaves out"),
            "verification[]": keys(ProbeResult),
            "environment.gpu": keys(fit.ChosenGpu),
        }
    )


def profile_keys() -> str:
    rank = {"rank": "Rank of the process", **record_keys(profile_records.RankProfile)}
    return json_objects(
        {
            "": record_keys(profile_records.Profile),
            "ranks[]": rank,
            "ranks[].operators[]": record_keys(profile_records.ProfiledOperator),
            "ranks[].kernels[]": record_keys(profile_records.ProfiledKernel),
            "ranks[].copies[]": {
                "direction": "Direction, such as `to_device`",
                **record_keys(profile_records.ProfiledCopies),
            },
            "ranks[].sums": record_keys(profile_records.ProfiledSums),
            "ranks[].memory.<device>": record_keys(profile_records.PeakMemory),
            "ranks[].trace": record_keys(profile_records.TraceFile),
        }
    )


def study_keys() -> str:
    records, renamed = study_records, study_json
    level_mean = {"mean": "samples_per_second", **renamed.INTERVAL}
    configuration = record_keys(records.Configuration, {"name": "key", **renamed.INTERVAL})
    expand = {
        "_configuration_dict(each.configuration)": configuration,
        "_renamed(pair, **SIGNIFICANT)": record_keys(records.Interaction, renamed.SIGNIFICANT),
    }
    effect = record_keys(records.MainEffect, renamed.SIGNIFICANT)
    return json_objects(
        {
            "": literal_keys(study_json.study_dict, expand=expand),
            "effects[]": literal_keys(study_json.effects_dict, (records.Effects,), expand),
            "effects[].main[]` and `sensitivity[].effects[]": effect,
            "size` and `gain": record_keys(records.Estimate),
            "noise": record_keys(records.Noise),
            "effects[].main[].levels[]": record_keys(records.LevelMean),
            "effects[].interactions[].cells[]": record_keys(records.CellMean),
            "curves[]": literal_keys(study_json.curve_dict),
            "curves[].points[]": record_keys(
                records.LevelMean, level_mean, {"samples_per_second": "mean throughput"}
            ),
            "curves[].knee": record_keys(records.Knee, renamed.KNEE),
            "configurations[]": record_keys(ConfigurationRow, renamed.CONFIGURATION),
            "blocks[]": record_keys(BlockLine, renamed.BLOCK),
        }
    )


def plan_keys() -> str:
    renamed = {"fixed": "", "remarks": "notes"}
    skipped = record_keys(SkippedGroup)
    rows = {**dict([FORMAT_KEY]), **record_keys(PlanView, renamed)}
    return json_objects({"": rows, "skipped[]": skipped})


def doctor_keys() -> str:
    share = {"core_share": "share of one core, 0 to 1"}
    return json_objects(
        {
            "": literal_keys(doctor_command.doctor, (DoctorReport,)),
            "sensors[]": record_keys(SensorState, more=share),
            "self_test[]": record_keys(CheckResult),
            "machine[]": record_keys(MachineRemark),
        }
    )


def top_keys() -> str:
    throughput = {"to_json(frame.throughput)": record_keys(LiveThroughput)}
    rows = literal_keys(frame_dict, (ExitStatus,), throughput)
    return json_objects({"": rows, "epoch": record_keys(EpochNow)})


PARTS: dict[str, Callable[[], str]] = {
    "metrics-process": lambda: metrics_of("process"),
    "metrics-host": lambda: metrics_of("host"),
    "metrics-gpu": lambda: metrics_of("gpu"),
    "metrics-derived": derived_metrics,
    "sensors": sensors,
    "commands": commands,
    "exit-codes": exit_codes,
    "settings": settings,
    "summary-keys": summary_keys,
    "trial-keys": lambda: plain_keys(
        [FORMAT_KEY, *((key, meaning) for key, _, meaning in trial_json.KEYS)]
    ),
    "profile-keys": profile_keys,
    "fit-keys": fit_keys,
    "study-keys": study_keys,
    "plan-keys": plan_keys,
    "doctor-keys": doctor_keys,
    "top-keys": top_keys,
    "causes": causes,
    "thresholds": thresholds,
    "proofs": proofs,
    "messages": messages,
    "explained-keys": lambda: plain_keys(bottleneck_json.KEYS),
    "finding-keys": lambda: plain_keys(
        (key, meaning) for key, _, meaning in bottleneck_json.FINDING_KEYS
    ),
}


def sensor_classes() -> list[type[Sensor]]:
    """The sensors there are: those with a name (the others are their base classes)."""
    for module in iter_modules(stepscope.sensors.__path__, "stepscope.sensors."):
        import_module(module.name)
    import_module("stepscope.capture.sampler")
    return [sensor for sensor in _all_below(Sensor) if hasattr(sensor, "name")]


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def first_sentence(text: str | None) -> str:
    """The first sentence of the first paragraph of a docstring, without its period."""
    paragraph = " ".join(cleandoc(text or "").partition("\n\n")[0].split())
    return re.split(r"\.\s", paragraph)[0].rstrip(".")


def rewritten(text: str) -> str:
    """A page with every generated part rewritten."""
    return _PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", text)


def _all_below(base: type[Any]) -> Iterator[type[Any]]:
    if base is not Sensor:
        yield base
    for child in base.__subclasses__():
        yield from _all_below(child)


def _metric_row(metric: Metric, source: str) -> tuple[str, ...]:
    return (
        f"`{metric.key}`",
        metric.label,
        metric.unit,
        metric.kind,
        source,
        metric.description,
    )


def _readers(key: str) -> str:
    names = [sensor.name for sensor in sensor_classes() if key in sensor.metrics]
    return ", ".join(dict.fromkeys(names))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _command(name: str, command: Any) -> str:
    parameters = [p for p in command.params if "--help" not in p.opts and not p.hidden]
    arguments = [p for p in parameters if p.param_type_name == "argument"]
    options = [p for p in parameters if p.param_type_name == "option"]
    usage = " ".join(["stepscope", name, "[OPTIONS]", *(_argument_name(a) for a in arguments)])
    parts = [f"## `stepscope {name}`", f"```text\n{usage}\n```", cleandoc(command.help or "")]
    if arguments:
        rows = ((f"`{_argument_name(a)}`", a.help) for a in arguments)
        parts.append(table(("argument", "meaning"), rows))
    parts.append(
        table(("option", "meaning"), ((_option_name(o), _option_help(o)) for o in options))
    )
    return "\n\n".join(parts)


def _argument_name(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return str(name) if argument.required else f"[{name}]"


def _option_name(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar or option.name.upper()}"
    return ", ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts))


def _option_help(option: Any) -> str:
    notes = []
    if option.is_flag and option.default:
        notes.append(f"default: `{option.opts[0]}`")
    elif not option.is_flag and _default(option.default):
        notes.append(f"default: {_default(option.default)}")
    if option.envvar:
        notes.append(f"environment variable: `{option.envvar}`")
    text, note = str(option.help), "; ".join(notes)
    if not notes:
        return text
    if not text.endswith(")"):
        return f"{text} ({note})"
    return f"{text[:-1]}; {note})" if text.count("(") == 1 else f"{text}; {note}"


def _values(name: str, setting: Setting) -> str:
    """The valid values of a setting, in words."""
    if setting.choices:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    kind = setting_type(name)
    plain = next((k for k in typing.get_args(kind) if k is not types.NoneType), kind)
    words = {bool: "yes or no", int: "whole number", float: "number", str: "text"}
    bounds = ((" from", setting.least), (" greater than", setting.above), (", up to", setting.most))
    return words[plain] + "".join(f"{how} {at:g}" for how, at in bounds if at is not None)


def _default(value: Any) -> str:
    """Nothing where it is left open."""
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def main(arguments: list[str]) -> int:
    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = rewritten(text)
        if new != text:
            stale.append(page.name)
            if "--check" not in arguments:
                page.write_text(new, encoding="utf-8")
    if stale and "--check" in arguments:
        sys.stderr.write(f"stale: {', '.join(stale)}; run: python docs/generate.py\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
