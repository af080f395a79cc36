"""Learning rates are those of a schedule over the study's own budget, by steps or by true
epochs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler

from tests.zoo.run import spec, study
from tests.zoo.verify import assert_refused, assert_works

STEPS, TRAIN = 40, 160
NEVER = {"monitor": "val_loss", "error": 1e-6}


@pytest.fixture
def zoo(tmp_path):
    """Runs a study whose networks are all pruned; test_plain.py has dense ones."""
    return partial(study, tmp_path, sparsities=[0.8])


def rates(make: Callable, lr: float, every: int = 1) -> list[float]:
    """The rates of STEPS steps under a scheduler that steps after each `every` of them."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr)
    scheduler, found = make(optimizer), []
    for i in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if (i + 1) % every == 0:
            scheduler.step()
    return found


def assert_rates(outcome, expected: Callable[[float, int], list[float]]) -> None:
    """`expected` makes the rates of a run from its learning rate and its steps an epoch."""
    assert_works(outcome, ["incomplete"])
    for result in outcome.results:
        lr, epoch = result.trial.params["model.lr"], math.ceil(TRAIN / result.trial.cell.batch_size)
        assert outcome.audit(result).rates == pytest.approx(expected(lr, epoch), rel=1e-6)


def scheduled(kind: str):
    return spec("schedules.Scheduled", kind=kind)


@pytest.mark.long  # the same schedule with accumulated batches is tested always
def test_one_cycle_over_the_estimated_steps(zoo):
    outcome = zoo(scheduled("one_cycle"), goal=NEVER)
    assert_rates(
        outcome,
        lambda lr, _: rates(lambda o: lr_scheduler.OneCycleLR(o, lr, total_steps=STEPS), lr),
    )


@pytest.mark.long  # the one over epochs is tested always
def test_a_cosine_over_the_budget_of_steps(zoo):
    outcome = zoo(scheduled("cosine_steps"), goal=NEVER)
    assert_rates(
        outcome, lambda lr, _: rates(lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS), lr)
    )


@pytest.mark.parametrize(
    "batch_sizes",
    [
        pytest.param([8, 32], id="whole epochs", marks=pytest.mark.long),
        pytest.param([24, 64], id="the last one is cut"),
    ],
)
def test_a_cosine_over_the_budget_in_epochs(zoo, batch_sizes):
    def expected(lr: float, epoch: int) -> list[float]:
        return rates(
            lambda o: lr_scheduler.CosineAnnealingLR(o, math.ceil(STEPS / epoch)), lr, epoch
        )

    assert_rates(zoo(scheduled("cosine_epochs"), goal=NEVER, batch_sizes=batch_sizes), expected)


def test_accumulated_batches_are_no_steps_of_a_schedule(zoo):
    outcome = zoo(scheduled("one_cycle"), goal=NEVER, trainer={"accumulate_grad_batches": 2})
    assert_works(outcome, ["incomplete"])
    for result in outcome.results:
        lr = result.trial.params["model.lr"]
        expected = rates(lambda o, lr=lr: lr_scheduler.OneCycleLR(o, lr, total_steps=STEPS), lr)
        assert outcome.audit(result).rates[::2] == pytest.approx(expected, rel=1e-6)


@pytest.mark.long
def test_a_rate_that_halves_at_the_end_of_each_epoch(zoo):
    outcome = zoo(scheduled("halving"), goal=NEVER)
    assert_rates(
        outcome, lambda lr, epoch: rates(lambda o: lr_scheduler.StepLR(o, 1, 0.5), lr, epoch)
    )


def test_a_rate_that_halves_on_a_plateau_steps_where_a_new_value_has_come(zoo):
    """Epochs are of 20 steps and of 5, checks come every 10."""
    outcome = zoo(scheduled("plateau"), goal={**NEVER, "check_interval": 10})
    assert_rates(
        outcome, lambda lr, epoch: [lr * 0.5 ** (i // max(epoch, 10)) for i in range(STEPS)]
    )


def test_a_schedule_by_epochs_that_never_end(zoo):
    space = {"model.lr": {"low": 0.01, "high": 0.02}}
    assert_refused(zoo("models.Images", "lit_dps.data.Digits", space=space), "epoch", "schedule")


def test_a_budget_of_epochs_is_told_not_to_apply(zoo):
    outcome = zoo(trainer={"max_epochs": 3}, batch_sizes=[32])
    assert_works(outcome)
    assert sum("trainer.max_epochs" in line for line in outcome.err.splitlines()) == 1
    assert "trainer.max_epochs" not in zoo(batch_sizes=[32]).err


@pytest.mark.parametrize("kind", ["epochs", pytest.param("estimated", marks=pytest.mark.long)])
def test_a_length_that_is_computed_in_setup(zoo, kind):
    outcome = zoo(spec("schedules.LengthInSetup", kind=kind), goal=NEVER)

    def expected(lr: float, epoch: int) -> list[float]:
        total = epoch * math.ceil(STEPS / epoch)
        return rates(lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 - step / total), lr)

    assert_rates(outcome, expected)


def test_a_rate_of_zero_for_a_stretch_of_the_budget_is_named(zoo):
    outcome = zoo(
        spec("schedules.TooShort", steps=5), goal=NEVER, batch_sizes=[32], sparsities=[0.0]
    )
    assert (
        "at B = 32 the learning rate is 0 from step 5 to the end of 40 steps of the budget"
        in outcome.err
    )


def test_the_shape_of_a_schedule_is_stored_with_its_trials(zoo):
    outcome = zoo(scheduled("one_cycle"), goal=NEVER, batch_sizes=[32], sparsities=[0.0], trials=2)
    for result in outcome.results:
        assert (result.flags["warm_up_steps"], result.flags["schedule_steps"]) == (11, STEPS)
