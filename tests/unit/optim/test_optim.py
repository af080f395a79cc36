"""Update rules against TensorFlow's, written out by hand, and the schedule inside a real
Trainer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_dps.models import MLP
from lit_dps.module import ImageClassifier
from lit_dps.optim import RULES, SGD, RateSchedule
from tests.support.tiny import Recorder, fit

STEPS = 20
CURVATURE = np.diag([4.0, 1.0, 0.2]) + 0.1
NOISE = np.random.default_rng(0).normal(size=(STEPS, 3))
START = np.array([1.0, -2.0, 0.5])


def gradient(w: np.ndarray, step: int) -> np.ndarray:
    return CURVATURE @ w + NOISE[step]


def tensorflow(rule: str, rates: list[float], momentum: float) -> np.ndarray:
    """GradientDescentOptimizer, or MomentumOptimizer (ApplyMomentum), which multiplies by the rate
    of the step last."""
    w, accumulator, path = START.copy(), np.zeros(3), []
    for step, rate in enumerate(rates):
        g = gradient(w, step)
        accumulator = momentum * accumulator + g
        if rule == "sgd":
            w = w - rate * g
        elif rule == "momentum":
            w = w - rate * accumulator
        else:
            w = w - rate * g - rate * momentum * accumulator
        path.append(w)
    return np.array(path)


@pytest.mark.parametrize("rule", ["sgd", "momentum", "nesterov"])
@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_updates_are_tensorflows_also_while_the_rate_changes(rule, schedule):
    initial, momentum, decay_steps, end = 0.1, 0.9, 12, 0.05  # the decay ends within the 20 steps
    rates = [initial] * STEPS
    if schedule == "linear":
        rates = [
            (initial - end * initial) * (1 - min(t, decay_steps) / decay_steps) + end * initial
            for t in range(STEPS)
        ]

    w = nn.Parameter(torch.tensor(START))
    optimizer = RULES[rule].make([w], initial, {"momentum": momentum})
    scheduler = RateSchedule(schedule, decay_steps, end).scheduler(optimizer)
    path = []
    for step in range(STEPS):
        w.grad = torch.tensor(gradient(w.detach().numpy(), step))
        optimizer.step()
        scheduler.step()
        path.append(w.detach().numpy().copy())
    # float64, 20 steps of a stable linear recurrence: rounding stays at some 1e-15
    np.testing.assert_allclose(path, tensorflow(rule, rates, momentum), rtol=0, atol=1e-13)


def test_the_three_rules_differ():
    """So that the test above cannot pass with one rule for all."""
    paths = [tensorflow(rule, [0.1] * STEPS, 0.9)[-1] for rule in ("sgd", "momentum", "nesterov")]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert np.abs(paths[i] - paths[j]).max() > 0.01


def images(n: int = 12) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(n, 1, 2, 2, generator=generator), torch.randint(10, (n,), generator=generator)
    )


def classifier(**arguments) -> ImageClassifier:
    torch.manual_seed(0)
    return ImageClassifier(MLP((1, 2, 2), hidden=(3,)), **arguments)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_in_training_every_optimizer_step_has_the_rate_of_the_papers_formula(accumulate):
    rate, decay_steps, end = 0.4, 10, 0.01
    module = classifier(
        optimizer="momentum",
        learning_rate=rate,
        schedule="linear",
        decay_steps=decay_steps,
        end_factor=end,
    )
    recorder = Recorder(lambda trainer, _: trainer.optimizers[0].param_groups[0]["lr"])
    fit(
        module,
        DataLoader(images(), 2),  # 6 batches: the schedule runs on across epochs
        callbacks=[recorder],
        max_steps=15,
        accumulate_grad_batches=accumulate,
    )
    theirs = [
        (rate - end * rate) * (1 - min(t, decay_steps) / decay_steps) + end * rate
        for t in range(15)
    ]
    assert recorder.values == pytest.approx(theirs, rel=1e-12)


def test_a_constant_rate_stays():
    recorder = Recorder(lambda trainer, _: trainer.optimizers[0].param_groups[0]["lr"])
    fit(classifier(learning_rate=0.3), DataLoader(images(), 2), callbacks=[recorder], max_steps=8)
    assert recorder.values == [0.3] * 8


@pytest.mark.parametrize("rule", ["sgd", "momentum", "nesterov"])
def test_a_trained_classifier_follows_the_rule_from_its_own_gradients(rule):
    module = classifier(
        optimizer=rule,
        learning_rate=0.2,
        momentum=0.8,
        schedule="linear",
        decay_steps=5,
        end_factor=0.1,
    )
    grab = Recorder(
        lambda _, m: [
            torch.cat([getter(p).flatten() for p in m.parameters()])
            for getter in (_data, _gradient)
        ]
    )
    fit(module, DataLoader(images(), 4), callbacks=[grab], max_steps=9)
    accumulator = torch.zeros_like(grab.values[0][0])
    for step, ((w, g), (after, _)) in enumerate(
        zip(grab.values[:-1], grab.values[1:], strict=True)
    ):
        rate = (0.2 - 0.02) * (1 - min(step, 5) / 5) + 0.02
        accumulator = 0.8 * accumulator + g
        change = {"sgd": g, "momentum": accumulator, "nesterov": g + 0.8 * accumulator}[rule]
        torch.testing.assert_close(
            after, w - rate * change, rtol=0, atol=1e-6
        )  # float32 at weights of about 1


def _data(parameter):
    return parameter.detach().clone()


def _gradient(parameter):
    return parameter.grad.clone()


def test_the_earlier_name_of_the_step_counter_works_with_a_warning():
    with pytest.warns(FutureWarning, match="has_step_counter"):
        rule = replace(SGD, name="counting", counts=True)
    assert rule.has_step_counter and not SGD.has_step_counter
