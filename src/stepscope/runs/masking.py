"""Masks what looks like a credential before it is written anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MASK = "***"

_SECRET_NAME = re.compile(
    r"(?i)(?:^|[^a-z])(?:[a-z0-9]*[_-])*"
    r"(?:pass(?:word|wd|phrase)?|pwd|secrets?|tokens?|credentials?|auth|authorization|bearer|cookie|"
    r"api[_-]?key|access[_-]?key|private[_-]?key|secret[_-]?key|encryption[_-]?key|apikey|key)$"
)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{10,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{15,}"
    r"|sk-[\w-]{16,}|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}"
    r"|ey[JK][\w-]{10,}\.[\w-]{5,}\.[\w-]*|[0-9a-f]{40})\b"
)
_URL_PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)
_ASSIGNMENT = re.compile(r"([\w.-]+)(\s*[=:]\s*)(\S+)")
_BEARER = re.compile(r"(?i)\b(bearer|basic|token)\s+[\w.~+/=-]{8,}")


def is_secret_name(name: str) -> bool:
    """Whether a variable or an option of this name holds something that must not be kept."""
    return _SECRET_NAME.search(name.lstrip("-").replace(".", "_")) is not None


def mask_text(text: str) -> str:
    """Mask passwords in URLs, tokens known by their shape, and values given to secret names."""
    text = _URL_PASSWORD.sub(rf"\1{MASK}@", text)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    text = _ASSIGNMENT.sub(_mask_assignment, text)
    return _SHAPES.sub(MASK, text)


def _mask_assignment(match: re.Match[str]) -> str:
    name, sign, value = match.groups()
    return f"{name}{sign}{MASK}" if is_secret_name(name) and value != MASK else match[0]


def mask_command(command: Iterable[str]) -> list[str]:
    """A command line without its credentials: `--token X` and `--token=X` alike."""
    masked: list[str] = []
    hide_next = False
    for word in command:
        if hide_next and not word.startswith("-"):
            masked.append(MASK)
            hide_next = False
            continue
        hide_next = word.startswith("-") and "=" not in word and is_secret_name(word)
        masked.append(mask_text(word))
    return masked


def mask_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with the values of secret names, and secrets within values, masked."""
    return {
        name: MASK if is_secret_name(name) else mask_text(value)
        for name, value in environment.items()
    }
