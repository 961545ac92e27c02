"""The summary as JSON, for `--json` and `derived/summary.json`. A missing value is null."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.metrics import BY_KEY
from stepscope.records.codec import to_json
from stepscope.report.bottleneck.json import diagnosis_dict
from stepscope.report.run.headline import (
    data_wait_share,
    of_tree,
    samples_per_joule,
    samples_per_second,
)

if TYPE_CHECKING:
    from stepscope.report.run.view import RunView

FORMAT = 1


def summary_dict(view: RunView) -> dict[str, Any]:
    """Return the summary of a run. The unit of a value is in its key."""
    summary, exit_status = view.summary, view.exit_status
    cpu, memory = of_tree(summary, "cpu"), of_tree(summary, "memory")
    gpus = [
        {
            "label": row.gpu.label,
            "uuid": row.gpu.uuid,
            "name": row.gpu.model,  # model name
            "used": row.used,
            "memory_bytes": row.gpu.memory_bytes,
            "power_limit_watts": row.gpu.power_limit_watts,
            **to_json(row.figures),
            "power_watts": row.power_watts,
            "throttled_power": row.throttled_power,
            "throttled_thermal": row.throttled_thermal,
            "ecc_uncorrected": row.ecc_uncorrected,
        }
        for row in view.gpu_use.each
    ]
    plain: dict[str, Any] = to_json(
        {
            "format": FORMAT,  # schema version
            "name": view.name,  # name of the run
            "command": view.command,  # the monitored command
            "started": view.started,  # start time, ISO 8601
            "outcome": exit_status.outcome,
            "reason": exit_status.reason,
            "exit_code": exit_status.exit_code,
            "signal": exit_status.signal,
            "evidence": exit_status.evidence,
            # the diagnosis, with the keys of `explain --json`; null if there is none
            "diagnosis": diagnosis_dict(view.finding) if view.finding else None,
            "seconds": summary.seconds,
            "steps": summary.steps,
            "samples": summary.samples,
            "samples_per_second": samples_per_second(summary.epochs),
            "data_wait_share": data_wait_share(summary.epochs),
            "cpu_allowed": summary.cpu_allowed,
            "cores": cpu.mean if cpu else None,
            "core_seconds": summary.core_seconds,
            "memory_peak_bytes": memory.max if memory else None,
            **to_json(view.gpu_use.overall),
            "samples_per_joule": samples_per_joule(summary.epochs),
            "gpus": gpus,  # one object per GPU
            "totals": summary.totals,
            "epoch_source": summary.epoch_source,
            "epochs": summary.epochs,
            # evaluations and phases, each with name, count and total seconds
            "phases": [{"name": n, "count": c, "seconds": s} for n, c, s in summary.phases],
            "roles": summary.roles,
            "statistics": [
                {**to_json(each), "unit": BY_KEY[each.metric].unit} for each in summary.statistics
            ],
            "missing": view.missing,  # metrics without values, each with the reason
            "notes": view.notes,  # remarks about the run
            "monitor": summary.monitor,
        }
    )
    return plain
