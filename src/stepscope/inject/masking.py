"""Mask credentials before anything is stored.

A credential is found in three ways, all listed in the tables below:

- by its name: `--api-key X`, `WANDB_API_KEY=X`, `{"token": "X"}`, `aws configure set secret_key X`
- by its format: `hf_…`, a password in a URL, a private key, a webhook
- by the program that receives it: `sshpass -p X`, `curl -u user:X`

In doubt it is masked, but common options of training commands stay readable: `--tokenizer gpt2`,
`--stop-token </s>`, `--sort-key name`. One search finds the places to examine, and each is examined
once, so the time is proportional to the length of the text.

The monitor and the monitored processes use it. Standard library only, for Python 3.7 and later.
"""

from __future__ import annotations

import re
from functools import lru_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any, Literal

MASK = "***"

# Names

_NO, _IF_RANDOM, _UNLESS_PLAIN, _ALWAYS = range(4)
"""How likely the value of a name is a secret."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_STRONG = _set(
    "password passwords passwd passphrase passcode pwd pw pswd secret secrets credential "
    "credentials creds apikey authtoken htpasswd authorization bearer otp totp cookie cookies "
    "passwort kennwort passe contrasena senha wachtwoord"
)
"""A value with such a word in its name is a secret."""
_MEDIUM = _set("pass auth oauth authentication pat tkn jwt sig signature pin psk")
"""A value with such a word in its name is a secret unless it is a plain word or number."""
_WEAK = _set("token tokens key keys session sessionid sid csrf hmac salt webhook sas dsn")
"""A value with such a word in its name is a secret if it looks random."""
_STRONG_PAIRS = {
    "key": _set(
        "api access secret private account auth signing encryption master shared storage admin "
        "app application service license project write read user client server root deploy ssh gpg"
    ),
    "token": _set(
        "api access auth oauth refresh session bearer bot hub hf github gitlab personal user "
        "security deploy ci registry admin service account client write read upload project app "
        "login identity csrf jwt vault slack discord telegram huggingface hugging hook"
    ),
}
"""Words that make a weak last word strong."""
_JOINED = re.compile(
    r"(?:password|passwd|passphrase|secret|apikey|accesskey|secretkey|privatekey|accountkey"
    r"|authkey|authtoken|accesstoken|apitoken|refreshtoken)$"
)
_NOT_PASSWORDS = _set("pass bypass compass encompass overpass surpass trespass underpass")
_PROPERTIES = _set(
    "file files path paths dir folder name names length len type version policy env var variable "
    "url uri endpoint host port count size num index idx rate ratio prob dim dims ttl timeout "
    "expiry expires expiration format algorithm alg method mode class field column header headers "
    "prefix suffix required enabled hint manager store arn alias backend provider ref strength "
    "regex pattern rule rules prompt stdin min max minimum maximum sock socket santa command"
)
"""As the last word of a name: not the secret itself."""
_HARMLESS_BEFORE = {
    "token": _set(
        "pad eos bos unk mask cls sep special image video audio start end stop begin max min num "
        "per first last next new extra prompt input output"
    ),
    "pass": _set("num n max min first second forward backward by single multi one two per render"),
    "key": _set(
        "image img video audio text label target input output caption sort primary foreign metric "
        "batch feature column group cache partition public query sample data state by dict map host"
    ),
}
"""Words that give a weak last word another meaning."""

# Values

_NOT_VALUES = _set("true false none null nil yes no on off 0 1 undefined optional required")
_REFERENCE = re.compile(
    r"\$\{[^}]*\}?|\$\(.*|\$[A-Z_][A-Z0-9_]*|%[A-Z_][A-Z0-9_]*%|\{\{.*|<[a-z][a-z _-]*>"
    r"|(?:op|vault|secret|arn|env|file):.*|id=\w+,.*"
    r"|\$?\{?(?:os|self|args|cfg|config|opts?|settings|secrets|env|getpass|keyring|process\.env"
    r"|var|data|module|local)"
    r"\b[.\[].*|(?:getenv|getpass|input|lambda|str|Optional)\b.*|[A-Za-z_][\w.]*\(.*",
    re.DOTALL,
)
"""A variable, an expression of a program or a placeholder, not the value itself."""
_CHOSEN = re.compile(r"(?=.*[A-Za-z])(?=.*[0-9!@#$%^&*+:~?])[^\s()\[\]/<>,]+")
"""A password that a person chose: not a plain word."""
_SEPARATORS = re.compile(r"[._/-]")
_PATH = re.compile(r"(?:~|\.{1,2})?/(?:[\w.@+-]+/?)+|[A-Za-z]:\\.*")


def looks_random(value: str) -> bool:
    """Return whether a part of a text, such as `q8Zr2mXw51` in `run-q8Zr2mXw51`, alternates between
    kinds of characters as random tokens do and words, numbers and versions do not."""
    if any(character in value for character in " \t\n()"):
        return False
    return any(_alternates(part) for part in _SEPARATORS.split(value) if len(part) >= 8)


def _alternates(text: str) -> bool:
    kinds = [
        "d" if character.isdigit() else "u" if character.isupper() else "l"
        for character in text
        if character.isalnum()
    ]
    pairs = list(zip(kinds, kinds[1:]))  # noqa: B905 (strict is new in Python 3.10)
    changes = sum(a != b for a, b in pairs)
    capitals = pairs.count(("u", "l"))  # a capital letter begins a word
    return changes - capitals >= 3 or (len(text) >= 20 and changes >= 5)


@lru_cache(maxsize=4096)
def _strength(name: str) -> int:
    """Return whether the value of this name is a secret: `_ALWAYS`, `_UNLESS_PLAIN` (a plain word
    or number), `_IF_RANDOM` or `_NO`."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words:
        return _NO
    *before, last = words
    qualifier = before[-1] if before else ""
    if last in _PROPERTIES or (last in ("id", "ids") and qualifier != "secret"):
        return _NO
    if last in _STRONG or _JOINED.search("".join(words)):
        return _ALWAYS
    if last.endswith("pass") and last not in _NOT_PASSWORDS:  # SSHPASS, requirepass
        return _ALWAYS
    singular = last[:-1] if last in ("tokens", "keys") else last
    if qualifier in _HARMLESS_BEFORE.get(singular, ()):
        return _NO
    if (last == "token" and not before) or (last == "pass" and before):
        return _ALWAYS
    if qualifier in _STRONG_PAIRS.get(singular, ()):
        return _ALWAYS
    if not _STRONG.isdisjoint(words) or not _MEDIUM.isdisjoint(words):
        return _UNLESS_PLAIN
    return _NO if _WEAK.isdisjoint(words) else _IF_RANDOM


def _is_secret(name: str, value: str) -> bool:
    """Return whether this value of this name must be masked."""
    strength = _strength(name)
    value = value.strip("\"'`").rstrip(",;)}]")
    if not strength or not value or value.lower() in _NOT_VALUES or value.strip("*.") == "":
        return False
    if _REFERENCE.fullmatch(value) and not looks_random(value):
        return False
    if value.lower() == name.lower().lstrip("-") or (name.lower() == "pwd" and value[0] in "/~"):
        return False
    if strength < _ALWAYS and (_PATH.fullmatch(value) or not looks_random(value)):
        return strength == _UNLESS_PLAIN and len(value) >= 6 and bool(_CHOSEN.fullmatch(value))
    # A special token of a tokenizer; a path to the secret.
    is_short = value[0] in "<[" and len(value) <= 12
    return not is_short and (not _PATH.fullmatch(value) or looks_random(value))


# Formats

_FORMATS = {
    "[A-Za-z0-9]{10,}": "pk_live_ rk_live_ sk_live_ sk_test_ rk_test_",
    "[A-Za-z0-9]{20,}": "hf_ api_org_ gho_ ghp_ ghr_ ghs_ ghu_ lin_api_ rnd_ akcp whsec_",
    "[A-Z0-9]{16}": "akia asia abia acca",
    "[A-Z0-9]{30,}": "age-secret-key-1",
    "[0-9a-f]{40,}": "doo_v1_ dop_v1_ dor_v1_ pul- sbp_ rubygems_",
    "[0-9a-fA-F]{32}": "shpat_ shpca_ shppa_ shpss_",
    r"[0-9a-f]{32}(?:-\d)?": "dapi",
    "[0-9a-f]{20,}-[0-9a-f]{30,}": "pmak-",
    r"\w{20,}": "jfrt@",
    r"\d_\w{20,}": "wandb_v",
    r"[\w-]{10,}": "xoxa- xoxb- xoxe- xoxo- xoxp- xoxr- xoxs-",
    r"[\w-]{20,}": "dckr_oat_ dckr_pat_ figd_ nvapi- github_pat_ hvb. hvr. hvs. ya29.",
    r"[\w-]{30,}": "r8_ gsk_ pplx- xai- npm_ phc_ tgp_v1_ aiza 1//0 pypi-",
    r"[\w=-]{20,}": "atatt atbb atctt gocspx- xapp- nrak-",
    r"[\w.-]{20,}": "dp.ct. dp.pt. dp.sa. dp.st.",
    r"[\w=+/-]{20,}": "sntrys_ sntryu_ sq0atp- sq0csp-",
    r"[\w.+/=-]{15,}": "gldt- glpat- glptt- glrt- glsa_ glc_",
    r"[\w.+/-]{24,}": "pcsk_ bkua_ bkct_ jina_ tvly- lsv2_ csk- fw_ rpa_ napi_ nfp_ vercel_ sgp_ "
    "pscale_ hrku- rzp_live_ cfpat- tfp_ sl. dt0c01. squ_ sqp_ absk apify_api_ fm2_ clojars_ pnu_ "
    "pat-eu1- pat-na1- xkeysib- ccipat_ xoxc- xoxd- shippo_ ntn_ tskey-",
    r"[\w-]{10,400}\.[\w-]{5,}(?:\.[\w-]*)*": "eyj eyk",
    r"(?=[\w-]{0,60}\d)[\w-]{16,}": "sk-",
    r"[\w-]{16,}\.[\w-]{16,}": "sg.",
}
"""The rest and the first characters, in lower case, of tokens of well-known services."""
_TOKENS = {first: rest for rest, firsts in _FORMATS.items() for first in firsts.split()}


@lru_cache(maxsize=None)  # compiling all of them would delay the start of a command
def _token(first: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z0-9])(?i:{re.escape(first)}){_TOKENS[first]}(?![A-Za-z0-9])")


_IN_TEXT = {
    "://": re.compile(r"://([^/\s\0]{1,4000}(?:@[^\s\0?=]{1,400})?)@"),
    '("': re.compile(r"\(\"([\w-]{24,})\""),
    "('": re.compile(r"\('([\w-]{24,})'"),
    "identified by": re.compile(r"(?i:identified by)\s+\W?([^\s'\"\\]{4,})"),
    "securestring": re.compile(r"(?i:securestring)\s+[\"']([^\"']+)"),
    "/t/": re.compile(r"/t/([\w-]{20,})"),  # conda
    "-----begin": re.compile(
        r"(?i:(-----BEGIN [A-Z ]*PRIVATE KEY[^\0]*?(?:-----END [A-Z ]*-----|(?=\0|\Z))))"
    ),
    "basic ": re.compile(r"(?i:basic[ \t]+)([A-Za-z0-9+/=_-]{8,})"),
    "bearer": re.compile(r"(?i:bearer[ \t]+)([\w.~+/=-]{8,})"),
    "/services/t": re.compile(r"(?i:/services/T)([\w/]{20,})"),
    "/hook": re.compile(r"/hooks?/([\w/-]{16,})"),
    "<<<": re.compile(r"<<<\s{0,9}[\"']?([^\s\"'\0]{6,400})"),
    "/webhook": re.compile(r"(?i:/webhook)(?:s|b2)?/([\w@/.-]{16,})"),
    ":aa": re.compile(r"(?<=\d):AA([\w-]{30,})"),  # Telegram
    ".atlasv1.": re.compile(r"\.atlasv1\.([\w=-]{40,})"),
}

_IN_TEXT_IF_RANDOM = ("://", '("', "('", "/t/", "<<<")

# Programs

_GAP = r"[\0 \t]+"
_GIVEN = r"(?P<masked>(?<=\0)[^\0]+|'[^'\0]*'|\"(?:[^\"\\\0]|\\.)*\"|[^\0\s'\"]+)"
_COMMAND_END = re.compile(r"\s[;|]|[;|]\s|&&|\n")


def _option(names: str) -> str:
    """An option with a separate or attached value."""
    return rf"{_GAP}{names}(?:{_GAP}|=)?{_GIVEN}"


def _user_and(separator: str, names: str) -> str:
    """An option with a user and a password."""
    return rf"{_GAP}{names}(?:{_GAP}|=)?['\"]?[^\0\s'\"{separator}]+{separator}{_GIVEN}"


_PIPED = ("echo", "printf")
_INTO_STDIN = rf"{_GAP}(?:-n{_GAP}|['\"]?%s['\"]?{_GAP})?{_GIVEN}\s*\|\s*\w"
"""A password that is piped to another program."""
_LOGIN = _option("-p")
_ATTACHED = rf"{_GAP}-p{_GIVEN}"
_PROGRAMS = {
    trigger: (before, option)
    for trigger, before, option in (
        ("sshpass", "", _option("-p")),
        ("mongo", "", _option("-p")),
        ("twine", "", _option("-p")),
        ("beeline", "", _option("-p")),
        ("login", rf"(?:docker|podman|nerdctl|buildah|skopeo|registry|oc|crane|az){_GAP}", _LOGIN),
        ("cqlsh", "", _option("-p")),
        ("nuget", "", _option("-k")),
        ("unlock", f"bw{_GAP}", rf"{_GAP}(?!-){_GIVEN}"),
        ("put-parameter", "", _option("--value")),
        ("mysql", "", _ATTACHED),
        ("mariadb", "", _ATTACHED),
        ("7z", "", _ATTACHED),
        ("redis-cli", "", _option("-a")),
        ("ldap", "", _option("-[wW]")),
        ("unzip", "", _option("-P")),
        ("sqlcmd", "", _option("-P")),
        ("ipmitool", "", _option("-P")),
        ("ssh-keygen", "", _option("-[NP]")),
        ("curl", "", _user_and(":", "(?:-[a-zA-Z]*[uU]|--user|--proxy-user)")),
        ("http", "", "s?" + _user_and(":", "(?:-a|--auth)")),
        ("smbclient", "", _user_and("%", "(?:-U|--user)")),
        ("lftp", "", _user_and(",", "-u")),
        ("sqlplus", "", rf"{_GAP}[^\0\s/]+/(?P<masked>[^\0\s@]+)"),
        ("freerdp", "[xw]l?", rf"{_GAP}/p:{_GIVEN}"),
        ("wandb", "", rf"{_GAP}login{_GAP}(?:--?[\w-]+{_GAP})*(?!-){_GIVEN}"),
        ("alias", rf"mc{_GAP}", rf"{_GAP}set(?:{_GAP}[^\0\s]+){{3}}{_GAP}{_GIVEN}"),
        ("htpasswd", "", rf"{_GAP}-\w*b\w*(?:{_GAP}[^\0\s]+){{2}}{_GAP}{_GIVEN}"),
        ("rclone", "", rf"{_GAP}obscure{_GAP}{_GIVEN}"),
        ("from-literal", "--", rf"(?:{_GAP}|=)[^\0\s=]+={_GIVEN}"),
        *((name, "", _INTO_STDIN) for name in _PIPED),
    )
}
"""A word of a command line, what precedes it, and the credential that follows."""


@lru_cache(maxsize=None)
def _program(trigger: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    before, option = _PROGRAMS[trigger]
    return re.compile(rf"(?:^|[\0\s/;|&(\"'`])(?:{before})\Z"), re.compile(option)


# The search

_NAMES = _set(
    "pass pwd secret token key auth cred cookie session webhook jwt csrf hmac salt signature "
    "bearer contrasena senha kennwort wachtwoord tkn"
)
_CAPITALS = re.compile("[A-Z]+")
_SHORT_NAMES = [f"{name}{sign}" for name in _set("pw sid pat sig dsn pin psk otp") for sign in "=:"]
"""Names that are a part of many words."""


def _trie(literals: Iterable[str]) -> str:
    """Return a pattern for any of these texts that is fast to search: it branches by letter."""
    by_first: dict[str, list[str]] = {}
    for literal in literals:
        by_first.setdefault(literal[0], []).append(literal[1:])
    branches = []
    for first, rest in by_first.items():
        if len(rest) == 1:
            branches.append(re.escape(first + rest[0]))
        else:  # if one is the start of another, the shorter one is found
            branches.append(re.escape(first) + (f"(?:{_trie(rest)})" if all(rest) else ""))
    return "|".join(branches)


_TRIGGERS = re.compile(_trie([*_NAMES, *_SHORT_NAMES, *_TOKENS, *_IN_TEXT, *_PROGRAMS]))
_ASSIGN = re.compile(
    r"""(?:
        (?:\\*["'])?\]?(?:[ ]\d{1,2})?[ \t\0]*(?::=|=>|==|=|:(?!//)|%3[DdAa])[ \t]*\0?
        (?:[|>][-+]?[ \t]*\n\s*|(?:Some|SecretStr|Secret)\()?
      | [ ](?:PLAIN|LOGIN|XOAUTH2)[ ]
      | (?:\\*["'])?,?\s*(?:\{[^}]{0,200}?)?(?:\\*["'])?(?:value|default)(?:\\*["'])?\s*[:=]\s*
    )""",
    re.VERBOSE | re.IGNORECASE,
)
_PAIR = re.compile(r"""\\*["'][ \t]*,[ \t]*(?=\\*["'])|[ \t]+\|[ \t]+|/""")
"""Between a name and a value that are a pair of texts, or cells of a table."""
_USER_AND = re.compile(r"""[(\[]\s*["'][^"']*["']\s*,\s*(?=["'])""")
_QUOTE = re.compile(r"""[bBrRfFuU]{0,2}(\\*)(["'])""")
_BARE = re.compile(
    r"(?:(?i:bearer|basic|digest|token|negotiate|apikey)[ \t]+)?"
    r"[^\s\0;&|,]*(?:[;&|,](?![\s\0;&|,\"']|$|[\w.$-]{1,64}[=:])[^\s\0;&|,]*)*"
)
"""A value without quotes: up to a space, or a separator before the next name."""
_LINE = re.compile(r"[^\n\0]*")
_IN_BRACES = re.compile(r"\{(?!\{)((?:[^}\0\n]|\}\}){0,400})\}")
_SHELL_TEXT = re.compile(r"\s-|[;&|]\s|\.py\b|&&")
_SPACES = re.compile(r"[\0 \t]+")
_SETS = _set("set modify add config configure login --set -set")
_MAX_NAME = 100
_MAX_COMMAND = 2000
_SHOWN = 80
"""Characters of a value that decide whether it is a secret."""


def mask_text(text: str) -> str:
    """Mask the credentials in a text."""
    return _Text(text).masked()


def mask_command(command: Iterable[str]) -> list[str]:
    """Mask the credentials of a command line."""
    words = [word.replace("\0", " ") for word in command]
    return _Text("\0".join(words), "command").masked().split("\0") if words else []


def mask_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Mask the credentials in the values of variables."""
    text = "\0".join(map("=".join, environment.items()))
    words = _Text(text, "environment").masked().split("\0") if environment else []
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def mask_values(plain: Any, name: str = "") -> Any:
    """Mask the credentials in all texts of JSON values. The key of a text is its name, unless it is
    a word with other meanings such as `key`. A list of texts without a name is a command line."""
    if isinstance(plain, str):
        return MASK if name and _is_secret(name, plain[:_SHOWN]) else mask_text(plain)
    if isinstance(plain, dict):
        return {
            mask_text(key): mask_values(value, key if _strength(key) > _IF_RANDOM else name)
            for key, value in plain.items()
        }
    if isinstance(plain, list):
        if plain and not name and all(isinstance(each, str) for each in plain):
            return mask_command(plain)
        return [mask_values(each, name) for each in plain]
    return plain


class _Text:
    """A text, or words that are separated by null characters."""

    def __init__(self, text: str, kind: Literal["text", "command", "environment"] = "text") -> None:
        self._text = text
        self._kind = kind
        self._has_lines = kind == "text" and "\n" in text
        self._word = 0, -1
        self._is_shell = False
        """Whether the current word is a shell command: its values end at spaces."""
        self._searched: dict[str, int] = {}
        """Up to where the arguments of each program were searched."""

    def masked(self) -> str:
        text = self._text
        # Lower case of other letters may have another length.
        lower = text.lower() if text.isascii() else _CAPITALS.sub(lambda m: m[0].lower(), text)
        parts: list[str] = []
        done = kept_from = 0
        for trigger in _TRIGGERS.finditer(lower):
            if trigger.start() < done:
                continue
            done, span = self._examine(trigger[0], trigger.start(), trigger.end())
            if span is not None and span[1] > span[0] >= kept_from:
                parts += (text[kept_from : span[0]], MASK)
                kept_from = span[1]
                done = max(done, kept_from)
        return "".join((*parts, text[kept_from:]))

    def _examine(self, found: str, begin: int, end: int) -> tuple[int, tuple[int, int] | None]:
        """Return where to continue after a trigger, and the span to mask."""
        text = self._text
        if found in _TOKENS:
            token = _token(found).match(text, begin)
            return (end, None) if token is None else (token.end(), token.span())
        if found in _IN_TEXT:
            match = _IN_TEXT[found].match(text, begin)
            if match is None or (found in _IN_TEXT_IF_RANDOM and not _is_token(match[1][:_SHOWN])):
                return end, None
            return end, match.span(1)
        span = self._given_to_program(found, begin, end) if found in _PROGRAMS else None
        if span:
            return end, span
        end -= found[-1] in "=:"
        while end < len(text) and end - begin < _MAX_NAME and _is_name(text[end]):
            end += 1
        while begin > 0 and end - begin < _MAX_NAME and _is_name(text[begin - 1]):
            begin -= 1
        return end, self._value_of_name(begin, end, may_be_token=found in _NAMES)

    def _given_to_program(self, found: str, begin: int, end: int) -> tuple[int, int] | None:
        """Return the span of the credential in the arguments of a program."""
        text, (before, option) = self._text, _program(found)
        if not before.search(text, max(0, begin - 40), begin):
            return None
        if found in _PIPED:
            match = option.match(text, end, end + _MAX_COMMAND)
        else:
            begin = max(end, self._searched.get(found, 0))
            last = _COMMAND_END.search(text, begin, end + _MAX_COMMAND)
            self._searched[found] = last.start() if last else end + _MAX_COMMAND
            match = option.search(text, begin, self._searched[found])
        given = "" if match is None else match["masked"].strip("\"'")
        if match is None or _REFERENCE.fullmatch(given):
            return None
        if found in _PIPED and not (_CHOSEN.fullmatch(given) or looks_random(given)):
            return None
        return match.span("masked")

    def _value_of_name(self, begin: int, end: int, may_be_token: bool) -> tuple[int, int] | None:
        """Return the span of the value of a name, if it is a secret."""
        text, name = self._text, self._text[begin:end]
        # A token may contain such a word.
        if may_be_token and any(
            len(part) >= 20 and _alternates(part) for part in _SEPARATORS.split(name)
        ):
            return begin, end
        if not _strength(name):
            return None
        span = self._value_after(begin, end, _SHOWN)
        if span is None:
            return None
        given = text[slice(*span)]
        if given.startswith("-----BEGIN"):  # masked as a whole
            return None
        before = text[begin - 1 : begin]
        is_openssl = name == "pass" and before in ("\0", " ") and span[0] == end + 1
        is_cookies = "cookie" in name.lower() and "=" in given
        if is_openssl or is_cookies or _is_secret(name, given):
            return self._value_after(begin, end, len(text))
        return None

    def _value_after(self, begin: int, end: int, limit: int) -> tuple[int, int] | None:
        """Return the span of the value after a name, up to a limit of characters."""
        text = self._text
        assign = _ASSIGN.match(text, end)
        if assign:
            value = assign.end()
            users = _USER_AND.match(text, value)
            if users:
                value = users.end()
            whole_word = self._rest_of_word(begin, value, limit)
            return whole_word or self._value_at(begin, end, value, limit)
        pair = _PAIR.match(text, end)
        if pair:
            span = self._value_at(begin, end, pair.end(), limit)
            given = text[slice(*span)]
            is_chosen = pair[0] != "/" and _CHOSEN.fullmatch(given)
            return span if is_chosen or looks_random(given) else None
        if text[end : end + 1] == ">" and text[begin - 1 : begin] == "<":  # XML
            close = text.find("<", end, end + limit)
            return end + 1, close if close > 0 else min(end + limit, len(text))
        spaces = _SPACES.match(text, end)
        return self._next_word(begin, end, spaces.end(), limit) if spaces else None

    def _rest_of_word(self, begin: int, value: int, limit: int) -> tuple[int, int] | None:
        """Return the rest of the word, including spaces and quotes, if the word is NAME=VALUE and
        not a shell command."""
        if self._kind == "text":
            return None
        text = self._text
        if not self._word[0] <= begin <= self._word[1]:
            word_begin, word_end = text.rfind("\0", 0, begin) + 1, text.find("\0", begin)
            self._word = word_begin, len(text) if word_end < 0 else word_end
            before = text[max(0, word_begin - 5) : max(0, word_begin - 1)].rpartition("\0")[2]
            is_script = before.startswith("-") and before.endswith("c")  # bash -c
            self._is_shell = is_script or bool(_SHELL_TEXT.search(text, *self._word))
        word_begin, word_end = self._word
        if begin - word_begin > 2 or text[word_begin:begin].strip("+~"):
            return None
        if value > word_end:  # the value is the next word
            if self._kind == "environment":
                return value, value
            word_end = text.find("\0", value)
            return value, len(text) if word_end < 0 else word_end
        is_whole = self._kind == "environment" or text[begin] == "-" or not self._is_shell
        return (value, min(word_end, value + limit)) if is_whole else None

    def _value_at(self, name: int, name_end: int, begin: int, length: int) -> tuple[int, int]:
        """Return the span of a value in a text, without its quotes."""
        text, limit = self._text, begin + length
        quote = _QUOTE.match(text, begin)
        if quote:
            close = text.find(quote[1] + quote[2], quote.end(), limit)
            while close >= 0:
                escapes = 0
                while not quote[1] and text[close - escapes - 1] == "\\":
                    escapes += 1
                if escapes % 2 == 0:
                    return quote.end(), close
                close = text.find(quote[1] + quote[2], close + 1, limit)
            end = text.find("\0", begin, limit)
            return quote.end(), min(limit, len(text)) if end < 0 else end
        braces = _IN_BRACES.match(text, begin, limit)  # ODBC
        if braces:
            return braces.span(1)
        kind = text[name:name_end].lower()
        is_header = "cookie" in kind or "authorization" in kind
        is_quoted = name > 0 and text[name - 1] in "\"'" and text[name_end] in "=:"
        if is_header or is_quoted or self._is_line(name):
            line = _LINE.match(text, begin, limit)
            end = begin if line is None else line.end()
            if is_quoted:  # the name and the value are in quotes
                quoted = text.find(text[name - 1], begin, end)
                end = end if quoted < 0 else quoted
            return begin, end
        bare = _BARE.match(text, begin, limit)
        given = "" if bare is None else bare[0].partition("%26")[0].rstrip(")]},;'\"`\\")
        return begin, begin + len(given)

    def _is_line(self, name: int) -> bool:
        """Return whether a name is the first word of a line of a file with such lines."""
        if not self._has_lines:
            return False
        before = self._text[max(0, name - 40) : name].rpartition("\n")
        return bool(before[1]) and not before[2].strip(" \t-")

    def _next_word(self, begin: int, end: int, value: int, limit: int) -> tuple[int, int]:
        """Return the span of the word after an option or a name: `--token X`, `api_key X`."""
        text, nothing = self._text, (value, value)
        if text[end] == "\0":
            word_end = text.find("\0", value, value + limit)
            span = value, min(len(text), value + limit) if word_end < 0 else word_end
        else:
            span = self._value_at(0, 0, value, limit)
        given = text[slice(*span)]
        # A long word after a single dash is probably a random token that starts with a dash.
        if given.startswith("--") or (given.startswith("-") and len(given) <= 3):
            return nothing
        if text[begin] == "-" or looks_random(given):
            return span
        before = _SPACES.split(text[max(0, begin - 40) : begin].rstrip("\0 \t"))[-1].lower()
        is_given = _CHOSEN.fullmatch(given) and (
            text[end] == "\0"
            or "_" in text[begin:end]
            or "login" in text[max(0, begin - 80) : begin]
        )
        return span if is_given or before in _SETS else nothing


def _is_name(character: str) -> bool:
    return character.isalnum() or character in "_.-"


def _is_token(text: str) -> bool:
    """Return whether the user information of a URL, or a text in a call, is a secret."""
    return ":" in text or looks_random(text)
