"""The remaining time of a study as it is shown: steady between results, and rounded."""

from __future__ import annotations

import math
from collections.abc import Callable

from lit_dps.study.time_left import TimeRemaining

SECONDS_OF_ESTIMATE = 5.0  # after which the remaining time is estimated again
# Units that a remaining time is rounded up to, each below a limit, in seconds.
UNITS_BELOW = ((5, 300), (60, 3600), (300, math.inf))


class TimeLeft:
    """The remaining time as it is shown. It grows only when a trial has ended.

    The estimate grows a little with each look while a trial runs longer than expected. So the end
    that is shown becomes later only if a trial ended, or if the end that was shown has passed.

    Args:
        estimate: Estimates the remaining time; None if it is unknown.
        now: Returns the time in seconds.
    """

    def __init__(self, estimate: Callable[[], TimeRemaining | None], now: Callable[[], float]):
        self._estimate = estimate
        self._now = now
        self._last: TimeRemaining | None = None  # the last estimate; None if a trial ended since
        self._shown: TimeRemaining | None = None
        self._end = 0.0  # time at which the study ends by the shown estimate
        self._estimated_at = -math.inf

    def expire(self) -> None:
        """Let the next estimate be longer than the last one, because a trial has ended."""
        self._last = None
        self._shown = None
        self._estimated_at = -math.inf

    def remaining(self) -> TimeRemaining | None:
        """Return the remaining time to show; None if it is unknown."""
        now = self._now()
        if now - self._estimated_at >= SECONDS_OF_ESTIMATE:
            self._estimated_at = now
            self._update(self._estimate(), now)
        if self._shown is None:
            return None
        return self._shown._replace(seconds=max(self._end - now, 0.0))

    def _update(self, estimate: TimeRemaining | None, now: float) -> None:
        """Take a new estimate, but keep an earlier end of the same kind that has not passed.

        The kept end is shown as a lower bound if it is visibly earlier than the new one.
        """
        last = self._last
        self._last = estimate
        self._shown = estimate
        if estimate is None:
            return
        end = now + estimate.seconds
        is_same_kind = last is not None and last.is_lower_bound is estimate.is_lower_bound
        if is_same_kind and now < self._end < end:
            end = self._end
            if rounded_seconds(end - now) < rounded_seconds(estimate.seconds):
                self._shown = estimate._replace(is_lower_bound=True)
        self._end = end


def rounded_seconds(seconds: float) -> float:
    """Return a remaining time rounded up, since the estimate is not exact."""
    for unit, limit in UNITS_BELOW:
        if seconds < limit:
            return unit * math.ceil(seconds / unit)
    return seconds


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds: 0:01:40."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
