"""A run that changes what it trains on its way resumes as an unbroken one, to the last bit."""

from __future__ import annotations

import pytest

from lit_dps.core.trial import Cell, Trial
from tests.support.saved_study import GOAL, USER_DATA, Study
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.training.test_checkpoint_callback import assert_goes_on

FINETUNING = {
    "class_path": "lightning.pytorch.callbacks.BackboneFinetuning",
    "init_args": {"unfreeze_backbone_at_epoch": 1, "verbose": False},
}
CHANGES = ["freeze", "unfreeze", "evaluate", "group", "regroup", "hidden", "refreeze"]


def study(folder, model: dict, **trainer) -> Study:
    """Trials of 40 steps, seven an epoch, that are saved at each check of 4 steps."""
    goal = {**GOAL, "max_steps": 40}
    data = {"class_path": USER_DATA}
    return Study(folder, model=model, data=data, goal=goal, trainer=trainer, metrics=["val_loss"])


def changing(change: str) -> dict:
    return {"class_path": "tests.support.saved_user.Changing", "init_args": {"change": change}}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_trained_resumes(tmp_path, change):
    trial = Trial(Cell(8, 0.3), 0, {"model.rate": 0.01})
    assert_goes_on(study(tmp_path, changing(change)), trial, (3,))


def test_a_backbone_that_was_unfrozen_stays_so(tmp_path):
    model = {"class_path": "tests.support.saved_user.Backboned"}
    trial = Trial(Cell(8, 0.3), 0, {"model.rate": 0.01})
    assert_goes_on(study(tmp_path, model, callbacks=[FINETUNING]), trial, (1, 3))


@pytest.mark.parametrize("change", ["grow", "activation", "foreign", "optimizer"])
def test_what_a_fresh_module_does_not_have_begins_anew(tmp_path, change):
    trial = Trial(Cell(8, 0.0), 0, {"model.rate": 0.01})
    some = study(tmp_path, changing(change))
    whole, _ = some.run(trial, saved=False)
    some.run(trial, interrupt=5)
    result, _ = some.run(trial)
    assert result.curve == whole.curve
    assert "restarts" in some.said[-1]


def test_a_pause_keeps_what_was_unfrozen(tmp_path):
    trial = Trial(Cell(8, 0.0), 0, {"model.rate": 0.01})
    some = study(tmp_path, changing("group"))
    whole, _ = some.run(trial, saved=False)
    paused, _ = some.run(trial, pause=lambda cell: 20)
    assert paused.curve["step"] == [4, 8, 12, 16, 20]
    assert some.run(trial)[0] == whole
