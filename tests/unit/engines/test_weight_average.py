"""The average of the weights is what is checked, in every loop, with values in closed form."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Trial
from lit_dps.core.trial_config import AVERAGE_KEY, OptimConfig
from lit_dps.engines.row_tensors import Rows
from lit_dps.optim.weight_average import WeightAverage, share_of_step
from lit_dps.training import AverageCallback, GoalErrorCallback, PruningCallback
from lit_dps.training.checkpoint_files import Checkpoints
from lit_dps.training.workload import Workload
from tests.support import tiny
from tests.support.conformance import assert_conform
from tests.support.errors import refuses
from tests.support.ranks import same_on_ranks
from tests.support.runs import train, train_one
from tests.support.user_readings import Redraws  # noqa: F401  a method by class path
from tests.unit.engines.test_eligible import network
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_stack_rows import EXAMPLES, trials, workload

HALF_LIFE = 100.0
AVERAGED = {"optim": {"average_half_life": HALF_LIFE}}
GOAL = {"error": 0.01, "check_interval": 4, "max_steps": 24}
WAYS = {"single": {}, "lightning": {"lean": False}, "stacked": {"size": 2}}
RATES = [0.03, 0.06]


def plain(result):
    return dataclasses.replace(result, seconds=0.0)


def test_half_of_the_distance_remains_after_a_half_life_at_every_batch_size():
    for batch_size in (1, 4, 50, 100):
        module = nn.Linear(1, 1)
        average = WeightAverage(module, HALF_LIFE)
        with torch.no_grad():
            module.weight.fill_(1.0)
            average.begin()
            module.weight.fill_(0.0)
        for _ in range(100 // batch_size):
            average.update(batch_size)
        assert average.tensors["weight"].item() == pytest.approx(0.5, rel=1e-5)


def test_a_block_shows_the_average_and_gives_the_weights_back():
    module = nn.BatchNorm1d(2)
    average = WeightAverage(module, HALF_LIFE)
    average.begin()
    with torch.no_grad():
        module.weight.fill_(3.0)
        module.running_var.fill_(3.0)
        module.num_batches_tracked.fill_(7)
    place = module.weight
    average.update(100)
    with average.shown():
        assert module.weight.tolist() == pytest.approx([2.0, 2.0])
        assert module.running_var.tolist() == pytest.approx([2.0, 2.0])
        assert module.num_batches_tracked == 7
        with average.shown():
            pass
        assert module.weight.tolist() == pytest.approx([2.0, 2.0])
    assert module.weight is place and module.weight.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("of_weights", [torch.float32, torch.bfloat16, torch.float16])
def test_small_shares_of_a_step_move_the_average(of_weights):
    module = nn.Linear(1, 1, bias=False).to(of_weights)
    average = WeightAverage(module, 1e6)
    with torch.no_grad():
        module.weight.fill_(1.0)
        average.begin()
        module.weight.fill_(1.0625)
    for _ in range(2_000):
        average.update(1)
    expected = 1.0625 - 0.0625 * 2 ** (-2_000 / 1e6)
    assert average.tensors["weight"].item() == pytest.approx(expected, rel=1e-12)
    with average.shown():
        assert module.weight.dtype == of_weights
        assert module.weight.item() == average.tensors["weight"].to(of_weights).item()
    assert module.weight.item() == 1.0625


def test_the_row_of_a_stack_has_the_precision_of_one_network():
    half_life = torch.tensor([[1e6]], dtype=torch.float64)
    buffer = torch.full((1, 1), 3.0)
    average = torch.ones(1, 1, dtype=torch.float64)
    averages = {"mean": average.clone()}
    weights = torch.full((1, 1), 1.0625)
    rows = Rows(weights, weights, {}, {}, {"mean": buffer}, weights, average, averages, half_life)
    for _ in range(2_000):
        rows.update_average(torch.ones(1, 1))
    share = 2 ** (-2_000 / 1e6)
    assert rows.average.item() == pytest.approx(1.0625 - 0.0625 * share, rel=1e-12)
    assert averages["mean"].item() == pytest.approx(3 - 2 * share, rel=1e-12)
    assert rows.validated_weights.dtype == rows.validated_buffers["mean"].dtype == torch.float32


def test_a_parameter_that_is_trained_later_has_an_average_of_its_own():
    first = nn.Linear(1, 1)
    second = nn.Linear(1, 1)
    module = nn.Sequential(first, second)
    first.requires_grad_(False)
    with torch.no_grad():
        first.weight.fill_(2.0)
    average = WeightAverage(module, HALF_LIFE)
    average.begin()
    average.update(10)
    assert average.tensors["0.weight"].item() == 2.0
    first.requires_grad_(True)
    second.requires_grad_(False)
    with torch.no_grad():
        first.weight.fill_(0.0)
    average.update(100)
    with average.shown():
        assert first.weight.item() == pytest.approx(1.0)
    assert first.weight.item() == 0.0


@pytest.mark.parametrize("value", [-1.0, float("inf"), True, "100"])
def test_a_half_life_that_is_none_is_refused(value):
    with refuses(AVERAGE_KEY, value):
        OptimConfig(average_half_life=value)


class Reference(EMAWeightAveraging):
    """Lightning's callback, whose average begins at the initial weights."""

    def __init__(self):
        super().__init__(decay=2 ** (-16 / HALF_LIFE))

    def on_train_start(self, trainer, pl_module):
        assert self._average_model is not None
        self._average_model.module.load_state_dict(pl_module.state_dict())
        self._average_model.n_averaged.fill_(1)


@pytest.mark.parametrize("kind", ["MLP", "Normalized"])
def test_the_curve_is_that_of_lightnings_callback(kind):
    arguments = {} if kind == "MLP" else network(kind)
    (trial,) = trials(Cell(16, 0.0), rates=RATES[:1])
    used = workload(**arguments)
    ours = train_one(trial, used, GOAL, **AVERAGED, metrics=("val_loss",))
    callback = {"callbacks": [{"class_path": f"{__name__}.Reference"}]}
    theirs = train_one(trial, workload(trainer=callback, **arguments), GOAL, metrics=("val_loss",))
    assert (ours.engine, theirs.engine) == ("single", "lightning")
    assert ours.curve["val_error"] == theirs.curve["val_error"]
    assert ours.curve["val_loss"] == pytest.approx(theirs.curve["val_loss"], rel=1e-5)
    without = train_one(trial, used, GOAL, metrics=("val_loss",))
    assert without.curve["train_loss"] == ours.curve["train_loss"]
    assert without.curve["val_loss"] != ours.curve["val_loss"]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kind", ["MLP", "Normalized", "Redraws"])
def test_all_loops_check_the_same_average(kind, early):
    arguments = network(kind) if kind == "Normalized" else {}
    pruning = {"method": f"{__name__}.Redraws"} if kind == "Redraws" else {}
    goal = {**GOAL, "early_reject": early}
    asked = trials(Cell(16, 0.8), rates=RATES)
    results = {}
    for name, options in WAYS.items():
        used = workload(**arguments)
        results[name] = train(asked, used, goal, **options, **AVERAGED, pruning=pruning)
        assert {result.engine for result in results[name]} == {name}
    for single, lightning in zip(results["single"], results["lightning"], strict=True):
        assert single.curve == lightning.curve
    ours, reference = results["stacked"], results["lightning"]
    assert assert_conform(ours, reference, Goal.from_dict(GOAL), EXAMPLES) == []


def test_each_cell_of_an_axis_has_its_half_life():
    cells = [Cell(16, 0.0, ((AVERAGE_KEY, value),)) for value in (0, 20.0, 500.0)]
    results = train(trials(*cells, rates=RATES), workload(), GOAL, size=4)
    curves = [result.curve["val_error"] for result in results]
    alone = [train_one(r.trial, workload(), GOAL, lean=False).curve["val_error"] for r in results]
    assert curves == alone and curves[0] != curves[2] != curves[4] != curves[0]


def test_under_a_batch_schedule_the_half_life_counts_examples():
    (trial,) = trials(Cell(16, 0.5), rates=RATES[:1])
    batch = {"schedule": "doubling", "options": {"start": 0.25, "steps": 3}}
    ways = [{}, {"lean": False}]
    single, lightning = (
        train_one(trial, workload(), GOAL, batch=batch, **AVERAGED, **way) for way in ways
    )
    assert single.curve == lightning.curve
    constant = train_one(trial, workload(), GOAL, **AVERAGED)
    assert single.curve["val_error"] != constant.curve["val_error"]


def on_a_rank() -> tuple:
    (trial,) = trials(Cell(16, 0.5), rates=RATES[:1])
    result = train_one(trial, workload(), GOAL, lean=False, **AVERAGED)
    return result.status, np.round(result.curve["val_error"], 4).tolist()


def test_two_ranks_check_the_average_of_one_process():
    assert same_on_ranks(2, on_a_rank) == on_a_rank()


class Killed(BaseException):
    """Ends the process at a check."""


@pytest.mark.parametrize("name", WAYS)
def test_a_run_that_is_killed_and_resumed_equals_an_unbroken_one(name, tmp_path):
    asked = trials(Cell(16, 0.5), rates=RATES)
    options = {**WAYS[name], **AVERAGED}
    unbroken = train(asked, workload(), GOAL, **options)
    calls = []

    def kill() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Killed

    with pytest.raises(Killed):
        files = Checkpoints(tmp_path, "study", minutes=0)
        train(asked, workload(), GOAL, **options, checkpoints=files, raise_if_stopped=kill)
    reports = []
    files = Checkpoints(tmp_path, "study", 60, reports.append)
    resumed = train(asked, workload(), GOAL, **options, checkpoints=files)
    assert any("resumes from step" in report for report in reports)
    assert [plain(result) for result in resumed] == [plain(result) for result in unbroken]


def test_local_sgd_has_no_average():
    (trial,) = trials(Cell(16, 0.0), rates=RATES[:1])
    local = {"workers": 2, "steps": 4}
    result = train_one(trial, workload(), GOAL, local=local, **AVERAGED)
    assert result.failure is not None and AVERAGE_KEY in result.failure


DIMENSIONS, COPIES, B, RATE, STEPS = 5, 4000, 8, 0.5, 40


def expected_loss(half_life: float) -> float:
    """The loss of the average on the noisy quadratic, by the recursion of its second moments.

    w' = (1 - rate h) w - rate z and a' = (1 - s) a + s w', with Var z = h / B (Zhang et al. 2019).
    """
    share, loss = share_of_step(B, half_life), 0.0
    for h in 1 / np.arange(1, DIMENSIONS + 1):
        step = np.array([[1 - RATE * h, 0], [share * (1 - RATE * h), 1 - share]])
        noise = np.array([RATE, share * RATE])
        moments = np.ones((2, 2))
        for _ in range(STEPS):
            moments = step @ moments @ step.T + np.outer(noise, noise) * h / B
        loss += 0.5 * h * moments[1, 1]
    return loss


@pytest.mark.parametrize("options", [{"lean": False}, {"size": 2}], ids=["lightning", "stacked"])
def test_the_loss_on_the_noisy_quadratic_is_the_closed_form(options):
    model = {
        "class_path": "lit_dps.models.NoisyQuadratic",
        "init_args": {"dimensions": DIMENSIONS, "copies": COPIES},
    }
    used = Workload(model, {"class_path": "lit_dps.data.GradientNoise"}, {"accelerator": "cpu"})
    goal = {"metric": "val_loss", "at_most": 1e-9, "check_interval": STEPS, "max_steps": STEPS}
    losses = {}
    for half_life in (1e-3, 100.0):
        asked = [Trial(Cell(B, 0.0), i, {"model.learning_rate": RATE}) for i in range(2)]
        optim = {"average_half_life": half_life}
        result, _ = train(asked, used, goal, optim=optim, **options)
        # 4,000 copies: the mean has a standard error of about 1 %.
        (losses[half_life],) = result.curve["val_loss"]
        assert losses[half_life] == pytest.approx(expected_loss(half_life), rel=0.04)
    assert losses[100.0] < 0.7 * losses[1e-3]


class Line(LightningModule):
    """One weight, which begins at 1."""

    def __init__(self, fails: bool = False):
        super().__init__()
        self.line = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.line.weight)
        self.fails = fails

    def training_step(self, batch, batch_idx):
        return self.line(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_error", self.line(batch[0]).abs().mean())
        if self.fails and self.global_step:
            raise KeyboardInterrupt

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(module, callbacks, steps=4, **options):
    data = DataLoader(TensorDataset(torch.ones(8 * steps, 1)), batch_size=8)
    return tiny.fit(module, data, data, callbacks=callbacks, max_steps=steps, **options)


def test_an_interrupted_validation_gives_the_weights_back():
    module = Line(fails=True)
    callback = AverageCallback(HALF_LIFE)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(module, [callback])
    assert callback.average is not None
    # Each step multiplies the weight by 1 - 2 x 0.1.
    assert module.line.weight.item() == pytest.approx(0.8**4)
    assert callback.average.tensors["line.weight"].item() > 0.8


@pytest.mark.parametrize("others", [GoalErrorCallback(0.1), PruningCallback(0.5)])
def test_another_order_of_the_callbacks_is_refused(others):
    callbacks = [others, AverageCallback(HALF_LIFE)]
    if isinstance(others, PruningCallback):
        callbacks.reverse()
    with refuses("callbacks", type(others).__name__):
        fit(Line(), callbacks)


@pytest.mark.parametrize(("saved", "resumed"), [(0.0, 100.0), (100.0, 50.0), (100.0, 0.0)])
def test_a_checkpoint_of_another_half_life_is_refused(tmp_path, saved, resumed):
    path = tmp_path / "average.ckpt"
    fit(Line(), [AverageCallback(saved)], steps=2).save_checkpoint(path)
    with refuses(AVERAGE_KEY, resumed):
        fit(Line(), [AverageCallback(resumed)], ckpt_path=path)
    continued = AverageCallback(saved)
    fit(Line(), [continued], ckpt_path=path)
    unbroken = AverageCallback(saved)
    fit(Line(), [unbroken])
    if saved:
        assert continued.average is not None and unbroken.average is not None
        assert continued.average.tensors == unbroken.average.tensors


def evaluate(verb: str, path, callbacks) -> float:
    """Return the error that `validate` or `test` of a checkpoint logs."""
    module = Line()
    data = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=8)
    trainer = Trainer(**tiny.QUIET, callbacks=callbacks)
    (logged,) = getattr(trainer, verb)(module, data, ckpt_path=path, verbose=False)
    assert module.line.weight.item() == pytest.approx(0.8**4)  # not replaced for longer
    return logged["val_error"]


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_a_checkpoint_is_evaluated_with_its_average(tmp_path, verb):
    path = tmp_path / "average.ckpt"
    callback = AverageCallback(HALF_LIFE)
    trainer = fit(Line(), [callback])
    trainer.save_checkpoint(path)
    average = callback.average.tensors["line.weight"].item()
    assert trainer.callback_metrics["val_error"].item() == pytest.approx(average, rel=1e-6)
    evaluated = evaluate(verb, path, [AverageCallback(HALF_LIFE)])
    assert evaluated == pytest.approx(average, rel=1e-6) != pytest.approx(0.8**4, rel=0.1)
    assert evaluate(verb, path, [AverageCallback(0.0)]) == pytest.approx(0.8**4)
    with refuses(AVERAGE_KEY, 50.0):
        evaluate(verb, path, [AverageCallback(50.0)])
    fit(Line(), []).save_checkpoint(path)
    assert evaluate(verb, path, [AverageCallback(HALF_LIFE)]) == pytest.approx(0.8**4)


def average_on_a_rank() -> float:
    callback = AverageCallback(HALF_LIFE)
    fit(Line(), [callback], steps=2)
    assert callback.average is not None
    return callback.average.tensors["line.weight"].item()


def test_the_examples_of_ranks_with_different_batches_are_added():
    expected = 1.0
    for step in (1, 2):  # on 8 examples at each rank
        expected += share_of_step(16, HALF_LIFE) * (0.8**step - expected)
    assert same_on_ranks(2, average_on_a_rank) == pytest.approx(expected, rel=1e-6)


class Skips(Line):
    """Returns no loss for every second batch."""

    def training_step(self, batch, batch_idx):
        if batch_idx % 2:
            return None
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_examples_of_batches_without_a_loss_do_not_count(accumulated):
    callback = AverageCallback(HALF_LIFE)
    goal = GoalErrorCallback(metric="val_error", at_most=0.001, check_interval=2, max_steps=4)
    data = DataLoader(TensorDataset(torch.ones(128, 1)), batch_size=8)
    module = Skips()
    tiny.fit(module, data, data, callbacks=[callback, goal], accumulate_grad_batches=accumulated)
    assert callback.average is not None and goal.curve["step"] == [2, 4]
    # An accumulated loss is halved: the sum of one loss and none.
    factor = 1 - 0.2 / accumulated
    expected = 1.0
    for step in range(1, 5):
        expected += share_of_step(8, HALF_LIFE) * (factor**step - expected)
    assert module.line.weight.item() == pytest.approx(factor**4, rel=1e-5)
    assert callback.average.tensors["line.weight"].item() == pytest.approx(expected, rel=1e-5)
