"""Memory that a step frees is kept for the next one, instead of being given back to the system each time."""

from __future__ import annotations

import ctypes
import os
import platform

SWITCH = "LIT_DPS_KEEP_MEMORY"
_OWN = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3), from <malloc.h>


def keep_freed_memory() -> bool:
    """Tells the C library's allocator to keep what this process frees. Returns whether it was told.

    By default glibc maps each block of 32 MiB or more by itself and gives it back when it is freed, so every step of a
    large batch and every full check pays for all its pages anew: a third to a half of its time on the paper's networks.
    It changes no result. A process keeps the memory of its peak, which is the same but for batches of thousands, where
    what lies between the blocks may add a half.

    LIT_DPS_KEEP_MEMORY=0 in the environment switches it off, and so does a setting of the allocator there
    (MALLOC_TRIM_THRESHOLD_ and its like, GLIBC_TUNABLES). Other C libraries are left as they are.
    """
    environment = os.environ
    configured = any(name in environment for name in _OWN) or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    if configured or environment.get(SWITCH) == "0" or platform.libc_ver()[0] != "glibc":
        return False
    tell = ctypes.CDLL(None).mallopt
    return bool(tell(_MMAP_MAX, 0) and tell(_TRIM_THRESHOLD, 2**31 - 1))
