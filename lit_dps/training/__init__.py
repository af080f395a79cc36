"""Lightning callbacks: goal, pruning, stale gradients, local SGD, smoothness, gradient noise. They fit any module."""

from lit_dps.training.adam_scaling import AdamScalingCallback
from lit_dps.training.branch import BranchCallback
from lit_dps.training.delay import DelayCallback
from lit_dps.training.goal_error import GoalErrorCallback
from lit_dps.training.gradients import GradientNorms, SmoothnessCallback
from lit_dps.training.local import LocalSGDCallback
from lit_dps.training.noise_scale import NoiseScaleCallback
from lit_dps.training.pruning import PruningCallback

__all__ = [
    "AdamScalingCallback",
    "BranchCallback",
    "DelayCallback",
    "GoalErrorCallback",
    "GradientNorms",
    "LocalSGDCallback",
    "NoiseScaleCallback",
    "PruningCallback",
    "SmoothnessCallback",
]
