"""Room: how many trials a stack may have, and how much of a batch it takes at a time, by the memory that is free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

SHARE = 0.6  # of the free memory that is planned with; the rest is for what allocators and kernels take beside
STATE = 6  # tensors of a network's size: weights, accumulators, mask, gradients, and two on the way
WORK = 3  # what a backward pass holds, over what its forward pass saved for it
PART = 256  # examples at a time that fill a device; only then are more trials better than larger parts
CPU_SLOTS = 16  # beyond it a core's cache holds nothing of the next network


@dataclass(frozen=True)
class Room:
    """What a network costs, and what there is.

    Attributes:
        free: Bytes that may be used.
        state: Bytes a network takes whatever its batch.
        example: Bytes an example of its batch adds.
        batch_size: Examples of a batch.
        most: The most networks that are worth stacking on the device.
    """

    free: float
    state: int
    example: int
    batch_size: int
    most: int | None

    @classmethod
    def of(cls, module: LightningModule, x: Tensor, y: Tensor, batch_size: int, workers: int = 1) -> Room:
        """Measures a network on one example and on two.

        Args:
            module: The network, on its device.
            x: Images, on the same device.
            y: Their classes.
            batch_size: Examples of a batch.
            workers: Processes that share the free memory.
        """
        saved = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal saved
            saved += tensor.nbytes
            return tensor

        module.train()
        totals = []
        for examples in (1, 2):  # what does not grow is the network itself
            saved = 0
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                module.loss((x[:examples], y[:examples]))
            totals.append(saved)
        state = STATE * sum(p.nbytes for p in module.parameters()) + sum(b.nbytes for b in module.buffers())
        most = CPU_SLOTS if module.device.type == "cpu" else None
        example = WORK * (totals[1] - totals[0]) + 2 * x[0].nbytes
        return cls(SHARE * free_memory(module.device) / workers, state, example, batch_size, most)

    @property
    def slots(self) -> int:
        """Trials that fit beside each other with parts of `PART` examples; at least one."""
        fit = int(self.free // (self.state + min(self.batch_size, PART) * self.example))
        return max(1, fit if self.most is None else min(fit, self.most))

    def part(self, slots: int) -> int:
        """Examples of a batch that so many trials can take at a time; at least one."""
        return max(1, min(self.batch_size, int((self.free / slots - self.state) // self.example)))


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux: half of all there is
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
