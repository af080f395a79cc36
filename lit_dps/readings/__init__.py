"""Readings: what is measured along a run. Training itself does not depend on them.

`gradients` (local Lipschitz constant, gradient norms), `gradient_noise` (gradient noise scale),
`branching` (the critical batch size along a run), `smoothness` (the functions that the callbacks
use).
"""

from lit_dps.readings.branching import BranchCallback
from lit_dps.readings.gradient_noise import NoiseScaleCallback
from lit_dps.readings.gradients import GradientNorms, SmoothnessCallback

__all__ = ["BranchCallback", "GradientNorms", "NoiseScaleCallback", "SmoothnessCallback"]
