"""The history of a search space that was expanded, and where its points lie.

A best value near an end of its range suggests that better values lie beyond (`Range.boundary`).
Then the range is expanded on that side. All trials stay, and new points fill the added part alone,
as densely as the old part. So the expanded space is searched evenly, and all cells have the same
points.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from lit_dps.core.search_space import Box, Range, Space, space_from_dict, space_to_dict

EXPANSION_SHARE = 0.5  # of a range's width, on its scale, by which an end moves outward


@dataclass(frozen=True)
class ExpandedSpace:
    """A search space that replaced a smaller one.

    Attributes:
        first: The first point in the added part.
        end: The first point after those. Points from `end` on lie anywhere in the space.
        space: The expanded space.
    """

    first: int
    end: int
    space: Space

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON."""
        return {"first": self.first, "end": self.end, "space": space_to_dict(self.space)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> ExpandedSpace:
        """Return the space that `to_dict` stored."""
        return cls(stored["first"], stored["end"], space_from_dict(stored["space"]))


def expand_range(box: Range, ends: Collection[str]) -> Range:
    """Return a range with some of its ends moved outward, by `EXPANSION_SHARE` of its width.

    The width is measured on the range's scale. Limits of the new range:

    - A log range stays above 0, and a reverse_log range below 1, because of their scales.
    - A range that begins at 0 or above does not go below 0.
    - A linear range that ends below 1 moves at most half of the way to 1: the value may be a rate
      or a share.
    - An integer range keeps whole ends, and does not go below 1 if it began at 1 or above.

    Args:
        box: The range.
        ends: "low", "high" or both.
    """
    low = box.low
    if "low" in ends:
        low = _lower_end(box)
    high = box.high
    if "high" in ends:
        high = _upper_end(box)
    return replace(box, low=low, high=high)


def _lower_end(box: Range) -> float:
    low = box.value(-EXPANSION_SHARE)
    if box.integer:
        low = math.floor(low)
    if box.low < 0:
        return low
    smallest = min(box.low, 1) if box.integer else 0.0
    return max(low, smallest)


def _upper_end(box: Range) -> float:
    high = box.value(1 + EXPANSION_SHARE)
    if box.integer:
        return math.ceil(high)
    if box.scale == "linear" and box.high < 1:
        return min(high, (box.high + 1) / 2)
    return high


def expand_space(
    space: Space, ends: Mapping[str, Collection[str]], points: int
) -> ExpandedSpace | None:
    """Return the space that replaces a searched one; None if no end can move.

    Args:
        space: The searched space.
        ends: The ends that best values lie on, by key.
        points: Number of points that fill the searched space.
    """
    new: dict[str, Box] = {}
    growth = 1.0
    for key, box in space.items():
        new[key] = box
        if isinstance(box, Range):
            expanded = expand_range(box, ends.get(key, ()))
            new[key] = expanded
            growth *= expanded.width / box.width
    if new == dict(space):
        return None
    new_points = max(1, round(points * (growth - 1)))
    return ExpandedSpace(points, points + new_points, new)


def is_inside(space: Space, params: Mapping[str, Any]) -> bool:
    """Return True if a point lies within all ranges of a space."""
    for key, box in space.items():
        if isinstance(box, Range) and not box.low <= params[key] <= box.high:
            return False
    return True


def describe_expansions(history: Sequence[ExpandedSpace], names: Mapping[str, str]) -> list[str]:
    """Return one line for each expansion.

    Args:
        history: The first space, then each expanded one.
        names: The short name of each key.
    """
    lines = []
    for before, after in pairwise(history):
        moved = []
        for key, box in after.space.items():
            if box != before.space[key]:
                moved.append(f"{names[key]} from {before.space[key]} to {box}")
        where = f"points {after.first} to {after.end - 1} lie in the added part"
        lines.append(f"the box was widened, {', '.join(moved)}; {where}")
    return lines


def is_continuation(one: Sequence[Mapping], other: Sequence[Mapping]) -> bool:
    """Return True if one of two stored histories is the beginning of the other.

    Numbers may differ by the rounding of logarithms on another machine.
    """
    return all(map(_is_equal, one, other))


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-9)
    return one == other
