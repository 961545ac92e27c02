"""Rules of a design: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepscope.errors import BadDesign
from stepscope.studies.design.rules import MOST_CHARACTERS, BadRule, Rule, make_rule

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
        ("hang > 200", {}, True),
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
def test_what_is_not_set_decides_nothing(text: str, expected: bool) -> None:
    assert skips(text) is expected


@pytest.mark.parametrize(
    ("text", "column", "said"),
    [
        ("workers > 2 * cpsu", 14, "there is no setting or limit 'cpsu'. Did you mean cpus"),
        ("precision == fp16", 13, 'Text stands in quotes: "fp16"'),
        ("model == resnet18", 9, 'Text stands in quotes: "resnet18"'),
        ('precision == "fp61"', 13, "precision is never 'fp61'. Did you mean fp16"),
        ('precision in ["fp32", "fb16"]', 22, "precision is never 'fb16'. Did you mean fp16"),
        ("workers >", None, "cannot be understood"),
        ("workers = 3", None, "Equal is written =="),
        ("workers > 1 && cpus > 1", None, "Write `and`, `or`"),
        ("memory < 8GiB", None, 'A size stands in quotes: "8GiB"'),
        ('memory < "8XB"', 9, "'8XB' is no size"),
        ('workers > "2"', 10, "a number cannot be compared with text. Leave the quotes out"),
        ("model == 3", 9, "text cannot be compared with a number"),
        ("compile == 1", 11, "true or false cannot be compared with a number"),
        ('model < "x"', 8, "only numbers are less or more"),
        ("cpus > none", 7, "a number cannot be compared with nothing"),
        ("workers", 0, "this is a number, and neither true nor false"),
        ("workers and compile", 0, "Compare it with something: workers > 0"),
        ("model", 0, 'Compare it with something: model == "..."'),
        ("model * 2 == 4", 0, "only numbers can be computed with"),
        ('"a" + "b" == model', 0, "only numbers can be computed with"),
        ("batch_size ** 2 > 9", 0, "has no place in a rule"),
        ("batch_size << 2 > 9", 0, "has no place in a rule"),
        ("~workers > 1", 0, "has no place in a rule"),
        ("__import__('os').system('true')", 0, "has no place in a rule"),
        ("print(workers)", 0, "has no place in a rule"),
        ("workers.real > 1", 0, "has no place in a rule"),
        ("[1, 2][0] > workers", 0, "has no place in a rule"),
        ("(lambda: 1)() > workers", 0, "has no place in a rule"),
        ("[w for w in [1]] == workers", 0, "has no place in a rule"),
        ("f'{workers}' == model", 0, "has no place in a rule"),
        ("(workers := 3) > 2", 1, "has no place in a rule"),
        ("workers if compile else cpus", 0, "has no place in a rule"),
        ("1j > workers", 0, "has no place in a rule"),
        ("workers is none", 11, "Write == or !="),
        ("workers in 3", 11, "`in` wants a list"),
        ("min(workers) > 1", 0, "min is of two values or more"),
        ("min(workers, key=1) > 1", 0, "has no place in a rule"),
        ("", 0, "the rule is empty"),
        ("x" * (MOST_CHARACTERS + 1), 0, "more than 1000 characters"),
        ("(" * 400 + "1" + ")" * 400, None, "cannot be understood"),
        ("workers\0 > 1", None, "cannot be understood"),
        ("ä > 1", 0, "there is no setting or limit 'ä'"),
        ('model == "ä" and wokers > 1', 17, "there is no setting or limit 'wokers'"),
    ],
)
def test_what_is_no_rule(text: str, column: int | None, said: str) -> None:
    with pytest.raises(BadRule) as error:
        make_rule(text, 7, "")
    assert said in str(error.value) and "line 7" in str(error.value)
    assert isinstance(error.value, BadDesign)
    if column is not None:
        assert error.value.column == column


def test_reasons() -> None:
    rule = make_rule("workers >  2*cpus\n or compile", 3, "it never paid")
    assert rule.why == "workers > 2*cpus or compile: it never paid"
    assert rule == Rule("workers >  2*cpus\n or compile", 3, "it never paid")
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
def test_rules_mean_what_they_mean_in_python(text: str, settings: dict[str, Any]) -> None:
    allowed = {"__builtins__": {}, "min": min, "max": max}
    try:
        expected = bool(eval(text, allowed, settings))
    except ZeroDivisionError:
        return
    assert make_rule(text, 1, "").skips(settings) is expected


@given(st.text(max_size=60) | st.text("workers<>=+-*/%()[]'\"., 0123andornotminmax", max_size=60))
@example("workers < ']'")
@example("'\\N{x}' == model")
def test_any_text_is_a_rule_or_told_to_be_none(text: str) -> None:
    try:
        rule = make_rule(text, 1, "")
    except BadRule as error:
        assert 0 <= error.column <= max(len(text), 1)
    else:
        assert isinstance(rule.skips({}), bool)
