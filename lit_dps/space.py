"""Ranges of metaparameters: from the unit interval to a value and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lit_dps.errors import ConfigError

Scale = Literal["linear", "log", "reverse_log"]

# Share of a range's width, on its scale, within which a best value counts as on the boundary: the optimum may lie
# outside and the box should be widened (Godbole et al. 2023, "Deep Learning Tuning Playbook", the boundary check).
BOUNDARY = 0.05


@dataclass(frozen=True)
class Range:
    """A range [low, high] searched on a scale.

    Attributes:
        low: Lower end, included.
        high: Upper end, included.
        scale: "linear"; "log" (uniform in log x; low > 0); "reverse_log" (uniform in log(1 - x), for momentum;
            high < 1).
        integer: Whether values are whole numbers.
    """

    low: float
    high: float
    scale: Scale = "linear"
    integer: bool = False

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
            value = math.floor(self._unwarp(low + u * (high - low)) + 0.5)  # round() goes to even at Sobol's own points
            return min(max(value, int(self.low)), int(self.high))
        low, high = self._warp(self.low), self._warp(self.high)
        return min(max(self._unwarp(low + u * (high - low)), self.low), self.high)

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


Space = Mapping[str, Range]  # by configuration key, e.g. "model.learning_rate"


def short_names(keys: list[str]) -> dict[str, str]:
    """The shortest unambiguous name of each dotted key, for tables and axes: model.learning_rate -> learning_rate."""
    last = [key.rsplit(".", 1)[-1] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}
