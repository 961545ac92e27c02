"""The language guard: texts that users see use standard terms and plain sentences.

If a pattern matches, rewrite the sentence; docs/glossary.md has the words to use.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "stepscope"

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_INLINE_CODE = re.compile(r"`[^`\n]*`")

PATTERNS = {
    "rare words": r"\b(unsaid|befell|whoever|anew|likewise|knobs?|sentinels?|tenants?|foretold"
    r"|learnt|meanwhile|mend(ed|s)?|shall)\b",
    "is not a …": r"(?<!here )\b(is|are|was|were) no (?!longer|more|such|way|one)\b",
    "standard verbs": r"\b(be|is|are|was|were) told\b|\btold (from|apart)\b|\bcan(not)? be had\b"
    r"|\btells? (the truth|whether|how|what|apart)\b|\bcomes? to (its|an) end\b|\bgoes by\b",
    "of yours": r"\bof (yours|ours|theirs)\b",
    "quantities": r"\b(so|as) (many|much|long) (seconds|bytes|times|of it)\b|\bfor so long\b",
    "bottleneck": r"\bh(olds?|olding|eld) (it|them|this|a run|the run|training) back\b"
    r"|\bheld back by\b",
    "monitor": r"\bwatch(er|ers|ed|ing)\b",
    "healthy": r"\bas it should be\b",
    "imperative hints": r"\bLeave (it|them|--?\w+) out\b"
    r"|(?<!\w)Give (a|an|it|less|more|fewer|at|another|one)\b",
    "interference": r"\bdisturb(s|ed|ance)?\b",
    "processes start and exit": r"\b(process|worker|rank|runner|trial)(es|s)? (that )?"
    r"(dies?|died|lives?)\b",
    "gains": r"\b(never|stops?) pay(s|ing)?\b|\bpays off\b",
    "American spelling": r"\b(utilis|optimis|summaris|recognis|normalis|initialis)\w+"
    r"|\banalys(e|ed|ing)\b|\b(behaviour|colour|neighbour|labelled|grey|centre)s?\b",
    "sizes in GiB": r"(?<![\w(])\d[\d.,]* ?(kB|MB|GB|TB)(/s)?\b",
    "one spelling": r"(?<=[\d}]) %(?!\w)|\bdata sets?\b|\b([Cc]lean|[Ss]tart)-up\b"
    r"|\bcontrol groups?\b|\bof a core\b|\(pid \b",
    "word order": r"\bfor another reason than\b|\bother \w+ than\b|\bin line (\d|\{)",
    "processes stop": r"\b(process|probe|trial|worker)(es|s)? (is|are|was|were) ended\b",
    "install hints that work without PyPI": r"stepscope\[",
}
"""Patterns by what is wrong with a text that they match."""


def messages() -> list[tuple[str, str]]:
    """Every message of the product, with its place."""
    spec = importlib.util.spec_from_file_location("messages", ROOT / "docs" / "messages.py")
    assert spec and spec.loader
    sys.modules["messages"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [(f"{each.file}:{each.line}", each.text) for each in module.collect()]


def docs() -> list[tuple[str, str]]:
    """Every line of the docs without code, with its place."""
    lines = []
    pages = (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/*.md"))
    for page in sorted(pages):
        if page.name == "glossary.md":  # it names the words that are not used
            continue
        text = _FENCE.sub(lambda code: "\n" * code[0].count("\n"), page.read_text("utf-8"))
        for number, line in enumerate(_INLINE_CODE.sub("`code`", text).splitlines(), 1):
            lines.append((f"{page.relative_to(ROOT)}:{number}", line))
    return lines


@pytest.mark.parametrize("reason", PATTERNS)
def test_no_dialect(reason: str) -> None:
    pattern = re.compile(PATTERNS[reason])
    found = [f"{place}: {text}" for place, text in (*messages(), *docs()) if pattern.search(text)]
    assert not found, f"{reason}:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("rare words", "Pinned host memory; unsaid: with a GPU."),
        ("is not a …", "this is no rule"),
        ("standard verbs", "whether it is steady cannot be told"),
        ("of yours", "an affinity of yours keeps nobody else out"),
        ("quantities", "End it after so many seconds."),
        ("bottleneck", "What holds it back"),
        ("monitor", "what watching costs"),
        ("sizes in GiB", "peak memory 1.5 GB"),
        ("one spelling", "the GPU waits 66 % of the time"),
        ("word order", "it failed for another reason than memory"),
        ("processes stop", "a trial is ended"),
        ("install hints that work without PyPI", "pip install stepscope[torch]"),
    ],
)
def test_the_guard_notices(reason: str, text: str) -> None:
    assert re.search(PATTERNS[reason], text)


def test_the_page_of_messages_is_complete() -> None:
    """The start and the end of every error message are on the page, found without the collector."""
    page = " ".join((ROOT / "docs" / "messages.md").read_text("utf-8").split())
    missing = []
    for path in sorted(SOURCE.rglob("*.py")):
        for literal in re.findall(r'raise \w+\(\s*f?("[^"\n]*")', path.read_text("utf-8")):
            text = ast.literal_eval(literal)
            parts = (" ".join(part.split()) for part in (text.split("{")[0], text.split("}")[-1]))
            missing += [f"{path.name}: {part}" for part in parts if part not in page]
    assert missing == []


def test_every_class_name_has_one_meaning() -> None:
    files = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                files[node.name].add(path.name)
    assert [name for name, paths in files.items() if len(paths) > 1] == []
