"""Whether `stepscope fit` is right, beside the truth, the papers' tables, and other finders.

    export PYTHONPATH=src:benchmarks
    python -m max_batch --state state.json --seconds 570   measure until time is over
    python -m max_batch --state state.json --list          what is done and what holds
    python -m max_batch --state state.json --tables        write the result

The truth of a case is a scan: fresh processes, in steps of 1 % around the edge, each training 20
steps with an evaluation. Every measurement is kept at once, so that a run can be ended at any time
and goes on where it was; states of several runs, and result files, are merged: `--merge A B`. Scans
can run while another process asks `fit` (`--follow`, both with `--beside`): then seconds are not
told. What failed is tried again in the next run. `--device cpu --dry` goes the same ways with a
tiny model and a pretended limit, and needs a `--fit-command`.
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
    CARDS,
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
    from max_batch.children import Ask, Limit, Subject

ROOT = Path(__file__).resolve().parents[2]
FIT = f"{sys.executable} -m stepscope fit"
BEGAN = time.monotonic()
DRY_MODEL = "cnn"
GRACE_S = 15
"""What a program may take beyond the time of the whole."""
LEFT_OUT = ("environment", "host", "proof", "subject")
"""Of what fit answers: long, and not looked at here."""

Told = dict[str, Any]


class ItemFailed(Exception):
    """A piece of work that could not be done."""


class OutOfTime(Exception):
    """A piece of work that is not complete; what it measured so far is kept."""


class Bench:
    """Does the work on cases, one piece after the other."""

    def __init__(self, options: argparse.Namespace, state: State) -> None:
        self._options = options
        self._state = state
        self._findings = Findings(state)
        self._subject: tuple[Case, Subject] | None = None

    @property
    def beside(self) -> bool:
        """Whether others are at work on this GPU, so that seconds say nothing."""
        return bool(self._options.beside)

    def time_for(self, item: str) -> bool:
        return self._left() >= SECONDS[item]

    def _left(self) -> float:
        return float(self._options.seconds) - (time.monotonic() - BEGAN)

    def do(self, case: Case, item: str) -> Told | None:
        """What was measured; nothing where the points of a scan already say all."""
        if item in ("scan", "rates"):
            self._train_points(case, item)
            return None
        work = getattr(self, f"_{item}", None)
        told: Told = work(case) if work else self._rival(case, item)
        return told

    # ---- programs ----

    def _fit(self, case: Case) -> Told:
        answer, seconds = self._ask_fit(case, "fit", *self._limited(case))
        if not answer.get("largest"):
            raise ItemFailed(f"no largest batch: {answer.get('verdict')}: {answer.get('says')}")
        return {"seconds": seconds, "answer": answer}

    def _linear2019(self, case: Case) -> Told:
        words = [*self._limited(case), "--method", "linear2019"]
        answer, seconds = self._ask_fit(case, "linear2019", *words)
        linear = answer.get("linear")
        if not linear:
            raise ItemFailed(f"no linear2019 in the answer: {answer.get('says')}")
        linear.pop("layers", None)
        batch = dict(map(tuple, linear["by_reserve"]))[0]
        ooms = (answer.get("effort") or {}).get("ooms")
        return {"seconds": seconds, "batch": batch, "ooms": ooms, "linear": linear}

    def _cards(self, case: Case) -> Told:
        sizes = ",".join(f"{gib}GiB" for gib in CARDS)
        words = ["--estimate", "--cards", sizes, "--precision", case.precision]
        answer, seconds = self._ask_fit(case, "cards", *words)
        return {"seconds": seconds, "cards": answer["cards"], "effort": answer.get("effort")}

    def _limited(self, case: Case) -> list[str]:
        return ["--gpu-memory", f"{case.gib}GiB", "--precision", case.precision]

    def _ask_fit(self, case: Case, item: str, *words: str) -> tuple[Told, float]:
        command = [*shlex.split(self._options.fit_command), case.argument, *words]
        told, seconds = self._program([*command, "--json", "--fresh"], TIMEOUTS[item])
        answer: Told = told.get("fit") or told
        return {k: v for k, v in answer.items() if k not in LEFT_OUT}, seconds

    def _rival(self, case: Case, rival: str) -> Told:
        start = 0
        if rival == "accelerate":  # which cuts down: from a little above, not from far away
            start = 1 << (2 * self._answered(case)[0] - 1).bit_length()
        told, seconds = self._run_rival(case, rival, start)
        return {**told, "seconds": seconds}

    def _manual(self, case: Case) -> Told:
        """From 32, double until it fails, each level in a fresh process."""
        levels: list[Told] = []
        batch = 32
        while not levels or levels[-1]["passed"]:
            told, seconds = self._run_rival(case, "manual", batch)
            levels.append({**told, "seconds": seconds})
            batch *= 2
        passed = [each["batch"] for each in levels if each["passed"]]
        sums = {
            key: round(sum(each[key] for each in levels), 2)
            for key in ("seconds", "training_seconds")
        }
        return {"batch": max(passed, default=0), "levels": levels, **sums}

    def _run_rival(self, case: Case, rival: str, start: int) -> tuple[Told, float]:
        limit = self._limit(case)
        command = [
            sys.executable,
            "-m",
            "max_batch.rivals",
            rival,
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
        if limit.most is not None:
            command += ["--most", str(limit.most)]
        return self._program(command, TIMEOUTS[rival])

    def _program(self, command: Sequence[str], timeout: float) -> tuple[Told, float]:
        """What a program says as JSON, and its seconds from start to end."""
        paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        timeout = min(timeout, self._left() + GRACE_S)
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
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
            seconds = round(time.monotonic() - began, 2)
        told = _json_in(out)
        if told is None:
            said = (err.strip() or out.strip())[-600:]
            raise ItemFailed(f"exit code {process.returncode}: {said}")
        return told, seconds

    # ---- our own training ----

    def _three(self, case: Case) -> Told:
        from max_batch.children import Ask

        batch = self._answered(case)[0]
        alone = 3 * case.gib > AT_ONCE_GIB
        asks = [Ask(batch, self._limit(case), alone=alone) for _ in range(3)]
        known = self._state.point(case.name, batch)
        tries = [known] if known else []
        more = self._train(case, asks[len(tries) :], alone)
        return {**more, "tries": tries + more["tries"]}

    def _long(self, case: Case) -> Told:
        from max_batch.children import Ask

        batch = self._answered(case)[1]
        ask = Ask(batch, self._limit(case), steps=100, evaluations=(50, 100))
        return self._train(case, [ask], alone=True)

    def _train(self, case: Case, asks: list[Ask], alone: bool) -> Told:
        from max_batch.children import train_all

        began = time.monotonic()
        batch = asks[0].batch
        tries: list[Told] = []
        train_all(
            self._built(case), lambda _: asks.pop() if asks else None, tries.append, alone=alone
        )
        broken = [told["message"] for told in tries if _is_broken(told)]
        if broken:
            raise ItemFailed(broken[0])
        return {"batch": batch, "tries": tries, "seconds": round(time.monotonic() - began, 2)}

    def _train_points(self, case: Case, item: str) -> None:
        """Train what a scan wants, or at the rivals' answers, as long as there is time."""
        from max_batch.children import Ask, train_all

        self._answered(case)
        want = self._findings.scan_wants if item == "scan" else self._findings.rates_want
        broken: dict[int, str] = {}

        def next_ask(under_way: Sequence[int]) -> Ask | None:
            if len(broken) > 2 or not self.time_for(item):
                return None
            left = (b for b in want(case) if b not in under_way and b not in broken)
            batch = next(left, None)
            return None if batch is None else Ask(batch, self._limit(case))

        def tell(told: Told) -> None:
            points = self._findings.points(case).values()
            smaller = any(point.passed and point.batch < told["batch"] for point in points)
            odd = not (told["passed"] or told["memory"] or smaller)
            if _is_broken(told) or odd:  # what no batch can do is our mistake
                broken[told["batch"]] = told["message"]
            else:
                self._state.put_point(case.name, told["batch"], told)

        if want(case):
            train_all(self._built(case), next_ask, tell)
        if broken:
            raise ItemFailed("; ".join(f"{b}: {message}" for b, message in broken.items()))
        if want(case):
            raise OutOfTime

    def _built(self, case: Case) -> Subject:
        """The model of a case, which is kept for its next piece of work."""
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
            raise ItemFailed("fit has not answered")
        return batches


def _is_broken(told: Told) -> bool:
    """Whether a process says nothing of its batch: it failed otherwise, before its first step."""
    trained = str(told.get("where", "")).startswith(("step", "evaluation"))
    return not (told["passed"] or told["memory"] or trained)


def _end_group(process: subprocess.Popen[str]) -> None:
    """The program and all that it started and left behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _json_in(out: str) -> Told | None:
    """The JSON of a program that may have printed something before it."""
    for text in (out, out.strip().rpartition("\n")[2]):
        try:
            told = json.loads(text)
        except ValueError:
            continue
        if isinstance(told, dict):
            return told
    return None


def matches(patterns: str, case: Case, item: str) -> bool:
    """Patterns with commas between them, each a part of `resnet50 15GiB tf32/scan`, or with `*`."""
    name = f"{case.name}/{item}"
    return any(p in name or fnmatch.fnmatch(name, p) for p in patterns.split(",") if p)


def summary(findings: Findings, case: Case, item: str) -> str:
    told = findings.state.get(case.name, item) or {}
    if item == "fit":
        effort = told["answer"].get("effort") or {}
        largest, fast = findings.batches(case) or (0, 0)
        return f"largest {largest}, fast {fast}, {effort.get('probes')} probes"
    if item in ("scan", "rates"):
        true = findings.truth(case)
        points = len(findings.points(case))
        shown = f"largest {true.largest}, fast {true.fast}, " if true else ""
        return f"{shown}{points} points"
    if "tries" in told and item in ("three", "long"):
        return ", ".join("passed" if each["passed"] else each["where"] for each in told["tries"])
    return f"batch {told['batch']}" if "batch" in told else ""


def measure(options: argparse.Namespace, state: State, cases: Sequence[Case]) -> None:
    """All that is missing, in order, until the time is over."""
    bench, findings = Bench(options, state), Findings(state)
    for case, item in in_order(cases):
        if not matches(options.only, case, item) or findings.is_done(case, item):
            continue
        if not bench.time_for(item):
            print(f"no time for {case.name}, {item}", flush=True)
            continue
        _measure(bench, findings, case, item)


def follow(options: argparse.Namespace, state: State, cases: Sequence[Case]) -> None:
    """What another process has an answer of `fit` for, as soon as it has one."""
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
    began = time.monotonic()
    state = findings.state
    try:
        told = bench.do(case, item)
        if told is None:
            state.clear_failure(case.name, item)
        else:
            state.put(case.name, item, {**told, "beside": True} if bench.beside else told)
        said = summary(findings, case, item)
    except OutOfTime:
        said = "not complete: the time is over"
    except Exception as error:  # one piece of work must not cost the others
        name = "" if isinstance(error, ItemFailed) else f"{type(error).__name__}: "
        state.put(case.name, item, {"failed": f"{name}{error}"[:800]})
        said = f"FAILED {name}{error}".strip().rpartition("\n")[2][:300]
    now = time.monotonic()
    print(f"{now - BEGAN:6.1f} {case.name:28} {item:20} {now - began:6.1f} s  {said}", flush=True)


def machine() -> Told:
    """What a result file says of the machine that measured."""
    from stepscope.capture.environment import environment_record
    from stepscope.records.codec import to_json

    record = to_json(environment_record([], Path.cwd(), None))
    kept = ("cpu", "memory", "os", "cgroup", "gpus", "python", "versions")
    return {key: record.get(key) for key in kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, required=True, help="what was measured so far")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="states to take in first")
    parser.add_argument(
        "--seconds", type=float, default=570, help="begin nothing that would end later"
    )
    parser.add_argument("--only", default="*", help="parts of CASE/WORK, with commas between them")
    parser.add_argument("--again", default="", help="as --only: measure these anew")
    parser.add_argument(
        "--follow", type=Path, help="a state that another process writes: go on where it has fits"
    )
    parser.add_argument(
        "--beside", action="store_true", help="others measure here: seconds are off"
    )
    parser.add_argument("--list", action="store_true", help="what is done, and what holds")
    parser.add_argument("--tables", action="store_true", help="write the result, print its tables")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dry", action="store_true", help="a tiny model and a pretended limit")
    parser.add_argument("--fit-command", default=FIT, help="in place of `stepscope fit`")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    if options.dry != (options.device == "cpu"):
        parser.error("--dry and --device cpu belong together")
    absent = [str(path) for path in options.merge if not path.exists()]
    if absent:
        parser.error(f"there is no {', '.join(absent)}")
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
    state.begins(machine(), command)
    (follow if options.follow else measure)(options, state, cases)


if __name__ == "__main__":
    main()
