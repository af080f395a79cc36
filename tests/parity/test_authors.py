"""Our data, order, networks, pruning, update rules and checks against runs of the authors' own
code."""

from __future__ import annotations

import json
import logging
import math

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lit_dps.core.attempt import Attempt
from lit_dps.data import CIFAR10, MNIST, FashionMNIST
from lit_dps.data.loaders import AuthorsOrder
from lit_dps.models import ResNet8, SimpleCNN
from lit_dps.module import ImageClassifier
from lit_dps.training import GoalErrorCallback, PruningCallback
from tests.parity.authors import DATA, REFERENCE, load, needs_data, tensors, with_weights
from tests.parity.condense import digest

pytestmark = pytest.mark.slow
LONG = pytest.mark.long

FASHION = "traj-fashion-mnist-simple-cnn-momentum-b128-s{}-lr0.01-seed0"
CIFAR = "traj-cifar-10-resnet-8-nesterov-b128-s0.0-lr0.05-linear20-0.01-seed0"


class Losses(Callback):
    """Keeps the loss of every step."""

    def __init__(self):
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.values.append(float(outputs["loss"]))


@pytest.fixture(autouse=True)
def one_thread():
    """As trials run by default, and as the recorded runs did: sums in another order are other float
    noise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(module, data, sparsity, steps, goal=1e-6, interval=16, precision="32-true", early=False):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    losses, pruning = Losses(), PruningCallback(sparsity)
    check = GoalErrorCallback(
        goal, interval, math.ceil(steps / interval) * interval, early_reject=early
    )
    check.record_in(
        Attempt(None, check.goal, (0.95,))
    )  # which the first check meets: so that one looks at all images
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(
        max_epochs=-1,
        max_steps=steps,
        accelerator="cpu",
        precision=precision,
        callbacks=[losses, pruning, check],
        **quiet,
    )
    trainer.fit(module, datamodule=data)
    return losses.values, pruning, check


@pytest.mark.parametrize(("file", "n"), [("mnist-and-fashion-mnist", 60_000), ("cifar-10", 50_000)])
def test_split_and_order_are_the_authors(file, n):
    recorded, order = load(f"data-order-{file}"), AuthorsOrder(n)
    epochs = order.epochs()
    for name, ours in [
        ("val_ids", order.val_ids),
        ("train_ids", order.train_ids),
        ("prune_epoch", order.pruning_epoch),
        ("train_epoch1", next(epochs)),
        ("train_epoch2", next(epochs)),
    ]:
        theirs = recorded[name]
        np.testing.assert_array_equal(
            theirs if theirs.dtype == np.uint8 else digest(theirs), digest(ours), name
        )


# The dense run amplifies float32 noise at ReLU kinks: with two threads instead of one ours moves by
# 1.6e-3, and the authors' own numbers are 8.0e-4 off a float64 run. So it is compared in float64,
# where only their noise is left.
@needs_data
@pytest.mark.parametrize(
    ("sparsity", "precision"),
    [pytest.param("0.0", "64-true", marks=LONG), ("0.9", "32-true")],
)
def test_fashion_mnist_trajectory(sparsity, precision):
    recorded = load(FASHION.format(sparsity))
    network = with_weights(SimpleCNN(), recorded)
    module = ImageClassifier(network, optimizer="momentum", learning_rate=0.01, momentum=0.9)
    losses, pruning, check = run(
        module,
        FashionMNIST(root=str(DATA), batch_size=128),
        float(sparsity),
        33,
        precision=precision,
    )

    np.testing.assert_allclose(losses, recorded["losses"], rtol=1e-3)
    np.testing.assert_allclose(check.curve["val_error"], recorded["val_err"], atol=1.5 / 6000)
    if sparsity == "0.9":
        masks = tensors(network, recorded, "mask", "network.")
        differing = sum(int((pruning.mask[name] != masks[name].bool()).sum()) for name in masks)
        assert differing <= 2, f"{differing} mask elements differ: more than a tie at the threshold"
    # they mask in the forward pass and keep the untouched weights below, so the mask goes over
    # theirs too
    final, kept = tensors(network, recorded, "w1"), tensors(network, recorded, "mask")
    for name, parameter in network.named_parameters():
        final[name] = final[name] * kept[name]
        torch.testing.assert_close(
            parameter.detach().float(), final[name], rtol=0, atol=2e-3, msg=name
        )


# Two images of 5,000 lie so near a tie that float32 noise decides them: in another memory layout
# ours moves by one more than the authors' numbers are off a float64 run. So the mistakes are
# compared in float64, the losses in both.
@pytest.mark.long  # Fashion-MNIST is compared always
@needs_data
@pytest.mark.parametrize(
    ("precision", "steps"), [("32-true", 12), pytest.param("64-true", 33, marks=LONG)]
)
def test_cifar10_nesterov_trajectory_with_linear_decay(precision, steps):
    recorded = load(CIFAR)
    network = with_weights(ResNet8(), recorded)
    module = ImageClassifier(
        network,
        optimizer="nesterov",
        learning_rate=0.05,
        momentum=0.9,
        schedule="linear",
        decay_steps=20,
        end_factor=0.01,
    )
    interval = 16 if precision == "64-true" else 64  # beyond the last step: losses alone
    data = CIFAR10(root=str(DATA), batch_size=128)
    losses, _, check = run(module, data, 0.0, steps, interval=interval, precision=precision)
    np.testing.assert_allclose(losses, recorded["losses"][:steps], rtol=1e-3)
    if precision == "64-true":
        theirs = recorded["val_err"][: steps // 16]
        np.testing.assert_allclose(check.curve["val_error"], theirs, atol=1.5 / 5000)


@needs_data
@pytest.mark.parametrize(
    ("file", "network", "data"),
    [
        pytest.param("mnist-simple-cnn-seed0", SimpleCNN, MNIST, marks=LONG),
        pytest.param("fashion-mnist-simple-cnn-seed0", SimpleCNN, FashionMNIST, marks=LONG),
        pytest.param("cifar-10-resnet-8-seed0", ResNet8, CIFAR10, marks=LONG),
    ],
)
def test_snip_saliency(file, network, data):
    from lit_dps.pruning import gradient_sum, prunable, saliency

    recorded = load(file)
    network = with_weights(network(), recorded)
    module, data = ImageClassifier(network), data(root=str(DATA))
    data.setup("fit")
    batches = (
        data.transfer_batch_to_device(batch, module.device)
        for batch in data.pruning_dataloader(100)
    )
    parameters = prunable(network)
    losses = ((module.training_step(batch, 0), 1.0) for batch in batches)
    ours = saliency(gradient_sum(parameters, losses), parameters)
    theirs = tensors(network, recorded, "snip")
    scale = max(float(value.abs().max()) for value in theirs.values())
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=1e-3, atol=1e-4 * scale, msg=lambda m, name=name: f"{name}: {m}"
        )


def _trials():
    path = REFERENCE / "mnist.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["seed"] == 0]


TRIALS = [pytest.param(row, id=f"{row['optimizer']}-S{row['sparsity']}") for row in _trials()]


@needs_data
@pytest.mark.long  # 400 steps; trajectories above compare the first ones
@pytest.mark.parametrize("row", TRIALS)
def test_mnist_trials_end_where_the_authors_did(row):
    network = with_weights(SimpleCNN(), load("mnist-simple-cnn-seed0"))
    module = ImageClassifier(
        network,
        optimizer=row["optimizer"],
        learning_rate=row["lr"],
        momentum=row["momentum"] or 0.0,
    )
    data = MNIST(root=str(DATA), batch_size=row["batch_size"])
    _, pruning, check = run(
        module,
        data,
        row["sparsity"],
        row["cap"],
        row["goal_error"],
        row["check_interval"],
        early=True,
    )

    ours, theirs = np.array(check.curve["val_error"]), np.array(row["val_err"])
    interval = row["check_interval"]
    # Plain SGD at rate 0.2 is chaotic at first: the authors' own losses are 4e-2 off a float64 run
    # by step 28. So only the first check is compared as a value, and K, which forgets that.
    assert check.curve["exact"][0]
    np.testing.assert_allclose(ours[0], theirs[0], atol=0.01)
    if row["status"] == "complete":
        assert check.steps_to_result is not None
        assert abs(check.steps_to_result - row["steps_to_result"]) <= interval
    else:
        assert check.steps_to_result is None or check.steps_to_result >= row["cap"] - interval
    if pruning.mask is not None:
        kept = [kept for kept, _ in pruning.mask.kept().values()]
        np.testing.assert_allclose(kept, list(row["kept"].values()), atol=2)
