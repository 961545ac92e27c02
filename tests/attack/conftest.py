"""Fixtures of the attacks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from attack_runs import kill_started


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    kill_started()
