"""One line of a study's ledger: what is known of a trial that is over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from stepscope.analysis.study.records import Level
from stepscope.records import Outcome

Role = Literal["trial", "sentinel"]
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


@dataclass(frozen=True)
class Result:
    """A trial of a study that is over, as far as tables need it."""

    key: str
    """Of its spec."""
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
    """By the keys of `RESPONSES`, and some more: what was not measured is not in it."""
    low: float | None = None
    """Of its throughput, by what was known of the machine then."""
    high: float | None = None
    steady: bool = True
    noise: tuple[str, ...] = ()
    """Who disturbed it, in words."""
    cause: str = ""
    """What held it back: the title of its first finding."""
    machine: str = ""
    """Where it ran: known of merged studies."""

    @property
    def place(self) -> str:
        """Its run folder, in the folder of its study."""
        return place_of(self.key, self.role, self.repeat, self.attempt)

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
        return replace(self, machine=machine)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what is as usual is left out."""
        told: dict[str, Any] = {
            "key": self.key,
            "settings": dict(self.settings),
            "role": self.role,
            "repeat": self.repeat,
            "attempt": self.attempt,
            "block": self.block,
            "outcome": self.outcome.value,
            "began": self.began,
            "seconds": self.seconds,
            "values": dict(self.values),
        }
        for name in ("reason", "infrastructure", "cause"):
            if getattr(self, name):
                told[name] = getattr(self, name)
        for name in ("low", "high"):
            if getattr(self, name) is not None:
                told[name] = getattr(self, name)
        if self.noise:
            told["noise"] = list(self.noise)
        if not self.steady:
            told["steady"] = False
        return told

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> Result:
        """ValueError, KeyError or TypeError where it is none."""
        return cls(
            key=str(told["key"]),
            settings=dict(told["settings"]),
            role="sentinel" if told["role"] == "sentinel" else "trial",
            repeat=int(told["repeat"]),
            attempt=int(told["attempt"]),
            block=int(told["block"]),
            outcome=Outcome(told["outcome"]),
            reason=str(told.get("reason", "")),
            infrastructure=bool(told.get("infrastructure", False)),
            began=float(told["began"]),
            seconds=float(told["seconds"]),
            values=dict(told["values"]),
            low=told.get("low"),
            high=told.get("high"),
            steady=bool(told.get("steady", True)),
            noise=tuple(map(str, told.get("noise", ()))),
            cause=str(told.get("cause", "")),
        )


def place_of(key: str, role: Role, repeat: int, attempt: int) -> str:
    """Where the run folder of a trial is: `3fa0…/r2a1`, of a sentinel `3fa0…/s2a1`."""
    return f"{key}/{'s' if role == 'sentinel' else 'r'}{repeat}a{attempt}"
