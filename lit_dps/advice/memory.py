"""How much memory a step takes on a CPU, so that none is tried which the system would kill this
process for."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

SHARE = 0.8  # of the free memory that a step may take
_CGROUP = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
_FULL = ("can't allocate memory", "out of memory", "unable to allocate", "memoryerror")


class Memory:
    """What the steps that were timed took, and what a larger one would.

    The peak of this process is begun anew before each size where the system allows that (Linux);
    else a size that takes less than an earlier one, or than an import, is taken to take nothing
    more.
    """

    def __init__(self) -> None:
        self.sizes: list[tuple[int, float]] = []  # examples and the peak in bytes

    def begin(self) -> None:
        """To be called before a size is timed."""
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def end(self, size: int) -> None:
        """To be called after it was timed."""
        self.sizes.append((size, self.peak()))

    def wanting(self, size: int) -> float:
        """Bytes that a size would take beyond what may be taken; 0 or less where it fits, as far as
        is known.

        Memory grows by as much for each example as it did between the last two sizes.
        """
        if len(self.sizes) < 2:
            return 0.0
        (before, low), (last, high) = self.sizes[-2:]
        more = max(0.0, high - low) / (last - before) * (size - last)
        return more - SHARE * self.free() if more else 0.0

    def peak(self) -> float:
        """The most bytes that this process has held since `begin`."""
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            return 1024 * next(float(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        except (OSError, StopIteration, ValueError):  # another system
            unit = 1 if sys.platform == "darwin" else 1024
            return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)

    def free(self) -> float:
        """Bytes that are free on this machine, within the limit of its container."""
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
            free = 1024 * next(
                float(line.split()[1]) for line in lines if line.startswith("MemAvailable")
            )
            limit, used = (file.read_text().strip() for file in _CGROUP)
            free = free if limit == "max" else min(free, float(limit) - float(used))
        except (OSError, StopIteration, ValueError):  # another system, or no container
            pass
        return free


def is_full(error: BaseException | str) -> bool:
    """Whether an error, or its text, says that memory, of a device or of the machine, does not hold
    what was asked."""
    return isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in _FULL)
