"""Student's t for any probability, without SciPy: it takes half a second to import."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

_AS_NORMAL = 1e7
"""Degrees of freedom from which on Student's t and the normal agree to seven digits."""
_TINY = 1e-300


@lru_cache(maxsize=4096)
def t_quantile(probability: float, dof: float) -> float:
    """What Student's t with so many degrees of freedom is below of, with this probability."""
    if not 0 < probability < 1 or not dof > 0:
        raise ValueError(f"no quantile of {probability} with {dof} degrees of freedom")
    if probability < 0.5:
        return -t_quantile(1 - probability, dof)
    if probability == 0.5:
        return 0.0
    if dof >= _AS_NORMAL:
        return NormalDist().inv_cdf(probability)
    tail, below, above = 1 - probability, 0.0, 2.0
    while t_tail(above, dof) > tail:
        below, above = above, 2 * above
    while above - below > 1e-10 * above:
        middle = (below + above) / 2
        if t_tail(middle, dof) > tail:
            below = middle
        else:
            above = middle
    return (below + above) / 2


def t_tail(value: float, dof: float) -> float:
    """How often Student's t is above a value that is not negative."""
    whole = dof + value * value
    return 0.5 * _beta_share(dof / 2, 0.5, dof / whole, value * value / whole)


def _beta_share(a: float, b: float, x: float, rest: float) -> float:
    """The regularised incomplete beta function; `rest` is what x lacks of 1, in all its digits."""
    if x <= 0 or rest <= 0:
        return float(rest <= 0)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, its mirror does not
        return 1 - _beta_share(b, a, rest, x)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(scale + a * math.log(x) + b * math.log(rest)) / a / _fraction(a, b, x)


def _fraction(a: float, b: float, x: float) -> float:
    """Its continued fraction, by the method of Lentz."""
    value, upper, lower = 1.0, 1.0, 0.0
    for step in range(1, 1000):
        half = step // 2
        if step % 2:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        lower = 1 / ((1 + term * lower) or _TINY)
        upper = (1 + term / upper) or _TINY
        value *= upper * lower
        if abs(upper * lower - 1) < 1e-14:
            break
    return value
