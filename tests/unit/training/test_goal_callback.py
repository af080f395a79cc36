"""GoalErrorCallback on a module that knows nothing of it and an ordinary, finite DataLoader."""

import math

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer

from lit_dps.core.trial import Status
from lit_dps.training import GoalErrorCallback
from lit_dps.training.local_sgd_callback import LocalSGDCallback
from tests.support.errors import refuses
from tests.support.tiny import QUIET, Plain, fit, loader, weights


def checked(
    errors=(0.9,),
    goal=0.2,
    interval=4,
    budget=None,
    module=None,
    batches=5,
    val=None,
    name=None,
    **trainer,
):
    """A module trained on `batches` batches an epoch, its callback and its trainer; a budget of ten
    checks."""
    module = module if module is not None else Plain(errors=errors)
    callback = GoalErrorCallback(goal, interval, budget or 10 * interval, name or "val_error")
    trainer = fit(module, loader(4 * batches), val or loader(20), callbacks=[callback], **trainer)
    return module, callback, trainer


# epochs shorter than the interval, equal to it, longer, a multiple
@pytest.mark.parametrize("batches", [1, 3, 4, 5, 8, 100])
@pytest.mark.parametrize(
    ("errors", "checks"), [([0.1], 1), ([0.9, 0.2], 2), ([0.9, 0.5, 0.21, 0.2, 0.1], 4)]
)
def test_a_run_stops_at_its_first_check_at_or_below_the_goal(batches, errors, checks):
    module, callback, trainer = checked(errors, batches=batches)
    steps = 4 * checks
    assert (callback.status, callback.steps_to_result) == (Status.COMPLETE, steps)
    assert trainer.global_step == module.taken == len(module.losses) == steps
    assert module.checks == checks
    assert callback.curve["step"] == [4 * (i + 1) for i in range(checks)]


def test_a_run_that_spends_its_budget_is_incomplete_at_exactly_that_step():
    module, callback, trainer = checked(interval=6, budget=18)
    assert (callback.status, callback.steps_to_result) == (Status.INCOMPLETE, None)
    assert trainer.global_step == module.taken == 18
    assert callback.curve["step"] == [6, 12, 18]


def test_a_goal_met_at_the_last_check_is_complete():
    module, callback, _ = checked([0.9, 0.9, 0.2], interval=6, budget=18)
    assert (callback.status, callback.steps_to_result, module.taken) == (Status.COMPLETE, 18, 18)


def test_the_curve_holds_the_errors_and_the_loss_of_the_step_before_each_check():
    module, callback, _ = checked([0.75, 0.5, 0.25, 0.125], goal=0.2, interval=3)
    assert callback.curve["step"] == [3, 6, 9, 12]
    assert callback.curve["val_error"] == [0.75, 0.5, 0.25, 0.125]  # exact in float32
    assert callback.curve["train_loss"] == pytest.approx(
        [module.losses[i] for i in (2, 5, 8, 11)], rel=1e-6
    )


def test_the_check_changes_no_weight():
    module, _, _ = checked(interval=2, budget=8)
    plain = Plain()
    fit(plain, max_steps=8)
    for name, value in weights(plain).items():
        assert torch.equal(value, weights(module)[name])


@pytest.mark.parametrize("batches", [4, 6])
def test_accumulated_gradients_count_in_optimizer_steps(batches):
    module, callback, trainer = checked(
        [0.9, 0.9, 0.1], interval=3, batches=batches, accumulate_grad_batches=2
    )
    assert callback.curve["step"] == [3, 6, 9]
    assert callback.steps_to_result == trainer.global_step == module.taken == 9
    assert len(module.losses) == 18


@pytest.mark.parametrize("batches", [1, 3, 5])
def test_checks_come_at_the_same_optimizer_steps_when_an_epoch_ends_in_the_middle_of_an_accumulation(
    batches,
):
    """Lightning then steps at the end of the epoch, so optimizer steps are not a fixed number of
    batches."""
    module, callback, trainer = checked(
        [0.9, 0.9, 0.1], interval=3, batches=batches, accumulate_grad_batches=2
    )
    assert callback.curve["step"] == [3, 6, 9]
    assert callback.steps_to_result == trainer.global_step == module.taken == 9


def test_the_loss_of_an_accumulated_step_is_the_mean_over_its_batches():
    module, callback, _ = checked(interval=2, budget=4, batches=4, accumulate_grad_batches=2)
    pairs = [(module.losses[i] + module.losses[i + 1]) / 2 for i in (2, 6)]
    assert callback.curve["train_loss"] == pytest.approx(pairs, rel=1e-6)


class Diverging(Plain):
    """At a step, counted from 0, its loss, error or a weight stops being finite."""

    def __init__(self, what: str, at: int, value: float = math.nan):
        super().__init__()
        self.what, self.at, self.value = what, at, value

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * self.value if self.what == "loss" and self.global_step == self.at else loss

    def validation_step(self, batch, batch_idx):
        bad = self.what == "error" and self.global_step >= self.at
        self.log("val_error", torch.tensor(self.value if bad else 0.9))

    def on_train_batch_end(self, *_):
        if self.what == "weight" and self.global_step == self.at:
            with torch.no_grad():
                self.network[2].bias[1] = self.value


@pytest.mark.parametrize(
    ("what", "at", "value"),
    [
        *(("loss", at, value) for at in (5, 7) for value in (math.nan, math.inf, -math.inf)),
        *(("weight", 8, value) for value in (math.nan, math.inf)),
        ("weight", 6, -math.inf),
    ],
)
def test_a_run_that_diverges_is_infeasible_at_the_next_check(what, at, value):
    module, callback, trainer = checked(module=Diverging(what, at, value))
    assert (callback.status, callback.steps_to_result) == (Status.INFEASIBLE, None)
    assert trainer.global_step == module.taken == 8
    assert callback.curve["step"] == [4, 8]


class Tolerant(Diverging):
    """Logs the share of outputs further than 1 from the target: 0 for outputs of nan."""

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        output = self.network(x) if self.global_step >= self.at else torch.full((1, 3), 2.0)
        self.log("val_error", (output.abs() > 1).float().mean())


def test_a_diverged_network_with_a_perfect_metric_does_not_meet_the_goal():
    _, callback, _ = checked(module=Tolerant("weight", 8))
    assert (callback.status, callback.steps_to_result) == (Status.INFEASIBLE, None)
    assert callback.curve["val_error"][0] == 1.0 and math.isnan(callback.curve["val_error"][1])


def test_a_trainer_with_fewer_steps_than_the_budget_keeps_them_and_says_nothing_of_the_end():
    module, callback, trainer = checked(max_steps=10)
    assert trainer.global_step == module.taken == 10
    assert callback.curve["step"] == [4, 8]
    assert callback.status is None and callback.steps_to_result is None


def test_a_trainer_with_more_steps_than_the_budget_ends_at_the_budget():
    module, callback, _ = checked(interval=4, budget=8, max_steps=1000)
    assert (callback.status, module.taken) == (Status.INCOMPLETE, 8)


def test_two_fits_with_one_callback_start_afresh():
    callback = GoalErrorCallback(0.2, 4, 40)
    curves = []
    for errors, steps in (([0.9, 0.1], 8), ([0.9, 0.9, 0.15], 12)):
        module = Plain(errors=errors)
        fit(module, loader(), loader(), callbacks=[callback])
        assert (callback.status, callback.steps_to_result, module.taken) == (
            Status.COMPLETE,
            steps,
            steps,
        )
        curves.append(callback.curve)
    assert [curve["step"] for curve in curves] == [[4, 8], [4, 8, 12]]
    assert curves[0]["val_error"] == pytest.approx([0.9, 0.1])


def test_a_resumed_run_goes_on_with_its_curve(tmp_path):
    first = Plain(errors=[0.8, 0.7])
    callback = GoalErrorCallback(0.2, 4, 40)
    trainer = fit(first, loader(4), loader(), callbacks=[callback], max_steps=8)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    second, again = Plain(errors=[0.6, 0.1]), GoalErrorCallback(0.2, 4, 40)
    trainer = fit(second, loader(4), loader(), callbacks=[again], ckpt_path=tmp_path / "half.ckpt")
    assert (again.status, again.steps_to_result, trainer.global_step) == (Status.COMPLETE, 16, 16)
    assert again.curve["step"] == [4, 8, 12, 16]
    assert again.curve["val_error"] == pytest.approx([0.8, 0.7, 0.6, 0.1])


@pytest.mark.parametrize("limit", [0.5, 0.0, 1, 0, 3])
def test_a_trainer_that_skips_part_of_the_validation_split_is_refused(limit):
    """The number 1 is one batch to Lightning, 1.0 all of them."""
    with refuses("trainer.limit_val_batches", limit):
        checked(val=loader(20, 4), limit_val_batches=limit)


def test_the_error_for_a_module_without_val_error_names_what_it_logs():
    with refuses("goal.monitor", "val_error") as caught:
        checked(module=Plain(name="val_acc"))
    assert "val_acc" in caught.value.allowed


def test_the_error_can_go_by_another_name():
    _, callback, _ = checked(module=Plain(errors=[0.9, 0.1], name="mistakes"), name="mistakes")
    assert callback.steps_to_result == 8


def test_a_run_without_validation_data_is_refused_rather_than_trained_unchecked():
    module = Plain()
    with refuses("data", "Plain"):
        fit(module, loader(), None, callbacks=[GoalErrorCallback(0.2, 4, 40)])
    assert module.taken == 0


@pytest.mark.parametrize("arguments", [{"min_steps": 10}, {"min_epochs": 3}])
def test_the_first_check_at_the_goal_counts_also_when_the_trainer_must_go_on(arguments):
    _, callback, _ = checked([0.9, 0.1, 0.9, 0.05, 0.9], **arguments)
    assert (callback.status, callback.steps_to_result) == (Status.COMPLETE, 8)


class Manual(Plain):
    """Steps its optimizer itself and returns nothing, as GANs do."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, (x, y) = self.optimizers(), batch
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.network(x), y))
        optimizer.step()


def test_a_module_with_manual_optimization_that_returns_no_loss_can_meet_its_goal():
    module, callback, trainer = checked(module=Manual(errors=[0.9, 0.9, 0.1]))
    assert (callback.status, callback.steps_to_result) == (Status.COMPLETE, 12)
    assert trainer.global_step == module.taken == 12
    assert all(math.isnan(loss) for loss in callback.curve["train_loss"])


def test_a_sanity_check_is_no_check():
    module, callback, _ = checked([0.1, 0.9], num_sanity_val_steps=2, budget=8)
    assert (callback.steps_to_result, module.checks) == (4, 1)


def test_validating_alone_is_no_check():
    module, callback, trainer = checked([0.9, 0.1])
    trainer.validate(module, loader(), verbose=False)
    assert callback.curve["step"] == [4, 8] and callback.steps_to_result == 8
    fresh = GoalErrorCallback(0.2, 4, 40)
    Trainer(**QUIET, callbacks=[fresh]).validate(module, loader(), verbose=False)
    assert fresh.curve["step"] == [] and fresh.status is None


class AtOddSteps(GoalErrorCallback):
    """Validates at steps of its own choice, as a dry run does."""

    def is_check(self, step: int) -> bool:
        return step in (1, 3, 4)


def test_a_subclass_may_choose_the_steps_of_its_validations():
    module, callback = Plain(errors=[0.9]), AtOddSteps(0.2, 4, 4)
    fit(module, loader(), loader(), callbacks=[callback])
    assert callback.curve["step"] == [1, 3, 4] and module.checks == 3


def test_a_removed_attribute_names_the_new_one():
    callback = GoalErrorCallback(error=0.5, max_steps=16)
    with pytest.raises(AttributeError, match="shown_steps"):
        callback.budget = 200
    with pytest.raises(AttributeError, match="shown_steps"):
        _ = callback.budget
    with pytest.raises(AttributeError, match="schedule"):
        _ = LocalSGDCallback(workers=2).rounds
