"""What is known of a study so far: which trials have an answer, and which answers count.

Pure bookkeeping over results. An answer counts unless its block was disturbed and may be run again;
what failed around a trial is no answer until it has failed three times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from stepscope.analysis.study.drift import BlockJudged, BlockSeen, judge_blocks, trend
from stepscope.analysis.throughput import Spread
from stepscope.records import Outcome
from stepscope.studies.result import Result, Role

RETRIES = 2
"""How often a trial is tried again after something around it failed."""
Trial = tuple[str, int]
"""The key of a spec, and which repeat of it."""


def spread_of(results: Sequence[Result]) -> Spread | None:
    """How much trials were known to differ on their machine before the first of these: later ones
    have learnt from those before."""
    told = [result for result in results if result.values.get("spread_dof")]
    if not told:
        return None
    first = min(told, key=lambda result: result.began)
    return Spread(first.values["spread_cv"], first.values["spread_dof"], "others")


class Known:
    """All results of a study, and what follows from them."""

    def __init__(self, reruns: int = 1) -> None:
        self._reruns = reruns
        self.results: list[Result] = []
        self._of: dict[tuple[str, Role, int], list[Result]] = defaultdict(list)
        self._attempts: dict[tuple[str, Role, int], int] = defaultdict(int)
        self._judged: dict[int, BlockJudged] | None = None
        self._forgiven: set[str] = set()
        self.refused: dict[str, str] = {}
        """Keys of specs that turned out to be no workload here, and why."""
        self.elsewhere: set[Trial] = set()
        """That somebody else runs now."""

    def add(self, result: Result) -> None:
        self.results.append(result)
        where = (result.key, result.role, result.repeat)
        self._of[where].append(result)
        self._of[where].sort(key=lambda result: result.attempt)
        self.begun(result.key, result.role, result.repeat, result.attempt)
        self._judged = None

    def forgive(self, crashed: bool = False) -> None:
        """The study is run again: what failed before around a trial may have been mended, and
        nobody else can be running anything of it. With `crashed`, the code may have been, too."""
        again = (Outcome.CRASHED, Outcome.TIMEOUT) if crashed else ()
        self._forgiven = {
            result.place
            for result in self.results
            if result.infrastructure or result.outcome in again
        }
        self.elsewhere.clear()

    def begun(self, key: str, role: Role, repeat: int, attempt: int) -> None:
        """An attempt was made, whatever became of it: its number is taken."""
        where = (key, role, repeat)
        self._attempts[where] = max(self._attempts[where], attempt)

    def next_attempt(self, key: str, role: Role, repeat: int) -> int:
        return self._attempts[key, role, repeat] + 1

    def answer(self, key: str, repeat: int) -> Result | None:
        """The result that counts; None while there is none, or it is to be tried again."""
        found = self._of.get((key, "trial", repeat))
        if not found:
            return None
        answers = [r for r in found if r.is_result and r.place not in self._forgiven]
        calm = [result for result in answers if not self.is_disturbed(result)]
        if calm:
            return calm[-1]
        if len(answers) > self._reruns:
            return next((result for result in reversed(answers) if not result.noise), answers[-1])
        failed = [r for r in found if r.infrastructure and r.place not in self._forgiven]
        return (answers or failed)[-1] if len(failed) > RETRIES else None

    def best_known(self, key: str, repeat: int) -> Result | None:
        """What there is for tables: the answer, or one that may yet be replaced."""
        answer = self.answer(key, repeat)
        if answer is not None:
            return answer
        found = self._of.get((key, "trial", repeat), ())
        return next((result for result in reversed(found) if result.is_result), None)

    def is_disturbed(self, result: Result) -> bool:
        """Whether its block was, in a way that may have changed it."""
        judged = self.judged.get(result.block)
        return judged is not None and judged.flagged

    def lost(self, key: str, repeat: int) -> int:
        """How often who ran it died meanwhile."""
        found = self._of.get((key, "trial", repeat), ())
        return sum(result.outcome is Outcome.LOST for result in found)

    def has_failed(self, key: str, repeat: int) -> bool:
        """Whether something around it has."""
        return any(result.infrastructure for result in self._of.get((key, "trial", repeat), ()))

    def was_disturbed(self, key: str, repeat: int) -> bool:
        """Whether there is an answer that does not count."""
        return any(result.is_result for result in self._of.get((key, "trial", repeat), ()))

    @property
    def judged(self) -> Mapping[int, BlockJudged]:
        """Every block by its number, and whether it was disturbed."""
        if self._judged is None:
            self._judged = {
                number: judged
                for blocks in self._by_sentinel().values()
                for number, judged in judge_blocks(blocks, spread_of(self.results)).items()
            }
        return self._judged

    @property
    def trend(self) -> str:
        """Whether the machine became slower or faster over the study, in words."""
        most = max(self._by_sentinel().values(), key=len, default=[])
        return trend(most)

    @property
    def last_block(self) -> int:
        return max((result.block for result in self.results), default=0)

    @property
    def sentinels(self) -> int:
        """How many were begun."""
        return max((n for (_, role, n) in self._attempts if role == "sentinel"), default=0)

    @property
    def seconds(self) -> float:
        """That all trials took so far."""
        return sum(result.seconds for result in self.results)

    def in_blocks(self) -> dict[int, list[Result]]:
        blocks: dict[int, list[Result]] = defaultdict(list)
        for result in self.results:
            if result.block:
                blocks[result.block].append(result)
        return blocks

    def _by_sentinel(self) -> dict[str, list[BlockSeen]]:
        """The blocks, apart where a design that was edited gave them another sentinel."""
        found: dict[str, list[BlockSeen]] = defaultdict(list)
        for number, results in sorted(self.in_blocks().items()):
            sentinels = [result for result in results if result.role == "sentinel"]
            trained = [result for result in sentinels if result.is_ok and result.throughput]
            seen = BlockSeen(
                number=number,
                sentinel=trained[-1].throughput if trained else None,
                sentinel_failed=not trained and any(r.is_result for r in sentinels),
                noise=tuple(result.noise for result in results),
                trials=sum(result.role == "trial" for result in results),
            )
            found[sentinels[-1].key if sentinels else ""].append(seen)
        return found
