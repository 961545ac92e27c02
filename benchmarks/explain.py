"""Whether `stepscope explain` names what is planted, and whether its ceilings are true.

    python benchmarks/explain.py [--device cpu|gpu] [--only NAME,…] [--pairs 1] [--record] [--again]

Runs every script of tests/data/bottlenecks/ of a device under `stepscope run`, with its planted
cause and then without it, explains both, and prints the confusion matrix and, for each cause, the
speed-up that was predicted beside the one that was measured. `--record` keeps the runs for the
tests; `--again` explains kept runs once more instead of running anything.
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
"""How far a measured speed-up may be from the predicted one."""


@dataclass
class Case:
    """What became of one script."""

    script: str
    planted: str
    named: list[str] = field(default_factory=list)
    """The first cause, pair by pair."""
    named_when_fixed: list[str] = field(default_factory=list)
    confidence: list[str] = field(default_factory=list)
    wrong_and_sure: list[str] = field(default_factory=list)
    """Causes named first with high confidence that were not planted."""
    ceilings: list[float | None] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    speeds_fixed: list[float] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return all(matches(self.planted, name) for name in self.named)

    @property
    def predicted(self) -> float | None:
        known = [ceiling for ceiling in self.ceilings if ceiling is not None]
        return median(known) if known else None

    @property
    def measured(self) -> float | None:
        if not self.speeds or not self.speeds_fixed:
            return None
        return median(self.speeds_fixed) / median(self.speeds)


def matches(planted: str, named: str) -> bool:
    """A healthy run may be bound by whatever it should be bound by."""
    healthy = ("cpu.compute", "gpu.compute", "gpu.bandwidth")
    return named == planted or (planted == "healthy" and named in healthy)


def watch(script: Planted, runs: Path, fixed: bool, seconds: float | None) -> tuple[Path, float]:
    """Run a script under `stepscope run`: the run folder, and the speed that it printed."""
    out = runs / f"{script.name}{'-fixed' if fixed else ''}"
    command = script.command(fixed=fixed, seconds=seconds)
    with script.disturbed(fixed, seconds or 30):
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
    if done.returncode or (speed is None and script.cause != "short"):
        raise RuntimeError(f"{script.name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return max(out.iterdir(), key=lambda folder: folder.stat().st_mtime), speed or 0.0


def explain(run: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", "explain", str(run), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


class Runs:
    """Runs of a script, with its cause and without: made now, or those that were kept."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._folder = folder
        self._seconds: float | None = args.seconds
        self._kept = Path(args.record or RECORDED)
        self._record = args.record is not None
        self._again: bool = args.again

    def of(self, script: Planted, fixed: bool) -> tuple[Path, float]:
        name = f"{script.name}-fixed" if fixed else script.name
        archive, speeds = self._kept / f"{name}.tar.xz", self._kept / "speeds.json"
        known: dict[str, float] = json.loads(speeds.read_text()) if speeds.exists() else {}
        if self._again:
            return unpack(archive, self._folder), known[name]
        run, speed = watch(script, self._folder, fixed, self._seconds)
        if self._record:
            keep(run, archive)
            told = dict(sorted({**known, name: speed}.items()))
            speeds.write_text(json.dumps(told, indent=1) + "\n")
        return run, speed


def try_script(script: Planted, runs: Runs, pairs: int) -> Case:
    case = Case(script.name, script.cause)
    for _ in range(pairs):
        run, speed = runs.of(script, fixed=False)
        told = explain(run)
        case.named.append(told["cause"])
        case.confidence.append(told["confidence"])
        case.ceilings.append(told["ceiling"])
        if told["confidence"] == "high" and not matches(script.cause, told["cause"]):
            case.wrong_and_sure.append(told["cause"])
        case.speeds.append(speed)
        if script.cause not in ("short", "healthy", "gpu.compute", "gpu.bandwidth"):
            run, speed = runs.of(script, fixed=True)
            case.named_when_fixed.append(explain(run)["cause"])
            case.speeds_fixed.append(speed)
    return case


def show(case: Case, goal: float) -> str:
    sign = "ok   " if case.right else "WRONG"
    named = ", ".join(dict.fromkeys(case.named))
    text = f"{sign} {case.script:22} {case.planted:22} → {named:22}"
    if case.measured is None:
        return text
    text += f" measured {case.measured:5.2f}×"
    if case.predicted is not None:
        off = case.measured / case.predicted - 1
        text += (
            f" predicted {case.predicted:5.2f}× ({off:+.0%}{'' if abs(off) <= goal else ' OFF'})"
        )
    return text + f" then {', '.join(dict.fromkeys(case.named_when_fixed))}"


def matrix(cases: list[Case]) -> str:
    """Planted causes down, named ones across."""
    counts = Counter((case.planted, name) for case in cases for name in case.named)
    names = sorted({name for _, name in counts})
    wide = max(len(cause) for cause, _ in counts)
    lines = [f"{'':{wide}}  " + " ".join(str(i).rjust(2) for i in range(1, len(names) + 1))]
    for planted in sorted({cause for cause, _ in counts}):
        row = (counts.get((planted, name), 0) for name in names)
        lines.append(f"{planted:{wide}}  " + " ".join((str(n) if n else "·").rjust(2) for n in row))
    lines += [f"{i:4} = {name}" for i, name in enumerate(names, 1)]
    return "\n".join(lines)


def kept_on(scripts: list[Planted], folder: Path) -> dict[str, Any]:
    """The machine that kept runs come from, and the versions that trained there."""
    with tempfile.TemporaryDirectory() as place:
        run = unpack(folder / f"{scripts[-1].name}.tar.xz", Path(place))
        facts = json.loads((run / "run.json").read_text())
    frameworks = (facts.get("hook") or {}).get("frameworks")
    return {**facts["environment"], "frameworks": frameworks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--only", default="", help="names of scripts, with commas between them")
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=None, help="how long each one trains")
    parser.add_argument("--record", nargs="?", const=str(RECORDED), help="keep the runs for tests")
    parser.add_argument("--again", action="store_true", help="explain the kept runs once more")
    parser.add_argument("--out", type=Path, help="where the result goes; by default results/")
    args = parser.parse_args()
    only = [name for name in args.only.split(",") if name]
    scripts = [s for s in planted_scripts(args.device) if not only or s.name in only]
    if not scripts:
        parser.error(f"no {args.device} script is named {args.only}")
    goal = GOALS[args.device]
    cases = []
    with tempfile.TemporaryDirectory() as runs:
        for script in scripts:
            try:
                cases.append(try_script(script, Runs(Path(runs), args), args.pairs))
            except (RuntimeError, OSError, KeyError, subprocess.SubprocessError) as error:
                print(f"FAILED {script.name}: {error}", flush=True)
                cases.append(Case(script.name, script.cause, named=["failed"]))
                continue
            print(show(cases[-1], goal), flush=True)
    print("\n" + matrix(cases))
    right = sum(case.right for case in cases)
    told = [case for case in cases if case.predicted and case.measured]
    true = [c for c in told if abs((c.measured or 0) / (c.predicted or 1) - 1) <= goal]
    print(
        f"\nnamed right: {right} of {len(cases)}; wrong and sure: "
        f"{sum(bool(case.wrong_and_sure) for case in cases)}; ceilings within {goal:.0%}: "
        f"{len(true)} of {len(told)}"
    )
    figures = {
        "right": right,
        "scripts": len(cases),
        "wrong_and_sure": sum(bool(case.wrong_and_sure) for case in cases),
        "ceilings_true": len(true),
        "ceilings_told": len(told),
        "goal": goal,
        "cases": [
            {**asdict(case), "predicted": case.predicted, "measured": case.measured}
            for case in cases
        ],
    }
    if only and args.out is None:
        raise SystemExit(0 if right == len(cases) else 1)  # some scripts are no result
    kept = kept_on(scripts, Path(args.record or RECORDED)) if args.again else None
    figures["recorded_with"] = kept["frameworks"] if kept else None
    print(
        results_file.write(
            f"explain_{args.device}", figures, args.out or results_file.RESULTS, kept
        )
    )


if __name__ == "__main__":
    main()
