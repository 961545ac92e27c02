"""Runs an example study and keeps what it teaches: which factors matter, where more stops paying.

    python benchmarks/example_study.py [two_cores|one_gpu] [--out DIR] [--again]

The docs' figures of studies come from here. What was run before in DIR is not run again; with
`--again` nothing is run, and DIR may be from another machine.
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
from stepscope.report.study.sentences import curve_text, curve_title, sensitivity_text
from stepscope.report.study.view import StudyView

EXAMPLES = Path(__file__).parents[1] / "examples" / "study"
KEPT = (
    "trials",
    "spent_seconds",
    "best",
    "sensitivity",
    "curves",
    "fronts",
    "configurations",
    "blocks",
    "remarks",
)


def main() -> None:
    options = _options()
    design = EXAMPLES / f"{options.example}.yaml"
    if not options.again:
        command = ["study", "run", str(design), "--out", str(options.out)]
        subprocess.run([sys.executable, "-m", "stepscope", *command], check=True)
    view = open_study(options.out / options.example.replace("_", "-"))
    for ranking in view.rankings:
        print(sensitivity_text(ranking))
    for curve in view.analysis.curves:
        print(f"{curve_title(curve)}: {curve_text(curve)}")
    told = study_dict(view)
    figures = {"design": design.read_text(), **{key: told[key] for key in KEPT if key in told}}
    path = results_file.write(f"study_{options.example}", figures, measured_on=_machine(view))
    print(f"written: {path}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("example", nargs="?", default="two_cores", choices=("two_cores", "one_gpu"))
    parser.add_argument("--out", type=Path, default=Path("studies"))
    parser.add_argument("--again", action="store_true", help="run nothing, read what is there")
    return parser.parse_args()


def _machine(view: StudyView) -> dict[str, Any]:
    """The environment of a trial: where it was measured."""
    folder = view.folder
    for facts in sorted(folder.glob("*/r*/run.json")):
        return dict(json.loads(facts.read_text())["environment"])
    raise SystemExit(f"{folder} has no trial")


if __name__ == "__main__":
    main()
