"""Branched training: on a noisy quadratic, whose expected losses and critical batch size are
known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_dps.core.errors import ConfigError
from lit_dps.readings import BranchCallback
from lit_dps.readings.branching import Fork
from tests.support.tiny import Plain, assert_equal, fit, loader, weights

N, RATE, BATCH = 50, 0.01, 4
H = torch.arange(1, N + 1, dtype=torch.float64) ** -0.5


class Quadratic(LightningModule):
    """The loss 1/2 sum h w^2, whose gradient has the noise h / B along each coordinate (Zhang et
    al. 2019)."""

    def __init__(self, start: float = 0.5):
        super().__init__()
        self.weight = nn.Parameter(torch.full((N,), start, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        return (H * self.weight.square()).sum() / 2 + (self.weight * batch[0].mean(0)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), RATE)


def noise(n: int = 8192) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, N, dtype=torch.float64, generator=generator) * H.sqrt()
    return DataLoader(TensorDataset(x - x.mean(0)), BATCH, shuffle=True)


def expected(factors, squares: np.ndarray, stretches: int) -> list[float]:
    """The smoothed expected loss at the end of each branch: E w^2 <- (1 - rate h)^2 E w^2 + rate^2
    h / (k B)."""
    h = H.numpy()
    found = []
    for k in factors:
        own, smooth = squares.copy(), math.nan
        for _ in range(stretches):
            for _ in range(max(factors) // k):
                own = (1 - k * RATE * h) ** 2 * own + (k * RATE) ** 2 * h / (k * BATCH)
            loss = float((h * own).sum() / 2)
            smooth = loss if math.isnan(smooth) else (smooth + loss) / 2
        found.append(smooth)
    return found


@pytest.mark.parametrize(("start", "steps", "is_limited"), [(0.5, 2, False), (0.02, 30, True)])
def test_branches_of_a_noisy_quadratic_end_where_theory_says(start, steps, is_limited):
    factors, stretches = (1, 2, 4, 8, 16, 32, 64), 3
    callback = BranchCallback([steps], factors, stretches, repetitions=8)
    module = Quadratic(start)
    squares = []
    callback.on_fork = lambda fork: squares.append(module.weight.detach().square().numpy().copy())
    torch.manual_seed(0)
    fit(module, noise(), callbacks=[callback], max_steps=steps + 1)
    fork, truth = callback.forks[0], expected(factors, squares[0], stretches)
    assert (fork.step, fork.batch_size) == (steps, BATCH)
    differences = np.array(fork.losses) - fork.losses[0]
    expected_differences = np.array(truth) - truth[0]
    # Larger differences scatter more.
    root_mean_square = np.sqrt((expected_differences[1:] ** 2).mean())
    scale = np.maximum(1, np.abs(expected_differences) / root_mean_square)
    four_errors = 2 * fork.tolerance * scale
    assert (np.abs(differences - expected_differences) < four_errors).all()
    true_factor = Fork(steps, BATCH, factors, tuple(truth), fork.tolerance).factor
    assert true_factor / 2 <= fork.factor <= 2 * true_factor
    # Noise limits the batch size near the minimum only.
    assert (true_factor < max(factors)) == is_limited


def test_repetitions_make_the_tolerance():
    """Two standard errors of the differences to the branch of the run's own batch size: less with
    more examples."""
    tolerances = []
    for repetitions in (2, 8):
        callback = BranchCallback([1], (1, 2, 4), 1, repetitions)
        torch.manual_seed(0)
        fit(Quadratic(0.02), noise(), callbacks=[callback], max_steps=2)
        tolerances.append(callback.forks[0].tolerance)
    assert 0 < tolerances[1] < 1e-3 and all(map(math.isfinite, tolerances))


def test_the_critical_factor_is_the_largest_before_a_loss_rises():
    def factor(*losses, tolerance=0.1):
        return Fork(0, 4, (1, 2, 4, 8), losses, tolerance)

    assert factor(1.0, 1.05, 0.9, 1.3).critical == (16, 32)
    assert factor(1.0, 1.2, 0.9, 0.9).critical == (4, 8)
    assert factor(1.0, 1.0, math.inf, math.nan).critical == (8, 16)
    assert factor(1.0, 1.0, 1.0, 1.0).critical == (32, math.inf)
    fork = factor(1.0, 1.0, 1.0, math.inf)
    assert Fork.from_dict(fork.to_dict()).critical == fork.critical


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_the_run_itself_is_not_touched(make):
    ends = []
    for callbacks in ([], [BranchCallback([1, 3], (1, 2), 2, 2)]):
        torch.manual_seed(5)
        module = Plain(make_optimizer=lambda parameters: make(parameters, lr=0.05))
        fit(module, loader(shuffle=True), callbacks=callbacks, max_steps=6)
        ends.append(weights(module))
        assert module.taken == 6
    assert_equal(*ends)
    assert [fork.step for fork in callbacks[0].forks] == [1, 3]


def test_a_branch_of_factor_1_trains_as_the_run_does():
    """On the same batches, in their order, it is where the run is after as many steps."""
    callback, module = BranchCallback([0], (1, 2), 1, 1, tolerance=0.0), Plain()
    fit(module, loader(), callbacks=[callback], max_steps=2)
    later = [batch for i, batch in enumerate(loader()) if i in (2, 3)]
    with torch.no_grad():
        mean = sum(float(nn.functional.cross_entropy(module.network(x), y)) for x, y in later) / 2
    assert callback.forks[0].losses[0] == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"factors": (2, 4)}, "factors"),
        ({"factors": (1, 3, 4)}, "factors"),
        ({"repetitions": 1}, "repetitions"),
        ({"stretches": 0}, "stretches"),
        ({"tolerance": -1.0}, "tolerance"),
    ],
)
def test_bad_values_name_their_key(arguments, key):
    with pytest.raises(ConfigError) as caught:
        BranchCallback([1], **arguments)
    assert caught.value.key == f"BranchCallback.{key}"
    value = arguments[key]
    assert caught.value.value == (list(value) if key == "factors" else value)


def test_manual_optimization_is_refused():
    manual = Plain()
    manual.automatic_optimization = False
    with pytest.raises(ConfigError) as caught:
        fit(manual, callbacks=[BranchCallback([1])], max_steps=1)
    assert (caught.value.key, caught.value.value) == ("BranchCallback", "Plain")
