"""Lightning callbacks: the goal, pruning, smoothness and gradient norms. They work on any LightningModule."""

from lit_dps.training.goal_error import GoalErrorCallback
from lit_dps.training.gradients import GradientNorms, SmoothnessCallback
from lit_dps.training.pruning import PruningCallback

__all__ = ["GoalErrorCallback", "GradientNorms", "PruningCallback", "SmoothnessCallback"]
