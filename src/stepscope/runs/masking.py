"""Masks what looks like a credential before it is written anywhere.

A value is hidden for the name it is given to (`--api-key X`, `WANDB_API_KEY=X`, `{"token": "X"}`)
or for its own shape (`hf_…`, a password in a URL). In doubt it is hidden, but what a training
command is full of stays readable: `--tokenizer gpt2`, `--max-tokens 512`, `--image-key jpg`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MASK = "***"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_STRONG = _set("password passwords passwd passphrase pwd secret secrets credential credentials")
"""Secret wherever they stand in a name, unless it only says where to find it."""
_WHEREABOUTS = _set("file path dir name length type version policy")

_WEAK = _set("pass token tokens key keys auth oauth authorization authentication bearer cookie")
"""Secret at the end of a name, unless the word before makes them something else."""
_COUNTS = _set("num n max min total new nb avg no")
_HARMLESS_BEFORE = {
    "token": _set("pad eos bos unk mask cls sep special image video audio start end"),
    "key": _set(
        "image img video audio text label target input output caption sort primary foreign metric "
        "batch feature column group cache partition public query sample data state"
    ),
}
_GLUED = re.compile(
    r"(?:password|passwd|passphrase|secret|apikey|accesskey|secretkey|privatekey|accountkey"
    r"|authtoken|accesstoken|apitoken|sshpass|dbpass)$"
)
_NUMBER = re.compile(r"[\d_.,]+(?:[eE][+-]?\d+)?[kKmMgGbBtT]?")
_PLURALS = _set("tokens keys")
_SWITCH = _set("true false none null yes no on off 0 1")

_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])"
    r"(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{15,}"
    r"|sk-(?=[\w-]{0,200}\d)[\w-]{16,}|nvapi-[\w-]{20,}|wandb_v\d_\w{20,}|r8_[A-Za-z0-9]{30,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}"
    r"|ey[JK][\w-]{10,1000}\.[\w-]{5,}(?:\.[\w-]*)?|[0-9a-f]{40})(?![A-Za-z0-9])"
)
"""Bounds where there are any keep the time linear in the length of the text."""
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)", re.DOTALL)
_URL_USER = re.compile(r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]*://)[^/\s]+@", re.IGNORECASE)
_URL_SIGNATURE = re.compile(r"([?&](?:[\w-]*-)?(?:sig|signature)=)[^&\s\"']+", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer)[ \t]+[\w.~+/=-]{8,}", re.IGNORECASE)

_NAME = re.compile(r"(?<![\w.-])([\w.-]+)(?:\\?[\"'])?\]?[ \t]*(?::=|=>|==|[=:])[ \t]*")
_VALUE = re.compile(
    r"\"(?:[^\"\\]|\\.)*\"?|'(?:[^'\\]|\\.)*'?|(?:(?:bearer|basic|digest|token)[ \t]+)?\S+",
    re.IGNORECASE | re.DOTALL,
)


def is_secret_name(name: str) -> bool:
    """Whether a variable or an option of this name holds something that must not be kept."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words:
        return False
    *before, last = words
    if _GLUED.search(last):
        return True
    if not _STRONG.isdisjoint(words):
        return last not in _WHEREABOUTS
    if last not in _WEAK:
        return False
    qualifier = before[-1] if before else ""
    harmless = _HARMLESS_BEFORE.get(last.removesuffix("s"), frozenset())
    return qualifier not in _COUNTS and qualifier not in harmless


def mask_text(text: str) -> str:
    """Mask passwords in URLs, tokens known by their shape, and values given to secret names."""
    text = _PEM.sub(MASK, text)
    text = _URL_USER.sub(rf"\1{MASK}@", text)
    text = _URL_SIGNATURE.sub(rf"\1{MASK}", text)
    text = _mask_assignments(text)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    return _SHAPES.sub(MASK, text)


def mask_command(command: Iterable[str]) -> list[str]:
    """A command line without its credentials: `--token X` and `--token=X` alike."""
    masked: list[str] = []
    option = ""
    for word in command:
        name, sign, value = word.partition("=")
        # A long word behind a single dash is rather a random token that happens to begin with it.
        is_option = word.startswith("--") or (word.startswith("-") and len(word) <= 3)
        if option and not is_option:
            masked.append(MASK if _hides(option, word) else mask_text(word))
        elif sign and re.fullmatch(r"[-+~]*[\w./-]+", name) and _hides(name, value):
            # The word ends where the value ends, whatever blanks or quotes it contains.
            masked.append(f"{name}={MASK}")
        else:
            masked.append(mask_text(word))
        option = word if word.startswith("-") and not sign and is_secret_name(word) else ""
    return masked


def mask_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with the values of secret names, and secrets within values, masked."""
    return {
        name: MASK if _hides(name, value) else mask_text(value)
        for name, value in environment.items()
    }


def _mask_assignments(text: str) -> str:
    """Names are looked for everywhere, also in the value given to another, harmless name."""
    parts: list[str] = []
    done = 0
    for name in _NAME.finditer(text):
        value = _VALUE.match(text, name.end())
        if name.start() < done or value is None or not _hides(name[1], value[0]):
            continue
        quote = value[0][0] if value[0][0] in "\"'" else ""
        parts += (text[done : name.end()], quote, MASK, quote)
        done = value.end()
    return "".join((*parts, text[done:]))


def _hides(name: str, value: str) -> bool:
    """Whether this value of this name must not be kept.

    A switch says nothing, and a plural with a number is a count (`tokens=4e9`).
    """
    value = value.strip("\"'")
    if not is_secret_name(name) or value in ("", MASK):
        return False
    words = [word.lower() for word in _WORDS.findall(name)]
    if not _STRONG.isdisjoint(words):
        return True
    is_count = words[-1] in _PLURALS and _NUMBER.fullmatch(value.rstrip(",;)}]"))
    return not is_count and value.lower() not in _SWITCH
