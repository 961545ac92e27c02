"""A run is found by its folder, a file in it, or a folder of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.runs.reader import find_run


@pytest.mark.parametrize(
    "file", ["run.json", "derived/summary.json", "events/4000.bin", "trial/rank0.json"]
)
def test_run_is_found_by_any_of_its_files(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "runs" / "x"
    (folder / file).parent.mkdir(parents=True)
    (folder / "run.json").touch()
    (folder / file).touch()
    assert find_run(folder / file) == folder
    assert find_run(tmp_path / "runs") == folder
