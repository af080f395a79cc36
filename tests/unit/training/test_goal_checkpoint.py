"""GoalCheckpointCallback keeps the weights of a run that met its goal, and of no other."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Trainer

from lit_dps.training import GoalCheckpointCallback, GoalErrorCallback
from tests.e2e.advised_user import Data, Module


@pytest.mark.parametrize(("max_steps", "is_kept"), [(100, True), (50, False)])
def test_the_checkpoint_is_that_of_the_goal(tmp_path, max_steps, is_kept):
    file = tmp_path / "kept" / "pilot.ckpt"
    goal = GoalErrorCallback(error=0.05, check_interval=5, max_steps=max_steps)
    module = Module()
    trainer = Trainer(
        callbacks=[GoalCheckpointCallback(str(file)), goal],
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    goal.before_fit(trainer, Data())
    trainer.fit(module, datamodule=Data())
    assert file.exists() == is_kept
    if is_kept:
        saved = torch.load(file, weights_only=True)
        # K = 1600 / 32 + 25 = 75 steps leave no error; 0.05 is met before.
        assert saved["global_step"] == goal.steps_to_result == 75
        assert torch.equal(saved["state_dict"]["layer.weight"], module.layer.weight)
