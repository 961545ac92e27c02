"""Measure the structure of the source: size, folders, helpers, duplicates, parsers, sample reads.

    python benchmarks/structure.py                      this checkout
    python benchmarks/structure.py --before OLD/src     this checkout compared with another one

The figures describe the code; they do not replace reading it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from results_file import write

ROOT = Path(__file__).resolve().parents[1]
FLAT_FOLDER = 15
PROC_FILES = {
    "/proc/PID/stat": r"rpartition\(b?[\"']\) |rindex\(b?[\"']\)|rfind\(b?[\"']\)",
    "/proc/meminfo": r"[\"'/]meminfo[\"']",
    "/proc/PID/status": r"[\"'/]status[\"']",
    "/proc/PID/environ": r"[\"'/]environ[\"']",
}
COUNTED_TRIAL = """
import sys
from stepscope.runs import segments
read, folder = segments.read_segment, sys.argv[1]
def counting(path, *arguments, **options):
    with open(folder + "/readings", "a") as log:
        print(path.name, file=log)
    return read(path, *arguments, **options)
segments.read_segment = counting
from stepscope.cli.app import main
sys.argv = ["stepscope", "trial", "cnn", "--steps", "30", "--batch-size", "8", "--out", folder]
main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="the src folder of another checkout")
    arguments = parser.parse_args()
    columns = {"now": measure(ROOT / "src")}
    if arguments.before:
        columns = {"before": measure(arguments.before), **columns}
    print(json.dumps(columns, indent=2))
    print(f"written: {write('structure', columns)}", file=sys.stderr)


def measure(source: Path) -> dict[str, Any]:
    """Return the figures of a source folder."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(source.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    functions = [node for tree in trees.values() for node in _functions(tree)]
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]
    folders = Counter(path.parent for path in texts)
    classes = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(path)
    helpers = [uses for tree in trees.values() for uses in _helper_uses(tree)]
    source_text = "\n".join(texts.values())
    return {
        "lines": sum(text.count("\n") for text in texts.values()),
        "files": len(texts),
        "lines_per_file": {"median": median(t.count("\n") for t in texts.values())},
        "most_files_in_a_folder": max(folders.values()),
        "folders_over_15_files": sum(count > FLAT_FOLDER for count in folders.values()),
        "function_lines": {"median": median(lengths), "p90": round(quantiles(lengths, n=10)[-1])},
        "private_helpers": len(helpers),
        "used_once_percent": round(100 * sum(uses <= 1 for uses in helpers) / len(helpers)),
        "class_names_twice": sorted(n for n, paths in classes.items() if len(paths) > 1),
        "modules_that_parse": {
            name: sum(bool(re.search(pattern, text)) for text in texts.values())
            for name, pattern in PROC_FILES.items()
        },
        "dict_str_any": source_text.count("dict[str, Any]"),
        "fmt_skip": len(re.findall(r"# fmt: (?:skip|off)", source_text)),
        "branches_on_texts": sorted(
            f"{path.relative_to(source)}:{line}"
            for path, tree in trees.items()
            for line in _branches_on_texts(tree)
        ),
        "readings_of_samples_per_trial": _readings(source),
    }


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _helper_uses(tree: ast.AST) -> Iterator[int]:
    """Yield the number of references to each private function in its module."""
    uses: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            uses[node.id] += 1
        elif isinstance(node, ast.Attribute):
            uses[node.attr] += 1
    for function in _functions(tree):
        if function.name.startswith("_") and not function.name.startswith("__"):
            yield uses[function.name]


def _branches_on_texts(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that compare with, or search for, a text of two words or more."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            texts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            (".startswith", ".endswith")
        ):
            texts = node.args
        else:
            continue
        constants = [each.value for each in texts if isinstance(each, ast.Constant)]
        if any(re.search(r"[A-Za-z]{2,} [a-z]{2,}", str(each)) for each in constants):
            yield node.lineno


def _readings(source: Path) -> int:
    """Return how often `trial` reads the same sample file before it prints the result."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-c", COUNTED_TRIAL, folder],
            env={**os.environ, "PYTHONPATH": str(source)},
            capture_output=True,
            check=True,
        )
        return max(Counter((Path(folder) / "readings").read_text().split()).values())


if __name__ == "__main__":
    main()
