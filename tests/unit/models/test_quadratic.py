"""The noisy quadratic model: what is computed of it, against published code and brute force, and
the workload."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from scipy.optimize import minimize

from lit_dps.data import GradientNoise
from lit_dps.models import NoisyQuadratic
from lit_dps.optim.delay import delay_gradients
from lit_dps.readings import NoiseScaleCallback, ReadingsCallback
from lit_dps.readings.gradient import GradientNoise as NoiseReading
from lit_dps.training import DelayCallback, PruningCallback
from tests.support.errors import refuses
from tests.support.measured import lipschitz, terms_of
from tests.support.quadratic import NoisyQuadraticModel
from tests.support.tiny import fit

# K* by nqm.ipynb of Zhang et al. (github.com/gd-zhang/noisy-quadratic-model, be5db10), target 0.01:
# its search returns the last step that misses the target, the one before the first that meets it.
NOTEBOOK = {
    4: 1_507_367,
    64: 95_759,
    1024: 10_609,
    4096: 8_117,
    16_384: 7_447,
    65_536: 7_309,
    2**20: 7_268,
}
NOTEBOOK_MOMENTUM = {64: 80_744, 1024: 5_177, 16_384: 346}


def test_k_star_of_sgd_is_that_of_the_authors_notebook():
    model, rates = NoisyQuadraticModel(10_000, bins=100, guard=1e-8), np.logspace(-5, 0.5, 100)
    assert model.counts.sum() == 10_000
    assert {b: model.k_star(0.01, b, rates) - 1 for b in NOTEBOOK} == NOTEBOOK


def test_the_guard_of_the_notebook_matters_at_small_rates_alone():
    exact, rates = NoisyQuadraticModel(10_000, bins=100), np.logspace(-5, 0.5, 100)
    assert exact.k_star(0.01, 4, rates) == 1_508_044
    assert exact.k_star(0.01, 1024, rates) == NOTEBOOK[1024] + 1
    full = NoisyQuadraticModel(10_000)
    assert full.k_star(0.01, 1024, rates) == pytest.approx(
        NOTEBOOK[1024], rel=0.03
    )  # what the bins do


def test_k_star_of_momentum_is_that_of_the_authors_notebook():
    model, rates, momenta = (
        NoisyQuadraticModel(10_000, bins=100),
        np.logspace(-6, 1, 60),
        1 - np.logspace(-5, 0, 20),
    )
    assert {
        b: model.k_star(0.01, b, rates, momenta) - 1 for b in NOTEBOOK_MOMENTUM
    } == NOTEBOOK_MOMENTUM


def brute_force(
    model: NoisyQuadraticModel, steps: int, rate: float, batch_size: float, momentum=0.0, delay=0
):
    """E w^2 from the linear map of all noises to w, by the package's own update rule and queue."""
    moments = []
    for h in model.curvatures:
        response = torch.zeros(
            steps + 1, requires_grad=True, dtype=torch.float64
        )  # to w(0), then each noise
        with torch.no_grad():
            response[0] = 1.0
        optimizer = torch.optim.SGD([response], lr=rate, momentum=momentum)
        for t in range(steps):
            noise = torch.zeros(steps + 1, dtype=torch.float64)
            noise[1 + t] = 1.0
            response.grad = h * response.detach() + noise
            delay_gradients(optimizer, delay)
            optimizer.step()
        found = response.detach().numpy()
        moments.append(found[0] ** 2 + h / batch_size * (found[1:] ** 2).sum())
    return np.array(moments)


def test_the_moments_are_those_of_torchs_updates():
    model = NoisyQuadraticModel(4)
    assert model.moments(0.7, 3, 9) == pytest.approx(brute_force(model, 9, 0.7, 3), rel=1e-12)
    assert model.initial_loss == pytest.approx(
        0.5 * (1 + 1 / 2 + 1 / 3 + 1 / 4)
    ) and model.noise == pytest.approx(25 / 12)


@pytest.mark.parametrize(("momentum", "delay"), [(0.0, 0), (0.8, 0), (0.0, 3), (0.5, 2)])
def test_steps_are_the_first_at_which_torchs_updates_meet_the_target(momentum, delay):
    model, rate, target = NoisyQuadraticModel(4), 0.15, 0.5
    loss = [
        model.expected_loss(brute_force(model, t, rate, 2, momentum, delay)) for t in range(1, 40)
    ]
    first = 1 + next(i for i, value in enumerate(loss) if value <= target)
    assert first > delay + 2
    assert model.delayed_steps(target, [rate], 2, delay, momentum).tolist() == [first]
    if not delay:
        assert model.momentum_steps(target, [rate], momentum, 2).tolist() == [first]
    if not (delay or momentum):
        assert model.steps(target, np.array([rate]), 2).tolist() == [first]


def test_a_rate_beyond_the_noise_or_stability_never_gets_there():
    model = NoisyQuadraticModel(10)
    assert model.steps(0.1, np.array([0.1, 1.5, 2.5]), 1).tolist()[1:] == [np.inf, np.inf]
    assert model.momentum_steps(0.1, np.array([0.1, 9.0]), 0.9, 64).tolist()[1] == np.inf
    assert np.isinf(model.delayed_steps(0.01, [0.5], np.inf, 8, max_steps=500)).all()


def run(steps: int, copies: int = 400, batch_size: int = 4, **given) -> NoisyQuadratic:
    delay = given.pop("delay", 0)
    module = NoisyQuadratic(dimensions=6, copies=copies, **given)
    torch.manual_seed(3)
    fit(module, GradientNoise(batch_size), callbacks=[DelayCallback(delay)], max_steps=steps)
    return module


@pytest.mark.parametrize(
    "given",
    [
        {"learning_rate": 0.6},
        {"optimizer": "momentum", "learning_rate": 0.2, "momentum": 0.7},
        {"learning_rate": 0.2, "delay": 2},
    ],
)
def test_training_follows_the_exact_moments(given):
    module, steps = run(12, **given), 12
    found = module.w.detach().view(400, 6).double().square()
    exact = brute_force(
        NoisyQuadraticModel(6),
        steps,
        given["learning_rate"],
        4,
        given.get("momentum", 0.0),
        given.get("delay", 0),
    )
    error = found.std(0) / 400**0.5
    assert ((found.mean(0) - torch.tensor(exact)).abs() < 4 * error).all()


def test_without_noise_training_is_the_closed_form():
    model = run(9, copies=2, batch_size=10**12, learning_rate=0.5)
    expected = NoisyQuadraticModel(6).moments(0.5, np.inf, 9)
    assert model.w.detach().view(2, 6)[0].square().numpy() == pytest.approx(
        expected, rel=1e-4, abs=1e-8
    )


def test_what_is_measured_of_its_noise_is_exact():
    measured = lipschitz(interval=2)
    fit(NoisyQuadratic(6, 3), GradientNoise(8), callbacks=[measured], max_steps=2)
    h = torch.tensor(NoisyQuadraticModel(6).curvatures)
    assert terms_of(measured)["gradient_variance"] == pytest.approx(3 * float(h.sum()), rel=1e-5)
    assert terms_of(measured)["squared_gradient"] == pytest.approx(
        3 * float(h.square().sum()), rel=1e-5
    )
    assert terms_of(measured)["loss"] == pytest.approx(3 * float(h.sum()) / 2, rel=1e-5)


class NoiseOfSteps(NoiseReading):
    name = "noise_of_steps"
    when = "step"
    interval = 1


def noise_of_steps(**arguments) -> ReadingsCallback:
    path = f"{__name__}.{NoiseOfSteps.__name__}"
    return ReadingsCallback([{"class_path": path, "init_args": arguments}])


def test_its_noise_scale_is_that_of_independent_examples():
    """At w = 1 the variance is sum h and |G|^2 is sum h^2, for each of 64 copies."""
    measured = noise_of_steps()
    fit(NoisyQuadratic(learning_rate=1e-6), GradientNoise(8), callbacks=[measured], max_steps=1)
    h = torch.tensor(NoisyQuadraticModel(100).curvatures)
    found = measured.columns["noise_of_steps"]
    assert found["noise_variance"][0] == pytest.approx(64 * float(h.sum()), rel=0.03)
    squared = 64 * float(h.square().sum())
    assert found["noise_squared_gradient"][0] == pytest.approx(squared, rel=0.03)


def test_estimates_of_noise_take_no_more_examples_than_are_independent():
    with refuses("study.readings.gradient_noise.examples", 2048):
        measured = noise_of_steps(examples=2048)
        fit(NoisyQuadratic(6, 3), GradientNoise(8), callbacks=[measured], max_steps=1)


def test_batches_of_a_pass_are_of_independent_examples():
    data = GradientNoise(8)
    fit(NoisyQuadratic(6, 3), data, max_steps=1)
    sizes = [data.pruning_dataloader(size).batch_size for size in (100, 1024, 1025, 2048)]
    assert sizes == [100, 1024, 1024, 1024]


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_a_part_of_a_batch_is_refused_in_every_precision(precision):
    """Half a batch has the mean of the whole one, as if there were no noise."""
    with refuses("data", "4 of 8 examples"):
        fit(
            NoisyQuadratic(6, 3),
            GradientNoise(8),
            callbacks=[NoiseScaleCallback()],
            max_steps=2,
            precision=precision,
        )


def test_there_is_nothing_to_prune():
    with refuses("study.sparsities", 0.5):
        fit(
            NoisyQuadratic(6, 3),
            GradientNoise(8),
            callbacks=[PruningCallback(0.5, "magnitude")],
            max_steps=1,
        )


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"dimensions": 0}, "model.dimensions", 0),
        ({"copies": 0}, "model.copies", 0),
        ({"learning_rate": 0.0}, "model.learning_rate", 0.0),
        ({"momentum": 1.0}, "model.momentum", 1.0),
        ({"optimizer": "adam"}, "model.optimizer", "adam"),
    ],
)
def test_bad_values_name_their_key(given, key, value):
    with refuses(key, value):
        NoisyQuadratic(**given)


def test_the_batch_size_is_counted_in_examples():
    data: LightningDataModule = GradientNoise(8)
    with refuses("data.batch_size", 0):
        GradientNoise(0)
    fit(NoisyQuadratic(6, 3), data, callbacks=[], max_steps=1)
    batch = next(iter(data.train_dataloader()))
    assert batch.shape == (8, 18) and torch.equal(batch[0], batch[7])


def test_moments_under_a_constant_schedule_are_the_closed_form():
    model = NoisyQuadraticModel(20)
    after = model.schedule_moments([0.3] * 40, [8] * 40)
    for steps in (1, 7, 40):
        assert after[steps - 1] == pytest.approx(model.moments(0.3, 8, steps), rel=1e-12)


def test_moments_under_a_schedule_are_those_of_simulated_runs():
    model = NoisyQuadraticModel(3)
    rates = [0.8, 0.8, 0.4, 0.4, 0.2]
    batch_sizes = [1, 2, 2, 4, 16]
    copies = 100_000
    rng = np.random.default_rng(0)
    weights = np.ones((copies, 3))
    losses = []
    for rate, batch_size in zip(rates, batch_sizes, strict=True):
        noise = rng.standard_normal(weights.shape) * np.sqrt(model.curvatures / batch_size)
        weights = weights - rate * (model.curvatures * weights + noise)
        losses.append(0.5 * (model.curvatures * weights**2).sum(1))
    exact = model.expected_loss(model.schedule_moments(rates, batch_sizes))
    for step, of_copies in enumerate(losses):
        error = of_copies.std() / np.sqrt(copies)
        assert of_copies.mean() == pytest.approx(exact[step], abs=4 * error)
        assert error < 0.01 * exact[step]


def loss_of(model, rate, batch_sizes):
    moments = model.schedule_moments([rate] * len(batch_sizes), batch_sizes)
    return model.expected_loss(moments[-1])


def test_the_best_batch_sizes_are_the_minimum_that_is_searched():
    model = NoisyQuadraticModel(30)
    rate, steps, examples = 0.4, 12, 300.0
    best = model.best_batch_sizes(rate, steps, examples)
    assert best.sum() == pytest.approx(examples)
    assert (np.diff(best) > 0).all()

    def loss_of_logs(logs):
        shares = np.exp(logs - logs.max())
        return loss_of(model, rate, examples * shares / shares.sum())

    searched = minimize(loss_of_logs, np.zeros(steps), method="BFGS", options={"gtol": 1e-9})
    assert loss_of(model, rate, best) == pytest.approx(searched.fun, rel=1e-6)
    shares = np.exp(searched.x)
    assert examples * shares / shares.sum() == pytest.approx(best, rel=0.01)
    # The sum of the weights over the sizes, and the loss without noise.
    weights = model.noise_weights(rate, steps)
    without = loss_of(model, rate, [np.inf] * steps)
    assert loss_of(model, rate, best) == pytest.approx(without + (weights / best).sum())
    # What a constant batch size of the same examples loses.
    lost = (steps * weights.sum() - np.sqrt(weights).sum() ** 2) / examples
    constant = loss_of(model, rate, [examples / steps] * steps)
    assert constant - loss_of(model, rate, best) == pytest.approx(lost, rel=1e-6)
    assert lost > 0.002


def test_the_fewest_steps_at_a_number_of_examples():
    model = NoisyQuadraticModel(30)
    target, rate, examples = 0.2, 0.8, 400.0
    best, constant = model.scheduled_steps(target, rate, examples)
    assert best < constant < np.inf
    for steps, least in ((int(best), True), (int(best) - 1, False)):
        sizes = model.best_batch_sizes(rate, steps, examples)
        assert (loss_of(model, rate, sizes) <= target) == least
    for steps, least in ((int(constant), True), (int(constant) - 1, False)):
        assert (loss_of(model, rate, [examples / steps] * steps) <= target) == least
    assert model.scheduled_steps(1e-9, rate, 10.0, max_steps=50) == (np.inf, np.inf)


def test_seesaw_of_sgd_has_the_loss_of_the_halved_rates_in_fewer_steps():
    """Half the rate with B, or the rate with 2 B: the same loss to first order in the rate."""
    model = NoisyQuadraticModel(20)
    stages = 4
    halved_rates = np.repeat(0.02 * 0.5 ** np.arange(stages), 64 * 2 ** np.arange(stages))
    halved = loss_after(model, halved_rates, np.full(len(halved_rates), 4.0))
    rates = np.full(64 * stages, 0.02)
    doubled = loss_after(model, rates, np.repeat(4.0 * 2 ** np.arange(stages), 64))
    assert doubled == pytest.approx(halved, rel=0.01)
    # A rate of Adam's rule, 1 / sqrt(2) for each doubling, does not have it.
    roots = np.repeat(0.02 * 0.5 ** (np.arange(stages) / 2), 64)
    other = loss_after(model, roots, np.repeat(4.0 * 2 ** np.arange(stages), 64))
    assert abs(other / halved - 1) > 0.05


def loss_after(model, rates, batch_sizes):
    return model.expected_loss(model.schedule_moments(rates, batch_sizes)[-1])
