"""The results of a study: one line of the ledger for each finished trial, and which of them count.

An answer counts unless its block was disturbed and may be run again. What failed for something
around the trial is not an answer until it has failed three times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from stepscope.analysis.study.drift import BlockJudged, BlockSeen, Trend, judge_blocks, trend
from stepscope.analysis.study.records import Level
from stepscope.records import Outcome
from stepscope.records.trial import InterferenceReason, ProcessNoise

Role = Literal["trial", "sentinel"]
REFERENCE: Role = "sentinel"
"""A reference trial, by the word that ledgers, run.json and folder names have for it."""
MACHINE = "machine"
"""The factor that the machines of a merged study are levels of."""

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
"""Outcomes that answer what was asked. An OOM is one of them."""


class Attempt(NamedTuple):
    """One attempt at a trial, which has one claim and one run folder."""

    key: str
    role: Role
    repeat: int
    number: int

    @property
    def is_reference(self) -> bool:
        return self.role == REFERENCE

    @property
    def place(self) -> str:
        """Its run folder in the study: `3fa0…/r2a1`, of a reference trial `3fa0…/s2a1`."""
        return f"{self.key}/{'s' if self.role == REFERENCE else 'r'}{self.repeat}a{self.number}"


@dataclass(frozen=True)
class Result:
    """A finished trial, as its line in the ledger has it."""

    key: str
    settings: Mapping[str, Level]
    role: Role
    repeat: int
    attempt: int
    block: int
    outcome: Outcome
    reason: str = ""
    infrastructure: bool = False
    """Whether something around the trial failed, and not the trial."""
    began: float = 0.0
    """Seconds since 1970."""
    seconds: float = 0.0
    """From its preparation until it was cleaned up after."""
    values: Mapping[str, float] = field(default_factory=dict)
    """By the keys of `RESPONSES`, and some more; what was not measured is not in it."""
    low: float | None = None
    """Of its throughput, by what was known of the machine then."""
    high: float | None = None
    steady: bool = True
    noise: tuple[InterferenceReason, ...] = ()
    """What disturbed it."""
    cause: str = ""
    """Its bottleneck: the title of the first finding."""
    machine: str = ""
    """Where it ran; empty is the machine that ran the study."""

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
        """Whether it answers what was asked, so that it need not be tried again."""
        return self.outcome in RESULTS and not self.infrastructure

    @property
    def is_ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def throughput(self) -> float | None:
        return self.values.get("samples_per_second")

    def on(self, machine: str) -> Result:
        """The same on a machine with a name; without one, as it is."""
        return replace(self, machine=machine) if machine else self


RETRIES = 2
"""How often a trial is tried again after something around it failed."""
Trial = tuple[str, int]
"""The key of a spec, and which repeat of it."""


def noise_before(results: Sequence[Result]) -> ProcessNoise | None:
    """How much trials were known to differ on their machine before the first of these: later ones
    have learnt from those before."""
    told = [result for result in results if result.values.get("spread_dof")]
    if not told:
        return None
    first = min(told, key=lambda result: result.began)
    return ProcessNoise(first.values["spread_cv"], first.values["spread_dof"], "others")


class Results:
    """All results of a study, and what follows from them."""

    def __init__(self, reruns: int = 1) -> None:
        self._reruns = reruns
        self.results: list[Result] = []
        self._of: dict[tuple[str, Role, int], list[Result]] = defaultdict(list)
        self._attempts: dict[tuple[str, Role, int], int] = defaultdict(int)
        self._judged: dict[int, BlockJudged] | None = None
        self._retried: set[str] = set()
        self.refused: dict[str, str] = {}
        """Keys of specs that turned out to be no workload here, and why."""
        self.claimed_by_others: set[Trial] = set()
        """That another process runs now."""

    def add(self, result: Result) -> None:
        self.results.append(result)
        where = (result.key, result.role, result.repeat)
        self._of[where].append(result)
        self._of[where].sort(key=lambda result: result.attempt)
        self.begun(Attempt(*where, result.attempt))
        self._judged = None

    def retry_failed(self, crashed: bool = False) -> None:
        """The study is run again: what failed before around a trial may have been mended, and
        nobody else can be running anything of it. With `crashed`, the code may have been, too."""
        again = (Outcome.CRASHED, Outcome.TIMEOUT) if crashed else ()
        self._retried = {
            result.place
            for result in self.results
            if result.infrastructure or result.outcome in again
        }
        self.claimed_by_others.clear()

    def begun(self, attempt: Attempt) -> None:
        """Its number is taken, whatever becomes of it."""
        trial = attempt.key, attempt.role, attempt.repeat
        self._attempts[trial] = max(self._attempts[trial], attempt.number)

    def next_attempt(self, key: str, role: Role, repeat: int) -> int:
        return self._attempts[key, role, repeat] + 1

    def answer(self, key: str, repeat: int) -> Result | None:
        """The result that counts; None while there is none, or it is to be tried again."""
        tries = self.tries(key, repeat)
        found = [r for r in tries if not self._retried or r.place not in self._retried]
        answers = [result for result in found if result.is_result]
        calm = [result for result in answers if not self.is_disturbed(result)]
        if calm:
            return calm[-1]
        if len(answers) > self._reruns:
            return next((each for each in reversed(answers) if not each.noise), answers[-1])
        failed = [result for result in found if result.infrastructure]
        return (answers or failed)[-1] if len(failed) > RETRIES else None

    def best_known(self, key: str, repeat: int) -> Result | None:
        """What there is for tables: the answer, or one that may yet be replaced."""
        tried = (result for result in reversed(self.tries(key, repeat)) if result.is_result)
        return self.answer(key, repeat) or next(tried, None)

    def is_disturbed(self, result: Result) -> bool:
        """Whether its block was, in a way that may have changed it."""
        judged = self.judged.get(result.block)
        return judged is not None and judged.flagged

    def tries(self, key: str, repeat: int) -> Sequence[Result]:
        """All attempts at a trial that are over, also those that do not count."""
        return self._of.get((key, "trial", repeat), ())

    @property
    def judged(self) -> Mapping[int, BlockJudged]:
        """Every block by its number, and whether it was disturbed."""
        if self._judged is None:
            self._judged = {}
            for (machine, _), blocks in self._comparable_blocks().items():
                spread = noise_before([each for each in self.results if each.machine == machine])
                self._judged |= judge_blocks(blocks, spread)
        return self._judged

    @property
    def trend(self) -> Trend | None:
        """Whether the machine became slower or faster over the study."""
        return trend(max(self._comparable_blocks().values(), key=len, default=[]))

    @property
    def tried(self) -> int:
        """How often a trial was answered, also where that does not count."""
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
        """By machine and reference configuration, which an edited design may have changed."""
        found: dict[tuple[str, str], list[BlockSeen]] = defaultdict(list)
        for number, results in sorted(self.in_blocks().items()):
            references = [result for result in results if result.is_reference]
            trained = [result for result in references if result.is_ok and result.throughput]
            seen = BlockSeen(
                number=number,
                reference_rate=trained[-1].throughput if trained else None,
                reference_failed=not trained and any(r.is_result for r in references),
                noise=tuple(result.noise for result in results),
                trials=sum(result.is_trial for result in results),
            )
            found[results[0].machine, references[-1].key if references else ""].append(seen)
        return found
