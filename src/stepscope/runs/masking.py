"""Mask credentials before anything is stored.

A value is masked because of its name (`--api-key X`, `WANDB_API_KEY=X`, `{"token": "X"}`) or its
format (`hf_…`, a password in a URL). In doubt it is masked, but common options of training commands
stay readable: `--tokenizer gpt2`, `--max-tokens 512`, `--image-key jpg`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MASK = "***"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_STRONG = _set("password passwords passwd passphrase pwd secret secrets credential credentials")
"""Secret anywhere in a name, unless the last word makes it a property or a location."""
_PROPERTIES = _set("file path dir name length type version policy")

_WEAK = _set("pass token tokens key keys auth oauth authorization authentication bearer cookie")
"""Secret at the end of a name, unless the word before it gives it another meaning."""
_COUNTS = _set("num n max min total new nb avg no")
_HARMLESS_BEFORE = {
    "token": _set("pad eos bos unk mask cls sep special image video audio start end"),
    "key": _set(
        "image img video audio text label target input output caption sort primary foreign metric "
        "batch feature column group cache partition public query sample data state"
    ),
}
_JOINED = re.compile(
    r"(?:password|passwd|passphrase|secret|apikey|accesskey|secretkey|privatekey|accountkey"
    r"|authtoken|accesstoken|apitoken|sshpass|dbpass)$"
)
_NUMBER = re.compile(r"[\d_.,]+(?:[eE][+-]?\d+)?[kKmMgGbBtT]?")
_PLURALS = _set("tokens keys")
_SWITCH = _set("true false none null yes no on off 0 1")

_TOKEN_FORMATS = re.compile(
    r"(?<![A-Za-z0-9])"
    r"(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{15,}"
    r"|sk-(?=[\w-]{0,200}\d)[\w-]{16,}|nvapi-[\w-]{20,}|wandb_v\d_\w{20,}|r8_[A-Za-z0-9]{30,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}"
    r"|ey[JK][\w-]{10,1000}\.[\w-]{5,}(?:\.[\w-]*)?|[0-9a-f]{40})(?![A-Za-z0-9])"
)
"""Bounded repetitions keep the time linear in the length of the text."""
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
    """Return whether a variable or an option with this name contains a credential."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words:
        return False
    *before, last = words
    if _JOINED.search(last):
        return True
    if not _STRONG.isdisjoint(words):
        return last not in _PROPERTIES
    if last not in _WEAK:
        return False
    qualifier = before[-1] if before else ""
    harmless = _HARMLESS_BEFORE.get(last.removesuffix("s"), frozenset())
    return qualifier not in _COUNTS and qualifier not in harmless


def mask_text(text: str) -> str:
    """Mask passwords in URLs, tokens of known formats, and values of secret names."""
    text = _PEM.sub(MASK, text)
    text = _URL_USER.sub(rf"\1{MASK}@", text)
    text = _URL_SIGNATURE.sub(rf"\1{MASK}", text)
    text = _mask_assignments(text)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    return _TOKEN_FORMATS.sub(MASK, text)


def mask_command(command: Iterable[str]) -> list[str]:
    """Mask the credentials of a command line, both `--token X` and `--token=X`."""
    masked: list[str] = []
    option = ""
    for word in command:
        name, sign, value = word.partition("=")
        # A long word after a single dash is probably a random token that starts with a dash.
        is_option = word.startswith("--") or (word.startswith("-") and len(word) <= 3)
        if option and not is_option:
            masked.append(MASK if _is_secret(option, word) else mask_text(word))
        elif sign and re.fullmatch(r"[-+~]*[\w./-]+", name) and _is_secret(name, value):
            # The value is the rest of the word, including spaces and quotes.
            masked.append(f"{name}={MASK}")
        else:
            masked.append(mask_text(word))
        option = word if word.startswith("-") and not sign and is_secret_name(word) else ""
    return masked


def mask_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Mask the values of variables with secret names, and secrets inside of other values."""
    return {
        name: MASK if _is_secret(name, value) else mask_text(value)
        for name, value in environment.items()
    }


def _mask_assignments(text: str) -> str:
    """Mask values of secret names everywhere, also inside of the value of another name."""
    parts: list[str] = []
    done = 0
    for name in _NAME.finditer(text):
        value = _VALUE.match(text, name.end())
        if name.start() < done or value is None or not _is_secret(name[1], value[0]):
            continue
        quote = value[0][0] if value[0][0] in "\"'" else ""
        parts += (text[done : name.end()], quote, MASK, quote)
        done = value.end()
    return "".join((*parts, text[done:]))


def _is_secret(name: str, value: str) -> bool:
    """Return whether this value of this name must be masked.

    A boolean is not a secret, and a plural with a number is a count (`tokens=4e9`).
    """
    value = value.strip("\"'")
    if not is_secret_name(name) or value in ("", MASK):
        return False
    words = [word.lower() for word in _WORDS.findall(name)]
    if not _STRONG.isdisjoint(words):
        return True
    is_count = words[-1] in _PLURALS and _NUMBER.fullmatch(value.rstrip(",;)}]"))
    return not is_count and value.lower() not in _SWITCH
