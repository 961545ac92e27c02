"""Records the trial and the study that `tests/attack/fuzz.py` damages.

.venv/bin/python tests/data/folders/record.py      takes about 10 s

A seed of the fuzzer stands for the same damage on every machine, so it cannot use new folders.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from conftest import STEPSCOPE, trial_environment  # noqa: E402
from studies import design, planted_environment, study  # noqa: E402

TRIAL = ["cnn", "--steps", "20", "--batch-size", "8", "--data", "random", "--samples", "200"]
TRIAL += ["--workers", "1", "--ranks", "2", "--profile"]
DESIGN = "factors: {batch_size: [16, 64], workers: [0, 2]}\nskip: [workers > 4]\nrepeats: 2\n"
PLANTED = {
    "formula": "10 * batch_size * exp(noise / 50)",
    "oom": "batch_size == 64 and workers == 2",
}
OF_THIS_MACHINE = {
    rb'/sys/fs/cgroup/[^" ]*': b"/sys/fs/cgroup",
    rb'"boot_id": "[^"]*"': b'"boot_id": "recorded"',
    rb'"variables": \{[^}]*\}': b'"variables": {"OMP_NUM_THREADS": "2"}',
}


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        trial = [*STEPSCOPE, "trial", *TRIAL, "--out", place + "/runs"]
        subprocess.run(trial, env=trial_environment(folder), check=True)
        (run,) = (folder / "runs").iterdir()
        archive(run, HERE / "two_ranks.tar.xz")
        env = planted_environment(folder, memory=1e9, **PLANTED)
        study("run", design(folder, DESIGN), "--out", folder, env=env, check=True)
        archive(folder / "planted", HERE / "study.tar.xz")


def archive(folder: Path, target: Path) -> None:
    places = (folder.parent, HERE.parents[2], Path(sys.prefix))
    with tarfile.open(target, "w:xz", preset=9) as packed:
        for path in sorted(folder.rglob("*")):
            # Traces and reports are large, and never read.
            if path.is_file() and path.suffix != ".gz" and path.parent.name != "derived":
                data = path.read_bytes()
                if path.suffix in (".json", ".jsonl", ".claim", ".lock", ".log", ".yaml"):
                    for place in places:
                        data = data.replace(str(place).encode(), b"/home/user")
                    for pattern, text in OF_THIS_MACHINE.items():
                        data = re.sub(pattern, text, data)
                entry = tarfile.TarInfo(str(path.relative_to(folder)))
                entry.size = len(data)
                packed.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    main()
