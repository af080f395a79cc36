"""Lightning callbacks: the goal and pruning. They work on any LightningModule."""

from lit_dps.callbacks.goal_error import GoalErrorCallback
from lit_dps.callbacks.pruning import PruningCallback

__all__ = ["GoalErrorCallback", "PruningCallback"]
