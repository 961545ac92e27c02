"""Steps are written, truncated anywhere, and read."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from stepscope.runs.trial import read_steps
from stepscope.steplog import RECORD, Step, StepLog

NS = st.integers(0, 2**40)


@given(st.lists(st.tuples(st.integers(1, 2**40), NS, NS, NS, NS), max_size=20), st.integers(0, 47))
def test_round_trip_with_a_truncated_record(steps: list[tuple[int, ...]], partial: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "steps0.bin"
        log, end, written = StepLog(path), 0, []
        for number, (length, *parts) in enumerate(steps):
            end += length
            written.append(Step(end, number, *parts))
            log.add(written[-1])
        log.close()
        assert path.stat().st_size == len(written) * RECORD.size
        path.write_bytes(path.read_bytes() + b"\1" * partial)
        assert [Step(*map(int, record)) for record in read_steps(path)] == written


def test_steps_are_written_before_the_end(tmp_path: Path) -> None:
    """A trial that is killed loses a fifth of a second of steps at most."""
    log = StepLog(tmp_path / "steps0.bin")
    log.add(Step(5, 0, 1))
    assert len(read_steps(tmp_path / "steps0.bin")) == 1
