"""A pruner and the readings of docs/extending.md: their values."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.pruning import Mask, MaskUpdate, Network, prunable
from lit_dps.readings import Moment
from lit_dps.readings.registry import resolve_readings
from lit_dps.testing.toy import ToyRun, toy_network
from lit_dps.training.workload import Workload
from tests.support.recipes import import_recipe
from tests.support.runs import train_one
from tests.support.user_readings import FullHessian

DATA = {"class_path": "lit_dps.data.Digits"}
NETWORK = {"class_path": "tests.support.user_readings.TinyNetwork"}


def test_each_output_keeps_its_largest_inputs(tmp_path, monkeypatch):
    pruner = import_recipe("my_fan_in", tmp_path, monkeypatch).FanIn()
    module = toy_network(4, 20)
    network = Network(module, prunable(module), 8, lambda: 0, lambda: iter(()), lambda *_: None)
    mask = pruner.mask(network, 0.7, torch.Generator())
    for name, keep in mask.items():
        rows = keep.flatten(1)
        sizes = module.get_parameter(name).detach().abs().flatten(1)
        assert (rows.sum(1) == max(1, round(rows.shape[1] * 0.3))).all()
        smallest_kept = sizes.masked_fill(~rows, torch.inf).amin(1)
        assert (smallest_kept >= sizes.masked_fill(rows, 0).amax(1)).all()


def test_weights_are_exchanged_between_layers(tmp_path, monkeypatch):
    pruner = import_recipe("my_exchange", tmp_path, monkeypatch).Exchange(share=0.5)
    update = MaskUpdate(
        step=1,
        max_steps=9,
        sparsity=0.5,
        mask=Mask({"a": torch.tensor([True, True, True]), "b": torch.tensor([True, False, False])}),
        weights={"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([4.0, 0.0, 0.0])},
        gradients={"a": torch.tensor([0.0, 1.0, 9.0]), "b": torch.tensor([0.0, 7.0, 6.0])},
        generator=torch.Generator(),
    )
    mask = pruner.next_mask(update)
    assert mask["a"].tolist() == [False, False, True]
    assert mask["b"].tolist() == [True, True, True]


def test_damage_of_a_diagonal_hessian_is_exact(tmp_path, monkeypatch):
    """The loss is the sum of the cubes of the weights: H_ii = 6 w, and w^2 H_ii / 2 = 3 w^3."""
    pruner = import_recipe("my_damage", tmp_path, monkeypatch).Damage(probes=2)
    module = torch.nn.Linear(3, 2)
    batches = [(None, 8), (None, 4)]  # a full batch and a half, so that the sum has 1.5 batches
    network = Network(
        module,
        dict(module.named_parameters()),
        8,
        lambda: 2,
        lambda: iter(batches),
        lambda batch, i: sum((p**3).sum() for p in module.parameters()),
    )
    scores = pruner.scores(network, torch.Generator().manual_seed(0))
    assert scores.keys() == {"weight", "bias"}
    for name, parameter in module.named_parameters():
        expected = pruner.probes * 1.5 * 3 * parameter.detach() ** 3
        torch.testing.assert_close(scores[name], expected)


def test_a_subclass_callbacks_and_metrics_do_what_the_page_says(tmp_path, monkeypatch):
    module = import_recipe("my_module", tmp_path, monkeypatch)
    focal = module.Focal(toy_network(1, 3), gamma=1.5)
    x, y = torch.randn(8, 1, 8, 8), torch.arange(8) % 3
    p = focal(x).softmax(1)[torch.arange(8), y]
    assert focal.loss((x, y)).item() == pytest.approx((-((1 - p) ** 1.5 * p.log()).mean()).item())

    def train(name="Focal", **trainer):
        model = {"class_path": f"my_module.{name}", "init_args": {"network": NETWORK}}
        workload = Workload(model, DATA, {"accelerator": "cpu", **trainer})
        readings = resolve_readings(["tests.support.user_readings.FinalNorm"])
        trial = Trial(Cell(16), 0, {"model.gamma": 1.0, "model.learning_rate": 0.1})
        goal = {"error": 0.01, "check_interval": 4, "max_steps": 8, "early_reject": False}
        options = {"readings": readings, "metrics": ["val_loss"]}
        return train_one(trial, workload, goal, **options)

    plain = train()
    assert plain.engine == "single" and len(plain.curve["val_loss"]) == 2
    callback = {"class_path": "my_module.MaxNorm", "init_args": {"bound": 0.1}}
    bounded = train(callbacks=[callback])
    assert bounded.engine == "lightning"
    # 15 neurons of a norm of at most 0.1, and 15 biases.
    assert (
        bounded.end_readings["final_norm"] < 0.1 * 15**0.5 + 0.5 < plain.end_readings["final_norm"]
    )
    assert train("Bounded").end_readings == bounded.end_readings
    stopping = "lightning.pytorch.callbacks.EarlyStopping"
    refused = train(callbacks=[{"class_path": stopping, "init_args": {"monitor": "val_loss"}}])
    assert refused.status is Status.FAILED and "trainer.callbacks" in refused.failure


def test_a_goal_over_two_metrics_is_a_third_one(tmp_path, monkeypatch):
    import_recipe("my_calm", tmp_path, monkeypatch)
    model = {"class_path": "my_calm.Calm", "init_args": {"network": NETWORK}}
    workload = Workload(model, DATA, {"accelerator": "cpu"})
    goal = {"metric": "calm_error", "at_most": 0.01, "check_interval": 2, "max_steps": 24}
    trial = Trial(Cell(16), 0, {"model.learning_rate": 0.3})
    curve = train_one(trial, workload, goal, metrics=["val_error", "val_loss"]).curve
    calm = []
    for i, loss in enumerate(curve["val_loss"]):
        before = curve["val_loss"][max(i - 2, 0) : i]
        falls = len(before) == 2 and loss <= before[1] <= before[0]
        calm.append(curve["val_error"][i] if falls else 1.0)
    assert curve["calm_error"] == pytest.approx(calm)
    assert 0 < calm.count(1.0) < len(calm)


def read(reading, run):
    torch.manual_seed(0)
    with ExitStack() as stack:
        return reading.read(Moment(reading.name, 1, run, stack))


def test_the_sharpness_is_the_top_eigenvalue_of_the_hessian(tmp_path, monkeypatch):
    module = import_recipe("my_reading", tmp_path, monkeypatch)
    run = ToyRun(0.0)
    sharpness = read(module.Sharpness(examples=48, iterations=200), run)["sharpness"]
    assert float(sharpness) == pytest.approx(float(read(FullHessian(), run)["top"]), rel=1e-3)


def test_the_calibration_error_is_that_of_its_bins(tmp_path, monkeypatch):
    module = import_recipe("my_calibration", tmp_path, monkeypatch)
    run = ToyRun(0.0)
    x, y = run.data_module.on_device("val", run.module.device)
    confidence, prediction = run.module(x).detach().softmax(1).max(1)
    expected = 0.0
    for low in (0.0, 0.25, 0.5, 0.75):
        inside = (confidence >= low) & (confidence < low + 0.25)
        if inside.any():
            accuracy = float((prediction == y)[inside].double().mean())
            gap = abs(accuracy - float(confidence[inside].double().mean()))
            expected += gap * int(inside.sum()) / len(y)
    assert 0 < expected < 1
    assert float(read(module.Calibration(bins=4), run)["ece"]) == pytest.approx(expected)


def test_the_load_is_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (1.5, 2.0, 3.0))
    module = import_recipe("my_load", tmp_path, monkeypatch)
    assert read(module.MachineLoad(), ToyRun(0.0)) == {"load": 1.5}
