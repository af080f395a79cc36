"""The interval loop trains what Lightning's loop trains, bit for bit, and keeps out of what is not
its own."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lit_dps.core.trial import SCHEDULE, STACKED, WARM_UP, Cell, Status, Trial
from lit_dps.data import Digits
from lit_dps.engines.eligible import ineligibility_reason
from lit_dps.module import ImageClassifier
from lit_dps.training.checkpoint_files import Checkpoints
from lit_dps.training.workload import Workload
from tests.support.runs import engine as engine_of
from tests.support.runs import runs, train_one
from tests.support.runs import train as train_all
from tests.support.setups import training_of
from tests.unit.engines.test_engine import DATA, GOAL, MODEL, PARAMS, WORKLOAD, quiet  # noqa: F401

CPU = {"accelerator": "cpu"}
DECAY = {"schedule": "linear", "decay_steps": 30, "end_factor": 0.1}


def train(trial: Trial, workload: Workload = WORKLOAD, goal=GOAL, **options):
    """A trial's result without its time, and the final weights."""
    modules = []

    class Kept(Workload):
        def build(self, trial):
            built = super().build(trial)
            modules.append(built.module)
            return built

    result = train_one(trial, Kept(**vars(workload)), goal, **options)
    weights = torch.cat([t.detach().flatten().float() for t in modules[-1].state_dict().values()])
    return dataclasses.replace(result, seconds=0.0), weights


# 4 steps of 700 need more than the 1,618 examples of an epoch
SETTINGS = list(product(("sgd", "momentum", "nesterov"), ({}, DECAY), (0.0, 0.9), (3, 700)))
# Each rule, schedule, sparsity and batch size with each other value; the product is a long form.
BRIEF = [
    ("sgd", {}, 0.0, 3),
    ("sgd", DECAY, 0.9, 700),
    ("momentum", {}, 0.9, 700),
    ("momentum", DECAY, 0.0, 3),
    ("nesterov", {}, 0.9, 3),
    ("nesterov", DECAY, 0.0, 700),
]


@pytest.mark.parametrize(
    ("rule", "schedule", "sparsity", "batch_size"),
    [pytest.param(*each, marks=[] if each in BRIEF else pytest.mark.long) for each in SETTINGS],
)
def test_a_trial_is_the_same_bit_for_bit(rule, schedule, sparsity, batch_size):
    model = {**MODEL, "init_args": {**MODEL["init_args"], "optimizer": rule, **schedule}}
    workload = Workload(model, DATA, {"accelerator": "cpu"})
    trial = Trial(Cell(batch_size, sparsity), 1, PARAMS)
    goal = {"error": 0.05, "check_interval": 4, "max_steps": 40}
    for early in (False, True):
        (ours, weights), (plain, reference) = (
            train(trial, workload, {**goal, "early_reject": early}, lean=lean)
            for lean in (True, False)
        )
        assert ours == plain
        assert torch.equal(weights, reference)


class WarmUp(ImageClassifier):
    """The rate grows for 6 steps, from half of its value, and stays."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, 0.5 + step / 12)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Unlabelled(ImageClassifier):
    """Counts an example without a class as correct, but its `val_loss` is inherited."""

    def per_example_error(self, batch):
        x, y = batch
        return ((self(x).argmax(1) != y) & (y >= 0)).float()


class UnlabelledDigits(Digits):
    """Has no class for the last validation example."""

    def load(self):
        images = super().load()
        images.y["val"][-1] = -100
        return images


@pytest.mark.parametrize("size", [1, 2])
def test_an_ignored_class_is_refused(size):
    model = {**MODEL, "class_path": f"{__name__}.Unlabelled"}
    data = {"class_path": f"{__name__}.UnlabelledDigits"}
    workload = Workload(model, data, {"accelerator": "cpu"})
    trials = [Trial(Cell(64, 0.0), point, PARAMS) for point in range(2)]
    for result in train_all(trials, workload, GOAL, size=size, metrics=("val_loss",)):
        assert result.status is Status.FAILED
        assert result.failure.startswith("data is 'a split with the class -100'")


@pytest.mark.parametrize(
    "how", [{"lean": False}, {}, {"size": 2}], ids=["Lightning", "one", "stack"]
)
@pytest.mark.parametrize(
    ("module", "own", "shape"),
    [
        ("lit_dps.module.ImageClassifier", DECAY, (0, 31)),
        ("tests.unit.engines.test_interval_loop.WarmUp", {}, (6, 7)),
        ("lit_dps.module.ImageClassifier", {}, (None, None)),
    ],
)
def test_every_loop_stores_the_shape_of_the_schedule(module, own, shape, how):
    workload = Workload(
        {"class_path": module, "init_args": {**MODEL["init_args"], **own}}, DATA, CPU
    )
    trials = [Trial(Cell(16, 0.5), point, PARAMS) for point in range(2)]
    goal = {"error": 0.01, "check_interval": 4, "max_steps": 40}
    results = train_all(trials, workload, goal, **how)
    assert len(results) == 2
    for result in results:
        assert (result.flags.get(WARM_UP), result.flags.get(SCHEDULE)) == shape
        assert (STACKED in result.flags) is ("size" in how)


class Everything(nn.Module):
    """Batch normalization, dropout and a part that stays in evaluation mode."""

    def __init__(self):
        super().__init__()
        still = nn.BatchNorm2d(4).eval()
        convolution = nn.Sequential(
            nn.Conv2d(1, 4, 3, 2), nn.BatchNorm2d(4), still, nn.ReLU(), nn.Dropout(0.3)
        )
        self.layers = nn.Sequential(convolution, nn.Flatten(), nn.Linear(676, 10))

    def forward(self, x):
        return self.layers(x)


class Adam(ImageClassifier):
    """Adam with weight decay and a schedule that is no LambdaLR."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.003, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("sparsity", [0.0, 0.9])
def test_what_a_network_draws_keeps_and_is_updated_by_is_the_same_too(sparsity, early):
    network = {"class_path": "tests.unit.engines.test_interval_loop.Everything"}
    workload = Workload(
        {
            "class_path": "tests.unit.engines.test_interval_loop.Adam",
            "init_args": {"network": network},
        },
        DATA,
        CPU,
    )
    trial, goal = (
        Trial(Cell(16, sparsity), 1, {}),
        {"error": 0.02, "check_interval": 4, "max_steps": 40},
    )
    (ours, weights), (plain, reference) = (
        train(trial, workload, {**goal, "early_reject": early}, lean=lean) for lean in (True, False)
    )
    assert eligible(workload) is None
    assert ours == plain and torch.equal(weights, reference)


@pytest.mark.parametrize("early_reject", [False, True])
def test_checks_and_the_limit_come_at_the_same_steps(early_reject):
    goal, trial = {**GOAL, "early_reject": early_reject}, Trial(Cell(16, 0.0), 0, PARAMS)
    complete, _ = train(trial, goal=goal)
    assert complete.status is Status.COMPLETE
    assert complete.curve["step"] == list(range(4, complete.steps + 1, 4))
    outraced, weights = train(trial, goal=goal, limit=lambda cell: 8)
    assert (outraced.status, outraced.curve["step"]) == (Status.OUTRACED, [4, 8])
    plain, reference = train(trial, goal=goal, limit=lambda cell: 8, lean=False)
    assert plain == outraced and torch.equal(weights, reference)


@pytest.mark.parametrize(("lean", "size"), [(True, 1), (True, 2), (False, 1)])
@pytest.mark.parametrize("saves", [False, True])
def test_raise_if_stopped_is_called_only_after_a_validation_at_which_a_run_continues(
    tmp_path, lean, size, saves
):
    calls = []
    checkpoints = Checkpoints(tmp_path, "study", minutes=60) if saves else None
    goal = {**GOAL, "error": 0.001}
    engine = engine_of(WORKLOAD, goal, lean, size, checkpoints=checkpoints)
    asked = [Trial(Cell(16, 0.0), point, PARAMS) for point in range(2)]
    attempts = runs(asked, goal, pause=lambda cell: 12)
    results = list(engine.train(attempts, lambda: calls.append(1)))
    assert [result.status for result in results] == [Status.PAUSED] * 2
    # Steps 4 and 8 of each run, or of the stack of both runs.
    assert len(calls) == 4 // size


class OwnStep(ImageClassifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


class OwnName(ImageClassifier):
    pass


class Augmented(Digits):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


class Watcher(Callback):
    def on_train_batch_end(self, *args):
        pass


def eligible(workload: Workload) -> str | None:
    return ineligibility_reason(training_of(workload, GOAL), Trial(Cell(16, 0.5), 0, {}))


def of(
    module="lit_dps.module.ImageClassifier", data="lit_dps.data.Digits", **trainer
) -> str | None:
    return eligible(
        Workload({**MODEL, "class_path": module}, {"class_path": data}, {**CPU, **trainer})
    )


def own(name: str) -> str:
    return f"tests.unit.engines.test_interval_loop.{name}"


def test_it_trains_our_own_module_and_data_and_what_changes_nothing_in_a_step():
    assert of() is None
    assert of(own("OwnName")) is None


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"module": own("OwnStep")}, "overrides training_step"),
        ({"data": own("Augmented")}, "does not keep its images"),
        ({"callbacks": [{"class_path": own("Watcher")}]}, "trainer.callbacks contains Watcher"),
        ({"accumulate_grad_batches": 2}, "trainer.accumulate_grad_batches"),
        ({"precision": "bf16-mixed"}, "trainer.precision"),
        ({"profiler": "simple"}, "trainer.profiler"),
        ({"detect_anomaly": True}, "trainer.detect_anomaly"),
        ({"strategy": {"class_path": "lightning.pytorch.strategies.DDPStrategy"}}, ""),
    ],
    ids=str,
)
def test_it_leaves_alone_what_wants_to_be_asked_at_every_step(other, why):
    assert why in of(**other)


def test_a_module_of_its_own_trains_as_before():
    trial = Trial(Cell(16, 0.5), 0, PARAMS)
    ours, own_step = (
        train(trial),
        train(trial, Workload({**MODEL, "class_path": own("OwnStep")}, DATA, CPU)),
    )
    assert own_step[0] == ours[0] and torch.equal(own_step[1], ours[1])
