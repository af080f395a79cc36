"""What advice is asked for, and how much asking may cost."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from lit_dps.core.errors import ConfigError

Method = Literal["law", "branch"]
_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass(frozen=True)
class Options:
    """Options of the command.

    Attributes:
        budget: Seconds that asking may take, all runs of the command together.
        method: "law" probes K at a few batch sizes; "branch" forks a run
            (`lit_dps.readings.branching`).
        devices: Numbers of devices to answer for.
        price: Of a device-hour, in any currency; None answers in device-hours.
        bandwidth: Bytes a second between two devices, for numbers of devices that are not here;
            None where it is not
            known: then only those here are answered for.
        latency: Seconds of a message between two devices.
        trials: Trials of each probe.
    """

    budget: float
    method: Method = "law"
    devices: tuple[int, ...] = (1,)
    price: float | None = None
    bandwidth: float | None = None
    latency: float = 1e-5
    trials: int = 8

    def __post_init__(self):
        if self.method not in get_args(Method):
            raise ConfigError("--method", self.method, f"one of {', '.join(get_args(Method))}")
        if not self.devices or min(self.devices) < 1:
            raise ConfigError(
                "--devices", ",".join(map(str, self.devices)), "numbers of devices such as 1,2,4,8"
            )
        for key, value in (("price", self.price), ("bandwidth", self.bandwidth)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{key}", value, "a finite number above 0")
        if not 0 <= self.latency < math.inf:
            raise ConfigError("--latency", self.latency, "a finite number of seconds, 0 or more")
        if self.trials < 2:
            raise ConfigError("--trials", self.trials, "at least 2: the rate has to be searched")


def seconds_of(text: str) -> float:
    """The seconds of a budget such as 90s, 30m or 2h. Raises ConfigError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)", text.strip())
    if not found or not (seconds := float(found[1]) * _UNITS[found[2]]):
        raise ConfigError("--budget", text, "a time above 0 such as 90s, 30m or 2h")
    return seconds


def devices_of(text: str) -> tuple[int, ...]:
    """The numbers of devices of a list such as 1,2,4,8. Raises ConfigError for anything else."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigError("--devices", text, "numbers of devices such as 1,2,4,8") from None
