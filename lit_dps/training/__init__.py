"""Lightning callbacks: the goal, pruning, smoothness and gradient norms. They work on any LightningModule."""

from lit_dps.training.goal_error import GoalErrorCallback
from lit_dps.training.gradient_norms import GradientNorms
from lit_dps.training.pruning import PruningCallback
from lit_dps.training.smoothness import SmoothnessCallback

__all__ = ["GoalErrorCallback", "GradientNorms", "PruningCallback", "SmoothnessCallback"]
