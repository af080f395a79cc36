"""An epoch may end with a short batch: its trials are stacked, as Lightning's loop trains them."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_dps.core.goal import Goal
from lit_dps.core.trial import SHORT_STEPS, Cell, Status
from lit_dps.engines.loader_data import LoaderData
from lit_dps.engines.step_batches import MixedBatch, join_rows, parts_of
from lit_dps.parallel.process import Interrupted
from lit_dps.training.checkpoint_files import Checkpoints
from tests.support.conformance import assert_conform
from tests.support.runs import engine, runs, train
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_interval_graph import Captures, capture, graphed  # noqa: F401
from tests.unit.engines.test_logged_modules import both, trials, workload
from tests.zoo.animals.data import VALIDATION, Clouds
from tests.zoo.animals.models import Net

# 160 training examples: each epoch has three batches of 48 and one of 16.
CELLS = (Cell(48, 0.0), Cell(48, 0.8))
SHORT = 16
# Checks are in all phases of an epoch of 4 steps.
GOAL = {"error": 0.04, "check_interval": 3, "max_steps": 27}


@pytest.fixture
def double_precision():
    """Rounding in single precision depends on the processor; a wrong batch does not."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("model", "data", "arguments"),
    [
        pytest.param("models.Net", "data.Clouds", {}, marks=pytest.mark.long),
        ("parts.BatchNorm", "data.OwnOrder", {}),
        ("schedules.Scheduled", "data.Clouds", {"kind": "cosine_epochs"}),
    ],
)
def test_a_stack_with_short_batches_ends_as_in_lightning_s_loop(
    model, data, arguments, double_precision
):
    asked = trials(*CELLS)
    ours, reference = both(workload(model, data, **arguments), asked, GOAL, metrics=("val_loss",))
    assert {(result.engine, result.engine_reason) for result in ours} == {("stacked", "")}
    assert assert_conform(ours, reference, Goal.from_dict(GOAL), VALIDATION) == []
    theirs = {(result.trial.cell, result.trial.point): result for result in reference}
    for result in ours:
        expected = theirs[result.trial.cell, result.trial.point]
        assert result.curve["val_loss"] == pytest.approx(expected.curve["val_loss"], rel=1e-9)
        short_steps = result.curve["step"][-1] // 4
        assert result.flags[SHORT_STEPS] == expected.flags[SHORT_STEPS] == short_steps


def test_masks_change_in_steps_with_short_batches(double_precision):
    asked = trials(Cell(48, 0.5), rates=(0.01, 0.0005, 0.03))
    goal = {**GOAL, "error": 0.1}
    pruning = {"method": "tests.support.user_readings.Redraws"}
    ours, reference = both(workload("parts.BatchNorm"), asked, goal, pruning=pruning)
    assert {(result.engine, result.engine_reason) for result in ours} == {("stacked", "")}
    assert assert_conform(ours, reference, Goal.from_dict(goal), VALIDATION) == []


class Mixed:
    """Counts the steps in which rows have batches of different sizes."""

    def __init__(self, monkeypatch):
        self.steps = 0
        make = MixedBatch.__new__

        def count(kind, *arguments):
            self.steps += 1
            return make(kind, *arguments)

        monkeypatch.setattr(MixedBatch, "__new__", count)


# Trials meet it at different checks, so that the next ones begin in other phases of an epoch.
EASY = {"error": 0.5, "check_interval": 3, "max_steps": 27}


@pytest.mark.parametrize("model", ["models.Net", "parts.BatchNorm"])
def test_rows_in_different_phases_of_an_epoch_train_as_in_lightning_s_loop(model, monkeypatch):
    mixed = Mixed(monkeypatch)
    goal = {**EASY, "max_examples": 1000}
    rates = (0.01, 0.0005, 0.03, 0.002, 0.005)
    asked = trials(Cell(48, 0.5), rates=rates)
    ours = train(asked, workload(model), goal, size=2)
    assert mixed.steps >= 2
    reference = train(asked, workload(model), goal, lean=False)
    assert {result.engine for result in ours} == {"stacked"}
    assert assert_conform(ours, reference, Goal.from_dict(goal), VALIDATION) == []
    assert len({len(result.curve["step"]) for result in ours}) > 2
    theirs = {result.trial.point: result for result in reference}
    for result in ours:
        assert result.curve["examples"] == theirs[result.trial.point].curve["examples"]


@pytest.mark.parametrize("stops", [pytest.param(1, marks=pytest.mark.long), 3])
def test_an_interrupted_stack_with_short_batches_resumes(stops, tmp_path):
    used = workload("parts.BatchNorm", "data.OwnOrder")
    goal = {"metric": "val_loss", "at_most": 1e-6, "check_interval": 3, "max_steps": 15}
    asked = trials(Cell(48, 0.5))
    checkpoints = Checkpoints(tmp_path, "study", minutes=0)
    checks = []

    def raise_if_stopped() -> None:
        checks.append(1)
        if len(checks) == stops:
            raise Interrupted("test")

    with pytest.raises(Interrupted):
        interrupted = engine(used, goal, size=4, checkpoints=checkpoints)
        list(interrupted.train(runs(asked, goal), raise_if_stopped))
    resumed = train(asked, used, goal, size=4, checkpoints=checkpoints)
    unbroken = train(asked, used, goal, size=4)
    for ours, expected in zip(resumed, unbroken, strict=True):
        assert ours.curve == expected.curve
        assert ours.flags == expected.flags and ours.flags[SHORT_STEPS] == 3


def test_a_race_stops_rows_in_different_phases():
    asked = trials(Cell(48, 0.0), rates=(0.01, 0.0005, 0.03, 0.002))
    goal = {"metric": "val_loss", "at_most": 1e-9, "check_interval": 3, "max_steps": 27}
    limits = iter([30, 30, 6, 30, 12, 9] + 100 * [12])
    results = train(asked, workload(), goal, size=2, limit=lambda cell: next(limits))
    assert {result.status for result in results} == {Status.OUTRACED}
    unraced = train(asked, workload(), goal, size=4)
    curves = {result.trial.point: result.curve["train_loss"] for result in unraced}
    assert len({len(result.curve["step"]) for result in results}) > 1
    for result in results:
        losses = result.curve["train_loss"]
        assert losses == pytest.approx(curves[result.trial.point][: len(losses)], rel=1e-4)


@pytest.mark.parametrize(
    ("model", "ahead"),
    [
        ("models.Net", 4),
        ("parts.BatchNorm", 1),
        pytest.param("models.Net", 1, marks=pytest.mark.long),
        pytest.param("parts.BatchNorm", 4, marks=pytest.mark.long),
    ],
)
def test_steps_with_short_batches_are_captured_by_their_size(model, ahead, capture, graphed):  # noqa: F811
    asked = trials(Cell(48, 0.5), rates=(0.01, 0.0005, 0.03, 0.002, 0.005))
    goal = {**EASY, "check_interval": 6, "max_steps": 36}
    one_by_one = train(asked, workload(model), goal, size=2)
    captures = capture(Captures())
    results = train(asked, workload(model), goal, size=2, ahead=ahead)
    assert graphed[-1].reason == "" and captures.replays > 10
    assert len(results) == len(one_by_one) == 5
    expected = {result.trial.point: result for result in one_by_one}
    for result in results:
        assert result.steps == expected[result.trial.point].steps
        losses = expected[result.trial.point].curve["train_loss"]
        assert result.curve["train_loss"] == pytest.approx(losses, rel=1e-4)


class Memorizes(Net):
    """Trains short batches by another loss, which a stack cannot follow."""

    def training_step(self, batch, batch_idx):
        if len(batch[0]) == SHORT:
            return self.loss(batch) + torch.rand(())
        return self.loss(batch)


def test_a_module_that_only_fails_in_short_batches_is_not_stacked():
    used = workload("models.Net")
    used.model["class_path"] = f"{Memorizes.__module__}.Memorizes"
    results = train(trials(Cell(48, 0.0)), used, {**GOAL, "max_steps": 3}, size=4)
    assert {result.engine for result in results} == {"lightning"}
    assert "draws random numbers in a training step" in results[0].engine_reason


class Shuffled(Clouds):
    """Its loader keeps a generator, from whose state each epoch goes on."""

    def train_dataloader(self):
        arguments = self.hparams
        return DataLoader(
            self.train,
            arguments.batch_size,
            shuffle=True,
            drop_last=arguments.drop_last,
            num_workers=arguments.workers,
            generator=torch.Generator().manual_seed(3),
        )


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("batch_size", "workers"), [(48, 0), (40, 0), (48, 1), (40, 1)])
def test_the_epochs_of_a_loader_with_a_generator(batch_size, workers, drop_last):
    data = Shuffled(batch_size, drop_last=drop_last, workers=workers)
    data.setup()
    ours = LoaderData(data, Net(), torch.device("cpu"), batch_size, 4)
    x, _ = data.train.tensors
    loader = data.train_dataloader()
    sizes = list(islice(ours.batch_sizes(), len(loader)))
    assert ours.steps_of_epoch == len(loader)
    for order in islice(ours.epochs(), 3):
        # Lightning takes as many batches as the loader declares, and does not ask for more.
        batches = [batch[0] for batch in islice(loader, len(loader))]
        assert torch.equal(torch.cat(batches), x[torch.from_numpy(order)])
        assert [len(batch) for batch in batches] == sizes


def batches_of(sizes: list[int], first: int = 0) -> tuple[Tensor, ...]:
    return tuple(torch.arange(sum(sizes)).add(first).split(sizes))


def test_rows_are_joined_by_the_sizes_of_their_batches():
    full = torch.arange(9).view(3, 3)
    assert join_rows({0: full, 2: full}, 3) is full
    joined = join_rows({0: full, 2: full + 1}, 3)
    assert isinstance(joined, Tensor) and joined.shape == (3, 3, 3)
    assert torch.equal(joined[:, 1], full), "an empty row has the batches of the first one"
    first, second, third = join_rows({0: batches_of([3, 2, 3]), 2: batches_of([3, 3, 3], 9)}, 3)
    assert torch.equal(first, torch.tensor([[0, 1, 2], [0, 1, 2], [9, 10, 11]]))
    assert isinstance(second, MixedBatch) and isinstance(third, Tensor)
    (short_rows, short), (full_rows, longer) = second.parts
    assert (short_rows.tolist(), short.tolist()) == ([0], [[3, 4]])
    assert (full_rows.tolist(), longer.tolist()) == ([2], [[12, 13, 14]])


def test_steps_of_one_shape_are_taken_together():
    steps = [*batches_of(6 * [3]), *batches_of([2]), *batches_of([3])]
    mixed = MixedBatch(((torch.tensor([0]), torch.tensor([[1]])),))
    parts = list(parts_of([*steps, mixed, *batches_of([3])], torch.device("cpu")))
    assert [tuple(part.shape) for part in parts if isinstance(part, Tensor)] == [
        (4, 3),
        (1, 3),
        (1, 3),
        (1, 2),
        (1, 3),
        (1, 3),
    ]
    assert parts[5] is not mixed and isinstance(parts[5], MixedBatch)
    together = torch.cat([part.flatten() for part in parts[:5]])
    assert torch.equal(together, torch.cat(steps))
