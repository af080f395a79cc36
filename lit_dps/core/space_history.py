"""Boxes: the history of a search space that was widened, and where its points lie.

A best value near an end of its range says that better ones may lie beyond (`Range.boundary`). Then
the range is widened on that side, all trials stay, and new ones fill the added part alone, as
densely as the old box was filled: so all of the widened box is searched alike, and every cell has
the same points.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from lit_dps.core.search_space import Range, Space, space_from_dict, space_to_dict

FACTOR = 0.5  # of a range's width, on its scale, by which an end moves outward


@dataclass(frozen=True)
class ExpandedSpace:
    """A box that took the place of a smaller one.

    Attributes:
        first, end: Points first to end - 1 lie in the added part; those from `end` on anywhere in
            the box.
        space: The box.
    """

    first: int
    end: int
    space: Space

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {"first": self.first, "end": self.end, "space": space_to_dict(self.space)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> ExpandedSpace:
        """The inverse of `stored`."""
        return cls(given["first"], given["end"], space_from_dict(given["space"]))


def widened(box: Range, ends: Collection[str]) -> Range:
    """A range with some of its ends moved outward by `FACTOR` of its width, on its scale, as far as
    its kind allows.

    A log range stays above 0 and a reverse_log one below 1 by their scales. One that begins at 0 or
    above stays there, and a linear one that ends below 1 goes at most half of what is left to 1: it
    may be a rate, or a share. An integer one has whole ends, and stays at 1 or above if it was.
    """
    low, high = (box.value(u) for u in (-FACTOR * ("low" in ends), 1 + FACTOR * ("high" in ends)))
    if box.integer:
        low, high = math.floor(low), math.ceil(high)
    elif box.scale == "linear" and box.high < 1:
        high = min(high, (box.high + 1) / 2)
    if box.low >= 0:
        low = max(low, min(box.low, 1) if box.integer else 0.0)
    return replace(
        box, low=low if "low" in ends else box.low, high=high if "high" in ends else box.high
    )


def extended(
    space: Space, ends: Mapping[str, Collection[str]], points: int
) -> ExpandedSpace | None:
    """The box that takes the place of one with so many points; None where no end can move.

    Args:
        space: The box.
        ends: The ends that best values lie on, by key.
        points: Points that fill it.
    """
    new = {
        key: widened(box, ends[key]) if key in ends and isinstance(box, Range) else box
        for key, box in space.items()
    }
    if new == dict(space):
        return None
    growth = math.prod(
        new[key].width / box.width for key, box in space.items() if isinstance(box, Range)
    )
    return ExpandedSpace(points, points + max(1, round(points * (growth - 1))), new)


def inside(space: Space, values: Mapping[str, Any]) -> bool:
    """Whether a point lies in a box."""
    ranges = ((values[key], box) for key, box in space.items() if isinstance(box, Range))
    return all(box.low <= value <= box.high for value, box in ranges)


def told(boxes: Sequence[ExpandedSpace], names: Mapping[str, str]) -> list[str]:
    """A line for each time that a box was widened; the first is the box as it was."""
    lines = []
    for before, box in pairwise(boxes):
        moved = [
            f"{names[key]} from {before.space[key]} to {new}" for key, new in box.space.items()
        ]
        moved = [
            line
            for line, key in zip(moved, box.space, strict=True)
            if box.space[key] != before.space[key]
        ]
        where = f"points {box.first} to {box.end - 1} lie in the added part"
        lines.append(f"the box was widened, {', '.join(moved)}; {where}")
    return lines


def continued(one: Sequence[Mapping], other: Sequence[Mapping]) -> bool:
    """Whether of two stored histories one goes on from the other, but for how a machine rounds its
    logarithms."""
    return all(map(_alike, one, other))


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-9)
    return one == other
