"""Where metaparameters are searched: ranges and choices, and their map from the unit interval.

A best value near an end of its range suggests better values beyond that end (`Range.boundary`).
Then the range is expanded on that side (`ExpandedSpace`). All trials stay, and new points fill the
added part alone, as densely as the old part. So the expanded space is searched evenly, and all
cells have the same points.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from lit_dps.core.errors import ConfigError, is_number
from lit_dps.core.trial import Value, short_name, text_of

Scale = Literal["linear", "log", "reverse_log"]

# Share of a range's width, on its scale, within which a best value counts as on the boundary. Then
# the optimum may be outside, and the range should be expanded (Godbole et al. 2023, "Deep Learning
# Tuning Playbook", the boundary check).
BOUNDARY = 0.05

RATE_NAMES = ("learning_rate", "lr")  # arguments that are the learning rate


@dataclass(frozen=True)
class Range:
    """A range [low, high] that is searched on a scale.

    Attributes:
        low: Lower end, included.
        high: Upper end, included.
        scale: "linear"; "log" (uniform in log x; low > 0); "reverse_log" (uniform in log(1 - x),
            for momentum; high < 1).
        integer: Whether values are whole numbers.
    """

    low: float
    high: float
    scale: Scale = "linear"
    integer: bool = False

    def __str__(self) -> str:
        return f"[{self.low:g}, {self.high:g}] {self.scale}"

    @property
    def extremes(self) -> list[float | int]:
        """Both ends: if a module accepts them, it accepts all values between."""
        return [self.at(0.0), self.at(1.0)]

    def check(self, key: str) -> None:
        """Raise ConfigError about `key` if the range is empty, inverted or outside its scale."""
        shown = f"[{self.low:g}, {self.high:g}]"
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            raise ConfigError(key, shown, "a range with finite ends")
        if not self.low < self.high:
            raise ConfigError(key, shown, "a range with low below high")
        if self.scale not in ("linear", "log", "reverse_log"):
            raise ConfigError(f"{key}.scale", self.scale, "one of linear, log, reverse_log")
        if self.scale == "log" and self.low <= 0:
            raise ConfigError(key, shown, "a range that starts above 0, for the scale log")
        if self.scale == "reverse_log" and self.high >= 1:
            raise ConfigError(key, shown, "a range that ends below 1, for the scale reverse_log")
        if self.integer and (self.low != int(self.low) or self.high != int(self.high)):
            raise ConfigError(key, shown, "a range with whole ends, for integer: true")

    def at(self, u: float) -> float | int:
        """Return the value at u in [0, 1], where 0 is `low` (also for reverse_log) and 1 `high`."""
        if self.integer:
            # Each whole number has half a unit on both sides, on the scale.
            low = self._warp(self.low - 0.5)
            high = self._warp(self.high + 0.5)
            # round() would round Sobol's points at .5 to even numbers.
            value = math.floor(self._unwarp(low + u * (high - low)) + 0.5)
            return min(max(value, int(self.low)), int(self.high))
        return min(max(self.value(u), self.low), self.high)

    @property
    def width(self) -> float:
        """The width, on the scale, of the interval that `at` maps to."""
        half = 0.0
        if self.integer:
            half = 0.5
        return self._warp(self.high + half) - self._warp(self.low - half)

    def value(self, u: float) -> float:
        """Return the value at u on the scale, not rounded and not limited to the range."""
        low = self._warp(self.low)
        high = self._warp(self.high)
        return self._unwarp(low + u * (high - low))

    def unit(self, value: float) -> float:
        """Return the position of a value on the scale, 0 at `low` and 1 at `high`."""
        low = self._warp(self.low)
        high = self._warp(self.high)
        return (self._warp(value) - low) / (high - low)

    def contains(self, value: Value) -> bool:
        """Return True if a value of any kind is one of the range."""
        if isinstance(value, (str, bool)) or not self.low <= value <= self.high:
            return False
        return not self.integer or value == int(value)

    def boundary(self, value: float) -> Literal["low", "high"] | None:
        """Return the end that a value is on, within `BOUNDARY` of the width; None if neither."""
        u = self.unit(value)
        if u < BOUNDARY:
            return "low"
        if u > 1 - BOUNDARY:
            return "high"
        return None

    def _warp(self, x: float) -> float:
        if self.scale == "log":
            return math.log(x)
        if self.scale == "reverse_log":
            return -math.log1p(-x)
        return x

    def _unwarp(self, w: float) -> float:
        if self.scale == "log":
            return math.exp(w)
        if self.scale == "reverse_log":
            return -math.expm1(-w)
        return w


@dataclass(frozen=True)
class Choices:
    """A few equally likely values of a discrete metaparameter.

    Shallue et al. 2019 search label smoothing in 0, 0.01 and 0.1 this way.

    Attributes:
        choices: Only numbers, or only names and class paths.
    """

    choices: list[int | float | str]

    def __str__(self) -> str:
        return f"one of {', '.join(map(text_of, self.choices))}"

    @property
    def extremes(self) -> list[Value]:
        """All values: a module may reject any of them."""
        return list(self.choices)

    def check(self, key: str) -> None:
        """Raise ConfigError about `key` unless there are two or more distinct values of one kind.

        Numbers must be finite.
        """
        key = f"{key}.choices"
        if len(self.choices) < 2:
            raise ConfigError(key, self.choices, "a list of at least two values")
        if len({isinstance(value, str) for value in self.choices}) > 1:
            raise ConfigError(key, self.choices, "numbers alone, or names and class paths alone")
        if not all(isinstance(value, str) or math.isfinite(value) for value in self.choices):
            raise ConfigError(key, self.choices, "finite numbers")
        if len(set(map(text_of, self.choices))) < len(self.choices):
            raise ConfigError(key, self.choices, "values that differ, names in their last part")

    def at(self, u: float) -> Value:
        """Return the value at u in [0, 1]. Each value has an equal part, in their order."""
        index = int(u * len(self.choices))
        return self.choices[min(index, len(self.choices) - 1)]

    def unit(self, value: Value) -> float:
        """Return the middle of a value's part of [0, 1]."""
        return (self.choices.index(value) + 0.5) / len(self.choices)

    def contains(self, value: Value) -> bool:
        """Return True if a value is one of the choices."""
        return value in self.choices

    def boundary(self, value: Value) -> None:
        """Return None: choices have no ends."""


Box = Range | Choices
Space = Mapping[str, Box]  # by configuration key, e.g. "model.learning_rate"


def parse_box(key: str, value: Any) -> Box:
    """Return the range or the choices that a configuration defines.

    Args:
        key: Configuration key of the value.
        value: {low: 1e-4, high: 1, scale: log} or {choices: [0, 0.1]}, or a `Box`.

    Raises:
        ConfigError: for any other value.
    """
    if isinstance(value, Box):
        return value
    if not isinstance(value, Mapping) or not value:
        allowed = "a range, such as {low: 1e-4, high: 1}, or {choices: [0, 0.1]}"
        raise ConfigError(key, value, allowed)
    if "choices" in value:
        _check_names(key, value, Choices, required=("choices",))
        return _parse_choices(key, value)
    _check_names(key, value, Range, required=("low", "high"))
    return _parse_range(key, value)


def _check_names(
    key: str, value: Mapping[str, Any], kind: type[Range | Choices], required: tuple[str, ...]
) -> None:
    """Raise ConfigError for an unknown field, or if a required field is missing."""
    names = [field.name for field in fields(kind)]
    for name in value:
        if name not in names:
            allowed = f"omitted; the keys of a range are {', '.join(names)}"
            raise ConfigError(f"{key}.{name}", value[name], allowed)
    for name in required:
        if name not in value:
            raise ConfigError(key, dict(value), f"a range with low and high; {name} is missing")


def _parse_range(key: str, value: Mapping[str, Any]) -> Range:
    values = dict(value)
    for name in ("low", "high"):
        if not is_number(values[name]):
            raise ConfigError(f"{key}.{name}", values[name], "a number")
        values[name] = float(values[name])
    if not isinstance(values.get("integer", False), bool):
        raise ConfigError(f"{key}.integer", values["integer"], "true or false")
    return Range(**values)


def _parse_choices(key: str, value: Mapping[str, Any]) -> Choices:
    choices = value["choices"]
    is_list = isinstance(choices, list)
    if not is_list or not all(isinstance(each, str) or is_number(each) for each in choices):
        allowed = "a list of numbers, or of names and class paths"
        raise ConfigError(f"{key}.choices", choices, allowed)
    return Choices(choices)


def extreme_points(space: Space) -> list[dict[str, Value]]:
    """Return as few points as contain both ends of every range and all choices."""
    extremes = {key: box.extremes for key, box in space.items()}
    points = []
    for i in range(max(map(len, extremes.values()))):
        point = {}
        for key, values in extremes.items():
            point[key] = values[min(i, len(values) - 1)]
        points.append(point)
    return points


def space_to_dict(space: Space) -> dict[str, dict[str, Any]]:
    """Return a space as plain JSON."""
    return {key: asdict(box) for key, box in space.items()}


def space_from_dict(stored: Mapping[str, Mapping[str, Any]]) -> dict[str, Box]:
    """Return the space that `space_to_dict` stored."""
    space: dict[str, Box] = {}
    for key, values in stored.items():
        space[key] = Choices(**values) if "choices" in values else Range(**values)
    return space


def short_names(keys: list[str]) -> dict[str, str]:
    """Return the shortest unambiguous name of each key: model.learning_rate -> learning_rate."""
    last_names = [short_name(key) for key in keys]
    names = {}
    for key, name in zip(keys, last_names, strict=True):
        names[key] = key
        if last_names.count(name) == 1:
            names[key] = name
    return names


# Share of a range's width, on its scale, by which an end moves outward.
EXPANSION_SHARE = 0.5


@dataclass(frozen=True)
class ExpandedSpace:
    """A search space that replaced a smaller one.

    Attributes:
        first: The first point in the added part.
        end: The first point after the added part. Points from `end` on are from the entire space.
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
    smallest = 0.0
    if box.integer:
        smallest = min(box.low, 1)
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
        ends: The ends with best values, by key.
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
    """Return True if a point is within all ranges of a space."""
    for key, box in space.items():
        if isinstance(box, Range) and not box.low <= params[key] <= box.high:
            return False
    return True


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
