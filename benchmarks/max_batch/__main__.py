"""Accuracy of `stepscope fit`, compared with a scan, published tables and other tools.

    export PYTHONPATH=src:benchmarks
    python -m max_batch --state state.json --seconds 570   measure until the time is over
    python -m max_batch --state state.json --list          list measurements and criteria
    python -m max_batch --state state.json --tables        write the result

The true batch sizes of a case come from a scan: fresh processes in steps of 1% around the edge,
each training 20 steps with an evaluation. Every measurement is stored immediately, so a run can be
interrupted and continued; states of several runs, and result files, can be merged: `--merge A B`.
Scans can run while another process runs `fit` (`--follow`, both with `--shared`); durations are
ignored then. Failed measurements are repeated in the next run. `--device cpu --dry` runs the same
code with a tiny model and a simulated limit, and needs a `--fit-command`.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max_batch.cases import (
    AT_ONCE_GIB,
    PREDICTED_GIB,
    SECONDS,
    TIMEOUTS,
    Case,
    all_cases,
    dry_cases,
    in_order,
)
from max_batch.criteria import Findings
from max_batch.state import State

if TYPE_CHECKING:
    from max_batch.children import Limit, Request, Subject

ROOT = Path(__file__).resolve().parents[2]
FIT = f"{sys.executable} -m stepscope fit"
START = time.monotonic()
DRY_MODEL = "cnn"
GRACE_S = 15
"""Seconds that a program may run beyond the end of the run."""
OMITTED = ("environment", "loader", "verification", "subject")
"""Keys of a fit that are long and not used here."""

Record = dict[str, Any]


class ItemFailed(Exception):
    """A measurement failed."""


class OutOfTime(Exception):
    """A measurement is incomplete; what was measured so far is stored."""


class Bench:
    """Runs the measurements."""

    def __init__(self, options: argparse.Namespace, state: State) -> None:
        self._options = options
        self._state = state
        self._findings = Findings(state)
        self._subject: tuple[Case, Subject] | None = None

    @property
    def shared(self) -> bool:
        """Whether other measurements run on this GPU, so that durations are invalid."""
        return bool(self._options.shared)

    def time_for(self, item: str) -> bool:
        return self._left() >= SECONDS[item]

    def _left(self) -> float:
        return float(self._options.seconds) - (time.monotonic() - START)

    def do(self, case: Case, item: str) -> Record | None:
        """Run a measurement and return its record; None if it stores points itself."""
        if item in ("scan", "throughput"):
            self._train_points(case, item)
            return None
        method = getattr(self, f"_{item}", None)
        record: Record = method(case) if method else self._baseline(case, item)
        return record

    # ---- programs ----

    def _fit(self, case: Case) -> Record:
        answer, seconds = self._run_fit(case, "fit", *self._limited(case))
        if not answer.get("max_batch"):
            raise ItemFailed(f"no max batch: {answer.get('verdict')}: {answer.get('summary')}")
        return {"seconds": seconds, "answer": answer}

    def _linear2019(self, case: Case) -> Record:
        words = [*self._limited(case), "--method", "linear2019"]
        answer, seconds = self._run_fit(case, "linear2019", *words)
        linear = answer.get("linear2019")
        if not linear:
            raise ItemFailed(f"no linear2019 in the answer: {answer.get('summary')}")
        linear.pop("layers", None)
        batch = dict(map(tuple, linear["max_batch_by_reserve"]))[0]
        ooms = (answer.get("cost") or {}).get("ooms")
        return {"seconds": seconds, "batch": batch, "ooms": ooms, "linear": linear}

    def _predictions(self, case: Case) -> Record:
        sizes = ",".join(f"{gib}GiB" for gib in PREDICTED_GIB)
        words = ["--estimate", "--predict-for", sizes, "--precision", case.precision]
        answer, seconds = self._run_fit(case, "predictions", *words)
        return {
            "seconds": seconds,
            "predictions": answer["predictions"],
            "cost": answer.get("cost"),
        }

    def _limited(self, case: Case) -> list[str]:
        return ["--gpu-memory", f"{case.gib}GiB", "--precision", case.precision]

    def _run_fit(self, case: Case, item: str, *words: str) -> tuple[Record, float]:
        command = [*shlex.split(self._options.fit_command), case.argument, *words]
        answer, seconds = self._program([*command, "--json", "--no-cache"], TIMEOUTS[item])
        return {k: v for k, v in answer.items() if k not in OMITTED}, seconds

    def _baseline(self, case: Case, name: str) -> Record:
        start = 0
        if name == "accelerate":  # it shrinks the batch: start a little above the answer
            start = 1 << (2 * self._answered(case)[0] - 1).bit_length()
        result, seconds = self._run_baseline(case, name, start)
        return {**result, "seconds": seconds}

    def _manual(self, case: Case) -> Record:
        """Double the batch size from 32 until it fails, each level in a fresh process."""
        levels: list[Record] = []
        batch = 32
        while not levels or levels[-1]["passed"]:
            result, seconds = self._run_baseline(case, "manual", batch)
            levels.append({**result, "seconds": seconds})
            batch *= 2
        passed = [each["batch"] for each in levels if each["passed"]]
        sums = {
            key: round(sum(each[key] for each in levels), 2)
            for key in ("seconds", "training_seconds")
        }
        return {"batch": max(passed, default=0), "levels": levels, **sums}

    def _run_baseline(self, case: Case, name: str, start: int) -> tuple[Record, float]:
        limit = self._limit(case)
        command = [
            sys.executable,
            "-m",
            "max_batch.baselines",
            name,
            self._model(case) or case.model,
            "--cap",
            str(case.cap),
            "--device",
            limit.device,
            "--start",
            str(start),
            "--workers",
            "2" if self._options.dry else "16",
        ]
        if limit.max_batch is not None:
            command += ["--max-batch", str(limit.max_batch)]
        return self._program(command, TIMEOUTS[name])

    def _program(self, command: Sequence[str], timeout: float) -> tuple[Record, float]:
        """Run a program; return its JSON output and its duration in seconds."""
        paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        timeout = min(timeout, self._left() + GRACE_S)
        with tempfile.TemporaryDirectory() as folder:
            started = time.monotonic()
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                text=True,
                process_group=0,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={
                    **os.environ,
                    "STEPSCOPE_STATE": folder,
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                },
            )
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                raise ItemFailed(f"no answer within {timeout:.0f} s") from None
            finally:
                _end_group(process)
            seconds = round(time.monotonic() - started, 2)
        output = _json_in(out)
        if output is None:
            text = (err.strip() or out.strip())[-600:]
            raise ItemFailed(f"exit code {process.returncode}: {text}")
        return output, seconds

    # ---- reference training ----

    def _repeats(self, case: Case) -> Record:
        from max_batch.children import Request

        batch = self._answered(case)[0]
        exclusive = 3 * case.gib > AT_ONCE_GIB
        requests = [Request(batch, self._limit(case), exclusive=exclusive) for _ in range(3)]
        known = self._state.point(case.name, batch)
        runs = [known] if known else []
        record = self._train(case, requests[len(runs) :], exclusive)
        return {**record, "runs": runs + record["runs"]}

    def _long(self, case: Case) -> Record:
        from max_batch.children import Request

        batch = self._answered(case)[1]
        request = Request(batch, self._limit(case), steps=100, evaluations=(50, 100))
        return self._train(case, [request], exclusive=True)

    def _train(self, case: Case, requests: list[Request], exclusive: bool) -> Record:
        from max_batch.children import train_all

        started = time.monotonic()
        batch = requests[0].batch
        runs: list[Record] = []
        train_all(
            self._built(case),
            lambda _: requests.pop() if requests else None,
            runs.append,
            exclusive=exclusive,
        )
        invalid = [run["message"] for run in runs if _is_invalid(run)]
        if invalid:
            raise ItemFailed(invalid[0])
        return {"batch": batch, "runs": runs, "seconds": round(time.monotonic() - started, 2)}

    def _train_points(self, case: Case, item: str) -> None:
        """Train the batches of a scan, or the answers of the baselines, as time allows."""
        from max_batch.children import Request, train_all

        self._answered(case)
        findings = self._findings
        missing = findings.scan_batches if item == "scan" else findings.throughput_batches
        invalid: dict[int, str] = {}

        def next_request(running: Sequence[int]) -> Request | None:
            if len(invalid) > 2 or not self.time_for(item):
                return None
            batches = (b for b in missing(case) if b not in running and b not in invalid)
            batch = next(batches, None)
            return None if batch is None else Request(batch, self._limit(case))

        def notify(result: Record) -> None:
            points = findings.points(case).values()
            smaller_passed = any(point.passed and point.batch < result["batch"] for point in points)
            # An error at every batch size is a bug of the benchmark.
            is_bug = not (result["passed"] or result["memory"] or smaller_passed)
            if _is_invalid(result) or is_bug:
                invalid[result["batch"]] = result["message"]
            else:
                self._state.put_point(case.name, result["batch"], result)

        if missing(case):
            train_all(self._built(case), next_request, notify)
        if invalid:
            raise ItemFailed("; ".join(f"{b}: {message}" for b, message in invalid.items()))
        if missing(case):
            raise OutOfTime

    def _built(self, case: Case) -> Subject:
        """Return the built model of a case, cached for its next measurement."""
        from max_batch.children import build, prepare_to_fork

        if self._subject is None or self._subject[0] != case:
            prepare_to_fork()
            self._subject = case, build(case, self._model(case))
        return self._subject[1]

    def _limit(self, case: Case) -> Limit:
        from max_batch.children import Limit

        return Limit(self._options.device, case.cap, 4 * case.gib if self._options.dry else None)

    def _model(self, case: Case) -> str | None:
        return DRY_MODEL if self._options.dry else None

    def _answered(self, case: Case) -> tuple[int, int]:
        batches = self._findings.batches(case)
        if batches is None:
            raise ItemFailed("fit has no answer yet")
        return batches


def _is_invalid(result: Record) -> bool:
    """Return whether a process failed before its first step for a reason other than memory."""
    trained = str(result.get("where", "")).startswith(("step", "evaluation"))
    return not (result["passed"] or result["memory"] or trained)


def _end_group(process: subprocess.Popen[str]) -> None:
    """End a program and everything it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _json_in(out: str) -> Record | None:
    """Parse the JSON output of a program, also after other output."""
    for text in (out, out.strip().rpartition("\n")[2]):
        try:
            data = json.loads(text)
        except ValueError:
            continue
        if isinstance(data, dict):
            return data
    return None


def matches(patterns: str, case: Case, item: str) -> bool:
    """Match comma-separated patterns: substrings of `resnet50 15GiB tf32/scan`, or globs."""
    name = f"{case.name}/{item}"
    return any(p in name or fnmatch.fnmatch(name, p) for p in patterns.split(",") if p)


def summary(findings: Findings, case: Case, item: str) -> str:
    record = findings.state.get(case.name, item) or {}
    if item == "fit":
        cost = record["answer"].get("cost") or {}
        max_batch, recommended = findings.batches(case) or (0, 0)
        return f"max {max_batch}, recommended {recommended}, {cost.get('probes')} probes"
    if item in ("scan", "throughput"):
        true = findings.truth(case)
        points = len(findings.points(case))
        found = f"max {true.max_batch}, recommended {true.recommended}, " if true else ""
        return f"{found}{points} points"
    if "runs" in record and item in ("repeats", "long"):
        return ", ".join("passed" if run["passed"] else run["where"] for run in record["runs"])
    return f"batch {record['batch']}" if "batch" in record else ""


def measure(options: argparse.Namespace, state: State, cases: Sequence[Case]) -> None:
    """Run all missing measurements in order until the time is over."""
    bench, findings = Bench(options, state), Findings(state)
    for case, item in in_order(cases):
        if not matches(options.only, case, item) or findings.is_done(case, item):
            continue
        if not bench.time_for(item):
            print(f"no time for {case.name}, {item}", flush=True)
            continue
        _measure(bench, findings, case, item)


def follow(options: argparse.Namespace, state: State, cases: Sequence[Case]) -> None:
    """Run measurements as soon as another process has an answer of `fit` for the case."""
    bench, findings = Bench(options, state), Findings(state)
    failed: set[tuple[Case, str]] = set()
    while bench.time_for("scan"):
        state.merge([State(options.follow)])
        ready = (
            (case, item)
            for case, item in in_order(cases)
            if matches(options.only, case, item)
            and (case, item) not in failed
            and findings.batches(case)
            and not findings.is_done(case, item)
            and bench.time_for(item)
        )
        work = next(ready, None)
        if work is None:
            time.sleep(1)
            continue
        _measure(bench, findings, *work)
        if not findings.is_done(*work):
            failed.add(work)


def _measure(bench: Bench, findings: Findings, case: Case, item: str) -> None:
    started = time.monotonic()
    state = findings.state
    try:
        record = bench.do(case, item)
        if record is None:
            state.clear_failure(case.name, item)
        else:
            state.put(case.name, item, {**record, "shared": True} if bench.shared else record)
        text = summary(findings, case, item)
    except OutOfTime:
        text = "incomplete: the time is over"
    except Exception as error:  # other measurements must still run
        name = "" if isinstance(error, ItemFailed) else f"{type(error).__name__}: "
        state.put(case.name, item, {"failed": f"{name}{error}"[:800]})
        text = f"FAILED {name}{error}".strip().rpartition("\n")[2][:300]
    now = time.monotonic()
    print(f"{now - START:6.1f} {case.name:28} {item:20} {now - started:6.1f} s  {text}", flush=True)


def machine() -> Record:
    """Return the description of this machine for the result file."""
    from stepscope.capture.environment import environment_record
    from stepscope.records.codec import to_json

    record = to_json(environment_record([], Path.cwd(), None))
    kept = ("cpu", "memory", "os", "cgroup", "gpus", "python", "versions")
    return {key: record.get(key) for key in kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, required=True, help="state file")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="states to merge first")
    parser.add_argument("--seconds", type=float, default=570, help="duration of the run")
    parser.add_argument("--only", default="*", help="comma-separated patterns of CASE/ITEM")
    parser.add_argument("--again", default="", help="patterns like --only to measure again")
    parser.add_argument("--follow", type=Path, help="state of another process that runs fit")
    parser.add_argument(
        "--shared", action="store_true", help="other measurements run here: ignore durations"
    )
    parser.add_argument("--list", action="store_true", help="list measurements and criteria")
    parser.add_argument("--tables", action="store_true", help="write the result and print tables")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dry", action="store_true", help="use a tiny model and a simulated limit")
    parser.add_argument("--fit-command", default=FIT, help="replacement of `stepscope fit`")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    if options.dry != (options.device == "cpu"):
        parser.error("--dry and --device cpu must be used together")
    absent = [str(path) for path in options.merge if not path.exists()]
    if absent:
        parser.error(f"no such file: {', '.join(absent)}")
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    command = shlex.join(["python", "-m", "max_batch", *words])
    cases = dry_cases() if options.dry else all_cases()
    state = State(options.state)
    if options.merge:
        state.merge(State(path) for path in options.merge)
    if options.list or options.tables:
        from max_batch import tables

        show = tables.listed if options.list else tables.written
        print(show(Findings(state), cases, options.out))
        return
    for case, item in in_order(cases):
        if matches(options.again, case, item):
            state.forget(case.name, item)
    state.start_run(machine(), command)
    (follow if options.follow else measure)(options, state, cases)


if __name__ == "__main__":
    main()
