"""Hostile texts: JSON documents, ledgers and designs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

TEXTS = (
    r"\u001b[31m\u001b]0;owned\u0007\u009b31m",
    r"\ud800",
    r"a\u0000b",
    r"<script>alert(1)</script><img src=x onerror=alert(1)>",
    r"\u202e\u2028{{ 7 * 7 }}",
    r"[bold red]markup[/] %s {0} $(touch x)",
    r"../../../outside",
    "long " * 50_000,
    "",
)
"""JSON strings without their quotation marks."""
DEEP = 100_000
VALUES = (
    *(f'"{text}"' for text in TEXTS),
    *("0", "-1", "2147483648", "-9223372036854775808", "9223372036854775807"),
    *("9223372036854775808", "1" + "0" * 400, "9" * 5000),
    *("0.0", "-0.0", "5e-324", "1e300", "-1.7e308", "1e999", "NaN", "Infinity", "-Infinity"),
    *("null", "true", "false", "[]", "{}", "[[]]", "[null]", '{"": null}', '[{"a": 1}]'),
    "[" * DEEP + "]" * DEEP,
    '{"a":' * DEEP + "1" + "}" * DEEP,
    "[" * 60 + "]" * 60,
    f"[{'0,' * 100_000}0]",
    "{" + ",".join(f'"k{number}": {number}' for number in range(50_000)) + "}",
    '{"a": 1, "a": "two"}',
)
"""JSON values. Some are not valid JSON."""


def hostile_json(path: Path, rng: random.Random) -> str:
    """Replace values at random places of a JSON document."""
    document = _parsed(path.read_bytes())
    path.write_text(_changed(document, rng, rng.choice((1, 1, 2, 5, 20))))
    return "hostile JSON"


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # damaged before
        return {}


def _changed(document: Any, rng: random.Random, count: int) -> str:
    """Return the document as JSON with values replaced, keys added and values exchanged."""
    document, values = [document], []
    for _ in range(count):
        places = list(_places(document))
        container, key = rng.choice(places)
        action = rng.random()
        if action < 0.2:
            other, its_key = rng.choice(places)
            container[key] = json.loads(json.dumps(other[its_key]))
        elif action < 0.3 and isinstance(container, dict):
            container[json.loads(f'"{rng.choice(TEXTS)}"')] = container.pop(key)
        elif action < 0.4 and isinstance(container, dict):
            del container[key]
        else:
            container[key] = f"@{len(values)}@"
            values.append(rng.choice(VALUES))
    text = json.dumps(document[0] if document else None, indent=rng.choice((None, 1)))
    for number, value in enumerate(values):
        text = text.replace(f'"@{number}@"', value)
    return text


def _places(container: Any) -> Any:
    """Yield all containers with the keys or positions of their values."""
    keys = list(container) if isinstance(container, dict) else range(len(container))
    for key in keys:
        yield container, key
        if isinstance(container[key], dict | list):
            yield from _places(container[key])


def hostile_ledger(path: Path, rng: random.Random) -> str:
    """Change, repeat or add lines."""
    lines = path.read_text("utf-8", "replace").splitlines() or ["{}"]
    action = rng.choice(("changed", "repeated", "unfinished", "many attempts", "empty lines"))
    if action == "changed":
        for _ in range(rng.choice((1, 3, 10))):
            number = rng.randrange(len(lines))
            lines[number] = _changed(_parsed(lines[number]), rng, rng.choice((1, 2, 5)))
    elif action == "repeated":
        lines += lines * rng.choice((1, 50))
    elif action == "unfinished":
        lines.append('{"key": "' + rng.choice(("a", "\\", "é", "{")) * (256 << 10))
    elif action == "many attempts":
        lines += _many_attempts(lines[0], rng)
    else:
        lines += [""] * 1_000_000
    path.write_text("\n".join(lines) + ("" if action == "unfinished" else "\n"))
    return f"hostile ledger ({action})"


def _many_attempts(line: str, rng: random.Random) -> list[str]:
    """Return lines that differ in one field, for readers that compare each with all others."""
    result = _parsed(line)
    if not isinstance(result, dict):
        return []
    result["outcome"] = "lost"
    field = rng.choice(("attempt", "repeat", "block", "machine", "key"))
    text = {"machine": "{}", "key": "{:012x}"}.get(field)
    numbers = range(1, 20_000)
    return [json.dumps({**result, field: text.format(n) if text else n}) for n in numbers]


_DESIGN = "workload: cnn\nfixed: {framework: made_up.loop, data: random}\n"
_SKIP = _DESIGN + "factors: {batch_size: [1, 2]}\nskip: "
_BOMB = "".join(
    f"{chr(98 + level)}: &{chr(98 + level)} [{', '.join([f'*{chr(97 + level)}'] * 9)}]\n"
    for level in range(9)
)
DESIGNS = {
    "aliases": f"a: &a [x, x]\n{_BOMB}workload: cnn\nfactors: {{batch_size: *j}}\n",
    "recursive alias": "workload: cnn\nfactors: &a {batch_size: *a}\n",
    "recursive merge": "workload: cnn\nfixed: &a\n  <<: *a\n  <<: [*a, *a]\nfactors: *a\n",
    "python tag": "workload: !!python/object/apply:os.system ['touch executed']\n",
    "python name": "workload: !!python/name:os.system\nfactors: {batch_size: [1]}\n",
    "nesting": _DESIGN + "factors: " + "[" * 5000 + "]" * 5000,
    "nested mappings": "".join(" " * level + "a:\n" for level in range(600)),
    "many combinations": _DESIGN
    + f"factors: {{batch_size: {list(range(1, 900))}, workers: {list(range(900))}, "
    f"seed: {list(range(900))}}}\n",
    "power rule": _SKIP + "[9 ** 9 ** 9 ** 9 > batch_size]\n",
    "text rule": _SKIP + "[\"'a' * 10 ** 10 == 'b'\"]\n",
    "long rule": _SKIP + f"['{'not ' * 20_000}workers']\n",
    "nested rule": _SKIP + f"['{'(' * 900}1{')' * 900}']\n",
    "code rule": _SKIP + "[\"__import__('os').abort()\"]\n",
    "escape": r"""{name: "\e[31m\e]0;owned\a", workload: "\e[31m", factors: {"\e[1m": ["\x9b"]}}""",
    "escape in an error": _DESIGN + "factors: {batch_size: [\x1b[31m]}\n\x1b]0;owned\x07: 1\n",
    "surrogate": _DESIGN + 'name: "\\ud800"\nfactors: {batch_size: ["\\ud800"]}\n',
    "large numbers": _DESIGN + f"factors: {{batch_size: [1e999, .nan, .inf, {'9' * 5000}]}}\n",
    "sexagesimal": _DESIGN + f"factors: {{batch_size: [{':'.join(['59'] * 3000)}]}}\n",
    "dates": _DESIGN + "factors: {batch_size: [9999-99-99, 2001-01-01 00:00:00 +99:99]}\n",
    "many repeats": _DESIGN + "factors: {batch_size: [1, 2]}\nrepeats: 1000\nbudget: 10000000d\n",
    "outside workload": "workload: ../outside/evil.py:workload\nfactors: {batch_size: [1, 2]}\n",
    "outside framework": _DESIGN.replace("made_up.loop", "../outside/evil.py:FRAMEWORK")
    + "factors: {batch_size: [1, 2]}\n",
    "binary": "workload: !!binary aGVsbG8=\nfactors: !!set {a, b}\nskip: !!omap [a: 1]\n",
    "only a list": "- 1\n- 2\n",
    "two documents": _DESIGN + "---\n" + _DESIGN,
    "null bytes": "workload: cnn\0\n",
    "long": _DESIGN + "# " + "x" * (255 << 10),
}


def hostile_design(path: Path, rng: random.Random) -> str:
    name = rng.choice(sorted(DESIGNS))
    path.write_text(DESIGNS[name], "utf-8", "surrogatepass")
    return f"hostile design ({name})"
