"""Where metaparameters are searched, ranges and choices: from the unit interval to a value and
back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import Value, short_name, text_of

Scale = Literal["linear", "log", "reverse_log"]

# Share of a range's width, on its scale, within which a best value counts as on the boundary: the
# optimum may lie outside and the box should be widened (Godbole et al. 2023, "Deep Learning Tuning
# Playbook", the boundary check).
BOUNDARY = 0.05

RATE_NAMES = ("learning_rate", "lr")  # arguments that are the learning rate


@dataclass(frozen=True)
class Range:
    """A range [low, high] searched on a scale.

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
        """Values that together show whether all of them are accepted: both ends."""
        return [self.at(0.0), self.at(1.0)]

    def check(self, key: str) -> None:
        """Raises ConfigError, naming `key`, if the range is empty, inverted or off its scale."""
        shown = f"[{self.low:g}, {self.high:g}]"
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            raise ConfigError(key, shown, "both ends must be finite")
        if not self.low < self.high:
            raise ConfigError(key, shown, "low must be below high")
        if self.scale not in ("linear", "log", "reverse_log"):
            raise ConfigError(f"{key}.scale", self.scale, "one of linear, log, reverse_log")
        if self.scale == "log" and self.low <= 0:
            raise ConfigError(key, shown, "a log range must start above 0")
        if self.scale == "reverse_log" and self.high >= 1:
            raise ConfigError(key, shown, "a reverse_log range must end below 1")
        if self.integer and (self.low != int(self.low) or self.high != int(self.high)):
            raise ConfigError(key, shown, "an integer range must have whole ends")

    def at(self, u: float) -> float | int:
        """The value at u in [0, 1): 0 is `low` (for reverse_log too), 1 is `high`."""
        if self.integer:  # each whole number owns half a unit on both sides, on the scale
            low, high = self._warp(self.low - 0.5), self._warp(self.high + 0.5)
            value = math.floor(
                self._unwarp(low + u * (high - low)) + 0.5
            )  # round() goes to even at Sobol's own points
            return min(max(value, int(self.low)), int(self.high))
        low, high = self._warp(self.low), self._warp(self.high)
        return min(max(self._unwarp(low + u * (high - low)), self.low), self.high)

    @property
    def width(self) -> float:
        """What `at` spreads the unit interval over, on the scale."""
        half = 0.5 * self.integer
        return self._warp(self.high + half) - self._warp(self.low - half)

    def value(self, u: float) -> float:
        """The value at u on the scale, 0 at `low` and 1 at `high`; beyond them outside of the
        range. Not rounded."""
        low, high = self._warp(self.low), self._warp(self.high)
        return self._unwarp(low + u * (high - low))

    def unit(self, value: float) -> float:
        """Where a value lies on the scale, 0 at `low` and 1 at `high`."""
        low, high = self._warp(self.low), self._warp(self.high)
        return (self._warp(value) - low) / (high - low)

    def boundary(self, value: float) -> Literal["low", "high"] | None:
        """The end that a value lies on, within `BOUNDARY` of the width, or None."""
        u = self.unit(value)
        return "low" if u < BOUNDARY else "high" if u > 1 - BOUNDARY else None

    def _warp(self, x: float) -> float:
        if self.scale == "log":
            return math.log(x)
        return -math.log1p(-x) if self.scale == "reverse_log" else x

    def _unwarp(self, w: float) -> float:
        if self.scale == "log":
            return math.exp(w)
        return -math.expm1(-w) if self.scale == "reverse_log" else w


@dataclass(frozen=True)
class Choices:
    """A few values, each as likely as the others: a discrete metaparameter (Shallue et al. 2019
    search label smoothing in 0, 0.01 and 0.1 so).

    Attributes:
        choices: Numbers alone, or names and class paths alone.
    """

    choices: list[int | float | str]

    def __str__(self) -> str:
        return f"one of {', '.join(map(text_of, self.choices))}"

    @property
    def extremes(self) -> list[Value]:
        """Values that together show whether all of them are accepted: each of them."""
        return list(self.choices)

    def check(self, key: str) -> None:
        """Raises ConfigError, naming `key`, for fewer than two values, equal ones, mixed kinds, and
        none finite."""
        if len(self.choices) < 2:
            raise ConfigError(f"{key}.choices", self.choices, "at least two values")
        if len({isinstance(value, str) for value in self.choices}) > 1:
            raise ConfigError(
                f"{key}.choices", self.choices, "numbers alone, or names and class paths alone"
            )
        if not all(isinstance(value, str) or math.isfinite(value) for value in self.choices):
            raise ConfigError(f"{key}.choices", self.choices, "finite numbers")
        if len(set(map(text_of, self.choices))) < len(self.choices):
            raise ConfigError(
                f"{key}.choices", self.choices, "values that differ, names in their last part"
            )

    def at(self, u: float) -> Value:
        """The value at u in [0, 1): each owns an equal part, in their order; 1 is the last one."""
        return self.choices[min(int(u * len(self.choices)), len(self.choices) - 1)]

    def unit(self, value: Value) -> float:
        """The middle of a value's part."""
        return (self.choices.index(value) + 0.5) / len(self.choices)

    def boundary(self, value: Value) -> None:
        """Nothing: choices have no ends."""


Box = Range | Choices
Space = Mapping[str, Box]  # by configuration key, e.g. "model.learning_rate"


def box_of(key: str, given: Any) -> Box:
    """A range or choices as a configuration has it, {low: 1e-4, high: 1, scale: log} or {choices:
    [0, 0.1]}.

    Raises:
        ConfigError: naming `key`, for anything else.
    """
    if isinstance(given, Box):
        return given
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(
            key, given, "a range, such as {low: 1e-4, high: 1}, or {choices: [0, 0.1]}"
        )
    kind, plain = (Choices if "choices" in given else Range), dict(given)
    names = [field.name for field in fields(kind)]
    for name, value in plain.items():
        if name not in names:
            raise ConfigError(f"{key}.{name}", value, f"left out: there are {', '.join(names)}")
    for name in ("low", "high") if kind is Range else ("choices",):
        if name not in plain:
            raise ConfigError(key, plain, f"{name} is needed too")
    if kind is Range:
        for name in ("low", "high"):
            if not _is(plain[name], int, float):
                raise ConfigError(f"{key}.{name}", plain[name], "a number")
            plain[name] = float(plain[name])
        if not isinstance(plain.get("integer", False), bool):
            raise ConfigError(f"{key}.integer", plain["integer"], "true or false")
    elif not (
        isinstance(plain["choices"], list)
        and all(_is(value, int, float, str) for value in plain["choices"])
    ):
        raise ConfigError(
            f"{key}.choices", plain["choices"], "a list of numbers, or of names and class paths"
        )
    return kind(**plain)


def _is(value: Any, *types: type) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def extremes(space: Space) -> list[dict[str, Value]]:
    """Points that together have both ends of every range and each of the choices, as few as that
    takes."""
    ends = {key: box.extremes for key, box in space.items()}
    return [
        {key: e[min(i, len(e) - 1)] for key, e in ends.items()}
        for i in range(max(map(len, ends.values())))
    ]


def space_to_dict(space: Space) -> dict[str, dict[str, Any]]:
    """A space as plain JSON."""
    return {key: asdict(box) for key, box in space.items()}


def space_from_dict(space: Mapping[str, Mapping[str, Any]]) -> dict[str, Box]:
    """The inverse of `space_to_dict`."""
    return {
        key: (Choices if "choices" in fields else Range)(**fields) for key, fields in space.items()
    }


def short_names(keys: list[str]) -> dict[str, str]:
    """The shortest unambiguous name of each dotted key, for tables and axes: model.learning_rate ->
    learning_rate."""
    last = [short_name(key) for key in keys]
    return {
        key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)
    }
