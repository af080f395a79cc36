"""Readings: what is measured along a run. Training itself does not depend on them.

`reading` defines a reading, `registry` finds the readings that a configuration names,
`attempt_readings` takes the readings of an attempt, and `callback` calls it in Lightning's loop. A
file per quantity follows:

- `lipschitz`: local Lipschitz constant of the gradient, and the terms of the convergence theory;
- `gradient`: norm of the gradient of a step, and the noise scale at checks;
- `curvature`: batch sharpness and the top eigenvalue of the Hessian;
- `spent`: peak memory, seconds of a step, and counted examples;
- `gradient_noise`: callbacks for any trainer: norms of the gradient of a rank's part of a batch and
  of the whole batch, and the gradient noise scale;
- `branching`: critical batch size along a run.
"""

from lit_dps.readings.branching import BranchCallback
from lit_dps.readings.callback import ReadingsCallback
from lit_dps.readings.gradient_noise import GradientNorms, NoiseScaleCallback
from lit_dps.readings.reading import Moment, Reading
from lit_dps.readings.registry import READINGS

__all__ = [
    "READINGS",
    "BranchCallback",
    "GradientNorms",
    "Moment",
    "NoiseScaleCallback",
    "Reading",
    "ReadingsCallback",
]
