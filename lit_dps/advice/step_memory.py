"""Whether a larger batch fits in memory, by the memory that smaller ones took.

On a CPU the system kills a process that takes too much memory; `Memory` predicts when.
"""

from __future__ import annotations

import os
from pathlib import Path

from lit_dps.core.process_memory import kibibytes_in, peak_bytes, reset_peak

MAX_SHARE = 0.8  # of the free memory that a step may take
CGROUP = Path("/sys/fs/cgroup")
# Messages of torch, CUDA, numpy and Python, in lower case.
FULL_MESSAGES = ("can't allocate memory", "out of memory", "unable to allocate", "memoryerror")


class Memory:
    """The memory that timed steps took, and an estimate for larger ones.

    On Linux the peak of this process is reset before each size. On other systems, a size that takes
    less than an earlier one, or than an import, seems to take no further memory.
    """

    def __init__(self) -> None:
        self.sizes: list[tuple[int, float]] = []  # examples and the peak in bytes

    def begin(self) -> None:
        """Reset the peak; to be called before a size is timed."""
        reset_peak()

    def end(self, size: int) -> None:
        """Note the peak; to be called after a size was timed."""
        self.sizes.append((size, peak_bytes()))

    def missing(self, size: int) -> float:
        """Return the bytes that a size takes beyond what it may take; at most 0 if it fits.

        Each further example is assumed to take as much as between the last two sizes.
        """
        if len(self.sizes) < 2:
            return 0.0
        (before, low), (last, high) = self.sizes[-2:]
        growth = max(0.0, high - low) / (last - before) * (size - last)
        if not growth:
            return 0.0
        return growth - MAX_SHARE * self.free()

    def free(self) -> float:
        """Return the bytes that are free on this machine, within the limit of its container."""
        try:
            free = kibibytes_in(Path("/proc/meminfo"), "MemAvailable") * 1024
        except (OSError, ValueError):
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
        try:
            limit = (CGROUP / "memory.max").read_text().strip()
            used = (CGROUP / "memory.current").read_text().strip()
            if limit != "max":
                free = min(free, float(limit) - float(used))
        except (OSError, ValueError):
            # This is no container.
            pass
        return free


def is_full(error: BaseException | str) -> bool:
    """Return True if the reason of an error, or of its text, is a full memory."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return any(message in text for message in FULL_MESSAGES)
