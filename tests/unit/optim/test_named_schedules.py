"""Cosine, WSD and warm-up against torch's schedulers, and stacked."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Trial
from lit_dps.module import ImageClassifier
from lit_dps.optim import RateSchedule
from tests.support.conformance import assert_conform
from tests.support.errors import refuses
from tests.support.runs import train
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_stack_rows import EXAMPLES, workload

RATE, STEPS, WARMUP, END = 0.3, 40, 8, 0.05


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], RATE)


def of_torch(name: str, warmup: int) -> tuple[torch.optim.Optimizer, SequentialLR]:
    """The schedule made of torch's parts."""
    used = optimizer()
    parts, milestones = [], []
    if warmup:
        parts.append(LinearLR(used, 1 / warmup, 1.0, warmup - 1))
        milestones.append(warmup)
    length = STEPS - warmup
    if name == "constant":
        parts.append(ConstantLR(used, 1.0))
    elif name == "linear":
        parts.append(LinearLR(used, 1.0, END, length))
    elif name == "cosine":
        parts.append(CosineAnnealingLR(used, length, END * RATE))
    else:
        stable = length - length // 4
        parts += [ConstantLR(used, 1.0), LinearLR(used, 1.0, END, length // 4)]
        milestones.append(warmup + stable)
    return used, SequentialLR(used, parts, milestones)


@pytest.mark.parametrize("warmup", [0, WARMUP])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_rates_are_those_of_torch(name, warmup):
    schedule = RateSchedule(name, STEPS, END, warmup, decay_share=0.25)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = optimizer()
        scheduler = schedule.scheduler(ours)
        theirs, reference = of_torch(name, warmup)
        for step in range(STEPS + 1):
            rate = ours.param_groups[0]["lr"]
            assert rate == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-9), step
            scheduler.step()
            reference.step()
    if name != "constant":
        assert schedule.factor(STEPS) == schedule.factor(10 * STEPS) == pytest.approx(END)


@pytest.mark.parametrize(
    ("key", "arguments"),
    [
        ("model.schedule", {"schedule": "cosinus"}),
        ("model.warmup_steps", {"warmup_steps": -1}),
        ("model.warmup_steps", {"schedule": "linear", "decay_steps": 9, "warmup_steps": 9}),
        ("model.decay_share", {"decay_share": 0.0}),
        ("model.end_factor", {"end_factor": 1.5}),
        ("model.decay_steps", {"decay_steps": 0}),
    ],
)
def test_a_value_out_of_range_is_refused(key, arguments):
    with refuses(key):
        ImageClassifier(torch.nn.Linear(1, 1), **arguments)


@pytest.mark.parametrize("name", ["constant", "cosine", "wsd"])
def test_stacked_trials_follow_the_schedule_with_searched_numbers(name):
    goal = {"error": 0.05, "check_interval": 4, "max_steps": 40}
    numbers = [(0.06, 4, 20, 0.5), (0.1, 10, 30, 0.2), (0.03, 0, 40, 1.0)]
    asked = []
    for point, (rate, warmup, steps, share) in enumerate(numbers):
        params = {
            "model.learning_rate": rate,
            "model.warmup_steps": warmup,
            "model.decay_steps": steps,
            "model.decay_share": share,
        }
        asked.append(Trial(Cell(16, 0.0), point, params))
    used = workload(schedule=name)
    stacked = train(asked, used, goal, size=3)
    alone = train(asked, used, goal, lean=False)
    assert {result.engine for result in stacked} == {"stacked"}
    assert assert_conform(stacked, alone, Goal.from_dict(goal), EXAMPLES) == []
    constant = []
    for trial in asked:
        rate = trial.params["model.learning_rate"]
        constant.append(Trial(trial.cell, trial.point, {"model.learning_rate": rate}))
    plain = train(constant, workload(), goal, lean=False)
    for with_schedule, without in zip(alone[:2], plain[:2], strict=True):
        assert with_schedule.curve["train_loss"] != without.curve["train_loss"]
