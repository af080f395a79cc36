"""The options of the command, the clock of its budget, and its lines on stderr."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from typing import Literal, get_args

from lit_dps.core.errors import ConfigError
from lit_dps.core.progress_line import print_wrapped
from lit_dps.core.text import format_duration
from lit_dps.storage.advice_store import AdviceStore

Method = Literal["pilot", "branch"]
SECONDS_PER_UNIT = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
STORE_SECONDS = 5.0  # between two times that the clock is stored; a kill may lose as much
# The share of the budget that is reserved for the answer, within these limits.
ANSWER_SHARE = 0.12
MIN_ANSWER_SECONDS = 5.0
MAX_ANSWER_SECONDS = 20.0
SEARCH = "`lit-dps study` searches the learning rate at each batch size"


@dataclass(frozen=True)
class Options:
    """Options of the command.

    Attributes:
        budget: Seconds that all runs of the command together may take; infinite leaves the limit to
            the method "pilot".
        method: "pilot" trains the user's run, then few runs at larger batch sizes; "branch" forks
            a run (`lit_dps.readings.branching`).
        devices: Numbers of devices to answer for.
        price: Price of a device-hour, in any currency; None answers in device-hours.
        bandwidth: Bytes per second between two devices. If it is None, only the numbers of devices
            that are used here are answered for.
        latency: Seconds of a message between two devices.
    """

    budget: float = math.inf
    method: Method = "pilot"
    devices: tuple[int, ...] = (1,)
    price: float | None = None
    bandwidth: float | None = None
    latency: float = 1e-5

    def __post_init__(self):
        if self.method not in get_args(Method):
            allowed = " or ".join(get_args(Method))
            raise ConfigError("--method", self.method, f"{allowed}; {SEARCH}")
        if self.budget == math.inf and self.method != "pilot":
            raise ConfigError("--budget", None, "a time above 0 such as 90s, 30m or 2h")
        if not self.devices or min(self.devices) < 1:
            devices = ",".join(map(str, self.devices))
            raise ConfigError("--devices", devices, "numbers of devices such as 1,2,4,8")
        for key, value in (("price", self.price), ("bandwidth", self.bandwidth)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{key}", value, "a finite number above 0")
        if not 0 <= self.latency < math.inf:
            raise ConfigError("--latency", self.latency, "a finite number of seconds, 0 or more")


def seconds_of(text: str) -> float:
    """Return the seconds of a budget such as 90s, 30m or 2h.

    Raises:
        ConfigError: for any other text, and for 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)", text.strip())
    seconds = 0.0
    if match is not None:
        seconds = float(match[1]) * SECONDS_PER_UNIT[match[2]]
    if not seconds:
        raise ConfigError("--budget", text, "a time above 0 such as 90s, 30m or 2h")
    return seconds


def devices_of(text: str) -> tuple[int, ...]:
    """Return the numbers of devices of a list such as 1,2,4,8, ascending.

    Raises:
        ConfigError: for any other text, and for a number that occurs twice.
    """
    try:
        devices = sorted(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError("--devices", text, "numbers of devices such as 1,2,4,8") from None
    if len(set(devices)) < len(devices):
        allowed = "different numbers of devices such as 1,2,4,8"
        raise ConfigError("--devices", text, allowed)
    return tuple(devices)


class Clock:
    """The time that all runs of the command have taken.

    It is stored regularly, because a run may be killed.

    Args:
        budget: Seconds of the budget.
        store: Where the time is stored.
        spent: Seconds that earlier runs took.
        began: When this run began, on the monotonic clock; None is now.
        announced: What an earlier run announced; infinite without one.

    Attributes:
        spent_before: Seconds that earlier runs took.
        announced: The most seconds that the user was told that all runs take.
        was_announced: Whether an earlier run told so. Its announcement stays: a later one would
            include the time that is spent, and be kept always.
    """

    def __init__(
        self,
        budget: float,
        store: AdviceStore,
        spent: float,
        began: float | None = None,
        announced: float = math.inf,
    ):
        self.budget = budget
        self.store = store
        self.announced = announced
        self.was_announced = announced < math.inf
        self.spent_before = spent
        self._stored = time.monotonic()
        if began is None:
            began = self._stored
        self._began = began

    @property
    def spent(self) -> float:
        """Seconds that all runs have taken."""
        return self.spent_before + time.monotonic() - self._began

    @property
    def remaining(self) -> float:
        """Seconds until the answer has to begin."""
        answer = max(ANSWER_SHARE * self.budget, MIN_ANSWER_SECONDS)
        answer = min(answer, MAX_ANSWER_SECONDS)
        return self.budget - answer - self.spent

    @property
    def announced_text(self) -> str:
        """The announced time, at most the budget, as text."""
        return format_duration(min(self.announced, self.budget), 2)

    def announce(self, seconds: float) -> None:
        """Store the most seconds of all runs, unless an earlier run announced them."""
        if not self.was_announced:
            self.announced = seconds
            self.store.keep(announced=seconds)

    def save(self) -> None:
        """Store the time."""
        self._stored = time.monotonic()
        self.store.keep(spent=self.spent)

    def tick(self) -> None:
        """Store the time if that was some seconds ago; to be called often."""
        if time.monotonic() > self._stored + STORE_SECONDS:
            self.save()


def print_line(text: str) -> None:
    """Print a line about the progress of the command."""
    print_wrapped(text)
