"""The reading `lipschitz` on modules whose constants can be computed by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial_config import SmoothnessConfig
from lit_dps.module import ImageClassifier
from lit_dps.readings import ReadingsCallback
from lit_dps.readings.lipschitz import Lipschitz
from lit_dps.training import PruningCallback
from tests.support.measured import lipschitz, terms_of
from tests.support.tiny import Plain, Recorder, assert_equal, fit, loader, two_layers, weights

N, FEATURES = 12, 3


def features() -> torch.Tensor:
    return torch.randn(N, FEATURES, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


class Quadratic(LightningModule):
    """f(w) = 1/2 mean (x w)^2, with the gradient H w, H = X' X / n."""

    def __init__(self, rate: float = 0.1):
        super().__init__()
        self.w, self.rate = (
            nn.Parameter(torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)),
            rate,
        )

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = 0.5 * (x @ self.w.T).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def batches(size: int = 4, **arguments) -> DataLoader:
    return DataLoader(TensorDataset(features()), size, **arguments)


def hessian(n: int = N) -> torch.Tensor:
    x = features()[:n]
    return x.T @ x / n


@pytest.mark.parametrize("examples", [None, 6])
def test_on_a_quadratic_it_is_the_hessian_along_the_update(examples):
    seen = Recorder(lambda trainer, module: module.w.detach().flatten().clone())
    measured = lipschitz(interval=2, examples=examples)
    module = Quadratic()
    fit(module, batches(), callbacks=[seen, measured], max_steps=4)
    path, h = [*seen.values, module.w.detach().flatten()], hessian(examples or N)
    assert measured.columns["lipschitz"]["step"] == [2, 4]
    for i, step in enumerate(measured.columns["lipschitz"]["step"]):
        direction = path[step] - path[step - 1]
        assert measured.columns["lipschitz"]["lipschitz"][i] == pytest.approx(
            float((h @ direction).norm() / direction.norm())
        )
        assert measured.columns["lipschitz"]["squared_gradient"][i] == pytest.approx(
            float((h @ path[step - 1]).square().sum())
        )


@pytest.mark.parametrize("examples", [None, 6])
def test_the_noise_is_that_of_single_examples_before_the_step(examples):
    seen = Recorder(lambda trainer, module: module.w.detach().flatten().clone())
    measured = lipschitz(interval=2, examples=examples, noise=True)
    fit(Quadratic(), batches(), callbacks=[seen, measured], max_steps=4)
    x = features()[: examples or N]
    found = zip(
        measured.columns["lipschitz"]["noise"],
        measured.columns["lipschitz"]["squared_gradient"],
        seen.values[1::2],
        strict=True,
    )
    for noise, squared, w in found:
        rows = (x @ w)[:, None] * x
        assert noise == pytest.approx(float(torch.cov(rows.T, correction=0).trace()))
        assert squared == pytest.approx(float(rows.mean(0).square().sum()))
    assert len(measured.columns["lipschitz"]["noise"]) == 2


def test_the_noise_of_pruned_coordinates_does_not_count():
    pruning, measured = (
        PruningCallback(0.67, method="magnitude"),
        lipschitz(interval=1, noise=True),
    )
    fit(Quadratic(), batches(), callbacks=[pruning, measured], max_steps=1)
    assert measured.columns["lipschitz"]["noise"] == [
        pytest.approx(4 * float(features()[:, 1].pow(4).mean() - hessian()[1, 1] ** 2))
    ]
    assert measured.columns["lipschitz"]["noise"] == [
        pytest.approx(terms_of(measured)["gradient_variance"])
    ]


def test_terms_before_the_first_step_and_rates_of_all_steps():
    measured = lipschitz(interval=100, floor=0.25)
    fit(Quadratic(rate=0.1), batches(), callbacks=[measured], max_steps=5)
    x, w = features(), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    rows = (x @ w)[:, None] * x  # gradient of each example
    assert terms_of(measured) == pytest.approx(
        {
            "loss": float(0.5 * (x @ w).square().mean()),
            "gradient_variance": float(torch.cov(rows.T, correction=0).trace()),
            "squared_gradient": float(rows.mean(0).square().sum()),
            "floor": 0.25,
            "steps": 5,
            "rate_sum": 0.5,
            "rate_square_sum": 0.05,
        }
    )


def test_pruned_coordinates_do_not_count():
    pruning, measured = PruningCallback(0.67, method="magnitude"), lipschitz(interval=1)
    fit(Quadratic(), batches(), callbacks=[pruning, measured], max_steps=1)
    assert pruning.mask["w"].tolist() == [[False, True, False]]
    assert measured.columns["lipschitz"]["lipschitz"] == [pytest.approx(float(hessian()[1, 1]))]
    gradient = float(hessian()[1, 1] * -2)
    assert measured.columns["lipschitz"]["squared_gradient"] == [pytest.approx(gradient**2)]
    assert terms_of(measured)["squared_gradient"] == pytest.approx(gradient**2)


def test_accumulated_batches_are_one_step():
    measured = lipschitz(interval=2)
    fit(Quadratic(), batches(2), callbacks=[measured], max_steps=4, accumulate_grad_batches=3)
    assert measured.columns["lipschitz"]["step"] == [2, 4]
    assert terms_of(measured)["steps"] == 4


@pytest.mark.parametrize("noise", [False, True])
def test_training_is_not_touched(noise):
    """Same weights bit for bit, with shuffled batches, dropout and a pruned network."""

    def train(*callbacks):
        module = ImageClassifier(nn.Sequential(two_layers(), nn.Dropout(0.3)))
        shuffled = loader(shuffle=True, generator=torch.Generator().manual_seed(2))
        torch.manual_seed(4)
        fit(module, shuffled, callbacks=[PruningCallback(0.5), *callbacks], max_steps=12)
        return module

    measured = lipschitz(interval=3, noise=noise)
    with_it, without = train(measured), train()
    assert measured.columns["lipschitz"]["step"] == [3, 6, 9, 12]
    assert_equal(weights(with_it), weights(without))


def test_the_rates_are_those_of_the_schedule():
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    module = ImageClassifier(
        network, learning_rate=0.4, schedule="linear", decay_steps=4, end_factor=0.5
    )
    measured = lipschitz(interval=100)
    fit(module, callbacks=[measured], max_steps=3)
    assert terms_of(measured)["rate_sum"] == pytest.approx(0.4 + 0.35 + 0.3)
    assert terms_of(measured)["rate_square_sum"] == pytest.approx(0.4**2 + 0.35**2 + 0.3**2)


def test_without_an_interval_nothing_is_measured():
    measured = ReadingsCallback.of(SmoothnessConfig())
    fit(Quadratic(), batches(), callbacks=[measured], max_steps=2)
    assert (measured.columns, measured.flags) == ({}, {})


def test_a_module_without_per_example_gradients_is_refused_in_one_line():
    module = Plain(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    with pytest.raises(ConfigError) as caught:
        fit(module, callbacks=[lipschitz()], max_steps=1)
    assert (caught.value.key, caught.value.value) == ("smoothness.interval", 100)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_brings_what_was_measured():
    measured, resumed = lipschitz(interval=1), lipschitz(interval=1)
    fit(Quadratic(), batches(), callbacks=[measured], max_steps=2)
    resumed.load_state_dict(measured.state_dict())
    assert (resumed.columns, resumed.flags) == (measured.columns, measured.flags)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"interval": 0}, "interval"),
        ({"examples": 0}, "examples"),
        ({"batch_size": 0}, "batch_size"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.5}, "delta"),
        ({"delta": 0.5, "last": 0.4}, "last"),
        ({"floor": float("nan")}, "floor"),
    ],
)
def test_bad_values_name_their_key(arguments, key):
    with pytest.raises(ConfigError) as caught:
        Lipschitz(**arguments)
    assert caught.value.key == f"smoothness.{key}"


def test_the_loss_of_a_classifier_is_its_cross_entropy():
    module, measured = ImageClassifier(two_layers()), lipschitz(interval=100)
    x, y = loader().dataset.tensors
    expected = float(F.cross_entropy(module.network(x), y).detach())
    fit(module, callbacks=[measured], max_steps=1)
    assert terms_of(measured)["loss"] == pytest.approx(expected, rel=1e-6)
