"""Trials of one cell whose metaparameters decide how they can be trained, and beside whom."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import nn

from lit_dps.core.attempt import Attempt
from lit_dps.core.goal import Goal
from lit_dps.core.trial import SINGLE, STACKED, Cell, Status, Trial, TrialResult
from lit_dps.engines import stack_filler, trial_engine
from lit_dps.engines.memory import WHOLE_BATCHES
from lit_dps.engines.stack import StackedNetworks
from lit_dps.engines.stack_filler import DIFFERENT_MODULE, batching_key
from lit_dps.engines.stackable_loss import keeps_untrained, reason_against_stacked_loss
from lit_dps.module import ImageClassifier
from lit_dps.optim import RULES
from lit_dps.optim.sgd import SGD
from lit_dps.pruning.snip import Snip
from lit_dps.training.workload import Workload
from tests.support.runs import train
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_stack_rows import GOAL, trials, workload


def of_second(results: Iterable[TrialResult]) -> TrialResult:
    return next(result for result in results if result.trial.point == 1)


class Penalized(ImageClassifier):
    def __init__(self, penalty: float = 0.0, **arguments):
        super().__init__(**arguments)
        self.penalty = penalty + self.hparams.weight_decay

    def loss(self, batch):
        return super().loss(batch) + self.penalty * sum(p.square().sum() for p in self.parameters())


SMOOTHED = replace(SGD, name="smoothed", hyperparameters=("label_smoothing",))


def test_a_rule_of_the_user_does_not_make_an_argument_of_the_loss_a_hyperparameter(monkeypatch):
    monkeypatch.setitem(RULES, f"{__name__}.SMOOTHED", SMOOTHED)
    keys = []
    for smoothing in (0.1, 0.2):
        params = {"model.learning_rate": 0.05, "model.label_smoothing": smoothing}
        attempt = Attempt(Trial(Cell(16), 0, params), Goal(0.1))
        keys.append(batching_key(attempt))
    assert keys[0] != keys[1]


@pytest.mark.parametrize("key", ["model.penalty", "model.weight_decay"])
def test_a_small_difference_of_losses_is_one(key):
    used = workload(class_path="tests.unit.engines.test_stack_filler.Penalized")
    params = [{"model.learning_rate": 0.05, key: number} for number in (1e-6, 3e-6)]
    asked = [Trial(Cell(16, 0.0), i, p) for i, p in enumerate(params)]
    ours = train(asked, used, {**GOAL, "max_steps": 16}, size=4)
    assert of_second(ours).curve == train(asked[1:], used, {**GOAL, "max_steps": 16})[0].curve


class PenalizedByRate(Penalized):
    def __init__(self, **arguments):
        super().__init__(penalty=arguments["learning_rate"], **arguments)


def test_the_reason_of_a_module_that_differs_is_stored():
    used = workload(class_path="tests.unit.engines.test_stack_filler.PenalizedByRate")
    asked = trials(Cell(16, 0.0), rates=[0.05, 0.02])
    goal = {**GOAL, "max_steps": 8}
    first, second = sorted(train(asked, used, goal, size=2), key=lambda r: r.trial.point)
    assert (first.engine, first.engine_reason) == (STACKED, "")
    assert (second.engine, second.engine_reason) == (SINGLE, DIFFERENT_MODULE)
    assert second.curve == train(asked[1:], used, goal)[0].curve


class Ramped(ImageClassifier):
    """Adds a penalty that grows from the second step on, over `warmup_steps`.

    The count of steps is a buffer or an untrained parameter.
    """

    def __init__(self, is_buffer: bool = True, **arguments):
        super().__init__(**arguments)
        if is_buffer:
            self.register_buffer("seen", torch.zeros(()))
        else:
            self.seen = nn.Parameter(torch.zeros(()), requires_grad=False)

    def loss(self, batch):
        ramp = self.seen / self.hparams.warmup_steps
        penalty = sum(p.square().sum() for p in self.network.parameters())
        loss = super().loss(batch) + ramp.clone() * 1e-3 * penalty
        self.seen.add_(1)
        return loss


@pytest.mark.parametrize("is_buffer", [True, False])
def test_an_argument_that_acts_from_the_second_step_on_is_a_difference(is_buffer):
    used = workload(class_path=f"{__name__}.Ramped", is_buffer=is_buffer)
    params = [{"model.learning_rate": 0.02, "model.warmup_steps": steps} for steps in (2, 20, 2)]
    asked = [Trial(Cell(16, 0.0), i, p) for i, p in enumerate(params)]
    goal = {**GOAL, "max_steps": 8}
    ours = sorted(train(asked, used, goal, size=3), key=lambda result: result.trial.point)
    reasons = [result.engine_reason for result in ours]
    assert reasons == ["", DIFFERENT_MODULE, ""]
    for result in ours:
        (alone,) = train([result.trial], used, goal)
        assert result.curve["train_loss"] == pytest.approx(alone.curve["train_loss"], rel=1e-4)


class Few(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 10))


class NotYetKnown(ImageClassifier):
    """Has a buffer that is nan until it is set."""

    def __init__(self, network: nn.Module, learning_rate: float = 0.1):
        super().__init__(network, learning_rate=learning_rate)
        self.register_buffer("scale", torch.full((), torch.nan))


def test_a_buffer_of_nan_is_equal_in_all_modules():
    model = {
        "class_path": f"{__name__}.NotYetKnown",
        "init_args": {"network": {"class_path": f"{__name__}.Few"}},
    }
    used = Workload(model, {"class_path": "lit_dps.data.Digits"}, {"accelerator": "cpu"})
    asked = [Trial(Cell(32, 0.0), i, {"model.learning_rate": 0.05 * (1 + i)}) for i in range(2)]
    results = train(asked, used, {"error": 0.2, "check_interval": 2, "max_steps": 4}, size=2)
    assert [result.engine for result in results] == ["stacked"] * 2


class Orthogonal(nn.Sequential):
    def __init__(self):
        orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(784, 8))
        super().__init__(nn.Flatten(), orthogonal, nn.ReLU(), nn.Linear(8, 10))


class Taught(nn.Module):
    """Is checked by an average of itself."""

    def __init__(self):
        super().__init__()
        self.student = Few()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x):
        if not self.training:
            return self.teacher(x)
        with torch.no_grad():
            for slow, fast in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                slow.lerp_(fast, 0.2)
        return self.student(x)


class FrozenFirst(Few):
    """Its first layer is frozen."""

    def __init__(self):
        super().__init__()
        self[1].requires_grad_(False)


class Centered(Few):
    """Keeps a moving average of its logits in an untrained parameter."""

    def __init__(self):
        super().__init__()
        self.center = nn.Parameter(torch.zeros(10), requires_grad=False)

    def forward(self, x):
        for layer in list(self)[:4]:
            x = layer(x)
        if self.training:
            with torch.no_grad():
                self.center.lerp_(x.mean(0), 0.1)
        return x


class CopiesItsBias(Taught):
    """Its teacher is updated in the data of its tensors."""

    def forward(self, x):
        self.teacher[1].bias.data.copy_(self.student[1].bias.data)
        return self.student(x)


@pytest.mark.parametrize(
    ("network", "keeps"),
    [(Few, True), (FrozenFirst, True), (Centered, False), (Taught, False), (CopiesItsBias, False)],
)
def test_a_teacher_that_equals_its_student_is_an_untrained_parameter_that_moves(network, keeps):
    module = ImageClassifier(network())
    before = copy.deepcopy(module.state_dict())
    assert keeps_untrained(module, (torch.rand(6, 1, 28, 28), torch.arange(6))) is keeps
    assert all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())


@pytest.mark.parametrize(
    ("name", "divides", "values"),
    [("Few", True, 1), ("FrozenFirst", True, 3), ("Centered", False, 3 + 10)],
)
def test_batches_are_divided_unless_the_loss_moves_untrained_parameters(
    monkeypatch, name, divides, values
):
    """A frozen layer adds no values to the comparison; it compares the losses of three steps."""
    microbatches, compared = [], []

    class Watched(StackedNetworks):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            microbatches.append(self.microbatch)

    class Reference(stack_filler._Reference):
        def _values_of(self, module):
            compared.append(super()._values_of(module))
            return compared[-1]

    monkeypatch.setattr(trial_engine, "StackedNetworks", Watched)
    monkeypatch.setattr(stack_filler, "_Reference", Reference)
    model = {
        "class_path": "lit_dps.module.ImageClassifier",
        "init_args": {"network": {"class_path": f"{__name__}.{name}"}},
    }
    used = Workload(model, {"class_path": "lit_dps.data.Digits"}, {"accelerator": "cpu"})
    asked = [Trial(Cell(32, 0.0), i, {"model.learning_rate": 0.05 * (1 + i)}) for i in range(2)]
    results = train(asked, used, {**GOAL, "max_steps": 4}, size=2)
    assert {result.engine for result in results} == {STACKED}
    assert [microbatch != WHOLE_BATCHES for microbatch in microbatches] == [divides]
    assert [len(of_module) for of_module in compared] == [values] * 2


def test_a_loss_without_a_mean_is_noticed_beside_a_frozen_layer():
    module = Summed(FrozenFirst())
    batch = (torch.rand(6, 1, 28, 28), torch.arange(6))
    assert "mean over the examples" in (reason_against_stacked_loss(module, batch) or "")


class Summed(ImageClassifier):
    def loss(self, batch):
        return super().loss(batch) * len(batch[1])


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", ["Orthogonal", "Taught"])
def test_each_choice_of_a_network_is_trained_as_it_can_be(name, size):
    model = {
        "class_path": "lit_dps.module.ImageClassifier",
        "init_args": {"network": {"class_path": f"{__name__}.Few"}},
    }
    used, choices = (
        Workload(model, {"class_path": "lit_dps.data.Digits"}, {"accelerator": "cpu"}),
        ("Few", name),
    )
    params = [
        {"model.learning_rate": 0.05, "model.network": f"{__name__}.{choice}"} for choice in choices
    ]
    asked = [Trial(Cell(32, 0.9), i, p) for i, p in enumerate(params)]
    goal = {"error": 0.2, "check_interval": 4, "max_steps": 12}
    after = of_second(train(asked, used, goal, size=size))
    (alone,) = train(asked[1:], used, goal, lean=False)
    assert replace(after, seconds=0, traceback="") == replace(alone, seconds=0, traceback="")
    assert after.failure or name == "Taught"


def test_workers_of_a_point_are_its_own():
    params = [{"model.learning_rate": 0.05, "local.workers": workers} for workers in (1, 4)]
    asked = [Trial(Cell(32, 0.0), i, p) for i, p in enumerate(params)]
    goal = {**GOAL, "max_steps": 16}
    ours = of_second(train(asked, workload(), goal, size=2, local={"steps": 4}))
    (reference,) = train(asked[1:], workload(), goal, lean=False, local={"steps": 4})
    assert ours.curve == reference.curve


class Raising(Snip):
    def scores(self, network, generator):
        raise ValueError("this method has no scores")


def test_an_error_at_the_start_of_a_stacked_trial_makes_it_a_failed_one():
    asked = trials(Cell(16, 0.5), rates=[0.02, 0.1, 0.05])
    pruning = {"method": f"{__name__}.Raising"}
    results = train(asked, workload(), {**GOAL, "max_steps": 8}, size=3, pruning=pruning)
    assert [result.trial for result in results] == asked
    assert {result.status for result in results} == {Status.FAILED}
    reason = "its stack raised an error: ValueError: this method has no scores"
    assert {(result.engine, result.engine_reason) for result in results} == {(SINGLE, reason)}


def test_an_error_in_a_step_of_a_stack_is_the_reason_of_its_single_runs(monkeypatch):
    def fails(*arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(StackedNetworks, "train", fails)
    asked = trials(Cell(16, 0.5), rates=[0.02, 0.1])
    goal = {**GOAL, "max_steps": 8}
    results = train(asked, workload(), goal, size=2)
    reason = "its stack raised an error: RuntimeError: out of memory"
    assert [(r.engine, r.engine_reason) for r in results] == [(SINGLE, reason)] * 2
    assert [r.curve for r in results] == [r.curve for r in train(asked, workload(), goal)]
