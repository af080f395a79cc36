"""Readings: what is measured along a run. Training itself does not depend on them.

One file per quantity, each with its callback:

- `lipschitz`: local Lipschitz constant of the gradient, and the terms of the convergence theory;
- `gradient_noise`: norms of the gradient of a rank's part of a batch and of the whole batch, and
  the gradient noise scale;
- `branching`: critical batch size along a run.
"""

from lit_dps.readings.branching import BranchCallback
from lit_dps.readings.gradient_noise import GradientNorms, NoiseScaleCallback
from lit_dps.readings.lipschitz import SmoothnessCallback

__all__ = ["BranchCallback", "GradientNorms", "NoiseScaleCallback", "SmoothnessCallback"]
