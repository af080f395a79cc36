"""Rates over the budget, evaluated on copies: those of the run itself, and what is said of them."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import lr_scheduler

from lit_dps.core.trial import SCHEDULE, WARM_UP
from lit_dps.training import GoalErrorCallback
from lit_dps.training.rate_curve import (
    is_constant,
    rate_curve,
    rate_remarks,
    schedule_shape,
    schedule_steps,
    warm_up_steps,
)
from tests.support.texts import numbers_in
from tests.support.tiny import Plain, Recorder, fit, loader

STEPS = 20  # epochs of 5


class Scheduled(Plain):
    def __init__(self, make, interval="step", frequency=1):
        super().__init__()
        self.make, self.interval, self.frequency = make, interval, frequency

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = {
            "scheduler": self.make(optimizer),
            "interval": self.interval,
            "frequency": self.frequency,
        }
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def warm(self, step):
        return min(1.0, step / 4)


class Evaluates(Callback):
    def on_train_start(self, trainer, pl_module):
        self.rates = rate_curve(trainer, pl_module, STEPS, 5)


def warm_then_decay(optimizer):
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    decay = lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 5)
    return lr_scheduler.SequentialLR(optimizer, [warm, decay], [5])


@pytest.mark.parametrize(
    ("make", "how"),
    [
        (lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=STEPS), {}),
        (warm_then_decay, {}),
        (lambda o: lr_scheduler.StepLR(o, 1, 0.5), {"interval": "epoch"}),
        (lambda o: lr_scheduler.ExponentialLR(o, 0.9), {"frequency": 3}),
    ],
)
def test_the_curve_is_that_of_the_run_and_does_not_move_it(make, how):
    seen, evaluates = (
        Recorder(lambda trainer, module: trainer.optimizers[0].param_groups[0]["lr"]),
        Evaluates(),
    )
    goal = GoalErrorCallback(error=0.01, check_interval=4, max_steps=STEPS)
    fit(Scheduled(make, **how), loader(), loader(), callbacks=[goal, evaluates, seen])
    assert evaluates.rates == pytest.approx(seen.values, rel=1e-9) and len(seen.values) == STEPS


def test_a_schedule_by_a_method_of_the_module_and_no_schedule():
    evaluates = Evaluates()
    module = Scheduled(lambda optimizer: lr_scheduler.LambdaLR(optimizer, module.warm))
    fit(module, loader(), callbacks=[evaluates], max_steps=2)
    assert evaluates.rates == pytest.approx([0, 0.025, 0.05, 0.075, *[0.1] * 16])
    fit(Plain(), loader(), callbacks=[evaluates], max_steps=2)
    assert evaluates.rates is None


def test_the_shape_of_a_schedule():
    rates = [0.1, 0.2, 0.3, 0.3, 0.2, 0.1, 0.1, 0.1]
    assert (warm_up_steps(rates), schedule_steps(rates), is_constant(rates)) == (2, 6, False)
    assert warm_up_steps([0.1, 0.2, 0.3]) is None and warm_up_steps([0.3, 0.2]) == 0
    assert schedule_steps([0.3, 0.2, 0.1]) == 3 and is_constant([0.1] * 3)


def remark_numbers(rates, length, steps):
    """Return the numbers in each remark on a curve of rates."""
    return [numbers_in(remark) for remark in rate_remarks(rates, [], length, steps)]


def test_rates_that_train_nothing_are_named():
    # The rate, the first and the last step, the number of steps.
    assert remark_numbers([0.1, 0.05, 0, 0, 0], 5, 5) == [[0, 2, 5]]
    named = rate_remarks([0, 0, 0.1, -0.1, -0.1, 0.1], [], 5, 6)
    assert [numbers_in(remark) for remark in named] == [[0, 0, 1, 6], [0, 3, 4, 6]]
    assert ["negative" in remark for remark in named] == [False, True]
    assert rate_remarks([0, 0.1, 0.05, 0], [], 5, 4) == [], "ends of a warm-up and of a decay"


def test_a_long_curve_is_read_a_few_times():
    """A budget of 20,000 steps took seconds in each run: the largest rate was sought at every
    step."""

    class Counted(list):
        reads = 0

        def __iter__(self):
            self.reads += 1
            return super().__iter__()

    rates = Counted(1.0 - step / 200 for step in range(200))
    assert schedule_steps(rates) == 200 and rates.reads <= 3


def test_lengths_that_the_evaluated_steps_do_not_reach_are_left_out():
    """A budget above the steps that are evaluated had the number of these as length of its
    schedule."""
    decay = [1.0 - step / 40 for step in range(20)]
    assert schedule_shape(decay, 20) == {WARM_UP: 0, SCHEDULE: 20}
    assert schedule_shape(decay, 40) == {WARM_UP: 0}
    assert schedule_shape(decay[::-1], 40) == {}
    ended = [0.1, 0.3, 0.2, 0.1, 0.1, 0.1]
    assert schedule_shape(ended, 40) == {WARM_UP: 1, SCHEDULE: 4}


def test_a_rate_of_0_beyond_the_evaluated_steps_is_a_bound():
    assert remark_numbers([0.1, 0, 0], None, 9) == [[0, 1, 2, 9]]
