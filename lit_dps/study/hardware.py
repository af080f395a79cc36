"""The hardware of this machine in words, which is stored with times."""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path

from lit_dps.core.config import cores


def hardware() -> str:
    """Return processor, usable cores and GPUs.

    An example is "AMD EPYC (family 26, model 2), 2 cores; 2 x NVIDIA H200". Clouds use one name for
    processors of several generations, so family and model are added where Linux names them.
    """
    import torch  # takes half a second, which commands that run no trials save

    info = _cpu_info()
    generation = []
    for key, name in (("cpu family", "family"), ("model", "model")):
        if key in info:
            generation.append(f"{name} {info[key]}")
    text = cpu_model()
    if generation:
        text += f" ({', '.join(generation)})"
    number = cores()
    # The text is stored and compared, so that a large number has no comma here.
    parts = [f"{text}, {number} {'core' if number == 1 else 'cores'}"]
    gpus = Counter(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    for name, number in gpus.items():
        parts.append(name if number == 1 else f"{number} x {name}")
    return "; ".join(parts)


def cpu_model() -> str:
    """Return the name of the processor, or its architecture if the system has no name."""
    return _cpu_info().get("model name") or platform.processor() or platform.machine()


def _cpu_info() -> dict[str, str]:
    """Return the entries of the first processor in /proc/cpuinfo; {} on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    entries = {}
    for line in first.splitlines():
        key, _, value = line.partition(":")
        if value.strip():
            entries[key.strip()] = value.strip()
    return entries
