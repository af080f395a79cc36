"""Settings that advice prints and branches train with are those of the optimizer in use."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from lit_dps.advice.report import adaptive_note
from lit_dps.advice.user_workload import Decay, look_at_optimizers, prepare_branches, prepare_pilot
from lit_dps.core.trial import Cell, Trial
from lit_dps.readings import BranchCallback
from lit_dps.training import AdamScalingCallback
from lit_dps.training.adam_scaling import AdamScales
from tests.support.texts import numbers_in
from tests.support.tiny import Plain, fit, loader
from tests.unit.advice.test_step_probe import Net, setup

OWN, BATCH_SIZE = 4, 8


class Doubled(Net):
    """Trains with twice the rate of its argument."""

    def configure_optimizers(self):
        lr = 2 * self.hparams.lr
        return torch.optim.AdamW(self.parameters(), lr, betas=(0.9, 0.99), weight_decay=0.01)

    def __init__(self, lr: float = 0.1, room: int = 10**9):
        super().__init__(lr, room)
        self.save_hyperparameters()


class Fixed(Doubled):
    """Has an argument that is called a rate and is none of its optimizer's."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3, betas=(0.9, 0.99), weight_decay=0.01)


class Picky(Doubled):
    """Fails at rates that no trial has."""

    def configure_optimizers(self):
        if self.hparams.lr > 0.1:
            raise RuntimeError("too large a rate")
        return super().configure_optimizers()


class Unreadable(Doubled):
    """Has no optimizer without a trainer that a test does not have."""

    def configure_optimizers(self):
        raise RuntimeError("no such cluster")


def of(module: str):
    given = setup()
    model = {"class_path": f"{__name__}.{module}"}
    return dataclasses.replace(given, workload=dataclasses.replace(given.workload, model=model))


def test_a_look_gives_the_rate_of_the_optimizer_and_not_of_the_argument():
    look = look_at_optimizers(of("Doubled"), Trial(Cell(BATCH_SIZE), 0, {"model.lr": 0.3}, 0))
    assert look.adaptive == AdamScales(0.99, 0.01, pytest.approx(0.6)) and look.notes == []


@pytest.mark.parametrize(("module", "is_adaptive"), [("Fixed", True), ("Unreadable", None)])
def test_an_optimizer_that_could_not_be_read_is_of_no_known_kind(module, is_adaptive):
    prepared = prepare_pilot(of(module))
    assert prepared.plan.is_adaptive is is_adaptive
    assert any("no such cluster" in note for note in prepared.notes) == (is_adaptive is None)


@pytest.mark.parametrize(
    ("module", "own_rate", "expected"),
    [
        # 0.01 (8 / 4) (0.2 / 0.4)
        ("Doubled", 0.2, "beta2 0.9801, weight decay 0.01 (from 0.99 and 0.01 at B = 4)"),
        ("Fixed", 1e-3, "beta2 0.9801, weight decay 0.02 (from 0.99 and 0.01 at B = 4)"),
        (
            "Picky",
            0.2,
            "beta2 0.9801 (from 0.99 at B = 4), and a weight decay that follows the optimizer's "
            "rate, which could not be read",
        ),
    ],
)
def test_the_printed_weight_decay_is_that_of_the_recommended_run(module, own_rate, expected):
    given = of(module)
    adaptive = AdamScales(0.99, 0.01, own_rate)
    probes = SimpleNamespace(setup=given)
    question = SimpleNamespace(setup=given, probes=probes, adaptive=adaptive)
    found = SimpleNamespace(law=None, best={"batch_size": BATCH_SIZE})
    assert adaptive_note(question, found, {"model.lr": 0.2}) == expected


class Recorded(torch.optim.AdamW):
    """Keeps rate, second moment and weight decay of each step."""

    steps: list[tuple[float, float, float]] = []

    def step(self, closure=None):
        for group in self.param_groups:
            if group["params"][0].dtype is torch.float64:
                continue  # a copy of unknown class is measured in double precision
            self.steps.append((group["lr"], group["betas"][1], group["weight_decay"]))
        return super().step(closure)


@pytest.mark.parametrize(
    ("callbacks", "expected"),
    [
        ([], (0.2, 0.99, 0.01)),
        # weight decay 0.01 k (1 / sqrt k), with k = 4
        ([AdamScalingCallback(4, rate=0.1)], (0.2, 0.99**4, 0.02)),
        # as earlier versions scaled it
        ([AdamScalingCallback(4)], (0.2, 0.99**4, 0.04)),
    ],
)
def test_branches_follow_the_rules_of_the_callback_beside_them(callbacks, expected):
    Recorded.steps.clear()
    module = Plain(
        make_optimizer=lambda parameters: Recorded(parameters, 0.1, (0.9, 0.99), weight_decay=0.01)
    )
    branches = BranchCallback([1], (1, 4), 1, 2, tolerance=0.0)
    fit(module, loader(batch_size=4), callbacks=[*callbacks, branches], max_steps=2)
    assert len(branches.forks) == 1
    of_branches = [step for step in Recorded.steps if step[0] > 0.1]
    assert of_branches == [pytest.approx(expected)] * branches.repetitions


class WarmedUp(Doubled):
    """Warms up over 2 steps, then decays over the budget."""

    decays = True

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches

        def factor(step: int) -> float:
            if step < 2:
                return step / 2
            return 1 - (step - 2) / (steps - 2) if self.decays else 1.0

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class OnlyWarmedUp(WarmedUp):
    decays = False


class TwoSchedules(WarmedUp):
    def configure_optimizers(self):
        (optimizer,), (schedule,) = super().configure_optimizers()
        other = {
            "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            "interval": "epoch",
        }
        return [optimizer], [schedule, other]


class Mixed(Doubled):
    """SGD and AdamW, each for a part of the network."""

    def __init__(self, lr: float = 0.1, room: int = 10**9):
        super().__init__(lr, room)
        self.automatic_optimization = False

    def configure_optimizers(self):
        first, *rest = self.parameters()
        return [torch.optim.SGD([first], 1.0), torch.optim.AdamW(rest, 0.1, weight_decay=0.01)]


def look(module: str):
    return look_at_optimizers(of(module), Trial(Cell(OWN), 0, {}, 0))


def test_a_look_reads_the_schedule():
    budget = setup().goal.max_steps
    seen = look("WarmedUp")
    assert (seen.warm_up, seen.rate_power) == (2, 0.5)
    warm_up, decay = seen.notes
    assert numbers_in(warm_up) == [2, OWN, 2 * OWN]
    assert decay.startswith(f"LambdaLR changes the learning rate until step {budget} at every")
    (warm_up,) = look("OnlyWarmedUp").notes
    assert numbers_in(warm_up) == [2, OWN, 2 * OWN]
    seen = look("TwoSchedules")
    assert seen.warm_up == 0
    (hidden,) = seen.notes
    assert hidden.startswith("LambdaLR cannot be scaled")
    assert look("Doubled").notes == []


def test_the_answer_says_how_far_the_rate_has_decayed_at_the_goal():
    rates = (*(i / 4 for i in range(4)), *(1 - i / 16 for i in range(17)))
    decay = Decay("LambdaLR", 20, warm_up=4, batch_size=8, rates=rates)
    # A quarter of the decay of 16 steps; at B = 32 the warm-up has 1 step, and the decay 19.
    assert decay.share_at(8, 8) == 0.75
    assert decay.share_at(1, 32) == 1.0 and decay.share_at(20, 32) == 0.0
    assert decay.share_at(1 + 19 / 4, 32) == 0.75
    note = decay.note(8, 8)
    assert numbers_in(note) == [20, 8, 75]
    assert decay.note(8, 20) is None, "the decay ends before the goal"
    assert look("WarmedUp").decay.end == setup().goal.max_steps
    assert look("OnlyWarmedUp").decay is None


def test_a_look_names_optimizers_that_need_different_rules():
    seen = look("Mixed")
    assert (seen.rate_power, seen.warm_up) == (None, 0)
    assert seen.adaptive is not None and seen.adaptive.reference_rates == [1.0, 0.1]
    (note,) = seen.notes
    assert note.startswith("The rate of SGD grows with B, the rate of AdamW with sqrt(B).")


def test_probes_keep_the_warm_up_in_examples():
    given = of("WarmedUp")
    probes = prepare_branches(given).setup
    (callback,) = [
        each
        for each in probes.workload.trainer["callbacks"]
        if each["class_path"].endswith("ScheduleScalingCallback")
    ]
    assert callback["init_args"] == {"reference": OWN, "warm_up": 2}
    assert "callbacks" not in prepare_branches(of("Net")).setup.workload.trainer
