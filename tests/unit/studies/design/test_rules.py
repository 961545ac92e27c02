"""Rules of a design: their meaning, and the messages for invalid ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepscope.errors import DesignError
from stepscope.studies.design.rules import MAX_CHARACTERS, Rule, RuleError, make_rule

GIB = 1 << 30


def skips(text: str, **settings: Any) -> bool:
    return make_rule(text, 1, "").skips(settings)


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        ("workers > 2 * cpus", {"workers": 3, "cpus": 1.0}, True),
        ("workers > 2 * cpus", {"workers": 2, "cpus": 1.0}, False),
        ("workers > 2", {}, False),
        ("batch_size == 32", {}, True),
        ('memory < "8GiB"', {"memory": 8 * GIB - 1}, True),
        ('memory < "8GiB"', {"memory": 8 * GIB}, False),
        ('"4GiB" <= memory <= "8GiB"', {"memory": 5 * GIB}, True),
        ('memory / ranks < "2GiB"', {"memory": 4 * GIB, "ranks": 3}, True),
        ('memory - "1GiB" < "2GiB"', {"memory": 2 * GIB}, True),
        ("memory / gpu_memory > 2", {"memory": 5 * GIB, "gpu_memory": 2 * GIB}, True),
        ('memory in ["1GiB", "1024MiB"]', {"memory": GIB}, True),
        ('max(memory, "2GiB") == "2GiB"', {"memory": GIB}, True),
        ('model == "cnn" and not compile', {"model": "cnn"}, True),
        ('model in ["lstm", "resnet18"]', {"model": "cnn"}, False),
        ('model not in ["lstm"]', {"model": "cnn"}, True),
        ("compile == true", {"compile": True}, True),
        ("compile == True or persistent == false", {"compile": True}, True),
        ("0 < workers < 4", {"workers": 2}, True),
        ("min(workers, 4) * prefetch > 7", {"workers": 9}, True),
        ("-workers + 1 < 0", {"workers": 2}, True),
        ("batch_size % ranks != 0", {"ranks": 3}, True),
        ("batch_size // 10 == 3", {}, True),
        ("ranks > gpus", {"ranks": 2, "gpus": 1}, True),
        ("ranks > gpus", {"ranks": 2, "gpus": "0,3"}, False),
        ("stall_timeout > 200", {}, True),
        ("  workers\n   > 2", {"workers": 3}, True),
        ('"fp16" == precision', {"precision": "fp16"}, True),
        ('framework == "adapters.mine"', {}, False),
    ],
)
def test_what_a_rule_skips(text: str, settings: dict[str, Any], expected: bool) -> None:
    assert skips(text, **settings) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cpus > 2", False),
        ("cpus <= 2", False),
        ("not cpus > 2", False),
        ("cpus != 2", False),
        ("cpus * 2 != 4", False),
        ("min(cpus, 1) == 1", False),
        ("cpus in [1, 2]", False),
        ("cpus not in [1, 2]", False),
        ("pin", False),
        ("not pin", False),
        ("cpus > 2 or batch_size == 32", True),
        ("cpus > 2 and batch_size == 32", False),
        ("cpus == none", True),
        ("cpus != none", False),
        ("none == cpus", True),
        ("cpus in [1, none]", True),
        ("cpus not in [1, none]", False),
        ("batch_size / workers > 8", False),
        ("not batch_size % workers > 8", False),
    ],
)
def test_unset_settings_are_unknown(text: str, expected: bool) -> None:
    assert skips(text) is expected


@pytest.mark.parametrize(
    ("text", "column", "expected"),
    [
        ("workers > 2 * cpsu", 14, "Unknown setting or limit 'cpsu'. Did you mean "),
        ("precision == fp16", 13, 'Put text in quotes: "fp16"'),
        ("model == resnet18", 9, 'Put text in quotes: "resnet18"'),
        ('precision == "fp61"', 13, "Unknown precision 'fp61'. Did you mean "),
        ('precision in ["fp32", "fb16"]', 22, "Unknown precision 'fb16'. Did you mean "),
        ("workers >", None, "Syntax error"),
        ("workers = 3", None, "Syntax error. Use == to test for equality"),
        ("workers > 1 && cpus > 1", None, "Use `and` or `or`"),
        ("memory < 8GiB", None, 'Put sizes in quotes: "8GiB"'),
        ('memory < "8XB"', 9, "8XB"),
        ('workers > "2"', 10, "Cannot compare a number with text. Remove the quotes"),
        ("model == 3", 9, "Cannot compare text with a number"),
        ("compile == 1", 11, "Cannot compare a boolean with a number"),
        ('model < "x"', 8, "Only numbers can be compared with <, <=, > or >=. Use == or !="),
        ("cpus > none", 7, "Cannot compare a number with none"),
        ("workers", 0, "Expected a condition, found a number"),
        ("workers and compile", 0, "Compare it with a value, for example workers > 0"),
        ("model", 0, 'Compare it with a value, for example model == "..."'),
        ("model * 2 == 4", 0, "Expected a number, found text"),
        ('"a" + "b" == model', 0, "Expected a number, found text"),
        ("batch_size ** 2 > 9", 0, "is not allowed in a rule"),
        ("batch_size << 2 > 9", 0, "is not allowed in a rule"),
        ("~workers > 1", 0, "is not allowed in a rule"),
        ("__import__('os').system('true')", 0, "is not allowed in a rule"),
        ("print(workers)", 0, "is not allowed in a rule"),
        ("workers.real > 1", 0, "is not allowed in a rule"),
        ("[1, 2][0] > workers", 0, "is not allowed in a rule"),
        ("(lambda: 1)() > workers", 0, "is not allowed in a rule"),
        ("[w for w in [1]] == workers", 0, "is not allowed in a rule"),
        ("f'{workers}' == model", 0, "is not allowed in a rule"),
        ("(workers := 3) > 2", 1, "is not allowed in a rule"),
        ("workers if compile else cpus", 0, "is not allowed in a rule"),
        ("1j > workers", 0, "is not allowed in a rule"),
        ("workers is none", 11, "`is` is not allowed in a rule. Use == or !="),
        ("workers in 3", 11, "`in` needs a list"),
        ("min(workers) > 1", 0, "`min` needs at least two values"),
        ("min(workers, key=1) > 1", 0, "is not allowed in a rule"),
        ("", 0, "The rule is empty"),
        ("x" * (MAX_CHARACTERS + 1), 0, "The rule is longer than 1000 characters"),
        ("(" * 400 + "1" + ")" * 400, None, "Syntax error"),
        ("workers\0 > 1", None, "Syntax error"),
        ("ä > 1", 0, "Unknown setting or limit 'ä'"),
        ('model == "ä" and wokers > 1', 17, "Unknown setting or limit 'wokers'"),
    ],
)
def test_invalid_rules(text: str, column: int | None, expected: str) -> None:
    with pytest.raises(RuleError) as error:
        make_rule(text, 7, "")
    assert expected in str(error.value) and str(error.value).startswith("Line 7, column ")
    assert isinstance(error.value, DesignError)
    if column is not None:
        assert error.value.column == column


def test_reasons() -> None:
    rule = make_rule("workers >  2*cpus\n or compile", 3, "too slow")
    assert rule.why == "workers > 2*cpus or compile: too slow"
    assert rule == Rule("workers >  2*cpus\n or compile", 3, "too slow")
    assert Rule("workers > 2", 3).skips({"workers": 3})


_NUMBERS = st.one_of(
    st.integers(0, 99).map(str),
    st.sampled_from(["workers", "batch_size", "lr", "ranks"]),
    st.floats(0, 100).map(lambda x: f"{x:.3f}"),
)


def _computed(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, st.sampled_from("+-*/%"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(inner, inner).map(lambda t: f"({t[0]} // {t[1]})"),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(
            lambda t: f"{t[0]}({t[1]}, {t[2]})"
        ),
        inner.map(lambda x: f"-{x}"),
    )


_VALUES = st.recursive(_NUMBERS, _computed, max_leaves=5)
_ORDERS = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
_COMPARED = st.one_of(
    st.tuples(_VALUES, _ORDERS, _VALUES).map(" ".join),
    st.tuples(_VALUES, _ORDERS, _VALUES, _ORDERS, _VALUES).map(" ".join),
    st.tuples(_VALUES, st.lists(_VALUES, max_size=3)).map(
        lambda t: f"{t[0]} in [{', '.join(t[1])}]"
    ),
    st.sampled_from(
        ["compile", "persistent", 'precision != "fp16"', 'model == "cnn"', "compile == True"]
    ),
)
_RULES = st.recursive(
    _COMPARED,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({' '.join(t)})"),
        inner.map(lambda x: f"(not {x})"),
    ),
    max_leaves=5,
)


@given(
    text=_RULES,
    settings=st.fixed_dictionaries(
        {
            "workers": st.integers(0, 20),
            "batch_size": st.integers(1, 512),
            "lr": st.floats(0.001, 10),
            "ranks": st.integers(1, 4),
            "compile": st.booleans(),
            "persistent": st.booleans(),
            "precision": st.sampled_from(["fp32", "fp16"]),
            "model": st.sampled_from(["cnn", "lstm"]),
        }
    ),
)
def test_rules_have_the_meaning_of_python(text: str, settings: dict[str, Any]) -> None:
    allowed = {"__builtins__": {}, "min": min, "max": max}
    try:
        expected = bool(eval(text, allowed, settings))
    except ZeroDivisionError:
        return
    assert make_rule(text, 1, "").skips(settings) is expected


@given(st.text(max_size=60) | st.text("workers<>=+-*/%()[]'\"., 0123andornotminmax", max_size=60))
@example("workers < ']'")
@example("'\\N{x}' == model")
def test_any_text_is_a_rule_or_a_rule_error(text: str) -> None:
    try:
        rule = make_rule(text, 1, "")
    except RuleError as error:
        assert 0 <= error.column <= max(len(text), 1)
    else:
        assert isinstance(rule.skips({}), bool)
