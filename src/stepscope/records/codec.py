"""Convert records to JSON and back. All JSON of the package goes through this module.

    to_json(record)         plain values: dict, list, str, int, float, bool, None
    from_json(Type, plain)  the record, checked against its annotations; unknown keys are ignored
    dumps(record)           the record as JSON text
    loads(Type, text)       the record from JSON text
    parse(text)             plain values from JSON text

A record is a dataclass. Its annotations are evaluated at run time, so the types of its fields must
not be imported under TYPE_CHECKING only.
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

_MAX_DEPTH = 64
"""The deepest record has less than ten levels."""


def to_json(value: Any, *, omit_defaults: bool = False) -> Any:
    """Return the value as plain JSON values. NaN and infinity, which JSON lacks, become None.

    With `omit_defaults`, fields with their default value are omitted.
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
    """Return a record as JSON text.

    This uses the standard encoder. msgspec rejects lone surrogates, which Python uses for file
    names that are not UTF-8 and which may occur in any command line.
    """
    plain = to_json(value, omit_defaults=omit_defaults)
    return json.dumps(plain, indent=indent, allow_nan=False)


def from_json(kind: type[_T], plain: Any) -> _T:
    """Return the record of this type. The ValueError of an invalid value names the field."""
    # Imported here because it takes 33 ms, and `import stepscope` does not need it.
    import msgspec

    return msgspec.convert(plain, kind, str_keys=True, dec_hook=_decode_other)


def salvage(kind: type[_T], plain: Any) -> _T:
    """Return the record with all valid fields, at any depth. Invalid fields keep their defaults.

    For files of processes that may have been killed at any time. Raises TypeError if a field
    without a default is invalid.
    """
    fields = {}
    for name, hint in get_type_hints(kind).items():
        value = plain.get(name) if isinstance(plain, Mapping) else None
        # A record or an optional record. In a tuple of records, one invalid record drops all.
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        nested = next((each for each in kinds if dataclasses.is_dataclass(each)), None)
        with contextlib.suppress(ValueError, TypeError):
            if value is None:
                continue
            fields[name] = salvage(nested, value) if nested else from_json(hint, value)  # type: ignore[arg-type]
    return kind(**fields)


def loads(kind: type[_T], text: str | bytes) -> _T:
    """Return the record in a JSON text. Raises ValueError if it is invalid."""
    import msgspec

    try:
        return msgspec.json.decode(text, type=kind, dec_hook=_decode_other)
    except (ValueError, RecursionError):  # lone surrogates and large numbers need `json`
        return from_json(kind, parse(text))


def parse(text: str | bytes) -> Any:
    """Return the plain values in a JSON text. Raises ValueError if it is invalid, nested deeper
    than any record, or has a number that fits neither 64 bits nor a float."""
    try:
        plain = json.loads(
            text, parse_int=_int64, parse_float=_finite, parse_constant=_not_a_number
        )
    except RecursionError:
        raise ValueError("the values are nested too deeply") from None
    level = [plain]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return plain
    raise ValueError(f"the values are nested more than {_MAX_DEPTH} levels deep")


def _int64(digits: str) -> int:
    number = int(digits)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"the number {digits[:30]} is out of range")
    return number


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits[:30]} is out of range")
    return number


def _not_a_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _decode_other(kind: type, value: Any) -> Any:
    if issubclass(kind, Path):
        return kind(value)
    raise ValueError(f"{kind.__name__} cannot be read from JSON")
