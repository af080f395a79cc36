"""What modules, callbacks and data modules see as the length of a training that ends by steps."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer

from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import trainer_arguments
from lit_dps.training import GoalErrorCallback
from tests.support.errors import refuses
from tests.support.ranks import same_on_ranks
from tests.support.tiny import QUIET, Plain, fit, loader

BUDGET = 12  # 3 epochs of 5 steps, the last one cut
GOAL = {"error": 0.01, "check_interval": 4, "max_steps": BUDGET}
EIGHT = {**GOAL, "max_steps": 8}


def lengths(trainer) -> tuple:
    return trainer.max_steps, trainer.max_epochs, trainer.estimated_stepping_batches


class Looks(Plain):
    """Keeps the lengths that its hooks see."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.seen = {}

    def setup(self, stage):
        self.seen["setup"] = lengths(self.trainer)

    def configure_model(self):
        self.seen["configure_model"] = lengths(self.trainer)

    def configure_optimizers(self):
        self.seen["configure_optimizers"] = lengths(self.trainer)
        return super().configure_optimizers()

    def on_fit_start(self):
        self.seen["on_fit_start"] = lengths(self.trainer)


class LooksToo(Callback):
    def __init__(self):
        self.seen = {}

    def setup(self, trainer, pl_module, stage):
        self.seen["setup"] = lengths(trainer)

    def on_fit_start(self, trainer, pl_module):
        self.seen["on_fit_start"] = lengths(trainer)


class Data(LightningDataModule):
    """Twenty examples; `read` is asked of the trainer in its setup."""

    def __init__(self, read=lambda trainer: None):
        super().__init__()
        self.read = read

    def setup(self, stage):
        self.seen = self.read(self.trainer)

    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return loader()


def fit_prepared(module, data, callbacks=(), goal=None, **arguments):
    """As the engine does it: data module and earlier callbacks see the budget too."""
    goal = goal or GoalErrorCallback(**GOAL)
    trainer = Trainer(**{**QUIET, **arguments}, callbacks=[*callbacks, goal])
    goal.before_fit(trainer, data)
    trainer.fit(module, datamodule=data)
    return goal


def test_every_hook_sees_the_budget():
    module, before = Looks(), LooksToo()
    goal = fit_prepared(module, Data(), [before])
    expected = (BUDGET, 3, BUDGET)
    assert module.seen == dict.fromkeys(
        ["setup", "configure_model", "configure_optimizers", "on_fit_start"], expected
    )
    assert before.seen == dict.fromkeys(["setup", "on_fit_start"], expected)
    assert goal.steps == module.taken == BUDGET


def test_a_callback_after_the_goal_sees_it_in_any_trainer():
    module, after = Looks(), LooksToo()
    fit(module, loader(), loader(), callbacks=[GoalErrorCallback(**GOAL), after])
    assert module.seen["setup"] == after.seen["setup"] == (BUDGET, 3, BUDGET)


def seen_by_a_rank() -> dict:
    module = Looks()
    fit_prepared(module, Data(), **trainer_arguments({**QUIET, "devices": ranks.world()}))
    return module.seen


def test_every_rank_sees_the_budget():
    """Each has a part of each batch, so that an epoch has as many steps."""
    hooks = ["setup", "configure_model", "configure_optimizers", "on_fit_start"]
    assert same_on_ranks(2, seen_by_a_rank) == dict.fromkeys(hooks, (BUDGET, 3, BUDGET))


def test_accumulated_batches_make_longer_epochs_of_steps():
    module = Looks()
    fit_prepared(module, Data(), accumulate_grad_batches=2)
    assert module.seen["setup"] == (BUDGET, 4, BUDGET)  # 3 steps an epoch


def test_a_run_that_ends_before_its_budget_shows_the_budget():
    module, goal = Looks(), GoalErrorCallback(error=0.01, check_interval=4, max_steps=4)
    goal.shown_steps = 40
    fit_prepared(module, Data(), goal=goal)
    assert module.seen["setup"] == module.seen["on_fit_start"] == (40, 8, 40)
    assert module.taken == 4


def test_a_resumed_run_sees_the_same_lengths(tmp_path):
    """Also where its epochs turned out shorter than they were when it began."""
    first, goal = Looks(), GoalErrorCallback(**EIGHT)

    def save() -> None:
        trainers[0].save_checkpoint(tmp_path / "a.ckpt")

    trainers = []

    class Keeps(Callback):
        def on_train_start(self, trainer, pl_module):
            trainers.append(trainer)

    goal.after_check = save
    fit(first, loader(), loader(), callbacks=[goal, Keeps()])
    second = Looks()
    fit(
        second,
        loader(),
        loader(),
        callbacks=[GoalErrorCallback(**EIGHT)],
        ckpt_path=tmp_path / "a.ckpt",
    )
    assert second.seen == first.seen and first.seen["setup"] == (8, 2, 8)
    state = torch.load(tmp_path / "a.ckpt", weights_only=False)
    state["callbacks"]["GoalErrorCallback"]["epochs"] = 5
    torch.save(state, tmp_path / "b.ckpt")
    third = Looks()
    fit(
        third,
        loader(),
        loader(),
        callbacks=[GoalErrorCallback(**EIGHT)],
        ckpt_path=tmp_path / "b.ckpt",
    )
    assert third.seen["configure_optimizers"] == (8, 2, 8) and third.taken == 4


@pytest.mark.parametrize("read", [lambda t: t.max_epochs, lambda t: t.estimated_stepping_batches])
def test_a_data_module_cannot_ask_for_its_own_length(read):
    with refuses("data", "Data"):
        fit_prepared(Plain(), Data(read))


def test_a_data_module_sees_the_steps():
    data = Data(lambda trainer: trainer.max_steps)
    fit_prepared(Plain(), data)
    assert data.seen == BUDGET and "setup" not in vars(data)


def test_a_length_of_epochs_that_is_given_stays():
    module = Looks()
    fit(module, loader(), loader(), callbacks=[GoalErrorCallback(**GOAL)], max_epochs=2)
    assert module.seen["setup"] == (BUDGET, 2, 10) and module.taken == 10
