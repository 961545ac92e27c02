"""What the repeats of a study teach of this machine: how much identical trials differ on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stepscope.runs.reader import open_run
from stepscope.runs.trial import read_trial
from stepscope.studies.known import Known
from stepscope.studies.spec import Spec
from stepscope.trials.spread import Machine, SpreadStore, device_kind


def teach(known: Known, spec: Spec, repeats: int, last: Path, tell: Callable[[str], None]) -> None:
    """Keep it, once: when the last repeat of a configuration was answered, in the folder `last`."""
    answers = [known.answer(spec.key, repeat) for repeat in range(1, repeats + 1)]
    rates = [
        answer.throughput
        for answer in answers
        if answer is not None and answer.is_ok and answer.throughput
        and not known.is_disturbed(answer)
    ]  # fmt: skip
    if None in answers or len(rates) < 2:
        return
    run = open_run(last)
    environment = run.facts.get("environment") or {}
    limits = {"cpus": spec.limits.cpus, "memory": spec.limits.memory}
    about = {**spec.workload.as_dict(), **limits}
    machine = Machine.of(environment, device_kind(read_trial(run).told), about)
    SpreadStore(tell=tell).learn(machine, rates)
