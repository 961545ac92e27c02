"""A fit for programs: the record as it is, with the batch to use on top."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stepscope.advice.answer import Fit

FORMAT = 1


def fit_dict(fit: Fit) -> dict[str, Any]:
    """All of it. What is no number, or endless, is null: JSON knows neither."""
    told = _plain({"batch_size": fit.batch_size, **fit.as_dict()})
    return {"format": FORMAT, **told}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
