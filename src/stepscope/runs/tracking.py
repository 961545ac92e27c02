"""The text that says whether epochs and steps are tracked, from the facts of the import hook."""

from __future__ import annotations

from typing import NamedTuple

from stepscope.records.facts import HookFacts

_KERAS = "Keras fit"
_HOOKED_FRAMEWORKS = ("torch", "keras")


class _Reason(NamedTuple):
    text: str
    hint: str = "Use stepscope.mark() or --epoch-pattern"


_REASONS = {
    "disabled": _Reason("the import hook is disabled", ""),
    "already_running": _Reason("the process was running before monitoring started", ""),
    "reported": _Reason("they come from marks or `--epoch-pattern`", ""),
    "no_python": _Reason("the command started no Python process"),
    "ignores_environment": _Reason(
        "Python was started with -I or -E, which ignores PYTHONPATH",
        "Remove that option, or use stepscope.mark() or --epoch-pattern",
    ),
    "no_site": _Reason(
        "Python was started with -S, which disables `site`",
        "Remove that option, or use stepscope.mark() or --epoch-pattern",
    ),
    "not_loaded": _Reason("Python did not load the import hook from PYTHONPATH"),
    "other_user": _Reason(
        "Python runs as another user, who cannot write to the run folder",
        "Run stepscope as that user, or as root with --out in a directory that is owned by root "
        "and that the user can access",
    ),
    "no_framework": _Reason("neither PyTorch nor Keras was imported"),
    "unsupported_framework": _Reason("the framework is not supported"),
}
"""By `HookFacts.reason`."""


def unsupported_frameworks(hook: HookFacts) -> list[str]:
    """Return the imported frameworks that the import hook cannot track."""
    return [name for name in hook.frameworks if name not in _HOOKED_FRAMEWORKS]


def reason_text(reason: str) -> str:
    """Return why epochs and steps are not tracked, or an empty text for an unknown reason."""
    if reason == "reported":
        return "no step was marked"
    return _REASONS[reason].text if reason in _REASONS else ""


def tracking_text(hook: HookFacts) -> str:
    """Return whether epochs and steps are tracked and by what, or why not and what to do."""
    if hook.attached:
        torch = " and ".join(name for name in hook.attached if name != _KERAS)
        by = [f"PyTorch {torch}"] if torch else []
        by += [_KERAS] if _KERAS in hook.attached else []
        return f"tracking epochs and steps ({', '.join(by)})"
    if hook.reason not in _REASONS:
        return ""
    text, hint = _REASONS[hook.reason]
    if hook.reason == "unsupported_framework" and (names := unsupported_frameworks(hook)):
        text = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not supported"
    if hook.other_run:
        hint = f"They are recorded in {hook.other_run}"
    text = f"not tracking epochs and steps automatically: {text}"
    return f"{text}. {hint}" if hint else text
