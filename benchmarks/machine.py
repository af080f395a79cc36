"""The machine and the versions that numbers were measured with."""

from __future__ import annotations

import os
import re

import torch

from lit_dps.core.config import cores
from lit_dps.study.hardware import cpu_model
from lit_dps.tracking.sync import environment_tags

PACKAGES = ("torch", "lightning", "optuna", "mlflow", "lit_dps")
GIB = 2**30


def machine() -> dict[str, str]:
    """CPU model, usable cores, memory and GPU."""
    return {"CPU": cpu_model(), "cores": str(cores()), "memory": memory(), "GPU": gpu()}


def versions() -> dict[str, str]:
    """Versions of what is measured."""
    tags = environment_tags(None)
    return {"python": tags["python"], **{name: tags[f"version.{name}"] for name in PACKAGES}}


def commit() -> str:
    """The git commit of lit_dps, with "-dirty" where files were changed since; "none" outside of
    git."""
    return environment_tags(None)["mlflow.source.git.commit"]


def memory() -> str:
    """The machine's memory in GiB."""
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB:.1f} GiB"
    except (ValueError, OSError, AttributeError):  # only POSIX tells
        return "unknown"


def gpu() -> str:
    """The GPUs' names, or "none"."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(names) or "none"


def load() -> str:
    """Processes that ran or waited for a core in the last minute: near 0 where nothing else
    disturbs."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def slug(found: dict[str, str]) -> str:
    """A machine as part of a file name: intel-xeon-processor-2-cores."""
    words = re.sub(r"\((R|TM|C)\)|@.*|CPU", " ", found["CPU"], flags=re.IGNORECASE)
    parts = [words, f"{found['cores']} cores", *([] if found["GPU"] == "none" else [found["GPU"]])]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")
