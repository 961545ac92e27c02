"""Student's t distribution without SciPy, which takes half a second to import."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

_AS_NORMAL = 1e7
"""Degrees of freedom above which Student's t and the normal distribution agree to 7 digits."""
_TINY = 1e-300


@lru_cache(maxsize=4096)
def t_quantile(probability: float, dof: float) -> float:
    """Return the quantile of Student's t distribution."""
    if not 0 < probability < 1 or not dof > 0:
        raise ValueError(f"no quantile for probability {probability} and {dof} degrees of freedom")
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
    """Return the upper tail probability of Student's t for a non-negative value."""
    total = dof + value * value
    return 0.5 * _beta_share(dof / 2, 0.5, dof / total, value * value / total)


def _beta_share(a: float, b: float, x: float, rest: float) -> float:
    """Regularized incomplete beta function; `rest` is 1 - x at full precision."""
    if x <= 0 or rest <= 0:
        return float(rest <= 0)
    if x > (a + 1) / (a + b + 2):  # the fraction of the mirrored function converges faster
        return 1 - _beta_share(b, a, rest, x)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(scale + a * math.log(x) + b * math.log(rest)) / a / _fraction(a, b, x)


def _fraction(a: float, b: float, x: float) -> float:
    """Continued fraction of the incomplete beta function (Lentz's method)."""
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
