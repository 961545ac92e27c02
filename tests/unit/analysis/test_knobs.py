"""What is advised on a trial can be typed: every option is one that `stepscope trial` has."""

from __future__ import annotations

import dataclasses

import pytest

from stepscope.analysis.causes.knobs import in_options
from stepscope.records import Advice, Finding, Verdict
from stepscope.workloads.spec import Workload


def advised(change: str) -> Advice:
    found = Finding("x", "x", "x", "high", "x", None, advice=(Advice(change, "w", "t.py:1", "l"),))
    return in_options(Verdict((found,), None, "", 0, 1)).first.advice[0]


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ("num_workers=12", "--workers 12"),
        ("batch_size=64", "--batch-size 64"),
        ("prefetch_factor=4", "--prefetch 4"),
        ("pin_memory=True", "--pin"),
        ("persistent_workers=True", "--persistent"),
        ('torch.set_float32_matmul_precision("high")', "--precision tf32"),
        ("with torch.autocast('cuda', dtype=torch.bfloat16):", "--precision bf16"),
        ('model = torch.compile(model, mode="reduce-overhead")', "--compile"),
    ],
)
def test_code_becomes_an_option(change: str, option: str) -> None:
    advice = advised(change)
    assert advice == Advice(option, "w")
    knob = option.split(maxsplit=1)[0].removeprefix("--").replace("-", "_")
    assert knob in {field.name for field in dataclasses.fields(Workload)}


def test_what_is_no_option_stays_as_it_is() -> None:
    assert advised("save less often") == Advice("save less often", "w", "t.py:1", "l")
