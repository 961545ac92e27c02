"""The text about the import hook."""

from __future__ import annotations

import pytest

from stepscope.records.facts import HookFacts
from stepscope.runs.tracking import reason_text, tracking_text

MARK_HINT = "Use stepscope.mark() or --epoch-pattern"


@pytest.mark.parametrize(
    ("attached", "source"),
    [
        (("DataLoader", "optimizer"), "PyTorch DataLoader and optimizer"),
        (("optimizer",), "PyTorch optimizer"),
        (("Keras fit",), "Keras fit"),
        (("DataLoader", "Keras fit", "optimizer"), "PyTorch DataLoader and optimizer, Keras fit"),
    ],
)
def test_attached(attached: tuple[str, ...], source: str) -> None:
    hook = HookFacts(enabled=True, attached=attached)
    assert tracking_text(hook) == f"tracking epochs and steps ({source})"


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (HookFacts(reason="disabled"), "the import hook is disabled"),
        (HookFacts(reason="reported"), "they come from marks or `--epoch-pattern`"),
        (HookFacts(reason="no_framework"), f"neither PyTorch nor Keras was imported. {MARK_HINT}"),
        (
            HookFacts(reason="unsupported_framework", frameworks={"jax": "0.4"}),
            f"jax is not supported. {MARK_HINT}",
        ),
        (
            HookFacts(reason="already_running", other_run="/runs/a"),
            "the process was running before monitoring started. They are recorded in /runs/a",
        ),
    ],
)
def test_not_attached(hook: HookFacts, text: str) -> None:
    assert tracking_text(hook) == f"not tracking epochs and steps automatically: {text}"


@pytest.mark.parametrize("reason", ["", "of a newer version"])
def test_unknown_reason_has_no_text(reason: str) -> None:
    assert tracking_text(HookFacts(reason=reason)) == reason_text(reason) == ""
