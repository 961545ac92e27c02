"""Check the causes and speed-up bounds of `stepscope explain` on scripts with planted bottlenecks.

    python benchmarks/explain.py [--device cpu|gpu] [--only NAME,…] [--pairs 1] [--record]
                                 [--recorded]

Runs every script of tests/data/bottlenecks/ for a device under `stepscope run`, with its planted
bottleneck and then without it, and explains both runs. Prints the confusion matrix and, for each
script, the predicted and the measured speed-up. `--record` stores the runs for the tests;
`--recorded` explains the stored runs instead of running the scripts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import results_file  # noqa: E402
from planted import RECORDED, Planted, keep, planted_scripts, speed_of, unpack  # noqa: E402

GOALS = {"cpu": 0.25, "gpu": 0.15}
"""Largest relative difference between the measured and the predicted speed-up."""


@dataclass
class Case:
    """The results of one script."""

    script: str
    planted: str
    named: list[str] = field(default_factory=list)
    """The cause of the first finding, for each pair of runs."""
    named_when_fixed: list[str] = field(default_factory=list)
    confidence: list[str] = field(default_factory=list)
    confidently_wrong: list[str] = field(default_factory=list)
    """Causes of first findings with high confidence that were not planted."""
    speedup_bounds: list[float | None] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    speeds_fixed: list[float] = field(default_factory=list)

    @property
    def is_correct(self) -> bool:
        return all(matches(self.planted, name) for name in self.named)

    @property
    def predicted(self) -> float | None:
        known = [bound for bound in self.speedup_bounds if bound is not None]
        return median(known) if known else None

    @property
    def measured(self) -> float | None:
        if not self.speeds or not self.speeds_fixed:
            return None
        return median(self.speeds_fixed) / median(self.speeds)


def matches(planted: str, named: str) -> bool:
    """Whether the named cause is the planted one; a healthy run has any of the healthy causes."""
    healthy = ("cpu.compute", "gpu.compute", "gpu.bandwidth")
    return named == planted or (planted == "healthy" and named in healthy)


def monitor(script: Planted, runs: Path, fixed: bool, seconds: float | None) -> tuple[Path, float]:
    """Run a script under `stepscope run`; return the run folder and the speed that it printed."""
    out = runs / f"{script.name}{'-fixed' if fixed else ''}"
    command = script.command(fixed=fixed, seconds=seconds)
    with script.interference(fixed, seconds or 30):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "stepscope",
                "run",
                "--quiet",
                "--out",
                str(out),
                "--name",
                script.name,
                "--",
                *command,
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
    speed = speed_of(done.stdout)
    if done.returncode or (speed is None and script.cause != "too_short"):
        raise RuntimeError(f"{script.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return max(out.iterdir(), key=lambda folder: folder.stat().st_mtime), speed or 0.0


def explain(run: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", "explain", str(run), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    diagnosis: dict[str, Any] = json.loads(done.stdout)
    return diagnosis


class Runs:
    """Runs of a script with and without its bottleneck, new or recorded."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._folder = folder
        self._seconds: float | None = args.seconds
        self._archives = Path(args.record or RECORDED)
        self._record = args.record is not None
        self._recorded: bool = args.recorded

    def of(self, script: Planted, fixed: bool) -> tuple[Path, float]:
        name = f"{script.name}-fixed" if fixed else script.name
        archive, speeds = self._archives / f"{name}.tar.xz", self._archives / "speeds.json"
        known: dict[str, float] = json.loads(speeds.read_text()) if speeds.exists() else {}
        if self._recorded:
            return unpack(archive, self._folder), known[name]
        run, speed = monitor(script, self._folder, fixed, self._seconds)
        if self._record:
            keep(run, archive)
            updated = dict(sorted({**known, name: speed}.items()))
            speeds.write_text(json.dumps(updated, indent=1) + "\n")
        return run, speed


def check_script(script: Planted, runs: Runs, pairs: int) -> Case:
    case = Case(script.name, script.cause)
    for _ in range(pairs):
        run, speed = runs.of(script, fixed=False)
        diagnosis = explain(run)
        case.named.append(diagnosis["cause"])
        case.confidence.append(diagnosis["confidence"])
        case.speedup_bounds.append(diagnosis["speedup_bound"])
        if diagnosis["confidence"] == "high" and not matches(script.cause, diagnosis["cause"]):
            case.confidently_wrong.append(diagnosis["cause"])
        case.speeds.append(speed)
        if script.cause not in ("too_short", "healthy", "gpu.compute", "gpu.bandwidth"):
            run, speed = runs.of(script, fixed=True)
            case.named_when_fixed.append(explain(run)["cause"])
            case.speeds_fixed.append(speed)
    return case


def show(case: Case, goal: float) -> str:
    verdict = "ok   " if case.is_correct else "WRONG"
    named = ", ".join(dict.fromkeys(case.named))
    text = f"{verdict} {case.script:22} {case.planted:22} → {named:22}"
    if case.measured is None:
        return text
    text += f" measured {case.measured:5.2f}×"
    if case.predicted is not None:
        off = case.measured / case.predicted - 1
        text += (
            f" predicted {case.predicted:5.2f}× ({off:+.0%}{'' if abs(off) <= goal else ' OFF'})"
        )
    return text + f" fixed: {', '.join(dict.fromkeys(case.named_when_fixed))}"


def matrix(cases: list[Case]) -> str:
    """Return the confusion matrix: planted causes in rows, named causes in columns."""
    counts = Counter((case.planted, name) for case in cases for name in case.named)
    names = sorted({name for _, name in counts})
    width = max(len(cause) for cause, _ in counts)
    lines = [f"{'':{width}}  " + " ".join(str(i).rjust(2) for i in range(1, len(names) + 1))]
    for planted in sorted({cause for cause, _ in counts}):
        row = (counts.get((planted, name), 0) for name in names)
        cells = " ".join((str(n) if n else "·").rjust(2) for n in row)
        lines.append(f"{planted:{width}}  {cells}")
    lines += [f"{i:4} = {name}" for i, name in enumerate(names, 1)]
    return "\n".join(lines)


def recorded_on(scripts: list[Planted], folder: Path) -> dict[str, Any]:
    """Return the machine that the recorded runs come from, and its framework versions."""
    with tempfile.TemporaryDirectory() as target:
        run = unpack(folder / f"{scripts[-1].name}.tar.xz", Path(target))
        facts = json.loads((run / "run.json").read_text())
    frameworks = (facts.get("hook") or {}).get("frameworks")
    return {**facts["environment"], "frameworks": frameworks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--only", default="", help="comma-separated names of scripts")
    parser.add_argument("--pairs", type=int, default=1, help="pairs of runs per script")
    parser.add_argument("--seconds", type=float, default=None, help="training time per run")
    parser.add_argument(
        "--record", nargs="?", const=str(RECORDED), help="store the runs for the tests"
    )
    parser.add_argument("--recorded", action="store_true", help="explain the stored runs")
    parser.add_argument("--out", type=Path, help="folder of the result (default: results/)")
    args = parser.parse_args()
    only = [name for name in args.only.split(",") if name]
    scripts = [s for s in planted_scripts(args.device) if not only or s.name in only]
    if not scripts:
        parser.error(f"unknown {args.device} script {args.only}")
    goal = GOALS[args.device]
    cases = []
    with tempfile.TemporaryDirectory() as runs:
        for script in scripts:
            try:
                cases.append(check_script(script, Runs(Path(runs), args), args.pairs))
            except (RuntimeError, OSError, KeyError, subprocess.SubprocessError) as error:
                print(f"FAILED {script.name}: {error}", flush=True)
                cases.append(Case(script.name, script.cause, named=["failed"]))
                continue
            print(show(cases[-1], goal), flush=True)
    print("\n" + matrix(cases))
    correct = sum(case.is_correct for case in cases)
    confidently_wrong = sum(bool(case.confidently_wrong) for case in cases)
    predicted = [case for case in cases if case.predicted and case.measured]
    within = [c for c in predicted if abs((c.measured or 0) / (c.predicted or 1) - 1) <= goal]
    print(
        f"\ncorrect: {correct} of {len(cases)}; wrong with high confidence: {confidently_wrong}; "
        f"speed-up bounds within {goal:.0%}: {len(within)} of {len(predicted)}"
    )
    figures = {
        "correct": correct,
        "scripts": len(cases),
        "confidently_wrong": confidently_wrong,
        "bounds_within_goal": len(within),
        "bounds": len(predicted),
        "goal": goal,
        "cases": [
            {**asdict(case), "predicted": case.predicted, "measured": case.measured}
            for case in cases
        ],
    }
    if only and args.out is None:
        raise SystemExit(0 if correct == len(cases) else 1)  # incomplete, so not stored
    machine = recorded_on(scripts, Path(args.record or RECORDED)) if args.recorded else None
    figures["recorded_with"] = machine["frameworks"] if machine else None
    print(
        results_file.write(
            f"explain_{args.device}", figures, args.out or results_file.RESULTS, machine
        )
    )


if __name__ == "__main__":
    main()
