"""Student's t distribution."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given
from scipy.stats import t as scipy_t

from stepscope.analysis.statistics import t_quantile, t_tail
from stepscope.analysis.trial.throughput import students_t

TABLE = {
    1: (6.3138, 12.706, 63.657, 636.62),
    2: (2.9200, 4.3027, 9.9248, 31.599),
    3: (2.3534, 3.1824, 5.8409, 12.924),
    4: (2.1318, 2.7764, 4.6041, 8.6103),
    5: (2.0150, 2.5706, 4.0321, 6.8688),
    30: (1.6973, 2.0423, 2.7500, 3.6460),
    math.inf: (1.6449, 1.9600, 2.5758, 3.2905),
}


@pytest.mark.parametrize("dof", TABLE)
def test_published_table(dof: float) -> None:
    quantiles = [t_quantile(probability, dof) for probability in (0.95, 0.975, 0.995, 0.9995)]
    assert quantiles == pytest.approx(TABLE[dof], rel=1e-4)


@given(st.floats(0.0001, 0.9999), st.floats(0.5, 1e6))
def test_quantile_matches_scipy(probability: float, dof: float) -> None:
    expected = float(scipy_t.ppf(probability, dof))
    assert t_quantile(probability, dof) == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(st.floats(0, 50), st.floats(1, 1000))
def test_tail_matches_scipy(value: float, dof: float) -> None:
    assert t_tail(value, dof) == pytest.approx(float(scipy_t.sf(value, dof)), rel=1e-8, abs=1e-300)


@pytest.mark.parametrize("dof", [1, 2, 3, 5, 10, 30])
def test_quantile_matches_the_table_of_trials(dof: int) -> None:
    assert t_quantile(0.95, dof) == pytest.approx(students_t(dof), rel=1e-4)


@pytest.mark.parametrize(("probability", "dof"), [(0, 3), (1, 3), (0.9, 0), (math.nan, 3)])
def test_invalid_arguments(probability: float, dof: float) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        t_quantile(probability, dof)
