"""Training: one trial under Lightning. The callbacks fit any LightningModule.

Read in this order: `workload` (module, data and trainer of a trial), `goal_callback` (stops at the
goal), `pruning_callback`, `training_pass` (one pass over the training split without side effects),
`checkpoint_callback`. Callbacks that only measure are in `lit_dps.readings`.
"""

from importlib import import_module
from typing import Any

from lit_dps.training.adam_scaling import AdamScalingCallback
from lit_dps.training.average_callback import AverageCallback
from lit_dps.training.batch_schedule_callback import BatchScheduleCallback
from lit_dps.training.delay_callback import DelayCallback
from lit_dps.training.goal_callback import GoalErrorCallback
from lit_dps.training.goal_checkpoint import GoalCheckpointCallback
from lit_dps.training.local_sgd_callback import LocalSGDCallback
from lit_dps.training.pruning_callback import PruningCallback
from lit_dps.training.schedule_scaling import ScheduleScalingCallback

__all__ = [
    "AdamScalingCallback",
    "AverageCallback",
    "BatchScheduleCallback",
    "DelayCallback",
    "GoalCheckpointCallback",
    "GoalErrorCallback",
    "LocalSGDCallback",
    "PruningCallback",
    "ScheduleScalingCallback",
]


def __getattr__(name: str) -> Any:
    """Return a callback that was in this room before; class paths in users' files name it here."""
    if name in ("BranchCallback", "GradientNorms", "NoiseScaleCallback"):
        return getattr(import_module("lit_dps.readings"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
