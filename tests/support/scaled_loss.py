"""A precision that scales the loss, as 16-mixed does on a GPU, and computes in full precision."""

from __future__ import annotations

import torch
from lightning.pytorch.plugins import MixedPrecision


class ScaledLoss(MixedPrecision):
    """Scales the loss on a CPU. Its scaler skips steps whose gradients are not finite.

    Args:
        init_scale: The first scale, which is halved after each skipped step.
    """

    def __init__(self, init_scale: float = 1024.0):
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=init_scale))

    def autocast_context_manager(self):
        return torch.autocast("cpu", enabled=False)
