"""The peak memory of this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_PROCESS = Path("/proc/self")


def reset_peak() -> bool:
    """Let `peak_bytes` begin at the present memory, and return whether the system could do so.

    Other systems than Linux cannot, nor can a container whose /proc is read-only.
    """
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes() -> float:
    """Return the most bytes that this process has held, since `reset_peak` on Linux."""
    try:
        return kibibytes_in(_PROCESS / "status", "VmHWM") * 1024
    except (OSError, ValueError):
        # This is not Linux.
        unit = 1 if sys.platform == "darwin" else 1024
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def kibibytes_in(file: Path, name: str) -> float:
    """Return a value of a file of lines such as "VmHWM:   123 kB".

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it has no such line.
    """
    for line in file.read_text().splitlines():
        if line.startswith(name):
            return float(line.split()[1])
    raise ValueError(f"{file} has no {name}")
