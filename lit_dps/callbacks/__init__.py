"""Lightning callbacks: the goal, pruning, smoothness and gradient norms. They work on any LightningModule."""

from lit_dps.callbacks.goal_error import GoalErrorCallback
from lit_dps.callbacks.gradient_norms import GradientNorms
from lit_dps.callbacks.pruning import PruningCallback
from lit_dps.callbacks.smoothness import SmoothnessCallback

__all__ = ["GoalErrorCallback", "GradientNorms", "PruningCallback", "SmoothnessCallback"]
