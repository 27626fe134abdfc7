"""Ranges of samples, numbered through all epochs: what workers are given, use and give back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Range = tuple[int, int]
"""Samples [start, stop)."""


def as_ranges(raw: Iterable[Sequence[int]]) -> tuple[Range, ...]:
    """Of lists, as JSON has them."""
    return tuple((int(start), int(stop)) for start, stop in raw)


def merge(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Ranges sorted, those that touch or overlap as one."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif stop > start:
            found.append((start, stop))
    return tuple(found)


def subtract(ranges: Iterable[Range], taken: Iterable[Range]) -> tuple[Range, ...]:
    """What is in ``ranges`` and not in ``taken``, in the order of ``ranges``."""
    left = list(ranges)
    for start, stop in taken:
        left = [piece for a, b in left for piece in ((a, min(b, start)), (max(a, stop), b)) if piece[0] < piece[1]]
    return tuple(left)


def total(ranges: Iterable[Sequence[int]]) -> int:
    """Number of samples."""
    return sum(stop - start for start, stop in ranges)


def first(count: int, ranges: Iterable[Sequence[int]]) -> tuple[Range, ...]:
    """The first ``count`` samples, in the order of ``ranges``; all of them where there are fewer."""
    found: list[Range] = []
    for start, stop in ranges:
        if count > 0:
            found.append((start, min(stop, start + count)))
        count -= stop - start
    return tuple(found)


def take(count: int, cursor: int, pool: tuple[Range, ...]) -> tuple[tuple[Range, ...], int, tuple[Range, ...]]:
    """``count`` samples, from the pool first, the lowest first: them, and cursor and pool after it."""
    taken = first(count, pool)
    fresh = count - total(taken)
    return merge([*taken, (cursor, cursor + fresh)]), cursor + fresh, subtract(pool, taken)
