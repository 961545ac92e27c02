"""Page cache of real files, as reported by the kernel."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.workloads.datasets.pagecache import evict, resident_share, warm

SIZE = (1 << 20) + 5


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True)
    if kind.stdout.strip() in ("tmpfs", "ramfs"):
        pytest.skip("this file system is in memory")
    paths = [tmp_path / str(number) for number in range(3)]
    for path in paths:
        path.write_bytes(os.urandom(SIZE))
    return paths


def test_files_can_be_evicted_and_read_back(files: list[Path]) -> None:
    assert resident_share(files) == 1.0
    evict(files)
    assert resident_share(files) == 0.0
    warm(files[:1])
    assert resident_share(files[:1]) == 1.0
    assert resident_share(files) == pytest.approx(1 / 3)
    warm(files)
    assert resident_share(files) == 1.0


def test_empty_files_do_not_count(tmp_path: Path, files: list[Path]) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert resident_share([tmp_path / "empty"]) is None
    assert resident_share([]) is None
    assert resident_share([tmp_path / "empty", *files]) == 1.0
    warm([tmp_path / "empty"])
    evict([tmp_path / "empty"])


@pytest.fixture
def in_memory() -> Iterator[Path]:
    path = Path(f"/dev/shm/stepscope-test-pagecache-{os.getpid()}")
    if not os.access(path.parent, os.W_OK):
        pytest.skip("/dev/shm is not writable")
    path.write_bytes(bytes(SIZE))
    yield path
    path.unlink()


def test_files_in_memory_cannot_be_evicted(in_memory: Path) -> None:
    evict([in_memory])
    assert resident_share([in_memory]) == 1.0


def test_files_of_other_users_are_unknown() -> None:
    """The kernel would report all their pages as resident."""
    if os.geteuid() != 0:
        pytest.skip("changing the user needs root")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mine")
        path.write_bytes(bytes(SIZE))
        path.parent.chmod(0o755)
        path.chmod(0o644)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setuid(65534)
                code = 0 if resident_share([path]) is None else 1
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
