"""ImageClassifier: its loss, its errors over an entire split, and what it refuses."""

import math

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_dps.core.errors import ConfigError
from lit_dps.module import ImageClassifier, LanguageModel, weights_finite
from tests.support.errors import refuses
from tests.support.tiny import QUIET

LOGITS = torch.randn(17, 3, generator=torch.Generator().manual_seed(1))
CLASSES = torch.randint(3, (17,), generator=torch.Generator().manual_seed(2))


def mean_cross_entropy(logits: np.ndarray, classes: np.ndarray) -> float:
    return float(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(classes)), classes]))


def test_the_training_loss_is_the_mean_cross_entropy():
    loss = ImageClassifier(nn.Identity()).training_step((LOGITS, CLASSES), 0)
    assert float(loss) == pytest.approx(
        mean_cross_entropy(LOGITS.double().numpy(), CLASSES.numpy()), rel=1e-6
    )


def test_per_example_error_is_the_probability_missed_and_one_more_for_the_wrong():
    found = ImageClassifier(nn.Identity()).per_example_error((LOGITS, CLASSES)).double().numpy()
    powers = np.exp(LOGITS.double().numpy())
    missed = 1 - powers[np.arange(17), CLASSES] / powers.sum(1)
    np.testing.assert_allclose(found, missed + (LOGITS.argmax(1) != CLASSES).numpy(), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_per_example_error_of_equal_and_broken_logits_is_decided_as_a_full_pass_does(value, dtype):
    logits, classes = torch.full((1000, 1000), value, dtype=dtype), torch.arange(1000)
    per_example_error = ImageClassifier(nn.Identity()).per_example_error((logits, classes))
    assert (
        torch.equal(per_example_error >= 1, logits.argmax(1) != classes)
        and per_example_error.isfinite().all()
    )


@pytest.mark.parametrize("batch_size", [1, 5, 16, 17, 100])
@pytest.mark.parametrize("split", ["val", "test"])
def test_errors_and_losses_are_of_the_split_whatever_the_batches(batch_size, split):
    module, trainer = (
        ImageClassifier(nn.Sequential(nn.Flatten(), _WithParameter())),
        Trainer(**QUIET),
    )
    loader = DataLoader(TensorDataset(LOGITS, CLASSES), batch_size)
    run = trainer.validate if split == "val" else trainer.test
    (logged,) = run(module, loader, verbose=False)
    mistakes = int((LOGITS.argmax(1) != CLASSES).sum())
    assert 0 < mistakes < 17
    assert logged[f"{split}_error"] == np.float32(mistakes) / np.float32(
        17
    )  # integers, divided once
    # one float32 rounding of the mean, and those of 17 logarithms
    assert logged[f"{split}_loss"] == pytest.approx(
        mean_cross_entropy(LOGITS.numpy(), CLASSES.numpy()), rel=1e-6
    )


class _WithParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", -0.1),
        ("learning_rate", math.nan),
        ("momentum", -0.1),
        ("momentum", 1.0),
        ("momentum", math.nan),
        ("decay_steps", 0),
        ("end_factor", -0.1),
        ("end_factor", 1.1),
        ("optimizer", "adagrad"),  # an unknown name must not train as something else
        ("schedule", "exponential"),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_key(key, value):
    with pytest.raises(ConfigError) as caught:
        ImageClassifier(nn.Linear(2, 2), **{key: value})
    assert caught.value.key == f"model.{key}"
    assert repr(value) in str(caught.value)


def test_a_weight_decay_that_the_rule_does_not_apply_warns(recwarn):
    class Own(ImageClassifier):
        """May use the weight decay in its loss."""

    silent = [
        Own(nn.Linear(2, 2), optimizer="sgd", weight_decay=0.1),
        ImageClassifier(nn.Linear(2, 2), optimizer="adamw", weight_decay=0.1),
        ImageClassifier(nn.Linear(2, 2), optimizer="nesterov"),
    ]
    for module in silent:
        module.configure_optimizers()
    assert len(recwarn) == 0
    ImageClassifier(nn.Linear(2, 2), optimizer="sgd", weight_decay=0.1).configure_optimizers()
    assert len(recwarn) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_weight_that_is_not_finite_is_seen(bad):
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert weights_finite(network) is True
    with torch.no_grad():
        network[1].bias[1] = bad
    assert weights_finite(network) is False


def test_labels_that_are_no_classes_are_refused_also_where_their_shape_would_broadcast():
    module = ImageClassifier(nn.Linear(4, 3))
    module.on_validation_epoch_start()
    batch = (torch.randn(3, 4), torch.eye(3))  # as many examples as classes
    with refuses("data", "labels of shape (3, 3)"):
        module.validation_step(batch, 0)
    module.validation_step((batch[0], torch.arange(3)), 0)


class OwnLoss(LanguageModel):
    """Sums the loss of the positions that count, but its mean is over all positions."""

    def per_example_error(self, batch):
        x, y = batch
        return ((self(x).argmax(1) != y) & (y >= 0)).any(1).float()

    def summed_loss(self, batch):
        return super().summed_loss(batch)


@pytest.mark.parametrize(
    ("kind", "shape"), [(ImageClassifier, (6,)), (LanguageModel, (6, 4)), (OwnLoss, (6, 4))]
)
def test_classes_that_torch_ignores_are_refused_in_a_validation(kind, shape):
    module = kind(nn.Identity())
    classes = torch.zeros(shape, dtype=torch.int64)
    logits = torch.randn(6, 3, *shape[1:])
    module.on_validation_epoch_start()
    module.validation_step((logits, classes), 0)
    classes[2:] = -100
    with refuses("data", "a split with the class -100"):
        module.validation_step((logits, classes), 0)


def test_a_module_with_its_own_error_and_loss_may_have_negative_classes():
    class Signs(ImageClassifier):
        """Predicts the sign -1 or 1 of an example."""

        def per_example_error(self, batch):
            return (self(batch[0])[:, 0].sign() != batch[1]).float()

        def summed_loss(self, batch):
            return torch.relu(1 - self(batch[0])[:, 0] * batch[1]).sum()

    loader = DataLoader(
        TensorDataset(torch.tensor([[1.0], [2.0]]), torch.tensor([-1, 1])), batch_size=1
    )
    (logged,) = Trainer(**QUIET).validate(Signs(_WithParameter()), loader, verbose=False)
    assert (logged["val_error"], logged["val_loss"]) == (0.5, 1.0)
