"""The summary for programs: `--json` and `derived/summary.json`. Missing is null."""

from __future__ import annotations

import dataclasses
from typing import Any

from stepscope.analysis.gpus import GpuRow
from stepscope.metrics import BY_KEY
from stepscope.records import Statistic
from stepscope.report.explainjson import plain, verdict_dict
from stepscope.report.headline import (
    data_wait_share,
    mean_cores,
    peak_memory,
    samples_per_joule,
    samples_per_second,
)
from stepscope.report.view import View

FORMAT = 1


def summary_dict(view: View) -> dict[str, Any]:
    """A run as plain values, each in the unit its key names, else as it is stored."""
    summary = view.summary
    ending = view.ending
    told = {
        "format": FORMAT,
        "name": view.name,
        "command": view.command,
        "started": view.started,
        "outcome": ending.outcome.value,
        "reason": ending.reason,
        "exit_code": ending.exit_code,
        "signal": ending.signal,
        "evidence": ending.evidence,
        "explained": verdict_dict(view.finding.verdict) if view.finding else None,
        "seconds": summary.seconds,
        "steps": summary.steps,
        "samples": summary.samples,
        "samples_per_second": samples_per_second(summary.epochs),
        "data_wait_share": data_wait_share(summary.epochs),
        "cpu_allowed": summary.cpu_allowed,
        "cores": mean_cores(summary),
        "core_seconds": summary.core_seconds,
        "memory_peak_bytes": peak_memory(summary),
        **dataclasses.asdict(view.gpu_use.together),
        "samples_per_joule": samples_per_joule(summary.epochs),
        "gpus": [_gpu(row) for row in view.gpu_use.each],
        "totals": summary.totals,
        "epoch_source": summary.epoch_source,
        "epochs": [dataclasses.asdict(row) for row in summary.epochs],
        "phases": [{"name": n, "count": c, "seconds": s} for n, c, s in summary.phases],
        "roles": list(summary.roles),
        "statistics": [_statistic(each) for each in summary.statistics],
        "missing": dict(view.missing),
        "notes": list(view.notes),
        "watcher": summary.watcher,
    }
    return {key: plain(value) for key, value in told.items()}


def _gpu(row: GpuRow) -> dict[str, Any]:
    return {
        "label": row.gpu.label,
        "uuid": row.gpu.uuid,
        "name": row.gpu.name,
        "used": row.used,
        "memory_bytes": row.gpu.memory_bytes,
        "power_limit_watts": row.gpu.power_limit_watts,
        **dataclasses.asdict(row.figures),
        "power_watts": row.power_watts,
        "slowed_power": row.slowed_power,
        "slowed_heat": row.slowed_heat,
        "ecc_uncorrected": row.ecc_uncorrected,
    }


def _statistic(found: Statistic) -> dict[str, Any]:
    return {**dataclasses.asdict(found), "unit": BY_KEY[found.metric].unit}
