"""The hardware of this machine in words: what times are told of."""

from __future__ import annotations

import platform
from collections import Counter
from pathlib import Path

from lit_dps.core.config import cores


def hardware() -> str:
    """Processor, cores that may be used, and GPUs: "AMD EPYC (family 26, model 2), 2 cores; 2 x
    NVIDIA H200".

    Family and model, where the system tells them: clouds give processors of several generations one
    name.
    """
    import torch  # half a second, which whoever runs no trials does not need

    told, names = _cpuinfo(), {"cpu family": "family", "model": "model"}
    kind = ", ".join(f"{name} {told[key]}" for key, name in names.items() if key in told)
    count = cores()
    found = [f"{cpu_model()}{f' ({kind})' if kind else ''}, {count} core{'s' * (count > 1)}"]
    gpus = Counter(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return "; ".join(found + [f"{n} x {name}" if n > 1 else name for name, n in gpus.items()])


def cpu_model() -> str:
    """The processor's name, where the system tells it, else its architecture."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def _cpuinfo() -> dict[str, str]:
    """What Linux tells of the first processor, proc_cpuinfo(5); nothing on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs if value.strip()}
