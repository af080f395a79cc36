"""Local SGD: the rule by hand and by its exact relations to synchronous SGD, alike in both engines,
taken up again."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.core.trial import Cell, Trial
from lit_dps.optim import RULES
from lit_dps.optim.local_sgd import LocalSGD
from lit_dps.training.workload import Workload
from tests.support.runs import train_one
from tests.unit.pruning.test_pruners_engines import MODEL
from tests.unit.training.test_delay_callback import HYPERPARAMETERS

DATA = {"class_path": "lit_dps.data.Digits", "init_args": {}}
GOAL = {"error": 0.02, "check_interval": 8, "max_steps": 24}
START = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
CURVATURE = torch.tensor([3.0, 1.0, 0.2], dtype=torch.float64)


def workload(rule: str, **arguments) -> Workload:
    init = {**MODEL["init_args"], "optimizer": rule, **arguments}
    return Workload({**MODEL, "init_args": init}, DATA, {"accelerator": "cpu"})


def trial(sparsity: float = 0.0, batch_size: int = 16, rate: float = 0.1, **local) -> Trial:
    others = tuple((f"local.{key}", value) for key, value in local.items())
    return Trial(Cell(batch_size, sparsity, others), 1, {"model.learning_rate": rate})


def quadratic(
    rounds: LocalSGDSchedule,
    rule: str,
    noise: Tensor,
    rate: float = 0.1,
    curvature=lambda x: CURVATURE * x,
):
    """The mean of the workers after each step, on a loss with these gradients, and noise of shape
    (steps, n, 3)."""
    x = nn.Parameter(START.clone())
    optimizer = RULES[rule].make([x], rate, HYPERPARAMETERS)
    local, found = LocalSGD(rounds, optimizer), []
    for drawn in noise:

        def update(worker, drawn=drawn):
            x.grad = curvature(x.detach()) + (drawn.mean(0) if worker is None else drawn[worker])
            optimizer.step()

        local.step(update)
        local.show()
        found.append(x.detach().clone())
    return torch.stack(found)


def noise(steps: int = 40, workers: int = 4) -> Tensor:
    return torch.randn(
        steps, workers, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )


def synchronous(rule: str, drawn: Tensor, **options) -> Tensor:
    """The same without workers."""
    return quadratic(LocalSGDSchedule(4, start=len(drawn)), rule, drawn, **options)


@pytest.mark.parametrize("steps", [1, 3, 8, 100])
@pytest.mark.parametrize("rule", ["sgd", "momentum", "nesterov"])
def test_on_a_quadratic_with_additive_noise_the_mean_goes_the_synchronous_way(rule, steps):
    """All of it is linear: no dependence on the length of rounds, with momentum of each worker's
    own."""
    drawn = noise()
    torch.testing.assert_close(
        quadratic(LocalSGDSchedule(4, steps), rule, drawn),
        synchronous(rule, drawn),
        rtol=0,
        atol=3e-15,
    )
    started = quadratic(LocalSGDSchedule(4, steps, start=7), rule, drawn)
    torch.testing.assert_close(started, synchronous(rule, drawn), rtol=0, atol=3e-15)


def test_where_curvature_varies_it_does_not():
    drawn, cubic = noise(), lambda x: CURVATURE * x**3
    ours = quadratic(LocalSGDSchedule(4, 8), "sgd", drawn, curvature=cubic)
    assert (ours - synchronous("sgd", drawn, curvature=cubic)).abs().max() > 1e-2
    adam = quadratic(
        LocalSGDSchedule(4, 8), "adam", drawn
    )  # nor under a rule that is not linear in the gradient
    assert (adam - synchronous("adam", drawn)).abs().max() > 1e-2


def test_rounds_of_one_step_of_sgd_are_the_synchronous_update_whatever_the_loss():
    drawn, cubic = noise(), lambda x: CURVATURE * x**3
    ours = quadratic(LocalSGDSchedule(4, 1), "sgd", drawn, curvature=cubic)
    torch.testing.assert_close(
        ours, synchronous("sgd", drawn, curvature=cubic), rtol=1e-13, atol=1e-15
    )


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam"])
def test_workers_that_never_meet_are_runs_of_their_own_and_their_mean_a_soup(rule):
    drawn, cubic = noise(), lambda x: CURVATURE * x**3
    alone = [
        quadratic(LocalSGDSchedule(1), rule, drawn[:, i : i + 1], curvature=cubic) for i in range(4)
    ]
    soup = quadratic(LocalSGDSchedule(4, 41), rule, drawn, curvature=cubic)
    assert torch.equal(soup, ((alone[0] + alone[1]) + alone[2] + alone[3]) / 4)


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_outer_optimizer_is_torchs_on_the_way_of_the_mean(nesterov):
    drawn, cubic = noise(), lambda x: CURVATURE * x**3
    rounds = LocalSGDSchedule(
        4, 5, start=3, outer_learning_rate=0.7, outer_momentum=0.9, outer_nesterov=nesterov
    )
    ours = quadratic(rounds, "momentum", drawn, curvature=cubic)
    theta = nn.Parameter(START.clone())
    outer = torch.optim.SGD([theta], 0.7, 0.9, nesterov=nesterov)
    inner = torch.optim.SGD([theta], 0.1, 0.9)
    for t in range(3):
        theta.grad = cubic(theta.detach()) + drawn[t].mean(0)
        inner.step()
    workers = [nn.Parameter(theta.detach().clone()) for _ in range(4)]
    inners = [torch.optim.SGD([x], 0.1, 0.9) for x in workers]
    for one in inners:
        one.load_state_dict(copy.deepcopy(inner.state_dict()))
    for t in range(3, 40):
        for i, x in enumerate(workers):
            x.grad = cubic(x.detach()) + drawn[t, i]
            inners[i].step()
        if (t + 1 - 3) % 5 == 0:
            theta.grad = theta.detach() - torch.stack([x.detach() for x in workers]).mean(0)
            outer.step()
            for x in workers:
                x.data.copy_(theta.detach())
        torch.testing.assert_close(
            ours[t], torch.stack([x.detach() for x in workers]).mean(0), rtol=1e-12, atol=1e-14
        )


def test_diloco_at_rate_one_without_momentum_is_local_sgd():
    """By the way of the outer gradient, theta - (theta - mean), that is; the mean itself differs in
    the last bit."""
    drawn, x = noise(), nn.Parameter(START.clone())
    ours, theta = (
        quadratic(LocalSGDSchedule(4, 5), "sgd", drawn, curvature=lambda x: CURVATURE * x**3),
        START.clone(),
    )
    outer = torch.optim.SGD([x], 1.0, 0.0)
    workers = [START.clone() for _ in range(4)]
    for t in range(40):
        workers = [w - 0.1 * (CURVATURE * w**3 + drawn[t, i]) for i, w in enumerate(workers)]
        if (t + 1) % 5 == 0:
            x.grad = x.detach() - torch.stack(workers).mean(0)
            outer.step()
            theta = x.detach().clone()
            workers = [theta.clone() for _ in range(4)]
    torch.testing.assert_close(ours[-1], theta, rtol=1e-13, atol=0)


def test_a_single_worker_with_an_outer_momentum_is_another_training_and_without_it_is_none():
    assert (
        LocalSGDSchedule(1, 5, outer_momentum=0.5).on
        and LocalSGDSchedule(1, 5, outer_learning_rate=0.5).on
    )
    assert not LocalSGDSchedule(1, 5).on and LocalSGDSchedule(2).on
    drawn = noise(workers=1)
    assert torch.equal(
        quadratic(LocalSGDSchedule(1, 5), "momentum", drawn),
        quadratic(LocalSGDSchedule(1, start=99), "momentum", drawn),
    )


@pytest.mark.parametrize("rate", [np.float32(0.5), np.int64(1)])
def test_an_outer_rate_may_be_a_number_of_numpy(rate):
    assert LocalSGDSchedule(2, 5, outer_learning_rate=rate).outer_learning_rate == rate


def test_meetings_and_communications_are_counted_alike():
    for rounds in (
        LocalSGDSchedule(4, 3),
        LocalSGDSchedule(4, 3, 5),
        LocalSGDSchedule(2, 1, 0),
        LocalSGDSchedule(2, 100, 7),
    ):
        counted = 0
        for step in range(1, 40):
            counted += step <= rounds.start or rounds.meet_after(step)
            assert rounds.communications(step) == counted, (rounds, step)
    assert LocalSGDSchedule(1, 3).communications(40) == 0


# Local SGD refuses the others.
AVERAGED_RULES = [name for name, rule in RULES.items() if rule.gradient_point is None]


@pytest.mark.parametrize("rule", AVERAGED_RULES)
@pytest.mark.parametrize("sparsity", [0.0, 0.8])
def test_both_engines_train_the_same_to_the_bit(rule, sparsity):
    rate = 0.01 if rule.startswith("adam") else 0.1
    used = workload(rule, **({"weight_decay": 0.1} if rule.startswith("adam") else {}))
    local = {
        "workers": 4,
        "steps": 5,
        "start": 6,
        "outer_learning_rate": 0.7,
        "outer_momentum": 0.5,
    }
    ours, theirs = (
        train_one(trial(sparsity, rate=rate, **local), used, GOAL, lean=lean)
        for lean in (True, False)
    )
    assert dataclasses.replace(ours, seconds=0.0) == dataclasses.replace(theirs, seconds=0.0)
    assert not ours.failure and len(ours.curve["step"]) == 3
    usual = train_one(trial(sparsity, rate=rate), used, GOAL)
    assert ours.curve["train_loss"] != usual.curve["train_loss"] and ours.kept == usual.kept


def test_until_the_start_and_with_one_worker_it_is_the_usual_training_to_the_bit():
    for lean in (True, False):
        usual, later, one = (
            train_one(trial(0.8, **local), workload("momentum"), GOAL, lean=lean)
            for local in ({}, {"workers": 4, "start": 24}, {"workers": 1, "steps": 5})
        )
        assert later.curve == usual.curve and one.curve == usual.curve


def test_rounds_of_one_step_are_the_whole_batch_in_both_engines():
    for lean in (True, False):
        usual, local = (
            train_one(trial(**o), workload("sgd"), GOAL, lean=lean) for o in ({}, {"workers": 4})
        )
        assert local.curve["train_loss"] == pytest.approx(usual.curve["train_loss"], rel=1e-3)


def test_in_a_stack_a_trial_of_local_sgd_is_trained_by_itself():
    used = workload("momentum")
    ours = train_one(trial(workers=4, steps=5), used, GOAL, size=4)
    assert ours.engine == "single" and "local SGD" in ours.engine_reason
    assert ours.curve == train_one(trial(workers=4, steps=5), used, GOAL).curve
