"""A part of all combinations that still tells what each factor does.

Where all factors have the same prime number of levels, a regular fraction: those combinations that
solve a few equations modulo that prime. Every level then comes equally often, and what cannot be
told apart is known beforehand. Otherwise points are exchanged until they have as few levels in
common as they can (Xu's J2, 2002), which is what makes levels, and pairs of them, equally frequent.
That is exact arithmetic, in an order that the seed gives: the same on every machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from stepscope.analysis.study.records import Factor

Table: TypeAlias = npt.NDArray[np.int64]
"""A row for each point: the number of the level of each factor."""
Effects: TypeAlias = npt.NDArray[np.float64]
"""A row for each point: what a model of main effects adds up for it."""

MOST_EXCHANGED = 2000
_MOST_STARTS = 8
_MOST_PASSES = 30
_LOOKED_AT = 64
_MOST_ALIASES = 3
_PRIMES = (2, 3, 5, 7, 11, 13)
_PARTS = {2: "a half", 3: "a third", 4: "a quarter"}


@dataclass(frozen=True)
class Part:
    """Which rows of a table were chosen, and what is to be said of that."""

    rows: list[int]
    remarks: tuple[str, ...]


def fraction_of(
    table: Table, factors: Sequence[Factor], share: Fraction, order: Sequence[int], seed: int
) -> Part:
    """A balanced part of the rows; `order` is the chance in it."""
    counts = [len(factor.levels) for factor in factors]
    size = max(1, round(len(table) * share))
    names = [factor.name for factor in factors]
    words = _regular_words(counts, share) if len(table) == prod(counts) else None
    if words is not None:
        rows = _solutions(table, words, counts[0], seed)
        return Part(rows, (f"{_part_of(share, len(table))}: {_aliases(words, names, counts[0])}",))
    rows = sorted(_balanced(table, counts, size, order))
    return Part(rows, (_told(table, rows, counts, names, share),))


# Regular fractions


def _regular_words(counts: Sequence[int], share: Fraction) -> Table | None:
    """The equations of a regular fraction, if there is one."""
    prime, inverse = counts[0], 1 / share
    if prime not in _PRIMES or set(counts) != {prime} or inverse.denominator != 1:
        return None
    equations, power = 0, 1
    while power < inverse:
        equations, power = equations + 1, power * prime
    if power != inverse or not 0 < equations < len(counts):
        return None
    return _best_words(prime, len(counts), equations)


def _best_words(prime: int, factors: int, equations: int) -> Table | None:
    """Equations whose shortest consequence is as long as can be had simply.

    The last factors each follow from the first ones; the search takes, in order, what keeps all
    consequences at least so long, as lexicodes do.
    """
    basic = factors - equations
    every = np.array(list(itertools.product(range(prime), repeat=basic)), dtype=np.int64)
    lengths = np.count_nonzero(every, axis=1)
    for resolution in range(factors, 1, -1):
        words = _words_of_length(every[lengths + 1 >= resolution], prime, equations, resolution)
        if words is not None:
            return words
    return None


def _words_of_length(left: Table, prime: int, equations: int, resolution: int) -> Table | None:
    basic = left.shape[1]
    span = np.zeros((1, basic + equations), dtype=np.int64)
    words: list[npt.NDArray[np.int64]] = []
    for number in range(equations):
        if not len(left):
            return None
        word = np.zeros(basic + equations, dtype=np.int64)
        word[:basic], word[basic + number] = left[0], prime - 1
        words.append(word)
        span = np.concatenate([(span + times * word) % prime for times in range(prime)])
        left = left[_keeps_length(left, span, prime, resolution)]
    return np.array(words)


def _keeps_length(left: Table, span: Table, prime: int, resolution: int) -> npt.NDArray[np.bool_]:
    """Which further words have no consequence that is too short."""
    basic = left.shape[1]
    fine = np.ones(len(left), dtype=bool)
    for times in range(1, prime):
        for known in span:
            lengths = np.count_nonzero((times * left + known[:basic]) % prime, axis=1)
            fine &= lengths + 1 + np.count_nonzero(known[basic:]) >= resolution
    return fine


def _solutions(table: Table, words: Table, prime: int, seed: int) -> list[int]:
    """The rows that solve all equations; the seed says which of the equal parts it is."""
    right = [(seed // prime**number) % prime for number in range(len(words))]
    return [int(row) for row in np.flatnonzero(((table @ words.T) % prime == right).all(axis=1))]


def _aliases(words: Table, names: Sequence[str], prime: int) -> str:
    """What cannot be told apart: the shortest consequences of the equations."""
    span = np.zeros((1, words.shape[1]), dtype=np.int64)
    for word in words:
        span = np.concatenate([(span + times * word) % prime for times in range(prime)])
    factors = {tuple(map(int, np.flatnonzero(word))) for word in span} - {()}
    shortest = min(map(len, factors))
    if shortest > 4:
        return "main effects and pairs are clear of each other"
    groups = sorted(group for group in factors if len(group) == shortest)
    pairs = [pair for group in groups for pair in _same(group, names)]
    told = "; ".join(pairs[:_MOST_ALIASES])
    more = f"; and {len(pairs) - _MOST_ALIASES} more" if len(pairs) > _MOST_ALIASES else ""
    clear = "main effects are clear of pairs; " if shortest == 4 else ""
    return f"{clear}{told}{more}"


def _same(group: Sequence[int], names: Sequence[str]) -> list[str]:
    """What an equation between factors makes the same."""
    first, *others = (names[factor] for factor in group)
    if len(group) < 4:
        return [f"{first} cannot be told from {'×'.join(others)}"]
    return [
        f"{first}×{other} cannot be told from {'×'.join(each for each in others if each != other)}"
        for other in others
    ]


# Other fractions


def _balanced(table: Table, counts: Sequence[int], size: int, order: Sequence[int]) -> list[int]:
    if len(table) > MOST_EXCHANGED:
        return _covering(table, _drawn(table, counts, size, order))
    effects = _effects(table, counts)
    most = min(size, _rank(effects))
    rows: list[int] = []
    for start in range(_MOST_STARTS):
        shift = start * len(order) // _MOST_STARTS
        rows = _covering(table, _exchanged(table, counts, [*order[shift:], *order[:shift]][:size]))
        if _rank(effects[rows]) == most:
            return rows
    return _telling_apart(effects, rows, most)


def _exchanged(table: Table, counts: Sequence[int], rows: list[int]) -> list[int]:
    """First what has few levels in common, pairs of them above all; then level by level."""
    common = np.zeros((len(table), len(table)), dtype=np.int64)
    for column, count in zip(table.T, counts, strict=True):
        common += count * (column[:, None] == column[None, :])
    alike = common**2
    above_all = 4 * len(rows) * int(alike.max()) + 1
    return _fewest_alike(above_all * common + alike, _fewest_alike(alike, rows))


def _telling_apart(effects: Effects, rows: list[int], most: int) -> list[int]:
    """Rows exchanged, at the cost of balance, until all main effects can be told apart."""
    rows = list(rows)
    while (rank := _rank(effects[rows])) < most:
        basis = np.linalg.svd(effects[rows])[2][:rank]
        new = int(np.linalg.norm(effects - effects @ basis.T @ basis, axis=1).argmax())
        wider = effects[[*rows, new]]
        needed = np.einsum("ij,ji->i", wider, np.linalg.pinv(wider))
        rows[int(needed[:-1].argmin())] = new
    return rows


def _fewest_alike(alike: Table, rows: list[int]) -> list[int]:
    """Rows exchanged for others as long as that makes them less alike, all together."""
    inside = np.zeros(len(alike), dtype=bool)
    inside[rows] = True
    load = alike[:, rows].sum(axis=1)
    for _ in range(_MOST_PASSES):
        before = list(rows)
        for place in sorted(range(len(rows)), key=lambda place: -int(load[rows[place]])):
            out = rows[place]
            change = 2 * (load - load[out]) + alike.diagonal() + alike[out, out] - 2 * alike[out]
            change[inside] = 0
            best = int(change.argmin())
            if change[best] < 0:
                inside[out], inside[best], rows[place] = False, True, best
                load += alike[best] - alike[out]
        if rows == before:
            break
    return rows


def _drawn(table: Table, counts: Sequence[int], size: int, order: Sequence[int]) -> list[int]:
    """Of many: one after the other what has the rarest levels among some; then level by level."""
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    cells = table + starts
    weights = np.repeat(counts, counts)
    seen = np.zeros(sum(counts), dtype=np.int64)
    waiting, rows = list(order[::-1]), []
    window: list[int] = []
    for _ in range(size):
        while waiting and len(window) < _LOOKED_AT:
            window.append(waiting.pop())
        scores = (seen * weights)[cells[window]].sum(axis=1)
        row = window.pop(int(scores.argmin()))
        seen[cells[row]] += 1
        rows.append(row)
    return _evened(table, counts, rows)


def _evened(table: Table, counts: Sequence[int], rows: list[int]) -> list[int]:
    """Points exchanged for their twins, which differ in one factor only, until levels are even."""
    places = {tuple(point): number for number, point in enumerate(table.tolist())}
    chosen = {tuple(table[row].tolist()) for row in rows}
    for factor, count in enumerate(counts):
        by_level: list[list[tuple[int, ...]]] = [[] for _ in range(count)]
        for point in sorted(chosen):
            by_level[point[factor]].append(point)
        while True:
            few, many = min(by_level, key=len), max(by_level, key=len)
            if len(many) - len(few) < 2:
                break
            level = by_level.index(few)
            twins = ((point, (*point[:factor], level, *point[factor + 1 :])) for point in many)
            free = ((point, twin) for point, twin in twins if twin in places and twin not in chosen)
            pair = next(free, None)
            if pair is None:
                break
            point, twin = pair
            many.remove(point)
            few.append(twin)
            chosen ^= {point, twin}
    return [places[point] for point in chosen]


def _covering(table: Table, rows: list[int]) -> list[int]:
    """With every level that there is, as far as so few rows can have them."""
    rows = list(rows)
    for factor in range(table.shape[1]):
        for level in sorted({*table[:, factor].tolist()} - {*table[rows, factor].tolist()}):
            candidates = np.flatnonzero(table[:, factor] == level).tolist()
            swap = next(
                ((place, row) for row in candidates for place in range(len(rows))
                 if _loses_nothing(table, rows, place, row)), None
            )  # fmt: skip
            if swap is not None:
                rows[swap[0]] = swap[1]
    return rows


def _loses_nothing(table: Table, rows: Sequence[int], place: int, row: int) -> bool:
    others = table[[each for number, each in enumerate(rows) if number != place] + [row]]
    return all((others[:, f] == level).any() for f, level in enumerate(table[rows[place]]))


def _told(
    table: Table, rows: Sequence[int], counts: Sequence[int], names: Sequence[str], share: Fraction
) -> str:
    chosen = table[rows]
    head = _part_of(share, len(table))
    missing = [
        name
        for name, there, has in zip(names, table.T, chosen.T, strict=True)
        if len({*there.tolist()}) > len({*has.tolist()})
    ]
    if missing:
        return f"{head}: too few for every level of {', '.join(missing)}"
    if _rank(_effects(chosen, counts)) < _rank(_effects(table, counts)):
        return f"{head}: too few to tell all main effects apart"
    spread = max(int(np.ptp(_level_counts(column))) for column in chosen.T)
    even = f"equally often, within {spread}" if spread else "equally often"
    return f"{head}: main effects can be told apart; levels of a factor come {even}"


def _effects(table: Table, counts: Sequence[int]) -> Effects:
    """A column for each level but the first of its factor, and one for all."""
    columns: list[Any] = [np.ones(len(table))]
    for column, count in zip(table.T, counts, strict=True):
        columns += [(column == level).astype(float) for level in range(1, count)]
    return np.stack(columns, axis=1)


def _rank(effects: Effects) -> int:
    return int(np.linalg.matrix_rank(effects))


def _level_counts(column: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.unique(column, return_counts=True)[1]


def _part_of(share: Fraction, whole: int) -> str:
    part = _PARTS.get(share.denominator) if share.numerator == 1 else None
    return f"{part or share} of {whole}"
