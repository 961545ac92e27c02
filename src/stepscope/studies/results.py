"""The results of a study: a ledger line for each finished trial, and which results count.

A result counts unless its block has interference and will be rerun. A failure of the infrastructure
counts only after it has happened three times.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from stepscope.analysis.study.drift import BlockJudged, BlockSeen, Trend, judge_blocks, trend
from stepscope.analysis.study.records import Level
from stepscope.records import Outcome
from stepscope.records.trial import InterferenceReason, ProcessNoise

Role = Literal["trial", "reference"]
REFERENCE: Role = "reference"
"""The role of a reference trial in ledgers and in run.json."""
MACHINE = "machine"
"""The factor whose levels are the machines of a merged study."""

RESULTS = frozenset(
    {
        Outcome.OK,
        Outcome.GPU_OOM,
        Outcome.HOST_OOM,
        Outcome.SHM_FULL,
        Outcome.TIMEOUT,
        Outcome.CRASHED,
    }
)
"""Outcomes that are results. An OOM is one of them."""


class Attempt(NamedTuple):
    """One attempt at a trial, with one claim and one run folder."""

    key: str
    role: Role
    repeat: int
    number: int

    @property
    def is_reference(self) -> bool:
        return self.role == REFERENCE

    @property
    def place(self) -> str:
        """The run folder in the study: `3fa0…/r2a1`, or `3fa0…/s2a1` for a reference trial."""
        return f"{self.key}/{'s' if self.role == REFERENCE else 'r'}{self.repeat}a{self.number}"


@dataclass(frozen=True)
class Result:
    """A finished trial: one line of the ledger."""

    key: str
    settings: Mapping[str, Level]
    role: Role
    repeat: int
    attempt: int
    block: int
    outcome: Outcome
    reason: str = ""
    infrastructure: bool = False
    """Whether the infrastructure failed, not the trial."""
    started: float = 0.0
    """Seconds since 1970."""
    seconds: float = 0.0
    """From the preparation to the end of the cleanup."""
    values: Mapping[str, float] = field(default_factory=dict)
    """By the keys of `RESPONSES` and a few more; values that were not measured are missing."""
    low: float | None = None
    """Interval of the throughput, with the noise of the machine as known at that time."""
    high: float | None = None
    steady: bool = True
    interference: tuple[InterferenceReason, ...] = ()
    cause: str = ""
    """The bottleneck: the cause of the first finding."""
    machine: str = ""
    """The machine that it ran on; empty is the machine that ran the study."""

    @property
    def place(self) -> str:
        return Attempt(self.key, self.role, self.repeat, self.attempt).place

    @property
    def is_trial(self) -> bool:
        return self.role == "trial"

    @property
    def is_reference(self) -> bool:
        return self.role == REFERENCE

    @property
    def is_result(self) -> bool:
        """Whether the outcome is a result of the trial, so that it is not retried."""
        return self.outcome in RESULTS and not self.infrastructure

    @property
    def is_ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def throughput(self) -> float | None:
        return self.values.get("samples_per_second")

    def on(self, machine: str) -> Result:
        """Return the result with a machine, unless its name is empty."""
        return replace(self, machine=machine) if machine else self


RETRIES = 2
"""How often a trial is retried after a failure of the infrastructure."""
Trial = tuple[str, int]
"""The key of a spec and the number of the repeat."""


def noise_before(results: Sequence[Result]) -> ProcessNoise | None:
    """Return the noise of the machine as it was known before the first of these results.

    Later results are not independent of it: the noise is learned from the earlier ones.
    """
    with_noise = [result for result in results if result.values.get("noise_dof")]
    if not with_noise:
        return None
    first = min(with_noise, key=lambda result: result.started)
    return ProcessNoise(first.values["noise_cv"], first.values["noise_dof"], "other_workloads")


class Results:
    """All results of a study, and which of them count."""

    def __init__(self, reruns: int = 1) -> None:
        self._reruns = reruns
        self.results: list[Result] = []
        self._by_trial: dict[tuple[str, Role, int], list[Result]] = defaultdict(list)
        self._attempts: dict[tuple[str, Role, int], int] = defaultdict(int)
        self._judged: dict[int, BlockJudged] | None = None
        self._retried: set[str] = set()
        self.refused: dict[str, str] = {}
        """Specs that turned out not to be a valid workload on this machine: reasons by key."""
        self.claimed_by_others: set[Trial] = set()
        """Trials that another process is running."""

    def add(self, result: Result) -> None:
        self.results.append(result)
        trial = (result.key, result.role, result.repeat)
        insort(self._by_trial[trial], result, key=lambda result: result.attempt)
        self.add_attempt(Attempt(*trial, result.attempt))
        self._judged = None

    def retry_failed(self, crashed: bool = False) -> None:
        """Discard failed results so that their trials are retried.

        A new run of the study retries failures of the infrastructure; with `crashed`, it also
        retries trials that crashed or timed out. Claims of other processes are dropped, because
        only one process can run the study.
        """
        retried = (Outcome.CRASHED, Outcome.TIMEOUT) if crashed else ()
        self._retried = {
            result.place
            for result in self.results
            if result.infrastructure or result.outcome in retried
        }
        self.claimed_by_others.clear()

    def add_attempt(self, attempt: Attempt) -> None:
        """Reserve the number of an attempt, whatever its outcome is."""
        trial = attempt.key, attempt.role, attempt.repeat
        self._attempts[trial] = max(self._attempts[trial], attempt.number)

    def next_attempt(self, key: str, role: Role, repeat: int) -> int:
        return self._attempts[key, role, repeat] + 1

    def answer(self, key: str, repeat: int) -> Result | None:
        """Return the result that counts; None if there is none or the trial is to be retried."""
        attempts = self.attempts(key, repeat)
        valid = [r for r in attempts if not self._retried or r.place not in self._retried]
        answers = [result for result in valid if result.is_result]
        clean = [result for result in answers if not self.has_interference(result)]
        if clean:
            return clean[-1]
        if len(answers) > self._reruns:
            return next((each for each in reversed(answers) if not each.interference), answers[-1])
        failed = [result for result in valid if result.infrastructure]
        return (answers or failed)[-1] if len(failed) > RETRIES else None

    def best_known(self, key: str, repeat: int) -> Result | None:
        """Return the answer, or else the last result, which a retry may still replace."""
        latest = (result for result in reversed(self.attempts(key, repeat)) if result.is_result)
        return self.answer(key, repeat) or next(latest, None)

    def has_interference(self, result: Result) -> bool:
        """Return whether the block of a result is flagged."""
        judged = self.judged.get(result.block)
        return judged is not None and judged.flagged

    def attempts(self, key: str, repeat: int) -> Sequence[Result]:
        """Return all finished attempts at a trial, including those that do not count."""
        return self._by_trial.get((key, "trial", repeat), ())

    @property
    def judged(self) -> Mapping[int, BlockJudged]:
        """All blocks by number, and whether they are flagged."""
        if self._judged is None:
            self._judged = {}
            by_machine: dict[str, list[Result]] = defaultdict(list)
            for result in self.results:
                by_machine[result.machine].append(result)
            for (machine, _), blocks in self._comparable_blocks().items():
                self._judged |= judge_blocks(blocks, noise_before(by_machine[machine]))
        return self._judged

    @property
    def trend(self) -> Trend | None:
        """The drift of the machine over the study, if there is one."""
        return trend(max(self._comparable_blocks().values(), key=len, default=[]))

    @property
    def tried(self) -> int:
        """Number of results of trials, including those that do not count."""
        return sum(result.is_trial and result.is_result for result in self.results)

    @property
    def last_block(self) -> int:
        return max((result.block for result in self.results), default=0)

    @property
    def references(self) -> int:
        return max((n for (_, role, n) in self._attempts if role == REFERENCE), default=0)

    @property
    def seconds(self) -> float:
        return sum(result.seconds for result in self.results)

    def in_blocks(self) -> dict[int, list[Result]]:
        blocks: dict[int, list[Result]] = defaultdict(list)
        for result in self.results:
            if result.block:
                blocks[result.block].append(result)
        return blocks

    def _comparable_blocks(self) -> dict[tuple[str, str], list[BlockSeen]]:
        """Group blocks by machine and reference trial, which an edited design may have changed."""
        groups: dict[tuple[str, str], list[BlockSeen]] = defaultdict(list)
        for number, results in sorted(self.in_blocks().items()):
            references = [result for result in results if result.is_reference]
            trained = [result for result in references if result.is_ok and result.throughput]
            seen = BlockSeen(
                number=number,
                reference_throughput=trained[-1].throughput if trained else None,
                reference_failed=not trained and any(r.is_result for r in references),
                interference=tuple(result.interference for result in results),
                trials=sum(result.is_trial for result in results),
            )
            groups[results[0].machine, references[-1].key if references else ""].append(seen)
        return groups
