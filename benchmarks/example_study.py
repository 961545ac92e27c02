"""Runs an example study and stores its results: which factors matter, and where the knees are.

    python benchmarks/example_study.py [two_cores|one_gpu] [--out DIR] [--read-only]

The figures of studies in the docs come from here. A study in DIR is resumed; with `--read-only` it
is only read, and DIR may come from another machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import results_file
from stepscope import open_study
from stepscope.report.study.export import study_dict
from stepscope.report.study.messages import curve_text, curve_title, sensitivity_text
from stepscope.report.study.view import StudyView

EXAMPLES = Path(__file__).parents[1] / "examples" / "study"
KEPT = (
    "trials",
    "elapsed_seconds",
    "best",
    "sensitivity",
    "curves",
    "fronts",
    "configurations",
    "blocks",
    "notes",
)


def main() -> None:
    options = _options()
    design = EXAMPLES / f"{options.example}.yaml"
    if not options.read_only:
        command = ["study", "run", str(design), "--out", str(options.out)]
        subprocess.run([sys.executable, "-m", "stepscope", *command], check=True)
    view = open_study(options.out / options.example.replace("_", "-"))
    for ranking in view.rankings:
        print(sensitivity_text(ranking))
    for curve in view.analysis.curves:
        print(f"{curve_title(curve)}: {curve_text(curve)}")
    results = study_dict(view)
    kept = {key: results[key] for key in KEPT if key in results}
    figures = {"design": design.read_text(), **kept}
    path = results_file.write(f"study_{options.example}", figures, measured_on=_machine(view))
    print(f"written: {path}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("example", nargs="?", default="two_cores", choices=("two_cores", "one_gpu"))
    parser.add_argument("--out", type=Path, default=Path("studies"))
    parser.add_argument("--read-only", action="store_true", help="read the study without running")
    return parser.parse_args()


def _machine(view: StudyView) -> dict[str, Any]:
    """Return the environment of a trial, which names the machine."""
    folder = view.folder
    for facts in sorted(folder.glob("*/r*/run.json")):
        return dict(json.loads(facts.read_text())["environment"])
    raise SystemExit(f"{folder} has no trial")


if __name__ == "__main__":
    main()
