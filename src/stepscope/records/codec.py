"""Records to JSON and back: the only encoder and the only decoder of the package.

    to_json(record)         plain values: dict, list, str, int, float, bool, None
    from_json(Type, plain)  the record, checked against its annotations; unknown keys are ignored
    dumps(record)           the same as text
    loads(Type, text)

A record is a dataclass whose annotations can be evaluated at run time: types that its fields name
must not be imported under TYPE_CHECKING only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")


def to_json(value: Any, *, omit_defaults: bool = False) -> Any:
    """Plain values that JSON has. NaN and infinity become None: JSON knows neither.

    With `omit_defaults`, fields that have their default are left out.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Enum):
            return value.value
        if value is None or isinstance(value, str | bool | int):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else None
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {
                field.name: plain(getattr(value, field.name))
                for field in dataclasses.fields(value)
                if not (omit_defaults and getattr(value, field.name) == _default(field))
            }
        if isinstance(value, Mapping):
            return {str(plain(key)): plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        if isinstance(value, set | frozenset):
            return sorted(plain(each) for each in value)
        if hasattr(value, "tolist"):  # numpy's arrays and numbers
            return plain(value.tolist())
        return str(value)

    return plain(value)


def dumps(value: Any, *, indent: int | None = None, omit_defaults: bool = False) -> str:
    """A record as JSON text.

    The standard encoder, not msgspec's: that one refuses the lone surrogates by which Python
    names files whose names are not UTF-8, and these are in every command line sooner or later.
    """
    plain = to_json(value, omit_defaults=omit_defaults)
    return json.dumps(plain, indent=indent, allow_nan=False)


def from_json(kind: type[_T], plain: Any) -> _T:
    """The record of this type; ValueError says which field is wrong."""
    # Imported here: it takes 33 ms, and `import stepscope` needs no decoder.
    import msgspec

    return msgspec.convert(plain, kind, str_keys=True, dec_hook=_decode_other)


def salvage(kind: type[_T], plain: Any) -> _T:
    """The record with every field that can be read, at any depth; the others have their defaults.

    For files that a dying process may have left in any state. TypeError where a field that has no
    default cannot be read.
    """
    found = {}
    for name, hint in get_type_hints(kind).items():
        value = plain.get(name) if isinstance(plain, Mapping) else None
        # A record or an optional one; of several (a tuple) all or none are read.
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        nested = next((each for each in kinds if dataclasses.is_dataclass(each)), None)
        with contextlib.suppress(ValueError, TypeError):
            if value is None:
                continue
            found[name] = salvage(nested, value) if nested else from_json(hint, value)  # type: ignore[arg-type]
    return kind(**found)


def loads(kind: type[_T], text: str | bytes) -> _T:
    """The record in a JSON text; ValueError where it is not one."""
    import msgspec

    try:
        return msgspec.json.decode(text, type=kind, dec_hook=_decode_other)
    except ValueError:  # also lone surrogates, NaN and large numbers, which only `json` reads
        return from_json(kind, json.loads(text))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _decode_other(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return kind(value)
    raise ValueError(f"{kind.__name__} cannot be read from JSON")
