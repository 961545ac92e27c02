"""Credentials in the forms in which they occur in practice, and values that resemble them.

`first`, `second` and `third` were used to develop the masking; `held_out` and `fourth` were not.
Each list was written by somebody who did not know the code. A character breaks up the credentials
in the files, so that secret scanners do not report them.
"""

from __future__ import annotations

import json
import os
import random
import string
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import STEPSCOPE
from stepscope.inject.masking import mask_command, mask_environment, mask_text
from stepscope.runs.events import read_folder

LISTS = Path(__file__).parent / "secrets"
HELD_OUT = ("held_out", "fourth")


def read_list(name: str) -> list[dict[str, Any]]:
    text = (LISTS / f"{name}.jsonl").read_text(encoding="utf-8").replace("¦", "")
    return [json.loads(line) for line in text.splitlines()]


def masked(entry: dict[str, Any]) -> str:
    if "command" in entry:
        return "\n".join(mask_command(entry["command"]))
    if "environment" in entry:
        return "\n".join(mask_environment(entry["environment"]).values())
    return mask_text(entry["text"])


@pytest.mark.parametrize(
    ("name", "least_masked", "most_harmless_masked"),
    [
        ("first", 120, 0),
        ("second", 144, 0),
        ("third", 109, 5),
        ("held_out", 74, 1),
        ("fourth", 114, 1),
    ],
)
def test_share_of_masked_forms(name: str, least_masked: int, most_harmless_masked: int) -> None:
    entries = read_list(name)
    secret = [entry for entry in entries if "hidden" in entry]
    leaked = [e["form"] for e in secret if any(each in masked(e) for each in e["hidden"])]
    lost = [
        e["form"] for e in entries if "kept" in e and any(k not in masked(e) for k in e["kept"])
    ]
    if name in HELD_OUT:  # the next fix must not be made for these forms
        leaked, lost = ["not shown"] * len(leaked), ["not shown"] * len(lost)
    assert len(secret) - len(leaked) >= least_masked, leaked
    assert len(lost) <= most_harmless_masked, lost


def words(kind: str) -> list[str]:
    """Return about 1 MB of arguments."""
    chance = random.Random(1)
    if kind == "paths":
        return [f"/data/train/n{chance.randrange(10**8)}/img_{i}.jpg" for i in range(27_000)]
    if kind == "options":
        letters = string.ascii_letters + string.digits
        return [
            word
            for i in range(42_000)
            for word in (f"--param-{i}", "".join(chance.choices(letters, k=8)))
        ]
    if kind == "json":
        layers = (f'"layer_{i}": {{"lr": {i}e-5, "name": "block{i}"}}' for i in range(20_000))
        return ["{" + ", ".join(layers) + "}"]
    return [kind * (1_000_000 // len(kind))]


def seconds(arguments: list[str]) -> float:
    begin = time.process_time()
    mask_command(arguments)
    return time.process_time() - begin


@pytest.mark.quiet
@pytest.mark.parametrize("kind", ["paths", "options", "json", "a"])
def test_a_megabyte_of_arguments_takes_less_than_50_ms(kind: str) -> None:
    """With a credential in each second word, it takes 0.2 s."""
    arguments = words(kind)
    assert min(seconds(arguments) for _ in range(5)) < 0.05


UNITS = [
    "key=",
    "token",
    "://",
    "password='",
    "cookie: a; ",
    "sk-",
    "eyJ-",
    "curl -u ",
    "echo a | ",
]
UNITS += [
    "password a ",
    "mysql ",
    "token=\\",
    "a.key_",
    "login('",
    ";a=",
    '"key": "',
    "pass:",
    "\\",
    "<",
    "password={abc1234x, ",
]


@pytest.mark.parametrize("unit", UNITS)
def test_time_is_proportional_to_the_length(unit: str) -> None:
    short, long = [unit * (25_000 // len(unit))], [unit * (200_000 // len(unit))]
    least = min(seconds(short) for _ in range(3))
    assert min(seconds(long) for _ in range(3)) < 8 * 2.5 * max(least, 0.001)


TRAINING = """
import stepscope
from torch.utils.data import DataLoader
loader = DataLoader(list(range(8)), batch_size=1 if "password=SECRET" else 2)
stepscope.mark("api_key=SECRET")
stepscope.mark("note", "token=SECRET")
stepscope.mark("password", "SECRET")
for batch in loader:
    pass
"""


def test_no_credential_reaches_the_run_folder(tmp_path: Path, python_file: Any) -> None:
    """Of the command, the environment, the name, the folder, source lines, marks and errors."""
    secret = "q8Zr2mXw51LkhT4nV0pGq"
    script = python_file(TRAINING.replace("SECRET", secret))
    command = [sys.executable, script, "--api-key", secret, f"https://me:{secret}@host/x"]
    subprocess.run(
        [*STEPSCOPE, "run", "-q", "--name", f"hf_{secret}x", "--out", tmp_path / "runs"]
        + ["--", *command],
        env={**os.environ, "WANDB_API_KEY": secret, "NCCL_X": f"token={secret}"},
        check=True,
        timeout=100,
    )
    (folder,) = (tmp_path / "runs").iterdir()
    assert secret not in folder.name
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
    # The records of a text are not contiguous.
    texts = [text for process in read_folder(folder / "events") for text in process.names.values()]
    assert {"api_key=***", "token=***"} < set(texts)
    assert any('batch_size=1 if "password=***" else 2' in text for text in texts)
    assert [text for text in texts if secret in text] == []
