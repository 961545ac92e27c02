"""Runs one trial: a fresh session of processes, fenced, watched, judged, and cleaned up after.

The trial's processes get a session and a process group of their own, so that a Ctrl-C in our
terminal is ours alone. If we die, the guard ends them. When the trial is over, nothing of it may be
left; what is left keeps the next one from starting.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stepscope.capture.command import environment_of
from stepscope.capture.outcome import Evidence
from stepscope.capture.reaper import Reaper
from stepscope.capture.session import (
    Plan,
    Session,
    allow_many_descriptors,
    next_tick,
)
from stepscope.capture.spawn import adoption
from stepscope.errors import BadWorkload, CannotTry, CannotWatch
from stepscope.records import Ending, Outcome
from stepscope.runs.masking import mask_text
from stepscope.runs.paths import RunPaths
from stepscope.trials import kin, stacks
from stepscope.trials.fence import Breach, Fence
from stepscope.trials.guard import Guard
from stepscope.trials.interrupts import uninterrupted
from stepscope.trials.leftovers import Snapshot, check_clean, leftovers
from stepscope.trials.prepare import TrialPlan, make_data, prepare, watch_plan
from stepscope.trials.processes import (
    end_of,
    is_full,
    own_children,
    own_descriptors,
    tail_of,
    wait_until,
)
from stepscope.trials.pulse import Progress, Pulse
from stepscope.trials.spread import Machine, SpreadStore, device_kind
from stepscope.trials.verdict import Seen, Stopped, judge_trial

_END_PATIENCE_S = 3.0
_STACKS_PATIENCE_S = 2.0
_ORPHAN_PATIENCE_S = 0.5
"""How long processes that outlive their trial's main one may take to leave by themselves."""
_BURIAL_S = 10.0
"""Who was killed and has not ended by then is stuck in the kernel."""


@dataclass(frozen=True)
class Tried:
    """A trial that is over."""

    paths: RunPaths
    ending: Ending
    left: list[str]
    """What of it could not be cleaned up."""
    asked_to_end: bool = False
    """Whether a Ctrl-C came, perhaps when it was over already: no other should follow."""


def run_trial(
    plan: TrialPlan,
    token: str,
    guard: Guard,
    tell: Callable[[str], None],
    show: Callable[[Progress], None] = lambda progress: None,
) -> Tried:
    """One trial, from nothing to nothing. BadWorkload if the workload turned out to be none.

    `token` begins with that of the guard, and is nobody else's.
    """
    show(Progress("making data", 0, None, None, None, 0.0, 0.0))
    make_data(plan.workload, tell)
    started_ns = time.monotonic_ns()
    for text in check_clean():
        tell(text)
    fence = Fence.build(plan.limits, token, plan.workload.ranks, plan.workload.workers)
    try:
        for path in fence.group_paths():
            guard.tell_group(path)
        watch = watch_plan(plan, started_ns)
        paths = prepare(plan, watch, fence)
        trial = _Trial(plan, watch, paths, fence, token, tell, show)
        with adoption, own_descriptors():
            tried = trial.run()
    finally:
        fence.close()
    _raise_if_no_workload(tried)
    return tried


def _raise_if_no_workload(tried: Tried) -> None:
    """A model that does not exist is no result: nothing is kept of it."""
    error = tried.ending.evidence.get("bad_workload")
    if error:
        shutil.rmtree(tried.paths.folder, ignore_errors=True)
        raise BadWorkload(error["message"], error["hint"])


class _Trial:
    """The life of one trial."""

    def __init__(
        self,
        plan: TrialPlan,
        watch: Plan,
        paths: RunPaths,
        fence: Fence,
        token: str,
        tell: Callable[[str], None],
        show: Callable[[Progress], None],
    ) -> None:
        self._plan = plan
        self._paths = paths
        self._fence = fence
        self._token = token
        self._tell = tell
        self._show = show
        self._pulse = Pulse(paths, plan.workload)
        self._roll = kin.Roll()
        self._pid: int | None = None
        self._stopped: Stopped | None = None
        self._stepped = False
        watch.command.append(str(paths.trial_spec))
        environment = environment_of(watch, paths)
        self._environment = fence.environment(environment)
        self._before = Snapshot.take()
        try:
            self._session = Session(watch, paths, self._pass_on, self._environment)
        except (OSError, CannotWatch) as error:
            shutil.rmtree(paths.folder, ignore_errors=True)
            raise CannotTry(f"The trial cannot be watched: {error}") from None

    def _pass_on(self, text: str) -> None:
        """What the hook attached to is news for a user's command, not for a loop of ours."""
        if not text.startswith("hook:"):
            self._tell(text)

    def run(self) -> Tried:
        session = self._session
        session.restart_clock()
        session.facts["trial"]["spawned_ns"] = born_ns = time.monotonic_ns()
        try:
            with uninterrupted() as heard:
                self._begin(born_ns)
            if heard:
                raise KeyboardInterrupt
            assert self._pid is not None
            with end_of(self._pid) as end:
                self._watch(end)
        except KeyboardInterrupt:
            self._stopped = Stopped(Outcome.INTERRUPTED, "it was interrupted")
        except BaseException as error:
            self._stopped = Stopped(Outcome.CRASHED, f"its runner failed: {error}")
            with uninterrupted():
                self._give_up()
            raise
        with uninterrupted() as heard:
            if self._stopped:
                self._end_processes()
            tried = self._finish()
        return replace(tried, asked_to_end=bool(heard) or tried.asked_to_end)

    def _begin(self, born_ns: int) -> None:
        others = own_children()
        self._pid = self._spawn()
        self._reaper = Reaper(self._session, self._pid)
        self._fence.place(self._pid)
        allow_many_descriptors()
        self._session.begin(
            self._pid, os.getpid(), born_ns, exclude=tuple(others), is_orphan=self._is_orphan
        )

    def _give_up(self) -> None:
        """We failed, not the trial: it is ended, and what was seen of it is kept."""
        self._end_processes()
        if hasattr(self._session, "tree"):
            self._finish()
            return
        if self._pid is not None:
            os.waitpid(self._pid, 0)
        shutil.rmtree(self._paths.folder, ignore_errors=True)

    def _is_orphan(self, pid: int) -> bool:
        """Whether a new child of ours is of this trial: we may have others of our own."""
        return kin.belongs(pid, self._token, self._roll)

    def _spawn(self) -> int:
        """In a session of its own, its output into files, nothing to read."""
        new = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        return os.posix_spawn(
            sys.executable,
            [*self._session.plan.command],
            self._environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(self._paths.stdout_log), new, 0o644),
                (os.POSIX_SPAWN_OPEN, 2, str(self._paths.stderr_log), new, 0o644),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[n for n in signal.Signals if n not in (signal.SIGKILL, signal.SIGSTOP)],
        )

    def _watch(self, end: select.poll) -> None:
        """Sample, look after limits and life, until the main process has ended or must end."""
        planned = time.monotonic()
        while not self._reaper.root_has_ended():
            now = time.monotonic()
            if now >= planned:
                self._tick(now - planned)
                planned = next_tick(planned, self._plan.interval_s)
            if self._stopped:
                return
            end.poll(max(0.0, planned - time.monotonic()) * 1e3)

    def _tick(self, late_s: float) -> None:
        self._reaper.safely(self._session.tick, late_s)
        self._reaper.safely(self._reaper.reap_orphans)
        pids = [p.pid for p in self._session.tree if p.state != "Z"]
        self._roll.meet(pids)
        breach = self._fence.inspect(pids)
        progress = self._pulse.feel()
        self._show(progress)
        if progress.steps and not self._stepped:
            self._stepped = True
            self._session.read_memory()
        self._stopped = self._reason_to_stop(breach, progress)
        if self._stopped and self._stopped.outcome is Outcome.TIMEOUT:
            self._stopped = self._with_stacks(self._stopped, pids)

    def _with_stacks(self, stopped: Stopped, pids: list[int]) -> Stopped:
        """Every Python process tells where it stands; one may know what the others wait for."""
        file = self._paths.trial_stacks
        if not stacks.dump(pids, file, _STACKS_PATIENCE_S):
            return stopped
        found: dict[str, Any] = {"stacks": "trial/stacks.txt"}
        if self._plan.workload.is_own:
            own = Path(self._plan.workload.model.rpartition(":")[0]).name
            place = stacks.stood_at(file, own)
            found |= {"stood_at": place} if place else {}
        return replace(stopped, evidence={**stopped.evidence, **found})

    def _reason_to_stop(self, breach: Breach | None, progress: Progress) -> Stopped | None:
        limits = self._plan.limits
        if breach is not None:
            return Stopped(Outcome.HOST_OOM, breach.reason, breach.evidence)
        if limits.timeout_s is not None and progress.elapsed_s > limits.timeout_s:
            reason = f"it was not done after {limits.timeout_s:g} s"
            return Stopped(Outcome.TIMEOUT, reason, {"limit": "timeout", "phase": progress.phase})
        if progress.silent_s > limits.hang_s:
            reason = f"nothing was heard of it for {limits.hang_s:g} s"
            return Stopped(Outcome.TIMEOUT, reason, {"limit": "hang", "phase": progress.phase})
        return None

    def _end_processes(self) -> None:
        """End every process of the trial, wherever it went."""
        kin.end_all(self._token, self._roll, _END_PATIENCE_S)

    def _wait_for_leaving(self) -> None:
        """Workers notice by themselves that their main process is gone, a moment later."""
        wait_until(lambda: not kin.kin_of(self._token, self._roll), _ORPHAN_PATIENCE_S)

    def _finish(self) -> Tried:
        session, reaper = self._session, self._reaper
        if kin.kin_of(self._token, self._roll):
            self._wait_for_leaving()
            self._end_processes()
        wait_until(reaper.root_has_ended, _BURIAL_S)
        reaper.safely(reaper.reap_orphans)
        session.mark_end_time(time.monotonic_ns())
        reaper.safely(session.last_sample)
        ending = self._judge()
        if not tail_of(self._paths.trial_stacks):
            self._paths.trial_stacks.unlink(missing_ok=True)
        left = leftovers(self._before, self._token, self._roll)
        session.facts["limits"] = self._limits()
        device = device_kind(self._told())
        machine = Machine.of(session.facts["environment"], device, self._plan.teaches)
        session.facts["trial"].update(
            spread=asdict(SpreadStore(tell=self._tell).get(machine)),
            ended_ns=session.facts["ending"]["monotonic_ns"],
            cleaned_ns=time.monotonic_ns(),
            left=left.describe(),
            removed=left.removed,
            unclaimed=left.unclaimed,
        )
        reaper.safely(session.end, ending, [])
        interrupted = ending.outcome is Outcome.INTERRUPTED
        return Tried(self._paths, ending, left.describe(), interrupted)

    def _limits(self) -> dict[str, Any]:
        """What was asked for, how it was enforced, and how near to it the trial came."""
        facts, limits = self._fence.facts(), self._plan.limits
        if "memory" in facts and facts["memory"].get("by") != "soft":
            facts["memory"] = {**facts["memory"], "peak": self._fence.peak_memory()}
        return {**facts, "time": {"timeout_s": limits.timeout_s, "hang_s": limits.hang_s}}

    def _told(self) -> dict[str, Any]:
        """What the first rank says of itself."""
        return next(iter(self._pulse.ranks()), {})

    def _judge(self) -> Ending:
        session = self._session
        ranks = self._pulse.ranks()
        errors = [rank["error"] for rank in ranks if rank.get("error")]
        bad = next((error for error in errors if error["kind"] == "workload"), None)
        if bad and not self._stopped and not self._stepped:
            return Ending(Outcome.CRASHED, bad["message"], evidence={"bad_workload": bad})
        progress = self._pulse.feel(now=True)
        ending = judge_trial(
            Seen(
                self._reaper.status or 0,
                ranks,
                self._plan.workload.ranks,
                self._stopped,
                self._fence.cgroup_kills() or 0,
                self._fence.counters(),
                session.evidence,
                Evidence.now(session.cgroup),
                session.shm_share(),
                mask_text(tail_of(self._paths.stderr_log)),
                is_full(self._paths.folder),
            )
        )
        if ending.outcome is Outcome.OK:
            return ending
        where = {"phase": progress.phase, "steps": progress.steps}
        return replace(ending, evidence={**where, **ending.evidence})
