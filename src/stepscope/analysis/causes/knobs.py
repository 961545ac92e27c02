"""Advice on a trial, in the words of its command: a trial has options, not lines of code."""

from __future__ import annotations

import re
from dataclasses import replace

from stepscope.records import Advice, Finding, Verdict

_OPTIONS = (
    (r"num_workers=(\d+)", r"--workers \1"),
    (r"batch_size=(\d+)", r"--batch-size \1"),
    (r"prefetch_factor=(\d+)", r"--prefetch \1"),
    (r"pin_memory=True", "--pin"),
    (r"persistent_workers=True", "--persistent"),
    (r'torch\.set_float32_matmul_precision\("high"\)', "--precision tf32"),
    (r".*torch\.autocast\(.*bfloat16\).*", "--precision bf16"),
    (r"model = torch\.compile\(.*\)", "--compile"),
)


def in_options(verdict: Verdict) -> Verdict:
    """The same verdict with what a user of `stepscope trial` can change."""
    return replace(verdict, findings=tuple(_finding(each) for each in verdict.findings))


def _finding(found: Finding) -> Finding:
    return replace(found, advice=tuple(_advice(each) for each in found.advice))


def _advice(advice: Advice) -> Advice:
    for pattern, option in _OPTIONS:
        match = re.fullmatch(pattern, advice.change)
        if match:
            return Advice(match.expand(option), advice.why)
    return advice
