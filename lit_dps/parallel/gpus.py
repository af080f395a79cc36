"""Which GPUs a worker sees: the visible GPUs are divided among the workers of a study.

A process sees the GPUs that CUDA_VISIBLE_DEVICES names: indices, UUIDs or MIG instances. Slurm and
users set it, and lit_dps never adds a GPU to it. A worker gets its part of the names before its
process initializes CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lit_dps.parallel import ddp

VARIABLE = "CUDA_VISIBLE_DEVICES"
_MIG_PREFIX = "MIG-"


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that this process sees, as CUDA_VISIBLE_DEVICES has them."""
    count = torch.cuda.device_count()
    value = os.environ.get(VARIABLE)
    if value is None:
        return [str(index) for index in range(count)]
    names = [name.strip() for name in value.split(",") if name.strip()]
    if names and names[0].startswith(_MIG_PREFIX):
        # CUDA shows a process one MIG instance only, however many are named.
        return names
    # CUDA ignores the first name that it does not know, and the names after it.
    return names[:count]


def gpus_of_worker(number: int, ranks: int, gpus: Sequence[str]) -> list[str]:
    """Return the GPUs of a worker: one for each of its ranks.

    If there are more workers than GPUs, several workers share a GPU.

    Args:
        number: Number of the worker, from 0.
        ranks: Number of the processes that train each trial together.
        gpus: The visible GPUs, at least as many as `ranks`.
    """
    groups = len(gpus) // ranks
    first = number % groups * ranks
    return list(gpus[first : first + ranks])


def worker_environment(number: int, ranks: int, trainer: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables with which a worker starts, so that it sees its GPUs only.

    Args:
        number: Number of the worker, from 0.
        ranks: Number of the processes that train each trial together.
        trainer: The arguments of Lightning's Trainer. If they name devices, all workers use these.
    """
    if not ddp.on_gpu(trainer) or ddp.names_devices(trainer):
        return {}
    gpus = visible_gpus()
    if len(gpus) < max(ranks, 2):
        return {}
    return {VARIABLE: ",".join(gpus_of_worker(number, ranks, gpus))}


def gpus_of_workers(workers: int, ranks: int, trainer: Mapping[str, Any]) -> int:
    """Return the number of GPUs that the workers of a study use together; 0 without a GPU.

    A single worker is this process, and trains on the first visible GPUs.
    """
    if not ddp.on_gpu(trainer):
        return 0
    if workers == 1 or ddp.names_devices(trainer):
        return ranks
    names = set()
    for number in range(workers):
        names.add(worker_environment(number, ranks, trainer).get(VARIABLE, ""))
    return len(names) * ranks
