"""The same trial several times, each in fresh processes, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from stepscope.analysis.trial import host_cpus, measure
from stepscope.errors import CannotTry, StepscopeError
from stepscope.records import Outcome
from stepscope.runs.reader import open_run
from stepscope.runs.trial import read_trial
from stepscope.trials import kin
from stepscope.trials.guard import Guard
from stepscope.trials.prepare import TrialPlan
from stepscope.trials.pulse import Progress
from stepscope.trials.runner import Tried, run_trial
from stepscope.trials.spread import Machine, SpreadStore, device_kind


def run_repeats(
    plan: TrialPlan,
    repeats: int,
    tell: Callable[[str], None],
    show: Callable[[int, Progress], None] = lambda number, progress: None,
) -> Iterator[Tried]:
    """Trials as they end. Stops where one was interrupted, or left something behind."""
    series = kin.new_token()
    guard = Guard.start(series)
    over = guard.leave  # unless each trial was over, and cleaned up after, it is the guard's turn
    try:
        for number in range(1, repeats + 1):
            facts = {**plan.facts, "repeat": number, "repeats": repeats}
            token, over = f"{series}.{number}", guard.leave
            tried = run_trial(replace(plan, facts=facts), token, guard, tell, partial(show, number))
            over = guard.dismiss
            yield tried
            if tried.asked_to_end:
                return
            if tried.left and number < repeats:
                raise CannotTry(
                    f"The next trial was not started: {'; '.join(tried.left)} is left of this one",
                    "End it, then try again",
                )
    except StepscopeError:
        over = guard.dismiss
        raise
    finally:
        over()


def learn(plan: TrialPlan, trials: Sequence[Tried], tell: Callable[[str], None]) -> None:
    """Keep, for the intervals of later trials, how much these repeats differ on this machine."""
    ended_well = [t for t in trials if t.ending.outcome is Outcome.OK]
    if len(ended_well) < 2:
        return
    rates, machine = [], None
    for tried in ended_well:
        run = open_run(tried.paths.folder)
        record = read_trial(run)
        environment = run.facts.get("environment") or {}
        measured = measure(record, run.recorded(), None, host_cpus(environment))
        if measured.rate and not measured.is_disturbed:
            rates.append(measured.rate.per_second)
        machine = Machine.of(environment, device_kind(record.told), plan.teaches)
    assert machine is not None
    SpreadStore(tell=tell).learn(machine, rates)
